"""What a library says when memory ends, what a user is told of it, and the limit that a run may set itself."""

import errno
import resource
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.memory import exhausted  # noqa: E402
from roofline.train.memory.exhausted import is_out_of_memory, limit_memory, out_of_memory, room  # noqa: E402


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (RuntimeError("HIP out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize(
    ("message", "predicted", "needed"),
    [
        ("it ended", None, 4001),
        ("you tried to allocate 2500 bytes", None, 4001),
        ("you tried to allocate 3500 bytes", None, 4500),
        ("you tried to allocate 3500 bytes", 4499, 4500),
        ("you tried to allocate 3500 bytes", 4501, 4501),
    ],
)
@pytest.mark.parametrize("accelerated", [False, True])
def test_what_is_needed_is_the_prediction_or_what_there_was_and_the_piece_that_was_missing(
    monkeypatch: pytest.MonkeyPatch, message: str, predicted: int | None, needed: int, accelerated: bool
) -> None:
    """A process with 1,000 of 4,000 bytes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerated)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (3000, 4000))
    monkeypatch.setattr(exhausted, "_host_memory", lambda: 4000)
    monkeypatch.setattr(exhausted, "data_bytes", lambda: 1000)
    said = str(out_of_memory("a microbatch", message, predicted))
    assert said.startswith(f"a microbatch needs {needed:,} bytes, 4,000 are available. Lower ")
    assert said.endswith(f"more processes: {message}")


@pytest.mark.parametrize(("hard", "limit"), [(resource.RLIM_INFINITY, 3000), (5000, 3000), (3000, 3000), (2000, 2000)])
def test_a_limit_is_no_higher_than_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch, hard: int, limit: int
) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(exhausted.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, hard))
    monkeypatch.setattr(exhausted.resource, "setrlimit", lambda kind, pair: limits.append((kind, pair)))
    limit_memory(3000)
    assert limits == [(resource.RLIMIT_DATA, (limit, hard))]


@pytest.mark.parametrize(
    ("kind", "room", "free", "processes", "bytes_"),
    [
        ("cpu", None, 4000, 1, 2000),
        ("cpu", None, 4000, 2, 1000),
        ("cpu", 900, 4000, 2, 900),
        ("cpu", None, None, 1, None),
        ("cuda", None, 4000, 1, None),
    ],
)
def test_a_cpu_s_process_takes_its_limit_or_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, kind: str, room: int | None, free: int | None, processes: int, bytes_: int | None
) -> None:
    monkeypatch.setattr(exhausted, "room", lambda: room)
    monkeypatch.setattr(exhausted, "detect", lambda: SimpleNamespace(memory_available=free))
    assert exhausted.affordable(torch.device(kind), processes) == bytes_


@pytest.mark.parametrize(("soft", "left"), [(resource.RLIM_INFINITY, None), (1500, 500), (1000, 0), (900, 0)])
def test_room_is_what_a_limit_leaves(monkeypatch: pytest.MonkeyPatch, soft: int, left: int | None) -> None:
    monkeypatch.setattr(exhausted.resource, "getrlimit", lambda kind: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(exhausted, "data_bytes", lambda: 1000)
    assert room() == left
