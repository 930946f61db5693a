"""Bundles made on first use, kept in ROOFLINE_HOME/bundles: one for each source and build."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.bundle import manifest as names
from roofline.bundle import origins
from roofline.bundle.manifest import BundleError, PlaceError
from roofline.bundle.origins import BundleOrigin
from roofline.bundle.reader import Bundle, changed_reason, open_bundle
from roofline.bundle.weights_checks import last_problem
from roofline.common import env, extensions, files
from roofline.common.fingerprint import fingerprint

if TYPE_CHECKING:
    from roofline.bundle.writer import WriteReport, WrittenBundle

    CompileTo = Callable[[Path, str, WriteReport], WrittenBundle]

KEPT = 2  # bundles of one source: those of two builds in turn do not push each other out
FIRST_LINE_SECONDS, LINE_SECONDS = 1.0, 5.0  # of a compilation, until a line says how far it is, and between two
WHOLE = 1 << 22  # bytes of a file up to which all of it goes into its identity: configurations, templates
HEAD = 1 << 16  # of a larger one its beginning, and
SAMPLE, SAMPLES = 1 << 12, 16  # so many bytes at so many places
COMPILER = ("models", "ops", "program", "backends/cpu", "bundle", "text", "weights")  # rooms whose code makes bundles


@dataclass(frozen=True)
class Cached:
    """A bundle in the cache: its directory, the path it was compiled from (None: it cannot be read), bytes on disk."""

    path: Path
    source: Path | None
    nbytes: int


def enabled() -> bool:
    """Whether sources are compiled into the cache on first use (ROOFLINE_BUNDLES)."""
    return env.read("ROOFLINE_BUNDLES") != "off"


def get(source: Path, compile_to: "CompileTo", say: Callable[[str], None]) -> Bundle:
    """The cached bundle of a source, compiled first where there is none that is right.

    Args:
        source: a file or folder of weights.
        compile_to: (directory, key, report) writes the bundle; report: see `writer.write_bundle`.
        say: takes lines: why a damaged bundle is replaced, how far a compilation is that takes longer than a second,
            and what was compiled.

    Raises ConfigError and CapacityError where the cache cannot be written, and what compiling raises.
    """
    key = key_of(source)
    path = _place(source, key)
    bundle, reason = _usable(path, key)
    if bundle is not None:
        return bundle
    try:
        with files.locked(env.home() / "locks" / f"bundle-{key[:16]}.lock", lambda: None):
            bundle, reason = _usable(path, key)  # another process may have compiled it while we waited
            if bundle is None:
                if reason:
                    say(f"Compiling {source} again: {reason}")
                written = compile_to(path, key, progress_lines(source, path, say))
                say(f"Compiled {source} in {written.seconds:.1f} s into {path} ({written.nbytes / 1e6:.0f} MB)")
                _forget_stale(source, path)
    except OSError as error:
        raise PlaceError(f"{error.filename or _folder()}: {files.cause_of(error)}") from error
    return bundle or _checked(path, key)


def progress_lines(
    source: Path, path: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> "WriteReport":
    """Says what a compilation takes of disk and how long it goes on: after a second, and then every few."""
    began = clock()
    next_line = began + FIRST_LINE_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal next_line
        now = clock()
        if now < next_line:
            return
        next_line = now + LINE_SECONDS
        remaining = (now - began) * (total - done) / done
        say(
            f"Compiling {source} for its first use here: {total / 1e6:.0f} MB of disk in {path.parent}, "
            f"{done / total:.0%} done, about {remaining:.0f} s left"
        )

    return report


def forget(source: Path) -> None:
    """Delete the bundle of a source as it is now, so that the next `get` compiles it."""
    path = _place(source, key_of(source))
    if path.is_dir():
        remove(Cached(path, source, 0))


def entries() -> Iterator[Cached]:
    """What is in the cache."""
    from roofline.weights.storage import folder_bytes

    for path in files.entries(_folder()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        _, origin = _origin(path)
        yield Cached(path, Path(origin.path) if origin else None, folder_bytes(path))


def remove(entry: Cached) -> int:
    """Delete a cached bundle; the bytes freed. Who has it open keeps what is mapped."""
    bundle_id, origin = _origin(entry.path)
    trash = entry.path.with_name(f".{entry.path.name}.part-gone-{os.getpid()}")
    try:
        entry.path.rename(trash)  # at once, so that nobody opens half of it
    except OSError:
        return 0  # another process was quicker, or may and we may not
    if origin is not None:
        origins.forget(bundle_id, origin)
    shutil.rmtree(trash, ignore_errors=True)
    return entry.nbytes


def _origin(path: Path) -> tuple[str, BundleOrigin | None]:
    """The id of a cached bundle, and what it was compiled from; None where that is not known."""
    try:
        bundle_id = names.read(path).id
    except BundleError:
        return "", None
    known = origins.origins(bundle_id)
    return bundle_id, next((origin for origin in known if path.name.endswith(f"-{origin.key[:16]}")), None)


def key_of(source: Path) -> str:
    """Hex identity of a source and of what would be made of it.

    It has the path, size, time and bytes (of large ones some) of the source's files; the core's build and layout; and
    the code that turns models into Programs, extensions included.
    """
    from roofline import _native

    facts = names.FORMAT, _native.versions(), _native.build_id(), fingerprint(*COMPILER), extensions.key()
    digest = hashlib.sha256(repr(facts).encode())
    source = source.resolve()
    parts = sorted(f for f in _files_of(source) if f.is_file())
    for file in parts:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(WHOLE if status.st_size <= WHOLE else HEAD))
            for part in range(SAMPLES if status.st_size > WHOLE else 0):
                stream.seek((part + 1) * (status.st_size - SAMPLE) // SAMPLES)
                digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def _files_of(source: Path) -> list[Path]:
    """The files that a source is read from: those of a folder, the parts of a GGUF model, or a file of weights with
    what lies beside it."""
    from roofline.weights.files.gguf_parts import part_names
    from roofline.weights.sources import find_tokenizer_files

    if source.is_dir():
        return list(source.iterdir())
    return [*part_names(source), *find_tokenizer_files(source).values()]


def _usable(path: Path, key: str) -> tuple[Bundle | None, str]:
    """The bundle at a path, or why it is not to be used (empty: there is none)."""
    if not os.path.isdir(path):  # not there, or where nothing can be read
        return None, ""
    try:
        return _checked(path, key), ""
    except BundleError as error:
        return None, error.reason


def _checked(path: Path, key: str) -> Bundle:
    bundle = open_bundle(path)
    if all(origin.key != key for origin in origins.origins(bundle.manifest.id)):
        raise BundleError(path, "it was compiled from something else")
    if last_problem(path) is not None:
        raise BundleError(path, changed_reason(names.WEIGHTS))
    return bundle


def _forget_stale(source: Path, path: Path) -> None:
    """Remove older bundles of the same source, and those whose source has gone."""
    from roofline.bundle.writer import sweep

    sweep(_folder())
    same = []
    for entry in entries():
        if entry.source is None or not entry.source.exists():
            remove(entry)
        elif entry.path != path and entry.source == source.resolve():
            same.append(entry)
    same.sort(key=lambda entry: entry.path.stat().st_mtime)
    for entry in same[: max(0, len(same) - (KEPT - 1))]:
        remove(entry)


def _place(source: Path, key: str) -> Path:
    return _folder() / f"{_slug(source)}-{key[:16]}"


def _folder() -> Path:
    return env.home() / "bundles"


def _slug(source: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.")[:60] or "model"
