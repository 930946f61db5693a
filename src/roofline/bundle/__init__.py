"""load(source): the one place where program, weights, text and backend meet."""
