"""What `roofline plan` prints: memory, arrangements, the curve, what was assumed; and the same as plain data."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from roofline.cli.output import console, print_table, ruled_table
from roofline.common.json_types import JsonObject
from roofline.common.units import human_bytes, human_count, human_rate, human_seconds

if TYPE_CHECKING:
    from roofline.bench.plan.arrangements import Arrangement
    from roofline.bench.plan.plan import Plan, PlannedPoint, Quantiles

FITS = ("arrangement", "weights/device", "workspace", "cache of a copy", "tokens", "requests at a time")
CURVE = (
    *("arrangement", "concurrency", "tok/s", "tok/s each", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"),
    *("of limit", "bound", "assumed"),
)


def show(plan: "Plan") -> None:
    """Print a plan for people."""
    out = console(highlight=False, markup=False)
    case, place = plan.case, plan.place
    dtype = f" in {case.dtype}" if case.dtype else ""
    out.print(f"{case.model}{dtype} on {place.count} x {place.name}, {human_bytes(place.memory)} each")
    weights = f"{plan.weight_bytes / 1e9:,.0f} GB" if plan.weight_bytes >= 1e10 else human_bytes(plan.weight_bytes)
    size = f"{weights} of weights ({human_count(plan.parameters)} parameters)"
    cache = f"{human_bytes(plan.kv_token_bytes)} of cache for each token ({plan.kv_format})"
    state = f", {human_bytes(plan.state_bytes)} of state for each sequence" if plan.state_bytes else ""
    out.print(f"{size}, {cache}{state}")
    for note in () if case.dtype else plan.shape.notes:
        out.print(note)
    out.print()
    table = ruled_table(None, FITS, ("arrangement",), padding=1)
    for arrangement in plan.arrangements:
        table.add_row(*_fit_row(plan, arrangement))
    print_table(out, table)
    out.print()
    prices = ("USD/Mtok",) if case.price is not None else ()
    table = ruled_table(f"Expected with {case.workload}", (*CURVE, *prices), ("arrangement", "bound"), padding=1)
    for point in plan.points:
        table.add_row(*_curve_row(point), *([f"{point.usd_per_mtok:.2f}"] if point.usd_per_mtok is not None else []))
    print_table(out, table, keys=2)
    for line in _notes(plan):
        out.print(line, style="dim")


def _fit_row(plan: "Plan", arrangement: "Arrangement") -> list[str]:
    longest = max(lengths.prompt + lengths.answer for lengths in plan.case.lengths)
    tokens = arrangement.cache_tokens
    token_bytes = plan.kv_token_bytes
    requests = min(tokens // longest, arrangement.limits.segments)
    sizes = human_bytes(arrangement.weights), human_bytes(arrangement.workspace), human_bytes(tokens * token_bytes)
    return [arrangement.name, *sizes, f"{tokens:,}", f"{requests} x {arrangement.replicas}"]


def _curve_row(point: "PlannedPoint") -> list[str]:
    from roofline.bench.plan.assumptions import short

    tpot = ["-", "-"]
    if point.tpot is not None:
        tpot = [_ms(point.tpot.p50) + _between(point.tpot_range, _ms), _ms(point.tpot.p95)]
    assumed = short(point.calibration)
    rate = f"{point.tokens_per_s:,.1f}" + _between(point.rate_range, _two_digits)
    rates = rate, f"{point.tokens_per_s / point.concurrency:,.1f}"
    times = _ms(point.ttft.p50) + _between(point.ttft_range, _ms), _ms(point.ttft.p95), *tpot
    name = point.arrangement.name
    return [name, f"{point.concurrency:,}", *rates, *times, f"{point.share:.0%}", point.bound, assumed]


def _between(ends: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    """ " (1,700 to 3,000)" with two digits of each end; "" where there is no range."""
    if ends is None:
        return ""
    low, high = (float(f"{end:.2g}") for end in ends)
    return f" ({text(low)} to {text(high)})"


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _ms(seconds: float) -> str:
    return human_seconds(seconds)


def _notes(plan: "Plan") -> list[str]:
    """What the figures are, and what they leave out."""
    from roofline.backends.capacity import SPARE_SLOTS
    from roofline.backends.fit import held_in

    place, roofs = plan.place, plan.place.roofs
    reads = human_rate(roofs.read_bytes_per_s(plan.weight_bytes), "B")
    arithmetic, rate = plan.arrangements[0].arithmetic
    flops = f"{human_rate(rate, 'op')} in {arithmetic}"
    stand_ins = [f"{name} as {other}" for name, other in held_in(plan.arrangements[0].split).items()]
    stand_in_notes = [f"kernels there read {', '.join(stand_ins)}: memory and reads are of that"] if stand_ins else []
    lines = [
        *stand_in_notes,
        *_assumed(plan),
        *_reserve(plan),
        f"roofs of a device: {reads}, {flops} ({_source(plan)})",
        "the real scheduler on a virtual clock, without the host's own time; prefix cache off; answers end at their "
        "last token",
    ]
    if plan.state_bytes:
        fixed, least = (
            plan.arrangements[0].split.parts[0].fixed_slots,
            plan.arrangements[0].limits.segments + SPARE_SLOTS,
        )
        count = f"{fixed} slots" if fixed else f"as many bytes, but at least {least} slots"
        lines.append(
            f"beside the cache lie slots of recurrent state, for sequences and snapshots: {count}, which are in the "
            "workspace"
        )
    shared = [arrangement for arrangement in plan.arrangements if arrangement.devices > 1]
    if any(arrangement.link_bytes_per_s is None for arrangement in shared):
        lines.append(
            f"what devices send each other takes no time beside its exchanges: no table has links of {place.name}"
        )
    elif shared:
        rates = [f"{human_rate(arrangement.link_bytes_per_s or 0, 'B')} ({arrangement.name})" for arrangement in shared]
        lines.append(f"a device receives at most {', '.join(rates)} from those it shares a copy with")
    if across := [arrangement.name for arrangement in shared if arrangement.crosses_hosts]:
        lines.append(
            f"{', '.join(across)}: over several hosts of {place.in_host} (--per-host), whose network is assumed to "
            f"give a device {human_rate(place.network, 'B')} (--network); no public figure is of such copies"
        )
    simulated = max(point.simulated for point in plan.points)
    if simulated:
        lines.append(
            f"copies with more than {simulated:,} requests each are those with {simulated:,}, whose further ones wait "
            "in the queue as long as the copy takes to answer them"
        )
    if any(point.waiting for point in plan.points):
        lines.append("where more requests are there than a copy computes at a time, the others wait: TTFT counts that")
    if plan.case.price is not None:
        price = plan.case.price
        lines.append(
            f"{price.usd_per_hour:g} USD for an hour of a device ({price.source}, {price.date}), always in use"
        )
    return lines


def _assumed(plan: "Plan") -> list[str]:
    """What each arrangement's steps are assumed to reach, and how sure that is."""
    from roofline.bench.plan.assumptions import in_words

    names: dict[str, list[str]] = {}
    for point in plan.points:
        names.setdefault(in_words(point.calibration), []).append(point.arrangement.name)
    lines = []
    for text, its in names.items():
        which = f"{', '.join(dict.fromkeys(its))}: " if len(names) > 1 else ""
        lines.append(f"assumed: {which}{text} ({plan.calibration.source})")
    lines.append("of limit: the least time of the same steps at the roofs")
    if any(point.rate_range is not None for point in plan.points):
        public = "8 of 10 public figures of such steps lie within; docs/how-to/plan.md says of which"
        ours = "all rows of ours on CPUs lie within, of weights of 4 bits on 2 cores; docs/explanation/measured.md"
        lines.append(f"(low to high): {ours if plan.place.is_host else public}")
    return lines


