"""Files of results: points appended as they are measured, so that a run that is ended early leaves a valid file."""

import hashlib
import os
from collections.abc import Iterable
from io import RawIOBase
from pathlib import Path

import msgspec

from roofline.bench.results.point import SCHEMA, Point
from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, write_all


def with_id(point: Point) -> Point:
    """The point with the hash of all else that it says as its id. Its numbers are as a reader of the file has them: a
    whole number where the schema has a float would be another text once it was read."""
    point = msgspec.json.decode(msgspec.json.encode(point), type=Point)
    return msgspec.structs.replace(point, id=_hash(msgspec.json.encode(point)))


def _hash(line: bytes) -> str:
    """Of a point's JSON without its id. It is of the text, so that a later version whose points have more fields finds
    the same of an old one."""
    fields = msgspec.json.decode(line, type=dict[str, object])
    return hashlib.sha256(msgspec.json.encode({**fields, "id": ""}, order="sorted")).hexdigest()[:32]


def append_points(points: Iterable[Point], path: Path) -> list[Point]:
    """Add points at the end of a file of results; what is in it already stays as it is, but for a last line without its
    end. Where the disk is full, nothing is added. Returns the points as a reader has them, with their ids.

    Raises ConfigError where the file cannot be written, OSError, with its name, where the disk is full.
    """
    named = [with_id(point) for point in points]
    lines = b"".join(msgspec.json.encode(point) + b"\n" for point in named)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        special = path.exists() and not path.is_file() and not path.is_dir()  # a pipe or a device
        with path.open("wb" if special else "ab", buffering=0) as stream:
            write_all(stream, lines, path) if special else _add(stream, lines, path)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        raise ConfigError(f"results cannot be written to {path}: {cause_of(error)}; name another file") from error
    return named


def _add(stream: RawIOBase, lines: bytes, path: Path) -> None:
    begin = len(_whole_lines(path, path.read_bytes()))
    stream.truncate(begin)
    try:
        write_all(stream, lines, path)
    except OSError:
        stream.truncate(begin)
        raise
    os.fsync(stream.fileno())


def _whole_lines(path: Path, data: bytes) -> bytes:
    """The lines of a file up to the last end of a line. Of what is behind that, a warning says that it is left out."""
    end = data.rfind(b"\n") + 1
    if end < len(data):
        log.get("bench").warning("%s: its last line was cut off, as of a run that was killed; it is left out", path)
    return data[:end]


def read_points(path: Path) -> list[Point]:
    """The points in a file. A last line without its end, of a run that was killed, is left out.

    Raises ConfigError, naming file and line, where it is no file of results or of another schema, or where a point was
    changed after it was written (its id no longer fits).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    lines = _whole_lines(path, data).splitlines()
    return [_point(path, number, line) for number, line in enumerate(lines, start=1)]


def _point(path: Path, number: int, line: bytes) -> Point:
    try:
        point = msgspec.json.decode(line, type=Point)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}, line {number} is no measured point: {error}") from error
    if point.schema != SCHEMA:
        raise ConfigError(f"{path}, line {number} has schema {point.schema!r}; this version reads {SCHEMA!r}")
    if point.id != _hash(line):
        raise ConfigError(f"{path}, line {number}: the point was changed after it was measured (its id does not fit)")
    return point
