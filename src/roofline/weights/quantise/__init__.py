"""Weights in fewer bits: which tensor gets which format, and how its values are rounded."""
