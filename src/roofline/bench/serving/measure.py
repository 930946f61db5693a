"""A point from the events of a load: figures, limit, what the client can be trusted with, what is wrong or missing."""

from typing import Literal

import msgspec
import numpy as np

import roofline
from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.load.plan import Plan
from roofline.bench.results.backlog import falls_behind
from roofline.bench.results.energy import energy_of
from roofline.bench.results.limits import Demand, impossible, limit_of
from roofline.bench.results.metrics import (
    NS_MS,
    answer_tokens,
    at_once,
    counts,
    figures,
    goodput,
    lengths,
)
from roofline.bench.results.point import (
    INTERRUPTED,
    Client,
    Energy,
    Figure,
    Kind,
    Limit,
    Load,
    Point,
    System,
    Validity,
    Window,
    Workload,
)
from roofline.bench.results.statistics import values_needed
from roofline.bench.results.unread import unread_counts, unread_in_words
from roofline.bench.results.window import Span, is_short, measured, measured_span, most_in_flight
from roofline.bench.serving.certificate import MOST_CPU, LoadCertificate, NullServerPace, certify
from roofline.bench.serving.load_test import LoadTest
from roofline.bench.serving.probes import fidelity
from roofline.bench.serving.recount import LEAST, TOLERANCE, miscounted
from roofline.common import log
from roofline.common.units import now_utc

Grade = Literal["A", "B", "C", "D"]
FEW = 0.01  # of the answers, that may be odd without a flag
MOST_GAP = 0.05  # of the median TPOT, that the client adds to a gap between parts of an answer
AHEAD = 0.8  # of the times of a server, that the null server takes when the client is certified at that server's pace
BEYOND = "above the limit: this cannot be"
MOST_SLIP = 0.05  # of the median latency, that 1 % of the requests are sent late


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a load ran. point: of what was sent by then, as it is kept."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        self.point = point


def measure(test: LoadTest, kind: Kind, plan: Plan) -> Point:
    """Send a plan's load, and keep the point. A figure beyond the limit is kept too, flagged, and told of (`LoadTest.
    impossible`). Raises Interrupted after Ctrl-C."""
    events = test.send(plan)
    errors = [request.error for request in measured(events) if request.error]
    empty = sum(request.empty for request in measured(events))
    test.answered += sum(request.completed for request in measured(events))
    test.failure = errors[-1] if errors else test.failure
    if empty and not events.head.interrupted:
        log.get("bench").warning("%d of %d answers had no text", empty, len(measured(events)))
    if errors and not events.head.interrupted:
        log.get("bench").warning(
            "%d of %d requests failed, the first with: %s", len(errors), len(measured(events)), errors[0]
        )
    probes = [request for request in events.requests if request.probe]
    lost = [probe.error for probe in probes if probe.error]
    if lost and not events.head.interrupted:
        log.get("bench").warning("%d of %d probes failed, the first with: %s", len(lost), len(probes), lost[0])
    point = test.keep(point_of(test, kind, plan, events), events)
    if events.head.interrupted:
        raise Interrupted(point)
    return point


