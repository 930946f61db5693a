"""The client's certificate: what the load generator adds to latencies, measured against a server that computes nothing.

The null server writes into each chunk when it had the request and when it wrote the chunk, by the clock that the
generator reads too. What is left of a latency is the generator's, the sockets' and the event loops' share. A load at
which that is more than MOST_ADDED_MS, or for which the generator needs most of a core, is not trusted.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.load.plan import Plan
from roofline.bench.load.run import run_plan
from roofline.bench.results.metrics import throughput
from roofline.bench.results.statistics import Interval, Values, percentile_interval
from roofline.bench.results.window import measured_span
from roofline.bench.traffic.random_integers import RandomIntegers
from roofline.bench.traffic.traffic import Traffic, TrafficRequest, write_traffic
from roofline.common.errors import ConfigError

MOST_ADDED_MS = 1.0  # to the median time to the first token
MOST_CPU = 0.8  # of a core
SECONDS = 1.5  # of a measurement
MOST_REQUESTS = 10_000  # of a measurement, where answers take less than a millisecond


@dataclass(frozen=True)
class NullServerPace:
    """How the null server answers: milliseconds to the first chunk and from chunk to chunk, chunks of an answer on
    average; answers have from half to one and a half times as many."""

    first_ms: float = 20.0
    gap_ms: float = 10.0
    chunks: int = 32


@dataclass(frozen=True)
class LoadCertificate:
    """What the generator added at so many streams, in milliseconds: medians, the first with its 95 % interval.

    streams: the most that it is trusted with, 0 where that is none; rate: requests a second that it sent then; cpu: of
    a core that it used.
    """

    streams: int
    rate: float
    ttft_added_ms: float
    ttft_interval: Interval | None
    gap_added_ms: float
    cpu: float

    @property
    def holds(self) -> bool:
        return self.ttft_added_ms < MOST_ADDED_MS and self.cpu < MOST_CPU


def certify(streams: int, pace: NullServerPace = NullServerPace()) -> LoadCertificate:
    """The certificate for a load of so many streams, or, where the generator cannot be trusted with it, of the most
    that it can: half as many are tried until that holds."""
    while True:
        measured = _measure(streams, pace)
        if measured.holds or streams == 1:
            return measured if measured.holds else replace(measured, streams=0, rate=0.0)
        streams //= 2


@contextmanager
def null_server(first_ms: float = NullServerPace.first_ms, gap_ms: float = NullServerPace.gap_ms) -> Iterator[str]:
    """The address of a null server, in a process of its own, while the block runs."""
    words = ["--first-ms", str(first_ms), "--gap-ms", str(gap_ms), "--parent", str(os.getpid())]
    command = [sys.executable, "-m", "roofline.bench.load.null_server", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None, "a pipe was asked for"
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise ConfigError(
                "the null server did not start; run `python -m roofline.bench.load.null_server` to see why"
            )
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def laps_of(streams: int, pace: NullServerPace) -> int:
    """How many requests each stream sends in a measurement."""
    answer_ms = pace.first_ms + pace.gap_ms * (pace.chunks - 1)
    return max(2, min(round(SECONDS * 1e3 / max(answer_ms, 0.01)), MOST_REQUESTS // streams))


def _measure(streams: int, pace: NullServerPace) -> LoadCertificate:
    laps, spread = laps_of(streams, pace), pace.chunks // 2
    # Answers of several lengths, as real ones: with a single one all streams would begin together again and again.
    random = RandomIntegers(0, "certificate")
    lengths = [pace.chunks - spread + random.below(2 * spread + 1) for _ in range(streams * laps)]
    requests = [TrafficRequest(prompt="a b c", prompt_tokens=3, max_tokens=length) for length in lengths]
    traffic = Traffic(
        name="null", version=1, seed=0, stop="ignored", source="the client's certificate", requests=requests
    )
    with (
        tempfile.TemporaryDirectory(prefix="roofline-certificate-") as folder,
        null_server(pace.first_ms, pace.gap_ms) as url,
    ):
        path = Path(folder) / "traffic.jsonl"
        write_traffic(traffic, path)
        events = run_plan(
            Plan(
                traffic=str(path),
                events=str(Path(folder) / "events.jsonl"),
                url=url,
                model="null",
                arrivals="closed",
                concurrency=streams,
                requests=len(requests),
                keep_text=True,
            )
        )
    if events.head.interrupted:
        raise KeyboardInterrupt
    return _certificate(events, streams)


def _certificate(events: Events, streams: int) -> LoadCertificate:
    completed = [request for request in events.requests if request.completed]
    if not completed:
        raise ConfigError("the load generator got no answer from the null server: is 127.0.0.1 reachable here?")
    ttft, gaps = added(completed)
    return LoadCertificate(
        streams=streams,
        rate=throughput(events, measured_span(events))["request_rate"].value or 0.0,
        ttft_added_ms=float(np.median(ttft)),
        ttft_interval=percentile_interval(ttft, 0.5),
        gap_added_ms=float(np.median(gaps)) if len(gaps) else 0.0,
        cpu=events.head.client_cpu or 0.0,
    )


def added(requests: list[RequestEvents]) -> tuple[Values, Values]:
    """Milliseconds that were added to each first chunk, and by which each gap between chunks differs from the gap at
    which the null server wrote them."""
    ttft: list[float] = []
    gaps: list[Values] = []
    for request in requests:
        moments = [word.partition(".")[::2] for word in (request.text or "").split()]
        received = int(moments[0][0])
        written = np.array([int(moment) for _, moment in moments], dtype=np.int64)
        seen = np.array(request.chunks, dtype=np.int64)
        ttft.append((request.chunks[0] - request.dispatched - int(written[0] - received)) * 1e-6)
        gaps.append(np.abs(np.diff(seen) - np.diff(written)) * 1e-6)
    return np.array(ttft), np.concatenate(gaps)
