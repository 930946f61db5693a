"""What fits on a device: requirements of a Program, capacity, weights, layers kept on the host."""
