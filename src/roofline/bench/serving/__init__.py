"""Servers under load: curves, sweeps, decoding and comparisons, each a series of measured points."""
