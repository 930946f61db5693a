"""The heads and compressed rows that attention takes, and its workspace where several programs share keys: known where
there is neither Triton nor a device."""

from roofline.common.errors import UnsupportedError

LARGEST_HEAD = 256
LARGEST_RANK, LARGEST_TURNED = 512, 64  # columns of a compressed row: of the value, and before them
PROGRAMS = 512  # keep any device busy
PARTIAL_ROWS = 512  # of workspace for each of these programs, at most
PARTIAL_COMPRESSED = 128  # the same over compressed rows, whose values are four times as wide


def workspace_limit(head_dim: int, programs: int = PROGRAMS) -> int:
    """The most float32 elements that any launch needs. head_dim: of values."""
    return programs * (PARTIAL_ROWS if head_dim <= LARGEST_HEAD else PARTIAL_COMPRESSED) * (head_dim + 2)


def takes_rows(turned: int, rank: int) -> bool:
    """Whether the kernel over compressed rows has ones of so many columns, `rank` of the value behind `turned`."""
    return 0 < turned <= LARGEST_TURNED and 0 < rank <= LARGEST_RANK


def check_row(turned: int, rank: int) -> None:
    """Raises UnsupportedError where `takes_rows` says no."""
    if not takes_rows(turned, rank):
        reason = f"attention on GPUs has up to {LARGEST_TURNED} + {LARGEST_RANK}"
        raise UnsupportedError(f"compressed rows of {turned} + {rank} columns", reason, ("backend=cpu",))
