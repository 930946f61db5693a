"""Extensions: packages of others that register ops, passes, model families, callbacks (docs/how-to/extending.md).

A package names a function in the entry-point group ``roofline.extensions``; it is called once in a process, before the
first model is read or compiled, and before a name is refused that none of ours has: the registries see to it, so that
no command has to. What was registered, here or by hand, is part of what a compiled bundle is kept under.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from roofline.common.errors import ConfigError, RooflineError

GROUP = "roofline.extensions"


@dataclass(frozen=True)
class Extension:
    """An entry point that was called: its name, and the package it came from with its version."""

    name: str
    package: str


@dataclass(frozen=True)
class Registered:
    """Something from outside the tree: "op", "pass", "model family", "weight format", "backend" or "callback", its
    name, its module."""

    kind: str
    name: str
    module: str


_loaded: dict[str, Extension] = {}
_registered: list[Registered] = []


def load() -> tuple[Extension, ...]:
    """Call the entry points of all installed extensions, those already called left out; all that are loaded.

    Raises ConfigError naming the package whose extension does not load.
    """
    if not _any_installed(tuple(sys.path)):
        return tuple(_loaded.values())
    from importlib.metadata import entry_points  # takes 10 ms, so only where there is something to find

    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        if point.value in _loaded:
            continue
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
        _loaded[point.value] = Extension(point.name, package)
        try:
            point.load()()
        except Exception as error:
            del _loaded[point.value]
            cause = str(error) if isinstance(error, RooflineError) else f"{type(error).__name__}: {error}"
            remedy = f"Repair or uninstall {package.split()[0]}." if point.dist else ""
            raise ConfigError(
                f"the extension {point.name!r} ({point.value}) of {package} does not load: {cause}. {remedy}".rstrip()
            ) from error
    return tuple(_loaded.values())


def note(kind: str, name: str, module: str) -> None:
    """Remember what was registered from outside, and by which module."""
    _registered.append(Registered(kind, name, module))


def registered() -> tuple[Registered, ...]:
    """All that was registered from outside the tree, in this order."""
    return tuple(_registered)


def key() -> str | None:
    """Hex identity of what is registered, by names and the sizes and times of the sources; "" when nothing is.

    None where something was registered by code that is in no file, which can change unseen: nothing may be kept then.
    Backends do not count, since what they compute from is the same for all, and callbacks belong to training.
    """
    entries = {entry for entry in _registered if entry.kind not in ("backend", "callback")}
    if not entries:
        return ""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: (entry.kind, entry.name)):
        digest.update(repr(entry).encode())
    for module in sorted({entry.module for entry in entries}):
        files = list(_sources(module))
        if not files:
            return None
        for file in files:
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _sources(module: str) -> Iterator[Path]:
    """The files of the top package that a module belongs to, or its own file."""
    top = sys.modules.get(module.partition(".")[0])
    file = getattr(top, "__file__", None) or getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None or not os.path.exists(file):
        return
    path = Path(file)
    yield from sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


@cache
def _any_installed(folders: tuple[str, ...]) -> bool:
    """Whether a package that is installed in one of the folders mentions the group: some 2 ms, at every start."""
    mark = f"[{GROUP}]".encode()
    for folder in dict.fromkeys(folders):
        try:
            with os.scandir(folder or ".") as entries:
                infos = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
        except OSError:
            continue
        for info in infos:
            try:
                with open(os.path.join(info, "entry_points.txt"), "rb") as file:
                    if mark in file.read():
                        return True
            except OSError:
                continue
    return False
