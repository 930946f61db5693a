"""Writing files atomically, locking them, and reading small ones that may not exist."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write `path` (text as UTF-8) so that it holds either all of the data or what it held before."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; `waiting` is called while another process holds it. The kernel drops it when we die."""
    import fcntl
    import time

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(0.1)
        yield  # closing the file unlocks it


def text_of(path: Path) -> str | None:
    """A small file's text without white space around it, None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def integer(text: str | None) -> int | None:
    """The whole number that `text` spells, None where it spells none."""
    return int(text) if text is not None and re.fullmatch("-?[0-9]+", text) else None
