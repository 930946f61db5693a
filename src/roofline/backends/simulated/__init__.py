"""The simulated backend: a model without weights and arithmetic, whose steps move a virtual clock by their price."""
