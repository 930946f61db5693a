"""Errors, environment variables, logging, units. Standard library only."""
