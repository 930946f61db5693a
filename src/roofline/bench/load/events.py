"""What a load generator saw of each request: raw moments, from which every figure can be computed again.

Moments are nanoseconds of a monotonic clock since the run began. A file of events has one JSON object a line, the head
first.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, write_atomically

SCHEMA = "bench.events/1"
Arrivals = Literal["closed", "constant", "poisson", "gamma", "ramp", "trace", "batch"]


class UnreadClient(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A client that did not read its answer, beside the measured requests.

    request: of the traffic, beside which it was sent; server: which of several, from 0; dispatched, headers, end: when
    it was sent, when its answer's head came, when its connection ended; status: of HTTP, 0 where there is no answer;
    closed_by: who ended it: the server, the client (after its seconds, or with the run), or nobody but the answer,
    which had come with its head; error: what went wrong before anything waited to be read.
    """

    request: int
    dispatched: int
    headers: int | None = None
    end: int | None = None
    status: int = 0
    server: int = 0
    closed_by: Literal["client", "server", "answer"] = "client"
    error: str | None = None


class EventsHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a file have in common.

    traffic_sha256: of the traffic file; arrivals: how requests were scheduled; concurrency: workers of a closed loop;
    rate: requests a second of the others; started: date and time of the run's beginning, ISO 8601, UTC; begin, end:
    the span that figures are taken from (what is outside warms up or runs out), in nanoseconds since the beginning;
    stop: as in the traffic; client_cpu: cores' worth of time that the generator used; interrupted: whether the run was
    ended before its plan was; joules: that counters of this machine showed for it, in so many joules_seconds;
    blocks: how many runs of one plan stand one after the other, each of which began when the one before had ended;
    unread_share: of the requests, beside which a client came that did not read; unread: these clients, which are not
    among the requests.
    """

    traffic: str
    traffic_sha256: str
    arrivals: Arrivals
    target: str
    started: str
    begin: int
    end: int
    concurrency: int | None = None
    rate: float | None = None
    stop: str = "ignored"
    client_cpu: float | None = None
    interrupted: bool = False
    joules: float | None = None
    joules_seconds: float | None = None
    blocks: int = 1
    unread_share: float = 0.0
    unread: list[UnreadClient] = []
    schema: str = SCHEMA


class RequestEvents(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. A moment that did not come, or that another tool's file does not tell, is None.

    request: its index in the traffic; scheduled: when the plan says that it should be sent (in a closed loop the moment
    at which its worker was free); dispatched: when the generator took it up; connected, sent: of its connection and of
    the last byte of its body; headers, first_byte: of the answer; first_reasoning, first_text: of the first part of
    the answer that is reasoning, that is text; chunks: of each part of the answer that holds text or reasoning;
    characters: in each of these; end: of the answer's last byte, or of its failure.

    prompt_tokens, completion_tokens, cached_tokens: as the server's usage counts them; status: of HTTP, 0 where there
    is no HTTP or no answer; finish: the server's reason; error: what went wrong, None where nothing did; server: which
    of several it was sent to, from 0; probe: whether the request is a probe whose answer is known; text: the answer,
    kept for probes and for counting tokens again; parts: how many the answer had, where `chunks` has the first and the
    last alone; first_known: False of an answer of which nothing tells when its first part came, as of one that was not
    streamed: `chunks` has its last moment alone.
    """

    request: int
    scheduled: int | None
    dispatched: int
    connected: int | None = None
    sent: int | None = None
    headers: int | None = None
    first_byte: int | None = None
    first_reasoning: int | None = None
    first_text: int | None = None
    chunks: list[int] = []
    characters: list[int] = []
    end: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 0
    finish: str | None = None
    error: str | None = None
    server: int = 0
    probe: bool = False
    text: str | None = None
    parts: int | None = None
    first_known: bool = True

    @property
    def planned(self) -> int:
        """When it should have been sent; where that is not known, when it was dispatched."""
        return self.dispatched if self.scheduled is None else self.scheduled

    @property
    def completed(self) -> bool:
        """Whether the answer came to its end, and had text or reasoning."""
        return self.error is None and self.end is not None and bool(self.chunks)

    @property
    def empty(self) -> bool:
        """Whether the answer came to its end without text or reasoning."""
        return self.error is None and self.end is not None and not self.chunks


class Events(msgspec.Struct):
    """A run of the load generator: its head, its requests in the order of their dispatch."""

    head: EventsHead
    requests: list[RequestEvents]


def write_events(events: Events, path: Path) -> None:
    """Write the events to a file, all of them or none."""
    write_atomically(path, b"\n".join(_lines(events)) + b"\n")


def _lines(events: Events) -> Iterator[bytes]:
    yield msgspec.json.encode(events.head)
    for request in events.requests:
        yield msgspec.json.encode(request)


def read_events(path: Path) -> Events:
    """The events in a file. A last line that was cut off, as by a full disk, is left out.

    Raises ConfigError, naming the file and the line, where it is no file of events.
    """
    lines = _complete_lines(path)
    try:
        head = msgspec.json.decode(next(lines, b""), type=EventsHead)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is not a file of events: {error}") from error
    if head.schema != SCHEMA:
        raise ConfigError(f"{path} has events of schema {head.schema!r}; this version reads {SCHEMA!r}")
    return Events(head, list(_requests(path, lines)))


def _complete_lines(path: Path) -> Iterator[bytes]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    end = data.rfind(b"\n") + 1
    if end < len(data):
        log.get("bench").warning("%s: its last line was cut off; it is left out", path)
    yield from data[:end].splitlines()


def _requests(path: Path, lines: Iterable[bytes]) -> Iterator[RequestEvents]:
    for number, line in enumerate(lines, start=2):
        try:
            request = msgspec.json.decode(line, type=RequestEvents)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}, line {number} is not a request's events: {error}") from error
        if (
            cause := negative_counts(request.prompt_tokens, request.completion_tokens, request.cached_tokens)
        ) is not None:
            raise ConfigError(f"{path}, line {number} is not a request's events: {cause}")
        yield request


def negative_counts(prompt: int | None, completion: int | None, cached: int | None) -> str | None:
    """Why counts of a server cannot be, None where they may be."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    wrong = [f"{name} is {count}" for name, count in counts.items() if count is not None and count < 0]
    return f"the usage cannot be: {', '.join(wrong)}" if wrong else None
