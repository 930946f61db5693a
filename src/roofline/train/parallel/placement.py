"""Which process of its run this one is, as torchrun and other launchers say it in the environment."""

from dataclasses import dataclass

from roofline.common import env
from roofline.common.errors import ConfigError

_MOST = 1 << 20  # processes of a run
_REMEDY = (
    "unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for a run of one process, or start several with --nproc "
    "or torchrun"
)


@dataclass(frozen=True)
class ProcessPlacement:
    """The number of this process among those of its run.

    local_rank: among those of its machine. local_size: how many those are; None: no launcher says so.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None

    @classmethod
    def from_environment(cls, group: tuple[int, int] | None = None) -> "ProcessPlacement":
        """The placement that the environment's variables say; group: rank and size, where a process group has them.

        Raises ConfigError with the variable that cannot be so.
        """
        size = group[1] if group else _number("WORLD_SIZE", range(1, _MOST + 1))
        several = f"is {size}" if group or env.foreign("WORLD_SIZE") else "is not set"
        bound = f", as it is where WORLD_SIZE {several}"
        local_size = _number("LOCAL_WORLD_SIZE", range(1, size + 1), bound) if env.foreign("LOCAL_WORLD_SIZE") else None
        if local_size is not None and local_size < size:
            local_bound = f", as it is where LOCAL_WORLD_SIZE is {local_size}"
        else:
            local_bound = bound
        rank = group[0] if group else _number("RANK", range(size), bound)
        return cls(rank, size, _number("LOCAL_RANK", range(local_size or size), local_bound), local_size)


def meeting_place(size: int) -> tuple[str, int] | None:
    """The address and the port where the processes of a run meet; None where one process names none.

    Raises ConfigError.
    """
    address = env.foreign("MASTER_ADDR")
    if address is None and size == 1:
        return None
    if address is None:
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment says that this is one of {size} processes, but MASTER_ADDR does not "
            f"say where they meet: {_REMEDY}"
        )
    port = env.foreign("MASTER_PORT") or ""
    if not _is_number(port) or int(port) not in range(1, 1 << 16):
        raise ConfigError(f"MASTER_PORT={port!r} beside MASTER_ADDR={address} is no port: set it for all processes")
    return address, int(port)


def _number(name: str, allowed: range, bound: str = "") -> int:
    """The number that a variable has, or the least that it can have."""
    text = env.foreign(name)
    if text is None:
        return allowed.start
    if not _is_number(text) or int(text) not in allowed:
        words = f"a whole number from {allowed.start:,} to {allowed.stop - 1:,}" if len(allowed) > 1 else allowed.start
        raise ConfigError(f"{name}={text!r} in the environment is not {words}{bound}: {_REMEDY}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
