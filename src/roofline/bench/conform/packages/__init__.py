"""Round trips through the client packages that people use, each where it is installed."""
