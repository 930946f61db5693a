"""What chip is this: detection, topology, the type and store of measured roofs."""
