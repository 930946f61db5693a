"""Files that are there whole or not at all."""

import os
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
