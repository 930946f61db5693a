"""The files of batches: lines of requests in, lines of answers out, and which requests of a file have an answer.

A line of requests: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. A line of
answers has the id `batch_req_NUMBER_HASH` of the request's line: its number in the file, from 1, and a hash of its
bytes. So a file of answers says itself which lines of which file it answers, and a run that was killed goes on from it.
"""

import os
import re
import stat
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from roofline.common.errors import ConfigError
from roofline.common.json_depth import json_depth_within
from roofline.common.json_escapes import parsed
from roofline.server.batches.endpoints import RouteReply
from roofline.server.limits import Limits
from roofline.server.response import one_line

MAX_PROBLEMS = 20  # of a file, that are told
MAX_ANSWER = 1 << 30  # bytes of a line of answers
ANSWER_ID = re.compile(r"batch_req_([0-9]{1,12})_([0-9a-f]{16})")
BEGINNING = b'{"id":"batch_req_'  # of every line of answers
LINE_ROOM = 4096  # bytes that a line may have beside its body


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. body: its bytes as they stand in the file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """Why a line was not computed."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True):
    """What the route answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class AnswerLine(msgspec.Struct, frozen=True):
    """A line of a file of answers. One of response and error is there."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None


class _Head(msgspec.Struct):
    """What is read of an answer when a run goes on."""

    class Told(msgspec.Struct):
        status_code: int

    id: str
    response: Told | None


class Problem(NamedTuple):
    """What is wrong with a line of requests, or, where it has no number, with all of them."""

    line: int | None
    code: str
    message: str
    param: str | None = None


class BadLine(Exception):
    """A line of requests that cannot be read. code, message and param as in errors of the server."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True)
class Rules:
    """What a file of requests may have. urls: that lines may name; lines: how many, None: any number."""

    urls: Collection[str]
    limits: Limits
    lines: int | None = None


def read_line(raw: bytes, rules: Rules) -> Line:
    """A line of requests. Raises BadLine."""
    if len(raw) > rules.limits.body_bytes + LINE_ROOM:
        raise BadLine("line_too_long", f"it is longer than the {rules.limits.body_bytes} bytes of a request's body")
    if not json_depth_within(raw, rules.limits.json_depth + 1):
        raise BadLine("invalid_json_line", f"it is not JSON nested at most {rules.limits.json_depth} deep")
    try:
        line = parsed(raw, partial(msgspec.json.decode, type=Line))
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", f"it is not a request of a batch: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"it is not JSON: {error}") from None
    if not 1 <= len(line.custom_id) <= rules.limits.user_characters:
        most = rules.limits.user_characters
        raise BadLine(
            "invalid_custom_id", f"custom_id has {len(line.custom_id)} characters, not 1 to {most}", "custom_id"
        )
    if line.method != "POST":
        raise BadLine("invalid_method", "method is not POST", "method")
    if line.url not in rules.urls:
        raise BadLine("invalid_url", f"url is {line.url[:100]!r}, not {' or '.join(rules.urls)}", "url")
    if memoryview(line.body)[:1] != b"{":
        raise BadLine("invalid_body", "body is not a JSON object", "body")
    return line


class RequestFile:
    """A file of requests that was read through once: how many it has, and a hash of each line.

    Of a line 8 bytes are kept: a million lines take 8 MB, and as much again while they are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0  # of lines that are not blank
        self.hashes = array("Q")  # of each line, 0 of a blank one
        self.problems: list[Problem] = []  # the first MAX_PROBLEMS
        self.urls: set[str] = set()  # that lines name

    @classmethod
    def scan(cls, path: Path, rules: Rules) -> "RequestFile":
        """Read and check each line. Raises OSError."""
        scanned, ids = cls(path), array("Q")
        for number, raw in numbered_lines(path, rules):
            scanned.hashes.extend([0] * (number - 1 - len(scanned.hashes)))
            scanned.hashes.append(hash_of(raw))
            scanned.count += 1
            if rules.lines is not None and scanned.count > rules.lines:
                problem = Problem(number, "too_many_lines", f"a batch may have at most {rules.lines} requests")
                scanned.problems.append(problem)
                break
            try:
                line = read_line(raw, rules)
            except BadLine as error:
                scanned.problems.append(Problem(number, error.code, str(error), error.param))
                if len(scanned.problems) >= MAX_PROBLEMS:
                    break
                line = None
            ids.extend([0] * (number - 1 - len(ids)))
            if line:
                scanned.urls.add(line.url)
            ids.append(hash_of(line.custom_id.encode("utf-8", "surrogatepass")) if line else 0)
        if not scanned.problems:
            scanned.problems += [
                Problem(again, "duplicate_custom_id", f"custom_id is that of line {first} too", "custom_id")
                for first, again in _twice(ids)
            ]
        if not scanned.count:
            scanned.problems.append(Problem(None, "empty_file", "the file has no requests"))
        return scanned

    def lines(self, rules: Rules, answered: "bytearray") -> Iterator[tuple[int, Line]]:
        """The requests without an answer, by their numbers, read again. Raises ConfigError where the file changed."""
        for number, raw in numbered_lines(self.path, rules):
            if number > len(self.hashes) or self.hashes[number - 1] != hash_of(raw):
                raise ConfigError(f"{self.path}: line {number} changed while the file was being answered; start again")
            if not answered[number - 1]:
                yield number, read_line(raw, rules)

    def answer_id(self, number: int, salt: bytes) -> str:
        """The id of the answer to a line. salt: of the model that answers, and of its settings."""
        return f"batch_req_{number}_{hash_of(salt + self.hashes[number - 1].to_bytes(8, 'little')):016x}"


def numbered_lines(path: Path, rules: Rules) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank by their numbers, without their ends; of one that is too long its beginning."""
    most = rules.limits.body_bytes + LINE_ROOM
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(most + 2):
            number += 1
            part = raw
            while len(part) == most + 2 and not part.endswith(b"\n"):
                part = file.readline(most + 2)
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            raw = raw.strip(b" \t\r\n")
            if raw:
                yield number, raw


