"""Commands that run a model."""
