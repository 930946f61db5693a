"""Programs on the C++ core."""

from roofline.backends.cpu.describe import describe

__all__ = ["describe"]
