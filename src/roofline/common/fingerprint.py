"""The identity of the package's own sources: of the code that computed something, whatever its version says."""

import hashlib
import os
from collections.abc import Iterator
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
    for place in sorted(_python_files(package, rooms)):
        with open(os.path.join(package, place), "rb") as file:
            data = file.read()
        digest.update(f"{place.replace(os.sep, '/')}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _python_files(package: Path, rooms: tuple[str, ...]) -> Iterator[str]:
    """Paths in the package as words: each start pays for this, and objects of pathlib would take twice as long."""
    for room in rooms or ("",):
        for folder, _, names in os.walk(os.path.join(package, room)):
            inside = os.path.relpath(folder, package)
            yield from (os.path.normpath(os.path.join(inside, name)) for name in names if name.endswith(".py"))
