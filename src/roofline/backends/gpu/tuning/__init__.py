"""Measured choices between kernels and tiles on a device."""
