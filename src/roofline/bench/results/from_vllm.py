"""Result files of `vllm bench serve --save-result --save-detailed` as events, as far as they tell them."""

from itertools import accumulate

import msgspec

from roofline.bench.load.events import Arrivals, Events, EventsHead, RequestEvents
from roofline.common.errors import ConfigError

TOOL = "vLLM"


class _Run(msgspec.Struct):
    """A run, in seconds of a monotonic clock. All lists have an entry for each request."""

    request_rate: float | str = "inf"
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    model_id: str = ""
    backend: str = ""
    start_times: list[float] | None = None
    ttfts: list[float] = []
    itls: list[list[float]] = []
    input_lens: list[int] = []
    output_lens: list[int] = []
    errors: list[str] = []
    request_goodput: float | None = None
    older_goodput: float | None = msgspec.field(default=None, name="request_goodput:")
    queue_times: list[float] = []


_NOTES = (
    "Parts are events with a choice, as vLLM's client counts them; some may hold no text, such as a chat's role.",
    "Answers end with their last part: the file has no moment of the last byte.",
    "Token counts are those of vLLM's client: the server's usage, or of a server without one the text encoded again.",
)
_PLANNED = "Planned moments are those from which requests waited in vLLM's client (queue_times)."
_NOT_PLANNED = "The file has no planned moments: no figure counts from them, and there is no goodput."


def read_vllm(text: bytes) -> tuple[Events, tuple[str, ...]]:
    """The events of a run, and what a reader of their figures must know. Raises ConfigError, without the file's name,
    where the file does not have each request."""
    try:
        run = msgspec.json.decode(text, type=_Run)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this is no result of vLLM that can be read: {error}") from error
    if not run.start_times or not run.ttfts:
        raise ConfigError("the file has no moments of single requests: run `vllm bench serve` with --save-detailed")
    if min([0, *run.input_lens, *run.output_lens]) < 0:
        raise ConfigError("a request has a negative number of tokens: the file is damaged")
    count = len(run.start_times)
    if any(len(each) != count for each in (run.ttfts, run.itls, run.input_lens, run.output_lens, run.errors)):
        raise ConfigError(f"the lists of its {count} requests have different lengths")
    planned = isinstance(run.request_rate, float) and run.max_concurrency is not None and len(run.queue_times) == count
    origin = min(run.start_times[at] - (run.queue_times[at] if planned else 0.0) for at in range(count))
    requests = sorted((_request(run, at, origin, planned) for at in range(count)), key=lambda each: each.dispatched)
    head = EventsHead(
        traffic="",
        traffic_sha256="",
        arrivals=_arrivals(run),
        target=f"{run.backend} {run.model_id}",
        started="",
        begin=0,
        end=requests[-1].dispatched,
        concurrency=run.max_concurrency,
        rate=run.request_rate if isinstance(run.request_rate, float) else None,
        stop="",
    )
    good = run.request_goodput if run.request_goodput is not None else run.older_goodput
    promised = (
        ()
        if good is None
        else (f"By vLLM's --goodput, whose limits the file does not have: {good:.4g} good requests/s.",)
    )
    return Events(head, requests), (*_NOTES, _PLANNED if planned else _NOT_PLANNED, *promised)


def _arrivals(run: _Run) -> Arrivals:
    if isinstance(run.request_rate, str):
        return "batch" if run.max_concurrency is None else "closed"
    if run.ramp_up_strategy is not None:
        return "ramp"
    return "poisson" if run.burstiness == 1 else "gamma"


def _request(run: _Run, at: int, origin: float, planned: bool) -> RequestEvents:
    """Of a request that failed, the parts that came before: of one without a message there is no first part."""
    assert run.start_times is not None, "it was checked"
    start, first = run.start_times[at] - origin, run.ttfts[at]
    moments = accumulate(run.itls[at], initial=start + first) if first else ()
    chunks = [round(moment * 1e9) for moment in moments]
    failed = run.errors[at] or (None if chunks else "no answer")
    return RequestEvents(
        request=at,
        scheduled=round((start - run.queue_times[at]) * 1e9) if planned else None,
        dispatched=round(start * 1e9),
        first_byte=chunks[0] if chunks else None,
        chunks=chunks,
        end=chunks[-1] if chunks and not failed else None,
        prompt_tokens=run.input_lens[at],
        completion_tokens=None if failed else run.output_lens[at],
        error=failed,
    )
