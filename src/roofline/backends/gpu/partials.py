"""The heads that attention takes, and its workspace where several programs share keys: known where there is neither
Triton nor a device."""

LARGEST_HEAD = 256
PROGRAMS = 512  # keep any device busy
PARTIAL_ROWS = 512  # of workspace for each of these programs, at most


def workspace_limit(head_dim: int, programs: int = PROGRAMS) -> int:
    """The most float32 elements that any launch needs."""
    return programs * PARTIAL_ROWS * (head_dim + 2)
