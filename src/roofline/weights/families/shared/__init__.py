"""What the readers of all families share."""
