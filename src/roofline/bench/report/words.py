"""How points are called and their figures written, the same in terminals, tables and charts; names of metrics."""

from collections.abc import Sequence

from roofline.bench.load.events import Arrivals
from roofline.bench.results.point import INTERRUPTED, Client, Figure, Point
from roofline.bench.results.unread import unread_share
from roofline.hardware.host_settings import differences

# Metrics that reports know, as `Point.metrics` names them.
TTFT, TPOT, E2E = "ttft", "tpot", "e2e"
REQUESTS, TOKENS, GOODPUT = "request_rate", "answer_rate", "goodput"
TRAIN, STEP, EFFICIENCY = "train_rate", "step_time", "efficiency"


def load_name(point: Point) -> str:
    """ "16 workers", "2.5/s poisson", "batch of 1, prompts of 1,024", or the preset of a point without load."""
    load, prompt = point.load, prompt_length(point)
    if load is None:
        return point.preset
    name = load_text(load.arrivals, load.concurrency, load.offered)
    return name if prompt is None else f"{name}, prompts of {prompt:,}"


def short_load(point: Point) -> str:
    """The load beside a mark: "16", "2.5/s", "1 at 1,024" of a batch behind such prompts."""
    load, prompt = point.load, prompt_length(point)
    if load is None:
        return ""
    if load.offered is not None:
        return f"{digits(load.offered)}/s"
    count = load.arrivals if load.concurrency is None else f"{load.concurrency:,}"
    return count if prompt is None else f"{count} at {prompt:,}"


def kind_of_load(point: Point) -> str:
    """ "workers", "batches", "scheduled arrivals": by which the formulas of a rate differ."""
    if point.load is None:
        return point.kind
    if point.kind == "compare":
        return "comparisons"
    return {"closed": "workers", "batch": "batches"}.get(point.load.arrivals, "scheduled arrivals")


def prompt_length(point: Point) -> int | None:
    """Of a point of `bench decode`, whose prompts all have the same; of others None. Older points say it by what the
    server counted."""
    if point.kind != "decode" or point.workload is None:
        return None
    length = point.extra.get("prompt")
    return length if isinstance(length, int) else round(point.workload.prompt.mean)


def load_text(arrivals: Arrivals, concurrency: int | None, offered: float | None) -> str:
    """A load by how it is sent. offered: requests a second, None of closed loops, batches and traces."""
    count = concurrency or 1
    if arrivals == "batch":
        return f"batch of {count:,}"
    if arrivals == "closed":
        return f"{count:,} worker{'s' * (count != 1)}"
    return arrivals if offered is None else f"{digits(offered)}/s {arrivals}"


def system_name(point: Point) -> str:
    """What a reader calls the system, with its version where it is known, and whether it was only planned."""
    name = " ".join(filter(None, (point.system.label, point.system.version)))
    return f"{name}, planned" if planned(point) else name


def planned(point: Point) -> bool:
    """Whether the point is of a simulation, so that nothing was measured."""
    return point.kind in ("plan", "fleet")


def place(point: Point) -> str:
    """What computes: "2 x MI300X", else the host's chip."""
    devices = [f"{device.count} x {device.name}" if device.count > 1 else device.name for device in point.devices]
    return " + ".join(dict.fromkeys(devices)) or point.host.chip


def machine(point: Point) -> str:
    """What computes, and the host's cores: what two measurements share that may be compared."""
    return f"{place(point)}, {point.host.cores} core{'s' * (point.host.cores != 1)}"


def central(of: Figure | None) -> float | None:
    """The number that stands for a metric: its value, else its median, else its mean."""
    if of is None:
        return None
    return next((number for number in (of.value, of.p50, of.mean) if number is not None), None)


def figure(point: Point, name: str) -> Figure | None:
    """A metric of a point, None where the point does not have it. Of latencies the one that counts from the planned
    moment, so that waiting in the client is in it, where there is one."""
    return point.metrics.get(f"{name}_corrected") or point.metrics.get(name)


def metric(point: Point, name: str) -> float | None:
    """The number of a metric of a point, None where the point does not have it."""
    return central(figure(point, name))


def mean(point: Point, name: str) -> float | None:
    """The mean of a metric of a point, its number where it has no mean, None where the point does not have it."""
    of = figure(point, name)
    return of.mean if of is not None and of.mean is not None else central(of)


def interval(point: Point, name: str) -> tuple[float, float] | None:
    """The 95 % interval of a metric, None where there is none."""
    of = figure(point, name)
    return None if of is None else of.ci95


def share(point: Point) -> float | None:
    """Of the limit at the measured roofs, where they are known, else at the data sheet's."""
    if point.limit is None:
        return None
    measured = point.limit.share_of_measured
    return measured if measured is not None else point.limit.share_of_sheet


def trusted(point: Point) -> bool:
    """Whether the client kept up, as its certificate says. Of an engine that is called, which has no client: yes."""
    return point.client is None or point.client.trusted


def doubt(point: Point) -> str:
    """Why a client is not trusted with a point, "" where it is."""
    if point.client is None or point.client.trusted:
        return ""
    if not _certified(point.client):
        return "the client was not certified"
    beyond = any(flag.startswith("client certified for") for flag in point.validity.flags)
    return "the client was not certified for this load" if beyond else "the client did not keep up"


def _certified(of: Client) -> bool:
    return of.ttft_added_ms is not None or of.most_streams is not None


def client(point: Point) -> str:
    """What a table says of the client."""
    if point.client is None:
        return "none"
    if point.client.trusted:
        return "trusted"
    return "not trusted" if _certified(point.client) else "not certified"


def interrupted(point: Point) -> str:
    """ ", interrupted" of a point whose load was not sent to its end, "" of others."""
    return f", {INTERRUPTED}" if INTERRUPTED in point.validity.flags else ""


def other_settings(new: Sequence[Point], old: Sequence[Point]) -> str:
    """ ", settings differ: SMT off, was on" where the hosts of two measurements were run in another way, or other
    shares of clients did not read, else ""."""
    after, before = ([point.host.settings for point in points if point.host.settings] for points in (new, old))
    texts = [*differences(after, before), *_other_shares(new, old)]
    return f", settings differ: {'; '.join(texts)}" if texts else ""


def _other_shares(new: Sequence[Point], old: Sequence[Point]) -> list[str]:
    """["requests with a client beside them that did not read 0.1, was 0"], or nothing."""
    after, before = (sorted({unread_share(point) for point in points}) for points in (new, old))
    if after == before:
        return []
    shares, earlier = (" and ".join(f"{share:g}" for share in shares) for shares in (after, before))
    return [f"share of requests with a client beside them that did not read {shares}, was {earlier}"]


def digits(value: float | None, count: int = 3) -> str:
    """With so many digits that count, without an exponent below a million; "-" for no number."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 10 ** (count - 1):
        return f"{value:,.0f}" if size < 1e9 else f"{value:.{count}g}"
    return f"{value:.{count}g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def with_interval(value: float | None, around: tuple[float, float] | None) -> str:
    """ "12.3 [12.1, 12.6]", without the brackets where there is no interval."""
    return digits(value) + (f" [{digits(around[0])}, {digits(around[1])}]" if around and value is not None else "")
