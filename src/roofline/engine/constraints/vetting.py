"""A constraint is tried in a process of its own first, which is ended where time or memory run out.

llguidance cannot be interrupted, and some constraints of a kilobyte take it minutes and gigabytes. What passes here
takes the engine's own threads as long again, at the most the budget.

    python -m roofline.engine.constraints.vetting    reads a vocabulary, then texts in llguidance's notation, from stdin
                                                     and writes what is wrong with each to stdout; ends when idle
"""

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import IO

import msgspec

from roofline.common import log
from roofline.common.errors import RooflineError
from roofline.common.processes import describe_end
from roofline.engine.constraints.library import SlowFormError, Words

COMPILE_SECONDS = 2.0  # of the processor
PATIENCE = 60.0  # seconds by the clock, for a machine that lets it wait
MEMORY = 4 << 30  # bytes of address space
IDLE_SECONDS = 60.0  # after which the process ends: it holds a vocabulary
_LENGTH = struct.Struct("<I")
_SLOW = "\0"  # before an answer of the process that is about time


class Vetting:
    """Tries constraints, one at a time; any thread may ask. words: the vocabulary."""

    def __init__(self, words: Words) -> None:
        self._words, self._lock = words, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, text: str) -> None:
        """Raises ValueError with what is wrong with a constraint in llguidance's notation, SlowFormError where that is
        the time it takes, and RooflineError where it cannot be tried."""
        with self._lock:
            for _ in range(2):  # a process that was idle may end just now
                answer = self._ask(text)
                if answer == "":
                    return
                if answer is not None:
                    kind = SlowFormError if answer.startswith(_SLOW) else ValueError
                    raise kind(answer.removeprefix(_SLOW))
                status = self._reap()
                if status == -signal.SIGPROF:
                    raise SlowFormError(f"it takes more than {COMPILE_SECONDS:g} s of a core")
                if status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
                    raise ValueError("it takes too much memory")
                if status != 0:
                    break
            raise RooflineError(f"a constraint could not be tried out: its process ended with {describe_end(status)}")

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._reap()

    def _ask(self, text: str) -> str | None:
        """The answer, "" where nothing is wrong; None where the process has ended, or was ended."""
        if self._process is None or self._process.poll() is not None:
            self._reap()
            command = [sys.executable, "-m", "roofline.engine.constraints.vetting"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            first = msgspec.msgpack.encode(self._words)
        else:
            first = b""
        process = self._process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            if first:
                _write(process.stdin, first)
            _write(process.stdin, text.encode("utf-8"))
        except OSError:
            return None
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            log.get("engine").error("a constraint was tried out for %g s without an answer", PATIENCE)
            process.send_signal(signal.SIGPROF)
            return None
        answer = _read(process.stdout)
        return None if answer is None else answer.decode("utf-8")

    def _reap(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        process.stdout.close()
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """A frame; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def main() -> int:
    """Answer until stdin ends, or nothing was asked for a while."""
    import resource

    from roofline.engine.constraints.library import compiled, library_tokenizer, try_out

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = open(0, "rb", buffering=0), open(1, "wb", buffering=0)  # noqa: SIM115  for the whole process
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    first = _read_whole(stdin)
    if first is None:
        return 0
    words = msgspec.msgpack.decode(first, type=Words)
    tokenizer = library_tokenizer(words)
    while select.select([stdin], [], [], IDLE_SECONDS)[0] and (text := _read_whole(stdin)) is not None:
        problem = ""
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # its signal ends a process that does not handle it
        try:
            try_out(compiled(tokenizer, text.decode("utf-8")), len(words.tokens), words.ends)
        except SlowFormError as error:
            problem = _SLOW + str(error)
        except ValueError as error:
            problem = str(error) or "it cannot be compiled"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(stdout, problem.encode("utf-8"))
    return 0


def _read_whole(stream: IO[bytes]) -> bytes | None:
    """A frame of an unbuffered stream, of which `read` may give a part."""
    data = b""
    size = _LENGTH.size
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            return None
        data += part
        if len(data) == _LENGTH.size:
            size += _LENGTH.unpack(data)[0]
    return data[_LENGTH.size :]


if __name__ == "__main__":
    sys.exit(main())
