"""A Program on a GPU, step by step: lowering, launches, graphs."""
