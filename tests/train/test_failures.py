"""Errors of libraries that end a run become one line with a remedy; others are left as they are."""

import errno
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import CapacityError  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run.failures import explained  # noqa: E402
from roofline.train.storage.store import StoreError  # noqa: E402
from tests.train import small  # noqa: E402


def explain(error: Exception, folder: Path, grouped: bool = False) -> str | None:
    cause = explained(error, small.config(folder, folder / "run"), World(grouped=grouped))
    return None if cause is None else f"{type(cause).__name__}: {cause}"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("HIP out of memory. Tried to allocate 2 GiB")])
def test_memory_that_ends_is_said(tmp_path: Path, error: Exception) -> None:
    said = explain(error, tmp_path)
    assert said is not None
    assert said.startswith(CapacityError.__name__)
    assert (str(error) or "MemoryError") in said
    assert "training needs " in said
    assert "training on rank 0 needs " in str(explain(error, tmp_path, grouped=True))


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:4", "connection reset by peer", "Broken pipe"])
def test_a_process_that_is_gone_is_said_to_those_that_lost_it(tmp_path: Path, text: str) -> None:
    error = RuntimeError(f"gloo: {text}")
    said = explain(error, tmp_path, grouped=True)
    assert said == "RooflineError: another process of this run has ended; what it said stands above"
    assert explain(error, tmp_path) is None, "a process that is alone has lost no other one"
    assert explain(RuntimeError("shapes do not match"), tmp_path, grouped=True) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_named_by_the_file_or_the_runs_folder(tmp_path: Path, number: int) -> None:
    for name, place in (("/far/file", "/far/file"), (None, str(tmp_path / "run"))):
        said = explain(OSError(number, "is full", name), tmp_path)
        assert said is not None
        assert said.startswith(f"{StoreError.__name__}: {place}: ")
        assert "free some space there" in said
    assert explain(OSError(errno.EIO, "is broken", "/far/file"), tmp_path) is None
    assert explain(ValueError(number), tmp_path) is None
