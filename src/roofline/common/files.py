"""Files that are there whole or not at all, and small ones that may not be there."""

import os
import re
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """All of the data (text as UTF-8) is in `path`, or what was there before; several processes may write at once."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def text_of(path: Path) -> str | None:
    """A small file's text without white space around it, None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def integer(text: str | None) -> int | None:
    """The number a text is, None where it is none."""
    return int(text) if text is not None and re.fullmatch("-?[0-9]+", text) else None
