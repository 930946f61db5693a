"""What a device and its links reach at best, measured through torch alone."""
