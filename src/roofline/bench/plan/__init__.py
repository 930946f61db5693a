"""Plans: what a model would do on devices that are not here, by the real scheduler on a virtual clock."""
