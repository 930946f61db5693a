"""Result files of AIPerf (NVIDIA's successor of genai-perf) as events, as far as they tell them.

`profile_export.jsonl` has a line for each request; `profile_export_aiperf.json` beside it says how they were sent. With
a prefix of the user's the two are PREFIX.jsonl and PREFIX.json.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from roofline.bench.load.events import Arrivals, Events, EventsHead, RequestEvents
from roofline.bench.results.ends import CANCELLED
from roofline.common.errors import ConfigError, UnsupportedError

TOOL = "AIPerf"
RECORDS, SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"
# The type of a phase -> arrivals of ours. Users at a rate each, and schedules, come at moments of their own.
_PHASES: dict[str, Arrivals] = {
    "concurrency": "closed",
    "constant": "constant",
    "poisson": "poisson",
    "gamma": "gamma",
    "fixed_schedule": "trace",
    "user_centric": "trace",
}
_TIMES = (
    "time_to_first_token",
    "time_to_first_output_token",
    "request_latency",
    "inter_token_latency",
    "inter_chunk_latency",
)
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}  # of a unit
_SAME_TIME = 0.01  # by which the parts of an answer may miss its latency, for rounding
_TOKENS = ("usage_prompt_tokens", "input_sequence_length", "output_sequence_length", "usage_prompt_cache_read_tokens")


class _Metadata(msgspec.Struct):
    """Nanoseconds since 1970."""

    request_start_ns: int
    request_end_ns: int
    x_request_id: str | None = None
    credit_issued_ns: int | None = None
    request_ack_ns: int | None = None
    benchmark_phase: str = "profiling"
    profiling_index: int | None = None
    was_cancelled: bool = False


class _Value(msgspec.Struct):
    """A metric as the file has it."""

    value: float | list[float] | str | bool | None = None
    unit: str | None = None

    @property
    def milliseconds(self) -> float:
        """How many a unit of it has."""
        return 1.0 if self.unit is None else _MILLISECONDS[self.unit]


class _Failure(msgspec.Struct):
    code: int | None = None
    type: str | None = None
    message: str = ""


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Value] = {}
    error: _Failure | None = None

    def number(self, name: str) -> float | None:
        """A metric that is one number, None where the record has none."""
        value = self.metrics[name].value if name in self.metrics else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def milliseconds(self, name: str) -> float | None:
        """A metric that is a time."""
        value = self.number(name)
        return None if value is None else value * self.metrics[name].milliseconds

    def count(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else round(value)


class _Phase(msgspec.Struct):
    type: str
    kind: str = "profiling"
    concurrency: int | None = None
    rate: float | None = None


class _Endpoint(msgspec.Struct):
    urls: list[str] = []


class _Config(msgspec.Struct):
    phases: list[_Phase] = []
    endpoint: _Endpoint = msgspec.field(default_factory=_Endpoint)
    slos: dict[str, float] | None = None


class _Total(msgspec.Struct):
    avg: float | None = None


class _Summary(msgspec.Struct):
    input_config: _Config | None = None
    goodput: _Total | None = None
    good_request_count: _Total | None = None


_PLANNED = (
    "Planned moments are those at which AIPerf's limiter let a request go: what it waited there for one of limited "
    "places is not in them."
)
_NOTES = ("Token counts are the server's usage with --use-server-token-count, otherwise those of AIPerf's tokenizer.",)
_ALONE = "How requests were sent is not known without the JSON file beside it: throughput is as of a trace."
_OTHER_FORM = (
    "The JSON file beside it says in no form that is known here how requests were sent: throughput is as of a trace."
)


def records_beside(summary: Path) -> Path:
    """The file of requests that belongs to a summary. Raises ConfigError where it is not there."""
    path = summary.with_name(RECORDS) if summary.name == SUMMARY else summary.with_suffix(".jsonl")
    if not path.is_file():
        raise ConfigError(
            f"this summary of AIPerf has no single requests, and {path.name}, which has them, is not beside it: "
            "keep the two together, or run `aiperf profile` with --export-level records"
        )
    return path


def summary_beside(records: Path) -> Path | None:
    """The summary that belongs to a file of requests, None where it is not there."""
    path = records.with_name(SUMMARY) if records.name == RECORDS else records.with_suffix(".json")
    return path if path.is_file() else None


def runs_of(lines: Sequence[bytes]) -> list[list[_Record]]:
    """The requests of each phase that was measured. Raises ConfigError, without the file's name, for another file."""
    runs: dict[int, list[_Record]] = {}
    lines_of: dict[tuple[int, str], int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = msgspec.json.decode(line, type=_Record)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} is no record of AIPerf that can be read: {error}") from error
        _check(record, number)
        if record.metadata.benchmark_phase == "profiling":
            key = (record.metadata.profiling_index or 0, record.metadata.x_request_id or f"line {number}")
            if lines_of.setdefault(key, number) != number:
                raise ConfigError(f"lines {lines_of[key]} and {number} have the same request: remove one of the two")
            runs.setdefault(record.metadata.profiling_index or 0, []).append(record)
    if not runs:
        raise ConfigError("the file has no request that was measured: all are of a warm-up")
    return [runs[index] for index in sorted(runs)]


