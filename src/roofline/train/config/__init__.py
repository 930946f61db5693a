"""The configuration of a run: its YAML keys, checked."""
