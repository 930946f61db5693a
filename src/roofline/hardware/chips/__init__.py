"""GPU architectures and products as data."""
