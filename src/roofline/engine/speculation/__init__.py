"""Guessing tokens, and verifying the guesses in one step."""
