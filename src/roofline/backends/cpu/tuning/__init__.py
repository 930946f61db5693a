"""Which kernel variants are fastest for a model on this machine."""
