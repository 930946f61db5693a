"""Block layouts of weight files, one file a family."""
