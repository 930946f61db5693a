"""Configurations of models, read from every kind of file into one canonical form."""