def hash_of(data: bytes) -> int:
    """64 bits, never 0."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def _twice(hashes: "array[int]") -> list[tuple[int, int]]:
    """(first line, later line) of the values that stand twice, 0 aside; at most MAX_PROBLEMS."""
    import numpy

    values = numpy.frombuffer(hashes, numpy.uint64) if hashes else numpy.zeros(0, numpy.uint64)  # [lines]
    ordered = numpy.sort(values)
    again = numpy.unique(ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)])
    pairs = []
    for value in again[:MAX_PROBLEMS]:
        first, *others = (int(at) + 1 for at in numpy.nonzero(values == value)[0])
        pairs += [(first, other) for other in others[:MAX_PROBLEMS]]
    return sorted(pairs, key=lambda pair: pair[1])[:MAX_PROBLEMS]


class AnswerFiles:
    """The files of answers of a run, appended to line by line. A line is in a file as a whole or, once the file is
    opened again, not at all.

    Args:
        errors: the file of lines that have no answer with status 200; None: they stand among the others.
        salt: of the answers' ids, as in `Requests.answer_id`.

    Raises:
        ConfigError: a file has lines that are no answers to these requests, by the model of this salt.
        OSError: a file cannot be written; it has the file's name.
    """

    def __init__(self, requests: RequestFile, output: Path, errors: Path | None, salt: bytes) -> None:
        self._requests, self._salt = requests, salt
        self.answered = bytearray(len(requests.hashes))  # 1 for each line with an answer
        self.completed = self.failed = 0  # answers with status 200, and others
        self._files: dict[BinaryIO, Path] = {}
        try:
            self._output = self._open(output)
            self._errors = self._output if errors is None else self._open(errors)
        except BaseException:
            self.close()
            raise

    def write(self, number: int, line: Line, reply: RouteReply | Failure) -> int:
        """Append an answer; the bytes that this took. Raises OSError, and the file is as it was then."""
        response = error = None
        if isinstance(reply, Failure):
            error = reply
        else:
            response = Response(reply.status, reply.request_id, msgspec.Raw(reply.body))
        good = response is not None and response.status_code == 200
        answer = AnswerLine(self._requests.answer_id(number, self._salt), line.custom_id, response, error)
        data = one_line(msgspec.json.encode(answer)) + b"\n"
        file = self._output if good else self._errors
        begins = file.tell()
        try:
            _write_all(file, data)
        except OSError as error:
            error.filename = str(self._files[file])
            file.seek(begins)
            file.truncate()
            raise
        self._count(number, good)
        return len(data)

    def sync(self) -> None:
        """Until here it survives the machine."""
        for file, path in self._files.items():
            try:
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)
                raise

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _count(self, number: int, good: bool) -> None:
        self.answered[number - 1] = 1
        self.completed += good
        self.failed += not good

    def _open(self, path: Path) -> BinaryIO:
        """A file of answers, read and without the half of a line at its end, to append to."""
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  it is closed by `close`
        self._files[file] = path
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(
                f"{path}: is a pipe or a device; a file is needed, which a run that was killed goes on from"
            )
        if os.path.samefile(path, self._requests.path):
            raise ConfigError(f"{path}: is the file of the requests; name another one for the answers")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path}: another run is writing it; name another file, or wait for its end") from None
        good_end = number = 0
        with open(os.dup(file.fileno()), "rb") as lines:
            while raw := lines.readline(MAX_ANSWER):
                number += 1
                if not raw.endswith(b"\n") and (raw.startswith(BEGINNING) or BEGINNING.startswith(raw)):
                    break  # half an answer
                self._read(path, number, raw)
                good_end += len(raw)
        file.seek(good_end)
        file.truncate()
        return file

    def _read(self, path: Path, line: int, raw: bytes) -> None:
        try:
            head = msgspec.json.decode(raw, type=_Head)
            parts = ANSWER_ID.fullmatch(head.id)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            parts = None
        number = int(parts[1]) if parts else 0
        of_these = 1 <= number <= len(self._requests.hashes)
        if not of_these or head.id != self._requests.answer_id(number, self._salt):
            problem = f"line {line} is no answer to {self._requests.path} by this model with these settings"
            raise ConfigError(f"{path}: {problem}; name another file for the answers, or remove this one")
        if self.answered[number - 1]:
            raise ConfigError(f"{path}: line {line} answers line {number} of the requests a second time; remove it")
        self._count(number, head.response is not None and head.response.status_code == 200)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
