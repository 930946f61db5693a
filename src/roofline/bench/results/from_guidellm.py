"""Result files of GuideLLM (its JSON output) as events, as far as they tell them."""

import msgspec

from roofline.bench.load.events import Arrivals, Events, EventsHead, RequestEvents
from roofline.common.errors import ConfigError, UnsupportedError

TOOL = "GuideLLM"
# A strategy's name -> arrivals of ours.
_STRATEGIES: dict[str, Arrivals] = {
    "synchronous": "closed",
    "concurrent": "closed",
    "throughput": "batch",
    "constant": "constant",
    "poisson": "poisson",
    "trace": "trace",
}


class _Timings(msgspec.Struct):
    """Seconds since 1970."""

    targeted_start: float | None = None
    request_start: float | None = None
    first_request_iteration: float | None = None
    first_token_iteration: float | None = None
    first_output_token_iteration: float | None = None
    last_token_iteration: float | None = None
    request_end: float | None = None
    token_iterations: int = 0


class _Info(msgspec.Struct):
    timings: _Timings
    error: str | None = None


class _Request(msgspec.Struct):
    info: _Info
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    failure: str | None = None  # no field of the file: which of its lists the request is in


class _Requests(msgspec.Struct):
    successful: list[_Request] | None = None
    errored: list[_Request] | None = None
    incomplete: list[_Request] | None = None


class _Strategy(msgspec.Struct):
    type_: str
    streams: int | None = None
    max_concurrency: int | None = None
    rate: float | None = None


class _Config(msgspec.Struct):
    strategy: _Strategy
    backend: dict[str, object] = {}


class _Span(msgspec.Struct):
    measure_start_time: float
    measure_end_time: float


class _Totals(msgspec.Struct):
    total: int


class _Metrics(msgspec.Struct):
    request_totals: _Totals


class _Benchmark(msgspec.Struct):
    config: _Config
    scheduler_metrics: _Span
    metrics: _Metrics
    requests: _Requests


_NOTES = (
    "The file has the first and the last part of each answer and how many there were: gaps between parts are absent.",
    "Moments of connections are absent.",
    "Token counts are those of GuideLLM: the server's usage, or of a server without one the parts of an answer.",
)


def read_guidellm(text: bytes) -> tuple[Events, tuple[str, ...]]:
    """The events of one benchmark of a file, and what a reader of their figures must know. Raises ConfigError, without
    the file's name, where it cannot be read, and UnsupportedError for a strategy that has no counterpart here."""
    try:
        benchmark = msgspec.json.decode(text, type=_Benchmark)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this is no benchmark of GuideLLM 0.8 that can be read: {error}") from error
    strategy, span, lists = benchmark.config.strategy, benchmark.scheduler_metrics, benchmark.requests
    if strategy.type_ not in _STRATEGIES:
        raise UnsupportedError(f"GuideLLM's strategy {strategy.type_!r}", "it is not known here", tuple(_STRATEGIES))
    stored = [*(lists.successful or []), *(lists.incomplete or [])]
    failed = lists.errored or []
    count, sent = len(stored) + len(failed), benchmark.metrics.request_totals.total
    if count < sent:
        raise ConfigError(f"the file keeps {count} of {sent} requests: run GuideLLM without a sample_size")
    for each in failed:
        each.failure = each.info.error or "failed"
    begun = [each for each in (*stored, *failed) if each.info.timings.request_start is not None]
    if not begun:
        raise ConfigError("the file has no request that was sent")
    origin = min(each.info.timings.targeted_start or each.info.timings.request_start or 0.0 for each in begun)
    origin = min(origin, span.measure_start_time)
    requests = [_request(each, number, origin) for number, each in enumerate(begun)]
    concurrency = 1 if strategy.type_ == "synchronous" else strategy.streams or strategy.max_concurrency
    head = EventsHead(
        traffic="",
        traffic_sha256="",
        arrivals=_STRATEGIES[strategy.type_],
        target=str(benchmark.config.backend.get("target", "")),
        started="",
        begin=_since(origin, span.measure_start_time),
        end=_since(origin, span.measure_end_time),
        concurrency=concurrency,
        rate=strategy.rate,
        stop="",
    )
    return Events(head, sorted(requests, key=lambda each: each.dispatched)), _NOTES


def _since(origin: float, moment: float) -> int:
    return round((moment - origin) * 1e9)


def _request(request: _Request, number: int, origin: float) -> RequestEvents:
    """Of a request that was under way when the run ended, there is no end; of an answer that was not streamed, no part
    but the end."""
    timings = request.info.timings

    def at(moment: float | None) -> int | None:
        return None if moment is None else _since(origin, moment)

    first, last = at(timings.first_token_iteration), at(timings.last_token_iteration)
    output = at(timings.first_output_token_iteration)
    start = at(timings.request_start)
    assert start is not None, "only requests that were sent are read"
    moments = [moment for moment in (start, first, last, at(timings.request_end)) if moment is not None]
    if moments != sorted(moments):
        raise ConfigError(f"request {number + 1} has its start, parts and end in no order of time: the file is damaged")
    if min(request.prompt_tokens or 0, request.output_tokens or 0, request.cached_tokens or 0) < 0:
        raise ConfigError(f"request {number + 1} has a negative number of tokens: the file is damaged")
    end = at(timings.request_end)
    chunks = [] if first is None or last is None else [first, last] if timings.token_iterations > 1 else [first]
    unstreamed = not chunks and end is not None and request.failure is None and bool(request.output_tokens)
    return RequestEvents(
        request=number,
        scheduled=at(timings.targeted_start),
        dispatched=start,
        first_byte=at(timings.first_request_iteration),
        first_reasoning=first if first != output else None,
        first_text=output,
        chunks=[end] if unstreamed and end is not None else chunks,
        parts=timings.token_iterations,
        end=end,
        first_known=not unstreamed,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.output_tokens,
        cached_tokens=request.cached_tokens,
        error=request.failure,
    )
