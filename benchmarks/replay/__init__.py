"""A published experiment, repeated at the size of this machine."""
