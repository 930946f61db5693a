"""The same events in the definitions of other tools, whose figures have the same names and other meanings."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.results.metrics import (
    METRICS,
    NS_MS,
    Metric,
    all_figures,
    answer_tokens,
    deliveries,
    distribution,
    first_part,
    gaps_of,
    goodput,
    of_requests,
)
from roofline.bench.results.objectives import OBJECTIVES
from roofline.bench.results.point import Figure
from roofline.bench.results.window import Span, measured
from roofline.common.errors import ConfigError
from roofline.common.names import unknown

MLPERF_SECONDS = 600.0  # that a run of MLPerf must last


@dataclass(frozen=True)
class Dialect:
    """How a tool computes its figures. figures: of events; notes: what differs from ours, a sentence each; read: which
    version of the tool this was read from."""

    figures: Callable[[Events], dict[str, Figure]]
    notes: tuple[str, ...]
    read: str


def recompute(events: Events, name: str) -> dict[str, Figure]:
    """The figures of a run as a tool would print them, or ours. Those that no request has a value of have 0 as their
    n. Raises ConfigError for a tool that is not here."""
    if name == "ours":
        return all_figures(events)
    if name not in DIALECTS:
        raise ConfigError(unknown("dialect", name, ["ours", *DIALECTS]))
    return DIALECTS[name].figures(events)


def _e2e_last_part(request: RequestEvents) -> float | None:
    return (request.chunks[-1] - request.dispatched) * NS_MS if request.chunks else None


def _after_first(request: RequestEvents) -> float | None:
    """(last part - start - TTFT) / (n - 1)"""
    tokens = answer_tokens(request)
    first = first_part(request)
    return None if first is None or tokens < 2 else (request.chunks[-1] - first) * NS_MS / (tokens - 1)


def _over_all(request: RequestEvents) -> float | None:
    tokens = answer_tokens(request)
    return (request.chunks[-1] - request.dispatched) * NS_MS / tokens if request.chunks and tokens else None


def _first_byte(request: RequestEvents) -> float | None:
    return None if request.first_byte is None else (request.first_byte - request.dispatched) * NS_MS


def _first_text(request: RequestEvents) -> float | None:
    return None if request.first_text is None else (request.first_text - request.dispatched) * NS_MS


def _scheduled_e2e(request: RequestEvents) -> float | None:
    if request.scheduled is None or not request.chunks:
        return None
    return (request.chunks[-1] - request.scheduled) * NS_MS


_TTFT_FIRST_EVENT = Metric("first event with a choice - sending begins", "ms", _first_byte)
_TPOT = Metric("(E2E - TTFT) / (answer tokens - 1)", "ms", _after_first)
_E2E = Metric("last part - sending begins", "ms", _e2e_last_part)


def _everything(events: Events) -> tuple[list[RequestEvents], Span]:
    """All completed requests, and the span from the first dispatch to the last end."""
    requests = [request for request in measured(events) if request.completed]
    if not requests:
        return [], Span(0, 1)
    ends = [request.end for request in requests if request.end is not None]
    return requests, Span(min(request.dispatched for request in requests), max(ends))


def _vllm(events: Events) -> dict[str, Figure]:
    requests, span = _everything(events)
    rows = {"ttft": _TTFT_FIRST_EVENT, "tpot": _TPOT, "e2el": _E2E}
    return {**_rows(rows, requests), "itl": gaps_of(requests), **_rates(events, span)}


def _guidellm(events: Events) -> dict[str, Figure]:
    requests, span = _everything(events)
    over_all = Metric("E2E / answer tokens, the first one included; over all tokens", "ms", _over_all)
    latency = Metric("the stream's end - sending begins", "ms", METRICS["e2e"].of)
    after = Metric("(last part - first part) / (answer tokens - 1); over all tokens but the first", "ms", _after_first)
    return {
        **_rows({"time_to_first_token": METRICS["ttft"], "request_latency": latency}, requests),
        "time_per_output_token": _by_tokens(over_all, requests, first=True),
        "inter_token_latency": _by_tokens(after, requests, first=False),
        **_rates(events, span),
    }


def _by_tokens(metric: Metric, requests: list[RequestEvents], first: bool) -> Figure:
    """The metric with each request counted as often as its answer has tokens, with or without the first one."""
    each = [(value, answer_tokens(request)) for request in requests if (value := metric.of(request)) is not None]
    values = np.repeat([value for value, _ in each], [tokens - (not first) for _, tokens in each])
    return distribution(metric.definition, metric.unit, values, independent=False)


def _aiperf(events: Events) -> dict[str, Figure]:
    requests, span = _everything(events)
    rows = {
        "time_to_first_token": Metric("first response that is not empty - sending begins", "ms", METRICS["ttft"].of),
        "inter_token_latency": Metric("(E2E - TTFT) / (answer tokens - 1), of each request", "ms", _after_first),
        "request_latency": _E2E,
    }
    return {**_rows(rows, requests), "inter_chunk_latency": gaps_of(requests), **_rates(events, span)}


def _inference_perf(events: Events) -> dict[str, Figure]:
    requests, span = _everything(events)
    rows = {
        "time_to_first_token": Metric("first part with text, not reasoning - sending begins", "ms", _first_text),
        "time_per_output_token": _TPOT,
        "normalized_time_per_output_token": Metric("E2E / answer tokens", "ms", _over_all),
        "request_latency": _E2E,
    }
    return {**_rows(rows, requests), "inter_token_latency": gaps_of(requests), **_rates(events, span)}


def _mlperf(events: Events) -> dict[str, Figure]:
    requests, span = _everything(events)
    rows = {
        "first_token_latency": METRICS["ttft_corrected"],
        "time_per_output_token": _TPOT,
        "sample_latency": Metric("last part - scheduled", "ms", _scheduled_e2e),
    }
    figures = {**_rows(rows, requests), **_rates(events, span)}
    for name, objective in OBJECTIVES.items():
        share = goodput(events, objective, span)["good_share"]
        long_enough = span.seconds >= MLPERF_SECONDS and (share.value or 0.0) >= objective.share
        figures[f"valid {name.removeprefix('mlperf:')}"] = Figure(
            definition=f"1 where {objective.share:.0%} keep {objective.ttft:g}/{objective.tpot:g} ms (TTFT/TPOT) in a "
            f"run of {MLPERF_SECONDS:.0f} s or longer",
            unit="1",
            n=share.n,
            value=float(long_enough),
        )
    return figures


def _rows(metrics: dict[str, Metric], requests: list[RequestEvents]) -> dict[str, Figure]:
    return {name: of_requests(metric, requests) for name, metric in metrics.items()}


def _rates(events: Events, span: Span) -> dict[str, Figure]:
    """Requests and tokens a second over that span, of the requests that completed alone: what came within it / its
    seconds."""
    requests = [each for each in measured(events) if each.completed]
    ends = np.array([each.end for each in requests if each.end is not None], dtype=float)
    moments, tokens = deliveries(requests)
    rows = {
        "request_throughput": ("completed requests", "requests/s", ends, np.ones(len(ends))),
        "output_throughput": ("answer tokens, a request's spread over its parts,", "tokens/s", moments, tokens),
    }
    figures = {}
    for name, (what, unit, at, amounts) in rows.items():
        inside = (at >= span.begin) & (at <= span.end)
        figures[name] = Figure(
            definition=f"{what} within the window / its seconds",
            unit=unit,
            n=int(np.count_nonzero(inside)),
            value=float(amounts[inside].sum() / span.seconds),
        )
    return figures


_ALL_OF_RUN = "Throughput is over all of the run, filling up and running empty included."
_SEND = "Latencies begin when the request is sent: what it waited for in the client before is in none of them."
DIALECTS = {
    "vllm": Dialect(
        _vllm,
        (
            "TTFT ends at the first event with a choice, which in a chat may name the role and hold no text.",
            "ITL are gaps between chunks, not tokens: a chunk of several tokens is one gap.",
            _SEND,
            _ALL_OF_RUN,
        ),
        "vLLM serve.py 009e6d4",
    ),
    "guidellm": Dialect(
        _guidellm,
        (
            "TPOT divides the time from the request on by all tokens, so the prompt's time is in it; what others call "
            "TPOT is its ITL.",
            "TPOT and ITL are over tokens: a request counts as often as its answer has tokens.",
            _SEND,
            _ALL_OF_RUN + " GuideLLM's options of warm-up and cool-down would shorten it.",
        ),
        "GuideLLM 0.8.1",
    ),
    "aiperf": Dialect(
        _aiperf,
        (
            "ITL is what others call TPOT: a mean of each request; gaps between chunks are inter_chunk_latency.",
            _SEND,
            _ALL_OF_RUN,
        ),
        "AIPerf db4f639",
    ),
    "inference-perf": Dialect(
        _inference_perf,
        (
            "TTFT ends at the first part with text: of a model that reasons first, all reasoning is in it.",
            "NTPOT divides the time from the request on by all tokens.",
            _SEND,
            _ALL_OF_RUN,
        ),
        "inference-perf 7de5ef2",
    ),
    "mlperf": Dialect(
        _mlperf,
        (
            "Latencies begin at the planned moment, so waiting in the client is in them, as in our corrected ones.",
            f"A run is valid only if it lasts {MLPERF_SECONDS:.0f} s and 99 % of its requests keep both limits.",
            _ALL_OF_RUN,
        ),
        "mlperf.conf of MLPerf Inference 5.1",
    ),
}