def point_of(test: LoadTest, kind: Kind, plan: Plan, events: Events) -> Point:
    """The point of a load's events."""
    span, head = measured_span(events), events.head
    metrics = figures(events, span)
    if test.settings.promise is not None:
        metrics |= goodput(events, test.settings.promise, span)
    certificate = _certificate(test, events, metrics)
    doubts = [] if certificate is None else _doubts(certificate, events, metrics)
    client, load = _client(test, events, certificate, trusted=not doubts), _load(events)
    limit = _limit(test, events, metrics)
    flags = [*_flags(test, plan, events, metrics, certificate), *doubts]
    if limit is not None and (reason := _impossible(test, limit, events, metrics)):
        test.impossible = reason
        flags.append(BEYOND)
        log.get("bench").warning("%s", reason)
    if is_short(events):
        flags.append("filling up and running empty are in the window")
    probed = fidelity(events, test.probes)
    if probed is not None and probed.equal < probed.probes:
        flags.append(f"probes with other answers: {probed.probes - probed.equal} of {probed.probes}")
    unread = unread_counts(head)
    if unread is not None:
        flags.append(unread_in_words(unread))
    counted = counts(events)
    if test.target.in_process is not None:
        counted.tokens_by = "engine"
    counted.miscounted = miscounted(events, test.tokenizer)
    if counted.miscounted:
        flags.append(f"answers with other counts of tokens: {counted.miscounted}")
    last = max([head.end, *(request.end or 0 for request in events.requests)])
    return Point(
        id="",
        run=test.run,
        kind=kind,
        preset=f"{test.traffic.name}@{test.traffic.version}",
        started=head.started,
        ended=now_utc(),
        system=_system(test),
        host=test.host,
        devices=[test.limits.device] if test.limits else [],
        workload=_workload(test, events),
        load=load,
        client=client,
        window=Window(
            method="all but the first and the last lap",
            warm_up_s=span.begin / 1e9,
            measured_s=span.seconds,
            cool_down_s=(last - span.end) / 1e9,
        ),
        counts=counted,
        metrics=metrics,
        validity=Validity(grade=_grade(test, limit, client, metrics), flags=flags),
        limit=limit,
        energy=_energy(test, events),
        fidelity=probed,
        unread=unread,
        extra={"most_in_flight": most_in_flight(events), **_prompt_of(test, kind, plan)},
    )


def _prompt_of(test: LoadTest, kind: Kind, plan: Plan) -> dict[str, int]:
    """The length of the prompts where all of a point have the same, in tokens that the traffic aims at."""
    requests = test.traffic.requests
    return {"prompt": requests[plan.first % len(requests)].prompt_tokens} if kind == "decode" else {}


def _system(test: LoadTest) -> System:
    target, limits = test.target, test.limits
    return System(
        label=test.system_label,
        target=target.name,
        engine=target.engine,
        version=target.version,
        model=target.model,
        options=target.options,
        parameters=limits.parameters if limits else 0,
        weight_bytes=limits.weight_bytes if limits else 0,
        weight_formats=limits.formats if limits else "",
        kv_format=limits.kv_format if limits and target.local_model else "",  # others may keep it otherwise
        replicas=target.replicas,
        devices_per_replica=limits.device.count if limits else 1,
        fingerprint=target.fingerprint,
    )


def _workload(test: LoadTest, events: Events) -> Workload:
    completed = [request for request in measured(events) if request.completed]
    cached = [request.cached_tokens for request in completed if request.cached_tokens is not None]
    requests = test.traffic.requests
    prompts = [
        requests[answer.request].prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens
        for answer in completed
    ]
    return Workload(
        name=test.traffic.name,
        sha256=test.traffic.sha256,
        requests=len(measured(events)),
        prompt=lengths(prompts),
        answer=lengths([answer_tokens(answer) for answer in completed]),
        stop=test.traffic.stop,
        prefix_cache="unknown" if not cached else "warm" if any(cached) else "cold",
    )


def _slips(events: Events) -> list[float]:
    """Milliseconds that requests were sent after their planned moments."""
    return [(request.dispatched - request.planned) * NS_MS for request in measured(events)]


def _load(events: Events) -> Load:
    head = events.head
    slips = _slips(events) or [0.0]
    return Load(
        arrivals=head.arrivals,
        concurrency=head.concurrency,
        offered=head.rate,
        achieved=_sent_rate(events),
        slip_p50_ms=float(np.quantile(slips, 0.5)),
        slip_p99_ms=float(np.quantile(slips, 0.99)),
    )


def _certificate(test: LoadTest, events: Events, metrics: dict[str, Figure]) -> LoadCertificate | None:
    """The client's for a load. Where the server answered more requests a second than the null server did, because its
    answers came sooner, the client is certified again at that pace; and where an open loop had more requests at a time
    than anybody could know before, with as many."""
    certificate, streams, rate = test.certificate, most_in_flight(events), _request_rate(metrics)
    if certificate is None or events.head.interrupted or not certificate.streams:
        return certificate
    beyond, faster = streams > certificate.streams, rate > certificate.rate
    if (beyond and events.head.arrivals in ("closed", "batch")) or not (beyond or faster):
        return certificate
    try:
        again = certify(streams, _pace(events, metrics) if faster else NullServerPace())
    except KeyboardInterrupt:  # the point is kept first
        events.head = msgspec.structs.replace(events.head, interrupted=True)
        return certificate
    return again if again.streams == streams else certificate


