"""Files of runs, ours or another tool's, read as events."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from roofline.bench.load.events import Events, read_events
from roofline.bench.results import from_aiperf, from_guidellm, from_vllm
from roofline.bench.results.ends import ends_in_words
from roofline.bench.results.unread import unread_counts, unread_in_words
from roofline.common.errors import ConfigError
from roofline.common.fields import naming
from roofline.common.files import cause_of

Run = TypeVar("Run")


@dataclass(frozen=True)
class Recorded:
    """A run as a file tells it. tool: that wrote the file, "" of ours; notes: what a reader of figures that are
    computed from its file must know, a sentence each."""

    events: Events
    tool: str = ""
    notes: tuple[str, ...] = ()


class _Keys(msgspec.Struct):
    """What tells files apart."""

    benchmarks: list[msgspec.Raw] | None = None
    request_throughput: float | dict[str, object] | None = None
    schema: str | None = None
    aiperf_version: str | None = None
    metadata: dict[str, object] | None = None


def read_run(path: Path, number: int | None = None) -> Recorded:
    """A run of a file: raw events of ours, a result of `vllm bench serve`, GuideLLM's JSON, either file of AIPerf.
    number: which of several runs, from 1. Raises ConfigError, naming the file."""
    recorded = _read_run(path, number)
    ends = ends_in_words(recorded.events)
    return replace(recorded, notes=(ends, *recorded.notes)) if ends else recorded


def _read_run(path: Path, number: int | None) -> Recorded:
    runs = _documents(_read(path))
    with naming(path):
        keys = _keys(runs[0] if runs else b"")
        if keys.aiperf_version is not None:
            path = from_aiperf.records_beside(path)
            return _of_aiperf(path, _documents(_read(path)), number)
        if keys.metadata is not None and "request_start_ns" in keys.metadata:
            return _of_aiperf(path, runs, number)
        if keys.benchmarks is not None:
            if not keys.benchmarks:
                raise ConfigError("the file has no benchmark: GuideLLM wrote none")
            events, notes = from_guidellm.read_guidellm(_chosen([bytes(each) for each in keys.benchmarks], number))
            return Recorded(events, from_guidellm.TOOL, notes)
        if isinstance(keys.request_throughput, float):
            events, notes = from_vllm.read_vllm(_chosen(runs, number))
            return Recorded(events, from_vllm.TOOL, notes)
        if number is not None:
            raise ConfigError("--run names a run in a file of another tool that has several: leave it out")
    events = read_events(path)
    unread = unread_counts(events.head)
    notes = () if unread is None else (f"{unread_in_words(unread)}; they are in no figure.",)
    return Recorded(events, notes=notes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error


def _of_aiperf(records: Path, lines: Sequence[bytes], number: int | None) -> Recorded:
    runs = from_aiperf.runs_of(lines)
    run = _chosen(runs, number)
    summary = from_aiperf.summary_beside(records)
    events, notes = from_aiperf.read_aiperf(run, (number or 1) - 1, None if summary is None else _read(summary))
    return Recorded(events, from_aiperf.TOOL, notes)


def _documents(text: bytes) -> list[bytes]:
    """The objects of a file that is one, or has one on each line, as vLLM's --append-result writes."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return [line for line in text.splitlines() if line.strip()]
    return [text]


def _keys(text: bytes) -> _Keys:
    """Those of a file's first object. Raises ConfigError where it is none."""
    try:
        return msgspec.json.decode(text, type=_Keys)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"this is neither a file of events nor a result of `vllm bench serve`, GuideLLM or AIPerf: {error}"
        ) from error


def _chosen(runs: Sequence[Run], number: int | None) -> Run:
    if number is None and len(runs) == 1:
        return runs[0]
    if number is None:
        raise ConfigError(f"the file has {len(runs)} runs: name one with --run, from 1")
    if not 1 <= number <= len(runs):
        raise ConfigError(f"the file has {len(runs)} runs, and no number {number}: correct --run")
    return runs[number - 1]
