"""Ids to text as they arrive, and stop strings."""
