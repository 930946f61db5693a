"""Quantised checkpoints of Hugging Face, one file a method: which tensors make a parameter, and in what format."""
