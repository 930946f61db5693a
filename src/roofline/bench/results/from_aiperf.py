"""Result files of AIPerf (NVIDIA's successor of genai-perf) as events, as far as they tell them.

`profile_export.jsonl` has a line for each request; `profile_export_aiperf.json` beside it says how they were sent. With
a prefix of the user's the two are PREFIX.jsonl and PREFIX.json.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from roofline.bench.load.events import Arrivals, Events, EventsHead, RequestEvents
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
_TOKENS = ("usage_prompt_tokens", "input_sequence_length", "output_sequence_length", "usage_prompt_cache_read_tokens")


class _Metadata(msgspec.Struct):
    """Nanoseconds since 1970."""

    request_start_ns: int
    request_end_ns: int
    credit_issued_ns: int | None = None
    request_ack_ns: int | None = None
    benchmark_phase: str = "profiling"
    profiling_index: int | None = None
    was_cancelled: bool = False


class _Value(msgspec.Struct):
    """Milliseconds of times."""

    value: float | list[float] | str | bool | None = None


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


class _Summary(msgspec.Struct):
    input_config: _Config | None = None


_NOTES = (
    "Planned moments are those at which AIPerf's limiter let a request go: what it waited there for one of limited "
    "places is not in them.",
    "Token counts are the server's usage with --use-server-token-count, otherwise those of AIPerf's tokenizer.",
)
_ALONE = "How requests were sent is not known without the JSON file beside it: throughput is as of a trace."


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
    for number, line in enumerate(lines, start=1):
        try:
            record = msgspec.json.decode(line, type=_Record)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} is no record of AIPerf that can be read: {error}") from error
        _check(record, number)
        if record.metadata.benchmark_phase == "profiling":
            runs.setdefault(record.metadata.profiling_index or 0, []).append(record)
    if not runs:
        raise ConfigError("the file has no request that was measured: all are of a warm-up")
    return [runs[index] for index in sorted(runs)]


def _check(record: _Record, number: int) -> None:
    """Raises ConfigError for moments and counts that cannot be."""
    times = record.metadata
    if times.request_end_ns < times.request_start_ns:
        raise ConfigError(f"line {number} has a request that ends before it starts: the file is damaged")
    if min([0, *(record.count(name) or 0 for name in _TOKENS)]) < 0:
        raise ConfigError(f"line {number} has a negative number of tokens: the file is damaged")
    if min([0.0, record.number("time_to_first_token") or 0.0, *_gaps(record)]) < 0:
        raise ConfigError(f"line {number} has a negative time: the file is damaged")


def read_aiperf(run: Sequence[_Record], at: int, summary: bytes | None) -> tuple[Events, tuple[str, ...]]:
    """The events of a run, and what a reader of their figures must know. at: which of the file's runs it is, from 0;
    summary: the JSON file that belongs to it, None where it is not there. Raises ConfigError, without the file's name,
    where that cannot be read, and UnsupportedError for a way of sending that has no counterpart here."""
    config = _config(summary)
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
    return Events(head, requests), _NOTES if phase is not None else (*_NOTES, _ALONE)


def _config(summary: bytes | None) -> _Config:
    if summary is None:
        return _Config()
    try:
        return msgspec.json.decode(summary, type=_Summary).input_config or _Config()
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the summary of AIPerf beside it cannot be read: {error}") from error


def _planned(record: _Record) -> int:
    times = record.metadata
    return times.request_start_ns if times.credit_issued_ns is None else times.credit_issued_ns


def _gaps(record: _Record) -> list[float]:
    gaps = record.metrics["inter_chunk_latency"].value if "inter_chunk_latency" in record.metrics else None
    return gaps if isinstance(gaps, list) else []


def _request(record: _Record, number: int, origin: int) -> RequestEvents:
    """Of an answer that was not streamed, its one part comes with its end."""
    times = record.metadata
    start = times.request_start_ns - origin
    first, latency = record.number("time_to_first_token"), record.number("request_latency")
    output = record.number("time_to_first_output_token")

    def after(milliseconds: float) -> int:
        return start + round(milliseconds * 1e6)

    chunks: list[int] = []
    if first is not None:
        chunks = [after(moment) for moment in accumulate(_gaps(record), initial=first)]
    elif latency is not None:
        chunks = [after(latency)]
    failed = _failure(record) or (None if chunks else "no answer")
    prompt = record.count("usage_prompt_tokens")
    return RequestEvents(
        request=number,
        scheduled=None if times.credit_issued_ns is None else times.credit_issued_ns - origin,
        dispatched=start,
        headers=None if times.request_ack_ns is None else times.request_ack_ns - origin,
        first_byte=None if times.request_ack_ns is None else times.request_ack_ns - origin,
        first_reasoning=chunks[0] if first is not None and output is not None and output > first else None,
        first_text=None if output is None else after(output),
        chunks=chunks,
        end=None if failed else max(times.request_end_ns - origin, *chunks),
        prompt_tokens=record.count("input_sequence_length") if prompt is None else prompt,
        completion_tokens=record.count("output_sequence_length"),
        cached_tokens=record.count("usage_prompt_cache_read_tokens"),
        error=failed,
    )


def _failure(record: _Record) -> str | None:
    if record.error is not None:
        error = record.error
        parts = [None if error.code is None else f"status {error.code}", error.type, error.message]
        return ", ".join(filter(None, parts)) or "failed"
    return "cancelled" if record.metadata.was_cancelled else None
