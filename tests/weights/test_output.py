"""Parts of files and folders that killed processes left are removed when the same is written again, and no others."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roofline.weights.files.output import check_new, new_file, new_folder, staging_folder

WRITER = """
import sys
from pathlib import Path
from roofline.weights.files.output import new_file, new_folder, staging_folder
kind, path = sys.argv[1], Path(sys.argv[2])
if kind == "file":
    with new_file(path, 4) as stream:
        stream.write(b"half")
        stream.flush()
        print("ready", flush=True)
        sys.stdin.read()
elif kind == "folder":
    with new_folder(path, 4) as folder:
        (folder / "a").write_bytes(b"half")
        print("ready", flush=True)
        sys.stdin.read()
else:
    with staging_folder(path) as outer, new_folder(outer / path.name, 4) as folder:
        (folder / "a").write_bytes(b"half")
        print("ready", flush=True)
        sys.stdin.read()
"""
KINDS = ("file", "folder", "staged")


@contextmanager
def writing(kind: str, path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that is in the middle of writing; it is killed at the end."""
    words = [sys.executable, "-c", WRITER, kind, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def write(kind: str, path: Path) -> None:
    if kind == "file":
        with new_file(path, 5) as stream:
            stream.write(b"whole")
    elif kind == "folder":
        with new_folder(path, 5) as folder:
            (folder / "a").write_bytes(b"whole")
    else:
        check_new(path, 5)
        with staging_folder(path) as folder:
            (folder / "a").write_bytes(b"whole")
            (folder / "a").rename(path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_process_left_is_removed_and_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new.gguf"
    with writing(kind, path) as process:
        part = f".new.gguf.{process.pid}.part"
    assert os.listdir(tmp_path) == [part]
    others = [".other.gguf.1.part", ".new.gguf.x.part", ".new.gguf.1.part.txt"]
    for name in others:
        (tmp_path / name).write_bytes(b"stays")
    with caplog.at_level(logging.WARNING):
        write(kind, path)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "new.gguf"])
    assert f"{tmp_path / part} was removed: a process that was killed while it wrote {path} had left it" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_living_process_writes_stays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    with writing(kind, path) as process:
        write(kind, path)
        assert sorted(os.listdir(tmp_path)) == [f".new.gguf.{process.pid}.part", "new.gguf"]


def test_what_this_process_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with new_folder(path, 1) as folder:
        check_new(path, 1)
        (folder / "a").write_bytes(b"whole")
    assert (path / "a").read_bytes() == b"whole"
