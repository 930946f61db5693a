"""libroofline through ctypes: what tests call with arguments that a C compiler would not let through."""

import ctypes as c
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

INT, FLOAT, SIZE = c.c_int32, c.c_float, c.c_size_t
OK, IDLE, INVALID, BUNDLE, UNSUPPORTED, CAPACITY, MEMORY = 0, 1, -1, -2, -3, -4, -5
RUNNING, STOP, LENGTH, ABORT, FAILED = range(5)


def open_files_to_the_limit() -> list[int]:
    """The descriptors of as many files as this process may still open."""
    descriptors = list[int]()
    with suppress(OSError):
        while True:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    return descriptors


class Options(c.Structure):
    _fields_ = (
        ("size", SIZE),
        ("isa", c.c_char_p),
        *((name, INT) for name in ("threads", "max_sequences", "max_length", "max_step_tokens")),
        ("cache_tokens", c.c_int64),
    )


class Sampling(c.Structure):
    _fields_ = (
        ("size", SIZE),
        *((name, FLOAT) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *((name, FLOAT) for name in ("presence_penalty", "frequency_penalty")),
        ("top_k", INT),
        ("seed", c.c_uint64),
        *((name, INT) for name in ("sample_index", "max_tokens", "min_tokens", "ignore_eos", "logprobs")),
        ("stop_ids", c.POINTER(INT)),
        ("stop_count", SIZE),
        ("bias_ids", c.POINTER(INT)),
        ("bias_values", c.POINTER(FLOAT)),
        ("bias_count", SIZE),
    )


class Event(c.Structure):
    _fields_ = (("request", c.c_uint64), ("id", INT), ("finish", INT), ("logprob", FLOAT), ("index", INT))


class Info(c.Structure):
    _fields_ = (
        ("size", SIZE),
        *((name, c.c_char_p) for name in ("name", "bundle", "fingerprint", "isa")),
        *((name, INT) for name in ("threads", "vocab_size", "max_length", "bos_id", "add_bos", "max_sequences")),
        ("cache_tokens", c.c_int64),
        ("eos_ids", c.POINTER(INT)),
        ("eos_count", SIZE),
    )


def sampling(**fields: Any) -> Sampling:
    """As RL_SAMPLING makes it, with some fields set; lists for the arrays."""
    made = Sampling(size=c.sizeof(Sampling), temperature=1, top_p=1, repetition_penalty=1)
    for name, value in fields.items():
        kind = {"stop_ids": INT, "bias_ids": INT, "bias_values": FLOAT}.get(name)
        setattr(made, name, value if kind is None else (kind * len(value))(*value))
        if name in ("stop_ids", "bias_ids"):
            setattr(made, name.replace("_ids", "_count"), len(value))
    return made


class Library:
    """The functions with their types, and shorter ways to call them."""

    def __init__(self, path: Path) -> None:
        self.c = c.CDLL(str(path))
        self.c.rl_last_error.restype = c.c_char_p
        handle, ids = c.c_void_p, c.POINTER(INT)
        self.c.rl_open.argtypes = [c.c_char_p, c.POINTER(Options), c.POINTER(handle)]
        self.c.rl_verify.argtypes = [c.c_char_p]
        self.c.rl_close.argtypes = [c.POINTER(handle)]
        self.c.rl_info.argtypes = [handle, c.POINTER(Info)]
        self.c.rl_submit.argtypes = [handle, ids, SIZE, c.POINTER(Sampling), c.POINTER(c.c_uint64)]
        self.c.rl_step.argtypes = [handle, c.POINTER(Event), SIZE, c.POINTER(SIZE)]
        self.c.rl_abort.argtypes = [handle, c.c_uint64]
        self.c.rl_decode.argtypes = [handle, ids, SIZE, c.c_char_p, SIZE, c.POINTER(SIZE)]

    def error(self) -> str:
        return str(self.c.rl_last_error().decode())

    def open(self, path: Any, **options: Any) -> c.c_void_p:
        handle = c.c_void_p()
        made = Options(size=c.sizeof(Options), **options)
        status = self.c.rl_open(str(path).encode(), c.byref(made), c.byref(handle))
        assert status == OK, self.error()
        return handle

    def refused(self, path: Any, **options: Any) -> tuple[int, str]:
        """Status and message of an rl_open that fails; the handle stays as it was."""
        handle = c.c_void_p()
        made = Options(size=c.sizeof(Options), **options)
        status = self.c.rl_open(str(path).encode(), c.byref(made), c.byref(handle))
        assert status < 0
        assert handle.value is None
        return status, self.error()

    def submit(self, handle: c.c_void_p, ids: list[int], made: Sampling | None = None) -> int:
        request = c.c_uint64()
        status = self.c.rl_submit(handle, (INT * len(ids))(*ids), len(ids), made, c.byref(request))
        assert status == OK, self.error()
        return request.value

    def step(self, handle: c.c_void_p, capacity: int = 64) -> list[Event] | None:
        """Events, None when idle."""
        events, count = (Event * capacity)(), SIZE()
        status = self.c.rl_step(handle, events, capacity, c.byref(count))
        assert status in (OK, IDLE), self.error()
        return None if status == IDLE else list(events[: count.value])

    def run(self, handle: c.c_void_p, capacity: int = 64) -> dict[int, list[Event]]:
        """Steps until idle; the events of each request."""
        found: dict[int, list[Event]] = {}
        while (events := self.step(handle, capacity)) is not None:
            for event in events:
                found.setdefault(event.request, []).append(event)
        return found

    def decode(self, handle: c.c_void_p, ids: list[int], capacity: int = 1 << 16) -> bytes:
        buffer, size = c.create_string_buffer(capacity), SIZE()
        status = self.c.rl_decode(handle, (INT * len(ids))(*ids), len(ids), buffer, capacity, c.byref(size))
        assert status == OK, self.error()
        return buffer.raw[: min(size.value, capacity)]

    def close(self, handle: c.c_void_p) -> int:
        return int(self.c.rl_close(c.byref(handle)))
