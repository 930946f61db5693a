"""Made-up points and events of a server whose throughput saturates, for the tests of reports."""

import hashlib
from pathlib import Path

import msgspec

from roofline.bench.load.events import Events, EventsHead, RequestEvents, write_events
from roofline.bench.results.point import (
    Client,
    Counts,
    Device,
    Figure,
    Host,
    Lengths,
    Limit,
    Load,
    Point,
    System,
    Validity,
    Window,
    Workload,
)
from roofline.bench.results.store import with_id

ANSWER, PROMPT = 60, 400  # mean tokens
WEIGHTS, KV, FLOPS = 2e9, 4e8, 6e10  # of one request's share of the limit


def figure(value: float, unit: str, spread: float = 0.03, n: int = 400) -> Figure:
    return Figure(definition="made up", unit=unit, n=n, value=value, ci95=(value * (1 - spread), value * (1 + spread)))


def latencies(p50: float, spread: float = 0.03) -> Figure:
    return Figure(
        definition="made up",
        unit="ms",
        n=400,
        mean=1.1 * p50,
        p50=p50,
        p90=1.7 * p50,
        p95=2 * p50,
        p99=3 * p50,
        ci95=(p50 * (1 - spread), p50 * (1 + spread)),
    )


def point(workers: int = 4, **changes: object) -> Point:
    """A point of a closed loop. Keywords: label, chip, most (requests a second at most), bandwidth, version, sha256,
    trusted, started, share, rate (Poisson arrivals instead)."""
    get = {
        "label": "ours", "chip": "A CPU", "most": 8.0, "bandwidth": 5e10, "version": "1.0", "sha256": "a" * 64,
        "trusted": True, "started": "2026-11-26T02:00:00+00:00", "share": None, "rate": None, "latency": 0.25,
        "preset": "typical",
    } | changes  # fmt: skip
    most, latency = float(get["most"]), float(get["latency"])
    rate = most * workers * latency / (workers * latency + 1)
    seconds = workers / rate
    limit_rate = float(get["bandwidth"]) / 5e9
    share = rate / limit_rate if get["share"] is None else float(get["share"])
    tpot = 1000 * seconds / ANSWER
    device = Device(
        name=str(get["chip"]), vendor="cpu", measured_flops=1e12 * float(get["bandwidth"]) / 5e10,
        measured_bytes_per_s=float(get["bandwidth"]), measured_at="2026-11-26T01:00:00+00:00",
    )  # fmt: skip
    lengths = Lengths(mean=PROMPT, p50=380, p95=800, most=900)
    return with_id(
        Point(
            id="",
            run="run",
            kind="curve",
            preset=str(get["preset"]),
            started=str(get["started"]),
            ended=str(get["started"]),
            system=System(
                label=str(get["label"]), target="http://127.0.0.1:1", engine="e", version=str(get["version"]), model="m"
            ),
            host=Host(chip=str(get["chip"]), cores=2, memory_bytes=8 << 30),
            devices=[device],
            workload=Workload(
                name=str(get["preset"]),
                sha256=str(get["sha256"]),
                requests=400,
                prompt=lengths,
                answer=Lengths(mean=ANSWER, p50=60, p95=80, most=80),
                stop="ignored",
            ),
            load=Load(
                arrivals="closed" if get["rate"] is None else "poisson",
                concurrency=workers if get["rate"] is None else None,
                offered=get["rate"],  # type: ignore[arg-type]
                achieved=rate,
            ),
            client=Client(version="1", trusted=bool(get["trusted"]), ttft_added_ms=0.4),
            window=Window(method="mser", warm_up_s=2, measured_s=30, cool_down_s=1),
            counts=Counts(
                completed=400, failed=4, unfinished=0, prompt_tokens=400 * PROMPT, answer_tokens=400 * ANSWER
            ),
            metrics={
                "request_rate": figure(rate, "requests/s"),
                "answer_rate": figure(rate * ANSWER, "tokens/s"),
                "ttft": latencies(300 * seconds),
                "tpot": latencies(tpot),
                "e2e": latencies(1000 * seconds),
            },
            limit=Limit(
                seconds=400 / limit_rate,
                bound="memory",
                flops=400 * FLOPS,
                weight_bytes=400 * WEIGHTS,
                kv_bytes=400 * KV,
                tokens_per_s=limit_rate * ANSWER,
                share_of_measured=share,
                assumptions=["experts are chosen evenly"],
            ),
            validity=Validity(
                grade="A" if get["trusted"] else "C", flags=[] if get["trusted"] else ["client used 92% of a core"]
            ),
        )
    )


