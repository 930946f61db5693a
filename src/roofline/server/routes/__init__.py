"""One file a route family."""
