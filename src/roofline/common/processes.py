"""What a process knows of the one that started it, and of those that it started."""

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_MEANINGS = {  # of signals that nobody sends on purpose
    signal.SIGBUS: "a file that it had mapped was truncated, or could not be read from its disk",
    signal.SIGKILL: "the system may have run out of memory",
}


def describe_end(status: int | None) -> str:
    """How a process ended, by its status as subprocess gives it: "exit status 1", or the signal and what that means."""
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:  # a real-time signal
        return f"signal {-status}"
    return f"{number.name}: {_MEANINGS[number]}" if number in _MEANINGS else number.name


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP, Ctrl-Z), or by a debugger, and not continued (Linux)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return False
    return state in (b"T", b"t")


def return_freed_memory() -> None:
    """Return memory of the host that was freed in this process to the system, if the C library can (glibc's can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allow_all_files(at_most: int | None = None) -> None:
    """Raise this process's limit of open files and connections as far as it may itself; many systems begin at 1024.
    at_most: up to this number alone; a limit that is higher already stays."""
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard
    if at_most is not None:
        if now == resource.RLIM_INFINITY or now >= at_most:
            return
        limit = at_most if hard == resource.RLIM_INFINITY else min(hard, at_most)
    with suppress(OSError, ValueError):  # of systems whose limit is none
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the process that started this one dies, even in the middle of a step.

    The kernel means the thread that spawned us, so parents spawn from a thread that lives as long as they do.

    Args:
        parent: its process id, if known: then this process also ends if it has died before this call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def end_now(status: int) -> NoReturn:
    """End this process without taking the interpreter down in order, where objects of native modules may still be held
    by the traceback of what ended it: the modules would report them as leaked."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(status)


@contextmanager
def signal_handlers_as_before() -> Iterator[None]:
    """Put the handlers of SIGINT, SIGTERM and SIGHUP back at the end of the block; from the main thread only.

    Behind a loop that took these signals uvloop leaves handlers that wake a closed loop alone, so nothing would end the
    process any more; asyncio puts Python's own in the place of what was there.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python and cannot be set again from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def hide_argument(secret: str) -> None:
    """Overwrite a value among this process's arguments, which every user of the machine can list (Linux)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    except (OSError, IndexError, ValueError):
        return
    if not 0 < start < end:  # 0 where the kernel does not tell
        return
    value, at = secret.encode(), start
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        if argument == value or (argument.startswith(b"-") and argument.endswith(b"=" + value)):
            ctypes.memset(at + len(argument) - len(value), ord("*"), len(value))
        at += len(argument) + 1
