"""Commands about training runs and what they read."""
