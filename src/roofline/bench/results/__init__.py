"""Results: the schema of a measured point, where points are kept, what is computed from raw events."""
