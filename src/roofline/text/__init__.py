"""Strings <-> ids: tokenizers, chat templates, detokenising, stop strings."""
