"""Files that are changed at random, and what reads them, try by try, in processes that may die."""

import copy
import faulthandler
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn

VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2, 1 << 31, 1 << 62, 1 << 70, 0.5, 1e300, float("nan"), float("inf"),
    "", "x", "cpu", "Q4_K", "\0", "\ud800", [], {}, [[]], [0], {"a": 1},
)  # fmt: skip
_WORDS = (
    *(b"", b"0", b"-1", b"9999999999", b"[", b"'", b"{% for m in messages %}", b"\xff" * 4, b"\xff" * 8, bytes(8)),
    *(bytes(4), b"\0\0\0\x80", b"\0\0\0\x7f", b"\0\0\0\0\x01\0\0\0", b"\0\0\0\0\0\0\0\x80"),
)
_RENEWED = 500  # tries of a process, so that what it keeps does not count against the next ones for ever


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything inside a value of JSON."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(way for key, value in inner for way in leaves(value, (*path, key)))]


def change_json(values: Any, random: Random) -> Any:
    """A value of JSON with one place changed or taken out, in place."""
    ways = leaves(values)[1:]
    if not ways:
        return copy.deepcopy(random.choice(VALUES))
    way = random.choice(ways)
    node = values
    for key in way[:-1]:
        node = node[key]
    old = node[way[-1]]
    if random.random() < 0.2:
        del node[way[-1]]
    elif isinstance(old, int) and random.random() < 0.5:
        node[way[-1]] = random.choice((old + 1, old - 1, -old, old * 2, old + 64))
    elif isinstance(old, str) and random.random() < 0.3:
        node[way[-1]] = change_bytes(old.encode(errors="surrogatepass"), random).decode(errors="replace")
    elif random.random() < 0.2:
        other = values
        for key in random.choice(ways):
            other = other[key] if isinstance(other, dict | list) and _has(other, key) else other
        node[way[-1]] = json.loads(json.dumps(other))
    else:
        node[way[-1]] = copy.deepcopy(random.choice(VALUES))
    return values


def _has(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


def change_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with a few places replaced, cut out or repeated."""
    raw = bytearray(data or b"x")
    for _ in range(random.choice((1, 1, 2, 4))):
        at, count = random.randrange(len(raw)), random.choice((0, 1, 1, 4, 8, 20))
        repeated = bytes(raw[random.randrange(len(raw)) :][:count])
        raw[at : at + count] = random.choice((*_WORDS, bytes([random.randrange(256)]), repeated))
        raw = raw or bytearray(b"x")
    return bytes(raw)


class TooLong(BaseException):
    """A try took more than its time."""


@dataclass(frozen=True)
class Limits:
    """Of a try. seconds: of time; grown: bytes of address space that a process may take beside what it had."""

    seconds: float = 20.0
    grown: int = 1 << 30


@dataclass
class Tally:
    """tries: how many were made; came: what came of them, and how often; failures: one line each."""

    tries: int = 0
    came: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {name}" for name, count in sorted(self.came.items()))
        return f"{self.tries} tries, {len(self.failures)} failed ({parts})"


def in_children(
    attempt: Callable[[int], str], tries: int, seconds: float, limits: Limits, allowed: tuple[type, ...] = ()
) -> Tally:
    """Calls `attempt` with 0, 1, ..., tries - 1, or until so many seconds are over, in forked processes.

    attempt: returns in a word what came of it. What it raises is a failure, and so are a signal that ends the process,
    more time or memory than the limits; allowed: errors that are none.
    """
    tally, end = Tally(), time.monotonic() + seconds
    while tally.tries < tries and time.monotonic() < end:
        last = min(tries, tally.tries + _RENEWED)
        state, (reader, writer) = mmap.mmap(-1, 8), os.pipe()
        struct.pack_into("<q", state, 0, tally.tries)
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(attempt, range(tally.tries, last), end, limits, allowed, state, writer)
        os.close(writer)
        status, said = _watched(child, state, reader, limits)
        (index,) = struct.unpack_from("<q", state)
        for line in said.decode(errors="replace").splitlines():
            kind, _, text = line.partition(" ")
            if kind == "failed":
                tally.failures.append(text)
            else:
                tally.came[kind] = tally.came.get(kind, 0) + 1
        if os.WIFSIGNALED(status):
            tally.failures.append(f"try {index}: the process was ended by signal {os.WTERMSIG(status)}")
            index += 1
        tally.tries = index
    return tally


def _watched(child: int, state: mmap.mmap, reader: int, limits: Limits) -> tuple[int, bytes]:
    """How a process ended, and what it said; it is killed where it stays in a try that its own alarm does not end."""
    said, index, since = b"", -1, time.monotonic()
    os.set_blocking(reader, False)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        try:
            while data := os.read(reader, 1 << 16):
                said += data
        except BlockingIOError:
            pass
        if done:
            os.close(reader)
            return status, said
        (now,) = struct.unpack_from("<q", state)
        if now != index:
            index, since = now, time.monotonic()
        elif time.monotonic() - since > 3 * limits.seconds:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def _child(
    attempt: Callable[[int], str],
    indices: range,
    end: float,
    limits: Limits,
    allowed: tuple[type, ...],
    state: mmap.mmap,
    writer: int,
) -> NoReturn:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + limits.grown, now + limits.grown))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _too_long)
    faulthandler.disable()
    index = indices.start
    for index in indices:
        struct.pack_into("<q", state, 0, index)
        if time.monotonic() > end:
            break
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        try:
            said = attempt(index)
        except allowed:
            said = "refused"
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error)[:300].split())
            said = f"failed try {index}: {type(error).__name__}: {text} at {place.filename}:{place.lineno}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(writer, f"{said}\n".encode(errors="replace"))
    else:
        struct.pack_into("<q", state, 0, index + 1)
    sys.stdout.flush()
    os._exit(0)


def _too_long(*_: object) -> None:
    raise TooLong("more than its time")


def report(tallies: Mapping[str, Tally]) -> int:
    """Prints what came of each; how many failed, at most 100."""
    for name, tally in tallies.items():
        for line in tally.failures:
            print(f"{name}: {line}")
        print(f"{name}: {tally}", flush=True)
    return min(100, sum(len(tally.failures) for tally in tallies.values()))