def _reserve(plan: "Plan") -> list[str]:
    """What of a GPU's memory a plan leaves to others."""
    from roofline.backends.gpu.backend import RESERVED

    if plan.place.product is None or plan.place.product.host:
        return []
    return [f"workspace: of the largest step, and {RESERVED:.0%} of the memory for the driver and its libraries"]


def _source(plan: "Plan") -> str:
    product = plan.place.product
    if product is None:
        return "measured"
    figures = (product.bandwidth, product.bf16 or product.fp16)
    return "; ".join(dict.fromkeys(figure.source for figure in figures if figure is not None))


def record(plan: "Plan") -> JsonObject:
    """The plan as plain data."""
    return {
        "model": plan.case.model,
        "dtype": plan.case.dtype,
        "notes": [] if plan.case.dtype else list(plan.shape.notes),
        "workload": plan.case.workload,
        "chip": plan.place.name,
        "count": plan.place.count,
        "memory": plan.place.memory,
        "weight_bytes": plan.weight_bytes,
        "parameters": plan.parameters,
        "kv_token_bytes": plan.kv_token_bytes,
        "state_bytes": plan.state_bytes,
        "kv_format": plan.kv_format,
        "assumed": asdict(plan.calibration),
        "roofs": {
            "bytes_per_s": plan.place.roofs.read_bytes_per_s(plan.weight_bytes),
            "bf16_flops": plan.place.roofs.bf16_flops,
            "arithmetic": plan.arrangements[0].arithmetic[0],
            "operations_per_s": plan.arrangements[0].arithmetic[1],
            "source": _source(plan),
        },
        "arrangements": [_arrangement(arrangement) for arrangement in plan.arrangements],
        "points": [_point(point) for point in plan.points],
    }


def _arrangement(arrangement: "Arrangement") -> JsonObject:
    return {
        "name": arrangement.name,
        "devices": arrangement.devices,
        "replicas": arrangement.replicas,
        "weights": arrangement.weights,
        "workspace": arrangement.workspace,
        "cache_tokens": arrangement.cache_tokens,
        "state_slots": arrangement.state_slots,
        "max_context": arrangement.max_context,
        "link_bytes_per_s": arrangement.link_bytes_per_s,
        "crosses_hosts": arrangement.crosses_hosts,
    }


def _point(point: "PlannedPoint") -> JsonObject:
    return {
        "arrangement": point.arrangement.name,
        "concurrency": point.concurrency,
        "tokens_per_s": point.tokens_per_s,
        "tokens_per_s_range": point.rate_range,
        "ttft_s_range": point.ttft_range,
        "tpot_s_range": point.tpot_range,
        "requests_per_s": point.requests_per_s,
        "ttft_s": _times(point.ttft),
        "tpot_s": None if point.tpot is None else _times(point.tpot),
        "e2e_s": _times(point.seconds),
        "limit_tokens_per_s": point.limit_tokens_per_s,
        "share": point.share,
        "bound": point.bound,
        "preemptions": point.preemptions,
        "usd_per_million_tokens": point.usd_per_mtok,
    }


def _times(times: "Quantiles") -> JsonObject:
    return asdict(times)