def _sent_rate(events: Events) -> float:
    """Requests a second that were sent. Of those at even gaps, the last one has none behind it within the run."""
    head = events.head
    sent = sum(request.dispatched <= head.end for request in measured(events)) - (head.arrivals == "constant")
    return max(sent, 0) / Span(0, head.end).seconds


def _pace(events: Events, metrics: dict[str, Figure]) -> NullServerPace:
    """That of a server's answers, and somewhat more."""
    parts = [len(request.chunks) for request in measured(events) if request.completed]
    first, gap = (AHEAD * _median(metrics, name) for name in ("ttft", "tpot"))
    return NullServerPace(first, gap, max(1, round(float(np.mean(parts)))) if parts else 1)


def _median(metrics: dict[str, Figure], name: str) -> float:
    figure = metrics.get(name)
    return 0.0 if figure is None else figure.p50 or figure.mean or 0.0


def _doubts(certificate: LoadCertificate, events: Events, metrics: dict[str, Figure]) -> list[str]:
    """Why a client is not trusted with a load that it sent, as flags."""
    streams, rate, cpu = most_in_flight(events), _request_rate(metrics), events.head.client_cpu or 0.0
    doubts = []
    if not certificate.streams:
        doubts.append(f"client not to be trusted: it adds {certificate.ttft_added_ms:.2g} ms to a first token")
    elif streams > certificate.streams:
        doubts.append(f"client certified for {certificate.streams} requests at a time, not {streams}")
    elif rate > certificate.rate:
        doubts.append(f"client certified for {certificate.rate:.3g} requests/s, not {rate:.3g}")
    if cpu > MOST_CPU:
        doubts.append(f"client used {cpu:.0%} of a core")
    if _late(events, metrics):
        doubts.append("requests were sent late")
    return doubts


def _client(test: LoadTest, events: Events, certificate: LoadCertificate | None, trusted: bool) -> Client | None:
    """None of an engine in this process, which has none."""
    if test.target.in_process is not None:
        return None
    cpu = events.head.client_cpu or 0.0
    if certificate is None:
        return Client(version=roofline.__version__, cpu=cpu)
    return Client(
        version=roofline.__version__,
        cpu=cpu,
        ttft_added_ms=certificate.ttft_added_ms,
        ttft_added_ci=certificate.ttft_interval,
        gap_added_ms=certificate.gap_added_ms,
        most_rate=certificate.rate,
        most_streams=certificate.streams,
        trusted=trusted,
    )


def _late(events: Events, metrics: dict[str, Figure]) -> bool:
    """Whether requests were sent so late that latencies show it."""
    latency = metrics["e2e"].mean if "e2e" in metrics else None
    return latency is not None and bool(np.quantile(_slips(events), 0.99) > MOST_SLIP * latency)


def _request_rate(metrics: dict[str, Figure]) -> float:
    return (metrics["request_rate"].value or 0.0) if "request_rate" in metrics else 0.0


def _limit(test: LoadTest, events: Events, metrics: dict[str, Figure]) -> Limit | None:
    completed = [request for request in events.requests if request.completed]
    if test.limits is None or not completed or "answer_rate" not in metrics:
        return None
    demand = demand_of(completed, most_in_flight(events), test.settings.tokens_per_step)
    return limit_of(test.limits, demand, metrics["answer_rate"].value or 0.0)


def _impossible(test: LoadTest, limit: Limit, events: Events, metrics: dict[str, Figure]) -> str:
    """Why the throughput cannot be, "" where it can."""
    assert test.limits is not None, "there is a limit"
    completed = [request for request in events.requests if request.completed]
    demand = demand_of(completed, most_in_flight(events), test.settings.tokens_per_step)
    return impossible(test.limits, limit, demand, metrics["answer_rate"].value or 0.0)


