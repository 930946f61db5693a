"""The processes of a run, and how a model and its sums are divided among them."""