def _check(record: _Record, number: int) -> None:
    """Raises ConfigError for moments and counts that cannot be, and for units that are not known."""
    times = record.metadata
    for name in _TIMES:
        unit = record.metrics[name].unit if name in record.metrics else None
        if unit is not None and unit not in _MILLISECONDS:
            known = ", ".join(_MILLISECONDS)
            raise ConfigError(f"line {number} has {name} in {unit!r}, which is no unit of time known here ({known})")
    if times.request_end_ns < times.request_start_ns:
        raise ConfigError(f"line {number} has a request that ends before it starts: the file is damaged")
    if min([0, *(record.count(name) or 0 for name in _TOKENS)]) < 0:
        raise ConfigError(f"line {number} has a negative number of tokens: the file is damaged")
    spans = [record.milliseconds(name) or 0.0 for name in _TIMES]
    if min([*spans, *_gaps(record)]) < 0:
        raise ConfigError(f"line {number} has a negative time: the file is damaged")
    first, latency = record.milliseconds("time_to_first_token"), record.milliseconds("request_latency")
    if first is not None and latency is not None and first > latency * (1 + _SAME_TIME):
        raise ConfigError(f"line {number} has a first token that comes after its answer's end: the file is damaged")


def read_aiperf(run: Sequence[_Record], at: int, summary: bytes | None) -> tuple[Events, tuple[str, ...]]:
    """The events of a run, and what a reader of their figures must know. at: which of the file's runs it is, from 0;
    summary: the JSON file that belongs to it, None where it is not there. Raises ConfigError, without the file's name,
    where that cannot be read, and UnsupportedError for a way of sending that has no counterpart here."""
    run_summary = _summary(summary)
    config = run_summary.input_config or _Config()
    phases = [phase for phase in config.phases if phase.kind == "profiling"]
    phase = phases[at] if at < len(phases) else None
    if phase is not None and phase.type not in _PHASES:
        raise UnsupportedError(f"AIPerf's phase of type {phase.type!r}", "it is not known here", tuple(_PHASES))
    arrivals = "trace" if phase is None else _PHASES[phase.type]
    origin = min(_planned(record) for record in run)
    ordered = sorted(run, key=lambda record: record.metadata.request_start_ns)
    requests = [_request(record, number, origin) for number, record in enumerate(ordered)]
    head = EventsHead(
        traffic="",
        traffic_sha256="",
        arrivals=arrivals,
        target=", ".join(config.endpoint.urls),
        started="",
        begin=0,
        end=requests[-1].dispatched,
        concurrency=phase.concurrency if phase is not None and arrivals == "closed" else None,
        rate=phase.rate if phase is not None and arrivals in ("constant", "poisson", "gamma") else None,
        stop="",
    )
    sending = () if phase is not None else (_ALONE if summary is None else _OTHER_FORM,)
    planned = (_PLANNED,) if any(each.scheduled is not None for each in requests) else ()
    return Events(head, requests), (*planned, *_NOTES, *sending, *_notes_of(run), *_promised(run_summary))


def _notes_of(run: Sequence[_Record]) -> Iterator[str]:
    """What the file does not tell of some answers, or tells in two ways."""
    answered = [each for each in run if _failure(each) is None and _moments(each)[0]]
    unstreamed = sum(each.milliseconds("time_to_first_token") is None for each in answered)
    if unstreamed:
        yield f"{unstreamed} of {len(answered)} answers have no time to a first token, as if they were not streamed."
    wrong = sum(map(_gaps_fail, answered))
    if wrong:
        yield f"The gaps between parts of {wrong} of {len(answered)} answers do not come to their latency: left out."
    missing = sum(not _moments(each)[1] for each in answered) - wrong
    if missing:
        yield f"{missing} of {len(answered)} answers have no gaps between parts, but their first part and their end."


