"""The training loop and what it calls in every step."""
