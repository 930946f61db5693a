"""What tuning found on a machine, and the files that keep it."""
