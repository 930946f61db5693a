"""Strings <-> ids."""
