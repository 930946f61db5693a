"""Triton Inference Server's generate extension, and the health routes of its protocol."""
