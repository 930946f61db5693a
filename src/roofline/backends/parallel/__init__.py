"""A model on several ranks of this machine."""
