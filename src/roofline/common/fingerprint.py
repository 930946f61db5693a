"""The identity of the package's own sources: of the code that computed something, whatever its version says."""

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


@cache
def fingerprint(*rooms: str) -> str:
    """Return a hex digest of all Python files of the package, or of those of some of its rooms.

    Their paths in the package and their bytes count. Sizes and times do not: two builds of a package may have them
    alike, and two hosts that installed the same may not. It is computed once in a process, in some milliseconds.
    """
    return digest_of(PACKAGE, rooms)


def digest_of(package: Path, rooms: tuple[str, ...] = ()) -> str:
    """Return a hex digest of the Python files of a folder, or of some folders in it."""
    digest = hashlib.sha256()
    folders = [package / room for room in rooms] or [package]
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        data = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
