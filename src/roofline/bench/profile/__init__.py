"""The time of each op of a step beside its roof, as a table and as a picture."""
