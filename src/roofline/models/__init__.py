"""Architectures as readable single-device text, and the only layer loop."""
