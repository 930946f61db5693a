"""A traffic file: the requests of a load test with their texts, so that every system under test reads the same bytes.

The first line is the head, each later one a request; the file's SHA-256 names it in results. Texts and numbers are made
with integer arithmetic alone (`random_integers.py`), so that the same seed gives the same bytes on every machine.
"""

import hashlib
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, write_atomically
from roofline.common.mistaken_files import unreadable

SCHEMA = "bench.traffic/1"
Row = TypeVar("Row")


class TrafficRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    prompt: its text; of a later turn only what the user adds, after the earlier turns and their answers. prompt_tokens:
    that its maker aimed at; a tokenizer may make a few more or fewer of the text. max_tokens: the answer's limit.
    at_us: when it arrives, in microseconds since the beginning, where the traffic is a recorded trace. session:
    requests of one conversation have the same; turn: counted from 0 within it.
    """

    prompt: str
    prompt_tokens: int
    max_tokens: int
    at_us: int | None = None
    session: int | None = None
    turn: int = 0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order in which they are sent.

    name, version: of the preset that made it; stop: whether answers end where the model ends them ("natural") or only
    at max_tokens ("ignored"); source: what the lengths are modelled on, in words; definition: by which results name it
    where it was made, not read, the same however many requests were made of it; it does not stand in the file.
    """

    name: str
    version: int
    seed: int
    stop: Literal["natural", "ignored"]
    source: str
    requests: list[TrafficRequest]
    definition: str = ""

    def encode(self) -> bytes:
        """The bytes of its file."""
        head = {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in ("name", "version", "seed", "stop", "source")},
        }
        lines = [
            msgspec.json.encode(head, order="sorted"),
            *(msgspec.json.encode(request) for request in self.requests),
        ]
        return b"\n".join(lines) + b"\n"

    @property
    def sha256(self) -> str:
        """By which results name it, in hexadecimal: of its definition where it was made, else of its file."""
        return self.definition or self.file_sha256

    @property
    def file_sha256(self) -> str:
        """Of the bytes of its file, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()


class _Head(msgspec.Struct, frozen=True):
    schema: str
    name: str
    version: int
    seed: int
    stop: Literal["natural", "ignored"]
    source: str


def write_traffic(traffic: Traffic, path: Path) -> None:
    """Write the file, all of it or nothing."""
    write_atomically(path, traffic.encode())


def read_traffic(path: Path) -> Traffic:
    """The traffic in a file. Raises ConfigError, naming file and line, where it is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    head = _decode(path, 1, lines[0] if lines else b"", _Head)
    if head.schema != SCHEMA:
        raise ConfigError(f"{path} is traffic of schema {head.schema!r}; this version reads {SCHEMA!r}")
    requests = [_decode(path, number, line, TrafficRequest) for number, line in enumerate(lines[1:], start=2)]
    return Traffic(
        name=head.name, version=head.version, seed=head.seed, stop=head.stop, source=head.source, requests=requests
    )


def _decode(path: Path, number: int, line: bytes, kind: type[Row]) -> Row:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        remedy = "`roofline bench traffic` writes such files"
        raise unreadable(path, f"{path}, line {number} is no traffic: {error}; {remedy}") from error