def _energy(test: LoadTest, events: Events) -> Energy | None:
    head = events.head
    if test.meter is None or head.joules is None or head.joules_seconds is None:
        return None
    tokens = sum(answer_tokens(request) for request in events.requests if request.completed)  # those of probes too
    return energy_of(test.meter, head.joules, head.joules_seconds, tokens)


def demand_of(completed: list[RequestEvents], sequences: int, tokens_per_step: float = 1.0) -> Demand:
    """The mean of what requests asked for; prompt tokens that came from a cache were not computed."""
    prompts = [max((answer.prompt_tokens or 0) - (answer.cached_tokens or 0), 0) for answer in completed]
    answers = [answer_tokens(answer) for answer in completed]
    return Demand(float(np.mean(prompts)), float(np.mean(answers)), sequences, tokens_per_step)


def _flags(
    test: LoadTest, plan: Plan, events: Events, metrics: dict[str, Figure], certificate: LoadCertificate | None
) -> list[str]:
    """What a reader must know before he believes the point."""
    counted, flags = counts(events), []
    if events.head.interrupted:
        flags.append(INTERRUPTED)
    if test.limits is not None and test.limits.below:
        flags.append(f"the chip was below its roofs before: {', '.join(test.limits.below)}")
    if test.target.in_process is not None:
        if _late(events, metrics):
            flags.append("requests were sent late")
    elif certificate is None:
        flags.append("client not certified")
    elif certificate.gap_added_ms > MOST_GAP * (gap := _median(metrics, "tpot")) > 0:
        share = certificate.gap_added_ms / gap
        flags.append(f"client adds {certificate.gap_added_ms:.2g} ms to gaps of {gap:.3g} ms ({share:.0%})")
    if "e2e" not in metrics or metrics["e2e"].n < values_needed(0.99):
        flags.append("too few requests for p99")
    if plan.first + plan.requests > len(test.traffic.requests):
        flags.append("traffic repeated")
    flags += _flags_of_answers(test, events)
    if events.head.arrivals in ("constant", "poisson", "gamma") and falls_behind(events):
        flags.append("the server falls behind the offered rate")
    if counted.tokens_by == "chunks":
        flags.append("tokens counted as parts of the answer")
    if all(request.cached_tokens is None for request in events.requests):
        flags.append("cache not known")
    return flags


def _flags_of_answers(test: LoadTest, events: Events) -> list[str]:
    """What is wrong with the answers that came, and with those that did not."""
    requests = measured(events)
    completed = [request for request in requests if request.completed]
    together = [request for request in completed if at_once(request)]
    many = len(together) > FEW * len(completed)
    apart = [request for request in completed if len(request.chunks) > 1 and _counts_differ(request)]
    groups = {
        "requests failed": [request for request in requests if request.error is not None],
        "answers without text": [request for request in requests if request.empty],
        "answers arrive in one part or burst, their TPOT is not known": together if many else [],
    }
    flags = [f"{name}: {len(group)} of {len(requests)}" for name, group in groups.items() if group]
    if len(apart) > FEW * len(completed) and test.target.in_process is None:
        ratio = sum(map(answer_tokens, apart)) / sum(len(request.chunks) for request in apart)
        flags.append(f"the usage counts {ratio:.3g} tokens for a part of the answer: {len(apart)} of {len(requests)}")
    return flags


def _counts_differ(request: RequestEvents) -> bool:
    """Whether the usage has another number of tokens than the answer had parts."""
    if request.completion_tokens is None or request.parts is not None:
        return False
    return abs(request.completion_tokens - len(request.chunks)) > max(LEAST, TOLERANCE * request.completion_tokens)


def _grade(test: LoadTest, limit: Limit | None, client: Client | None, metrics: dict[str, Figure]) -> Grade:
    """A where nothing is missing that a reader needs to measure the same again, one letter lower for each that is."""
    trusted = client is None or client.trusted
    missing = [not test.target.version, limit is None, not trusted, "e2e" not in metrics or metrics["e2e"].n < 5]
    grades: tuple[Grade, ...] = ("A", "B", "C", "D")
    return grades[min(sum(missing), 3)]
