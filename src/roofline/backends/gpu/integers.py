"""Arithmetic of launches on the host. Triton has functions of these names too, which also serve inside kernels: a call
of one takes microseconds."""


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up; both above 0."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below a number above 0."""
    return 1 << (number - 1).bit_length()
