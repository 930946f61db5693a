"""What chip is this: detection and measured roofs. The only room that knows chips by name."""