def _promised(summary: _Summary) -> Iterator[str]:
    """The objective of the run and what AIPerf says of it: which requests kept it is not computed again."""
    slos = (summary.input_config or _Config()).slos
    if not slos:
        return
    limits = ", ".join(f"{name} {limit:g}" for name, limit in slos.items())
    good = [
        f"{total.avg:.4g} {unit}"
        for total, unit in ((summary.good_request_count, "good requests"), (summary.goodput, "requests/s of goodput"))
        if total is not None and total.avg is not None
    ]
    yield f"The run's objective is {limits}; AIPerf's own figures of it: {', '.join(good) or 'none in the file'}."


def _summary(content: bytes | None) -> _Summary:
    if content is None:
        return _Summary()
    try:
        return msgspec.json.decode(content, type=_Summary)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the summary of AIPerf beside it cannot be read: {error}") from error


def _planned(record: _Record) -> int:
    times = record.metadata
    return times.request_start_ns if times.credit_issued_ns is None else times.credit_issued_ns


def _gaps(record: _Record) -> list[float]:
    """Those between the parts of the answer, in milliseconds."""
    gaps = record.metrics.get("inter_chunk_latency", _Value())
    return [gap * gaps.milliseconds for gap in gaps.value] if isinstance(gaps.value, list) else []


def _gaps_fail(record: _Record) -> bool:
    """Whether the gaps between parts do not come to the latency that the file has."""
    first, latency = record.milliseconds("time_to_first_token"), record.milliseconds("request_latency")
    gaps = _gaps(record)
    return bool(gaps) and None not in (first, latency) and not _same(_sum(first, gaps), latency or 0.0)


def _sum(first: float | None, gaps: Sequence[float]) -> float:
    return (first or 0.0) + sum(gaps)


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_TIME * max(one, other)


def _moments(record: _Record) -> tuple[list[float], bool]:
    """(milliseconds from the start to the parts of the answer, whether these are all parts): where there are no gaps
    that come to the latency, the first part and the last one, of an answer that was not streamed its end."""
    first, latency = record.milliseconds("time_to_first_token"), record.milliseconds("request_latency")
    gaps = _gaps(record)
    if first is None:
        return ([] if latency is None else [latency]), True
    if gaps and not _gaps_fail(record):
        return list(accumulate(gaps, initial=first)), True
    if latency is None:
        gap, tokens = record.milliseconds("inter_token_latency"), record.count("output_sequence_length")
        if gap is not None and tokens is not None:
            latency = first + gap * (tokens - 1)
    if latency is None or latency <= first:
        return [first], True
    return [first, latency], False


def _request(record: _Record, number: int, origin: int) -> RequestEvents:
    """AIPerf's acknowledgement is the answer's head; the first event, which may have no text, is not in the file."""
    times = record.metadata
    start = times.request_start_ns - origin
    first, output = record.milliseconds("time_to_first_token"), record.milliseconds("time_to_first_output_token")

    def after(milliseconds: float) -> int:
        return start + round(milliseconds * 1e6)

    moments, complete = _moments(record)
    chunks = [after(moment) for moment in moments]
    failed = _failure(record) or (None if chunks else "no answer")
    prompt = record.count("usage_prompt_tokens")
    return RequestEvents(
        request=number,
        scheduled=None if times.credit_issued_ns is None else times.credit_issued_ns - origin,
        dispatched=start,
        headers=None if times.request_ack_ns is None else times.request_ack_ns - origin,
        first_reasoning=chunks[0] if first is not None and output is not None and output > first else None,
        first_text=None if output is None else after(output),
        chunks=chunks,
        end=None if failed else max(times.request_end_ns - origin, *chunks),
        prompt_tokens=record.count("input_sequence_length") if prompt is None else prompt,
        completion_tokens=record.count("output_sequence_length"),
        cached_tokens=record.count("usage_prompt_cache_read_tokens"),
        error=failed,
        parts=None if complete else max(record.count("output_sequence_length") or 2, 2),
        first_known=first is not None or not chunks,
    )


def _failure(record: _Record) -> str | None:
    if record.error is not None:
        error = record.error
        parts = [None if error.code is None else f"status {error.code}", error.type, error.message]
        return ", ".join(filter(None, parts)) or "failed"
    return CANCELLED if record.metadata.was_cancelled else None
