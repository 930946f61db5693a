"""Which cores each of several processes that compute side by side is pinned to."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from roofline.common.files import integer, text_of
from roofline.hardware.detect import cpu_numbers, cpu_quota


def split_cores(parts: int, root: Path = Path("/")) -> list[list[int]]:
    """The allowed cores in `parts` groups of one size, neighbours together: threads of one core, cores of one package
    and of one NUMA node. Cores left over are in no group.

    Empty groups where a cgroup's quota is less than the cores: which of them it grants at a time is not known. root:
    where /sys and /proc are looked for (tests give a made-up tree).
    """
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(parts)]
    allowed = os.sched_getaffinity(0)
    quota = cpu_quota(root)
    if quota is not None and quota < len(allowed):
        return [[] for _ in range(parts)]
    nodes = _nodes(root)
    ordered = sorted(allowed, key=lambda cpu: (nodes.get(cpu, 0), *_place(root, cpu), cpu))
    size = len(ordered) // parts
    return [ordered[part * size : (part + 1) * size] for part in range(parts)]


def pin_to(cores: Sequence[int]) -> None:
    """Have this thread, and those it starts from now on, run on these cores only; an empty list changes nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """`pin_to` while the body runs."""
    before = sorted(os.sched_getaffinity(0)) if cores else []
    pin_to(cores)
    try:
        yield
    finally:
        pin_to(before)


def _nodes(root: Path) -> dict[int, int]:
    """The NUMA node of each core, where the kernel says it."""
    return {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        for cpu in cpu_numbers(text_of(folder / "cpulist") or "")
    }


def _place(root: Path, cpu: int) -> tuple[int, int]:
    """(package, core in it) of a CPU number; hardware threads of one core have the same."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package, core = (integer(text_of(folder / name)) for name in ("physical_package_id", "core_id"))
    return package or 0, cpu if core is None else core