def curve(loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32), **changes: object) -> list[Point]:
    return [point(workers, **changes) for workers in loads]


def events(requests: int = 200, workers: int = 4) -> Events:
    """Requests of a closed loop, each with 20 chunks; the first and last tenth of the span do not count."""
    second = 1_000_000_000
    rows = []
    for number in range(requests):
        start = (number // workers) * second + (number % workers) * 1_000_000
        wait = 50_000_000 + 1_000_000 * (number % 37)
        first = start + 5_000_000 + wait
        rows.append(
            RequestEvents(
                request=number,
                scheduled=start,
                dispatched=start + 1_000_000,
                connected=start + 2_000_000,
                sent=start + 3_000_000,
                headers=start + 5_000_000,
                first_byte=first - 1_000_000,
                chunks=[first + 30_000_000 * each for each in range(20)],
                characters=[5] * 20,
                end=first + 30_000_000 * 19 + 1_000_000,
                prompt_tokens=PROMPT,
                completion_tokens=40,
                status=200,
                finish="length",
            )
        )
    span = (requests // workers) * second
    head = EventsHead(
        traffic="typical", traffic_sha256="a" * 64, arrivals="closed", target="t",
        started="2026-11-26T02:00:00+00:00", begin=span // 10, end=span * 9 // 10, concurrency=workers,
    )  # fmt: skip
    return Events(head, rows)


def with_events(measured: Point, folder: Path, name: str = "events.jsonl", workers: int = 4) -> Point:
    """The point with its raw events in a file in the folder of results."""
    write_events(events(workers=workers), folder / name)
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return with_id(msgspec.structs.replace(measured, events=name, events_sha256=digest))


def compared_by_goodput(a: float, b: float, reach: float = 0.2, offered: float = 12.0) -> list[Point]:
    """The two points of `bench compare` at a rate with an objective: requests a second of each side that keep it. The
    latency of B is 1.2 times that of A."""
    out = []
    for side, good in (("A", a), ("B", b)):
        extra: dict[str, float | int | str | bool | None] = {"side": side, "by": "goodput", "verdict": "undecided"}
        extra |= {"latency_ratio": 1.2, "latency_low": 1.19, "latency_high": 1.21}
        extra |= {"goodput_difference": b - a, "goodput_low": b - a - reach, "goodput_high": b - a + reach}
        measured = point(4, label="old" if side == "A" else "new")
        load = msgspec.structs.replace(measured.load, arrivals="poisson", concurrency=None, offered=offered)
        metrics = {**measured.metrics, "goodput": figure(good, "requests/s")}
        out.append(
            with_id(msgspec.structs.replace(measured, run="g", kind="compare", extra=extra, load=load, metrics=metrics))
        )
    return out


def compared(
    ratio: float, workers: int = 4, low: float = 0.97, high: float = 1.03, verdict: str = "B is higher"
) -> list[Point]:
    """The two points that `bench compare` writes: A is llama.cpp, B ours, with its throughput times `ratio`."""
    out = []
    for side, label, most in (("A", "llama.cpp", 5.0), ("B", "ours", 5.0 * ratio)):
        extra: dict[str, float | int | str | bool | None] = {"side": side, "by": "throughput", "verdict": verdict}
        extra |= {"throughput_ratio": ratio, "throughput_low": ratio * low, "throughput_high": ratio * high}
        extra |= {"latency_ratio": 1 / ratio, "latency_low": low / ratio, "latency_high": high / ratio}
        measured = point(workers, label=label, most=most)
        out.append(with_id(msgspec.structs.replace(measured, run=f"{ratio} {workers}", kind="compare", extra=extra)))
    return out
