"""Ours beside other engines: `python -m benchmarks.peers`, and the README table made from its record."""
