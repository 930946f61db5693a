"""Measures the peak memory of this process, and tunes how the C library keeps freed memory."""

import ctypes
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from roofline.common.files import text_of
from roofline.common.processes import return_freed_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_DEFAULT_MMAP_MAX, _DEFAULT_TRIM_THRESHOLD = 65536, 128 << 10  # of glibc
_LARGE = 64 << 10  # bytes of a block that the system gets back when it is freed


class MemoryMeter:
    """The peak memory of this process since the meter was made: of its accelerator, or resident memory on a CPU.

    On a CPU the pages of files, such as mapped shards and code, are not counted.
    """

    def __init__(self, device: torch.device) -> None:
        import torch._dynamo  # noqa: F401  # the first optimizer step imports it, and it is large

        self.device = device
        self._before = self._stale_peak = 0
        if device.type == "cpu":
            # What an earlier run of this process has freed is not this one's.
            return_freed_memory()
            self._before = _status().get("RssAnon", 0)
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        status = _status()
        # Some kernels and sandboxes ignore this: then a new peak is known only once it exceeds the old one.
        ignored = status.get("VmHWM", 0) > status.get("VmRSS", 0) + (4 << 20)
        self._stale_peak = status["VmHWM"] if ignored else 0

    def peak(self) -> int | None:
        """Bytes; None if the system does not tell, or still reports an earlier peak."""
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated())
        status = _status()
        if "VmHWM" not in status or "RssFile" not in status or status["VmHWM"] <= self._stale_peak:
            return None
        return status["VmHWM"] - status["RssFile"] - self._before


def keep_freed_memory() -> None:
    """From now on this process keeps memory that is freed on a CPU, for later allocations.

    Otherwise the C library gives large blocks back to the system at once and requests them anew, zeroed page by page,
    in each step: a tenth to a fifth of a step's time. Does nothing without mallopt.
    """
    _tune({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1})


def give_back_freed_memory() -> None:
    """From now on this process gives large blocks of a CPU's memory back to the system as they are freed.

    glibc raises the size from which on it does so with each block that is freed, up to 32 MiB. What it keeps instead
    counts against a limit of data, and smaller blocks that are still used split it up: after a microbatch that did not
    fit, none of half the size does. Does nothing without mallopt.
    """
    _tune({_M_MMAP_MAX: _DEFAULT_MMAP_MAX, _M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: _DEFAULT_TRIM_THRESHOLD})


def _tune(values: Mapping[int, int]) -> None:
    """Set parameters of the C library's allocator, if it has them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in values.items():
            mallopt(parameter, value)


def grow_segments(device: torch.device) -> None:
    """From now on torch takes a GPU's memory in segments that grow. Other devices have no segments."""
    if device.type == "cuda":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def data_bytes() -> int:
    """The bytes of this process that a limit of its data (RLIMIT_DATA) counts; 0 if the system does not tell."""
    return _status().get("VmData", 0)


def anonymous_bytes() -> int:
    """The resident bytes of this process that are of no file; 0 if the system does not tell."""
    return _status().get("RssAnon", 0)


def _status() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes; empty without such a file."""
    text = text_of(Path("/proc/self/status")) or ""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
