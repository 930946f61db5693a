"""The model of a run: its shape, its modules, how its parameters start, and how they are optimised."""
