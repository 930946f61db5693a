"""Training: the order of samples, so far: numbers alone, no torch."""
