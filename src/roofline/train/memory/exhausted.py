"""Tells from what libraries raise, or silently do instead, that memory has run out; and says so with the numbers."""

import errno
import re
import resource

import torch

from roofline.common.errors import CapacityError
from roofline.hardware.detect import detect
from roofline.train.memory.meter import data_bytes

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can.?t allocate memory|cannot allocate memory|unable to allocate|DefaultCPUAllocator|bad_alloc"
    # oneDNN names what it could not create, not why; "a primitive descriptor" is something that it does not have.
    r"|could not (create|execute) a (primitive|memory|memory object|stream)\b(?! desc)"
    r"|can't start new thread",
    re.IGNORECASE,
)
_TRIED = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of a GPU (of any vendor) or of this process ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def out_of_memory(what: str, message: str, predicted: int | None = None) -> CapacityError:
    """The error for a user. message: what was raised; predicted: bytes of the run, beside what the process began with.

    What is needed is the prediction, and at the least what this process has and the piece that it did not get. Where it
    is not known how large that was, it is more than there is.
    """
    tried = _TRIED.search(message)
    if torch.accelerator.is_available():
        free, available = torch.accelerator.get_memory_info()
        used = available - free
    else:
        available, used = _host_memory(), data_bytes()
    needed = max(predicted or 0, used + (int(tried[1]) if tried else 0), available + 1)
    remedy = "Lower device_train_microbatch_size, max_seq_len or device_eval_batch_size, or share the model among more "
    remedy += f"processes: {' '.join(message.split())}"
    return CapacityError(what, needed, available, "bytes", remedy)


def limit_memory(size: int) -> None:
    """Limit the memory of this process to `size` bytes: beyond it allocations raise."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def room() -> int | None:
    """Bytes that this process may still allocate under its own limit; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - data_bytes())


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, or on this machine for a CPU; None where nothing says it."""
    if device.type == "cpu":
        return detect().memory_available
    return int(torch.accelerator.get_memory_info(device)[0])


def affordable(device: torch.device, processes: int) -> int | None:
    """Return the bytes that a process may take unasked; None where nothing says it, or memory is to be tried.

    Under a limit of its own that is all of the limit. On a CPU it is half of what is free, divided among the processes
    of this machine: a program that takes more makes all others page. A GPU belongs to its process.
    """
    limited = room()
    if limited is not None or device.type != "cpu":
        return limited
    free = free_memory(device)
    return None if free is None else free // 2 // processes


def _host_memory() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        return soft
    return data_bytes() + (detect().memory_available or 0)


class OneDnn:
    """Notices that torch has switched oneDNN off, as it does for good once a product of 16 bits gets no memory there.

    Its own products of 16 bits take hundreds of times as long: such a step would seem to hang.
    """

    def __init__(self) -> None:
        self._enabled = torch.backends.mkldnn.enabled

    def check(self) -> None:
        """Raise MemoryError, with oneDNN switched on again, if it was switched off."""
        if self._enabled and not torch.backends.mkldnn.enabled:
            torch.backends.mkldnn.set_flags(True)
            raise MemoryError("oneDNN could not allocate memory for a product of matrices")
