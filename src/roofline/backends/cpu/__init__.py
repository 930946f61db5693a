"""Programs on the C++ core."""
