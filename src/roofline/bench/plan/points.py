"""A plan as points of the schema of results, beside measured ones."""

from collections.abc import Sequence

import numpy as np

import roofline
from roofline.bench.plan.arrangements import Arrangement
from roofline.bench.plan.assumptions import in_words
from roofline.bench.plan.closed_loop import Lengths
from roofline.bench.plan.plan import Plan, PlannedPoint, Quantiles
from roofline.bench.results import point as schema
from roofline.common.units import now_utc
from roofline.hardware.detect import Machine, detect

DEFINITIONS = {
    "ttft": "first id - submission",
    "tpot": "(last id - first id) / (ids - 1)",
    "e2e": "last id - submission",
}
SIMULATED = "simulated: nothing was measured"


def points_of(plan: Plan, run: str) -> list[schema.Point]:
    """The points of a plan. run: a name that all of them have."""
    return [_point(plan, each, run) for each in plan.points]


def _point(plan: Plan, planned: PlannedPoint, run: str) -> schema.Point:
    now, case, arrangement = now_utc(), plan.case, planned.arrangement
    return schema.Point(
        id="",
        run=run,
        kind="plan",
        preset=case.workload,
        started=now,
        ended=now,
        system=schema.System(
            label=f"{case.model} on {plan.place.count} x {plan.place.name}, {arrangement.name}",
            target=f"simulated:{case.model}",
            engine="roofline",
            version=roofline.__version__,
            options={"max_batch_tokens": str(case.step[0]), "max_running": str(case.step[1])},
            model=case.model,
            parameters=plan.parameters,
            weight_bytes=plan.weight_bytes,
            weight_formats=case.dtype,
            kv_format=plan.kv_format,
            replicas=arrangement.replicas,
            devices_per_replica=arrangement.devices,
        ),
        host=host_of(detect()),
        devices=[device_of(arrangement, plan.weight_bytes, plan.place.count)],
        workload=_workload(plan, planned),
        load=schema.Load(
            arrivals="closed", concurrency=planned.concurrency, achieved=planned.requests_per_s
        ),
        client=None,
        window=schema.Window(
            method="the first `concurrency` requests warm up",
            warm_up_s=0.0,
            measured_s=planned.simulated_seconds,
            cool_down_s=0.0,
        ),
        counts=schema.Counts(
            completed=planned.requests,
            failed=0,
            unfinished=0,
            prompt_tokens=sum(each.prompt for each in case.lengths) * planned.requests // len(case.lengths),
            answer_tokens=sum(each.answer for each in case.lengths) * planned.requests // len(case.lengths),
            tokens_by="engine",
        ),
        metrics=_metrics(planned),
        validity=schema.Validity(grade="A", flags=[SIMULATED]),
        limit=_limit(planned),
        cost=_cost(plan, planned),
        extra={
            "arrangement": arrangement.name,
            "shares": in_words(planned.calibration),
            "shares_from": planned.calibration.source,
            "cache_tokens": arrangement.cache_tokens,
            "preemptions": planned.preemptions,
            **_ranges(planned),
        },
    )  # fmt: skip


def _ranges(planned: PlannedPoint) -> dict[str, float]:
    """The ends of what is likely of each figure, where public figures say that."""
    ranges = {"answer_rate": planned.rate_range, "ttft_s": planned.ttft_range, "tpot_s": planned.tpot_range}
    return {
        f"{name}_{end}": value
        for name, ends in ranges.items()
        if ends is not None
        for end, value in zip(("low", "high"), ends, strict=True)
    }


def host_of(machine: Machine) -> schema.Host:
    """The machine that simulated."""
    return schema.Host(chip=machine.chip, cores=machine.usable_cores, memory_bytes=machine.memory_total or 0)


def device_of(arrangement: Arrangement, working_set: int, count: int) -> schema.Device:
    """So many devices of an arrangement's place. working_set: bytes that a step reads."""
    place = arrangement.place
    product, roofs = place.product, place.roofs
    flops, reads = arrangement.arithmetic[1], roofs.read_bytes_per_s(working_set)
    if product is None:
        return schema.Device(name=place.name, vendor="", measured_flops=flops, measured_bytes_per_s=reads)
    sources = [figure.source for figure in (product.bf16 or product.fp16, product.bandwidth) if figure is not None]
    return schema.Device(
        name=product.name,
        vendor="amd" if product.chip.startswith("gfx") else "nvidia" if product.chip.startswith("sm_") else "",
        count=count,
        sheet_flops=flops,
        sheet_bytes_per_s=reads,
        sheet_source="; ".join(dict.fromkeys(sources)),
        watts=product.watts.value / product.dies if product.watts is not None else 0.0,
    )


def _workload(plan: Plan, planned: PlannedPoint) -> schema.Workload:
    lengths: Sequence[Lengths] = plan.case.lengths
    return schema.Workload(
        name=plan.case.workload,
        sha256=plan.case.workload_sha256,
        requests=planned.requests,
        prompt=_lengths([each.prompt for each in lengths]),
        answer=_lengths([each.answer for each in lengths]),
        stop="ignored",
        prefix_cache="off",
    )


def _lengths(values: list[int]) -> schema.Lengths:
    p50, p95 = np.percentile(values, (50, 95))
    return schema.Lengths(mean=float(np.mean(values)), p50=float(p50), p95=float(p95), most=max(values))


def _metrics(planned: PlannedPoint) -> dict[str, schema.Figure]:
    times = {"ttft": planned.ttft, "tpot": planned.tpot, "e2e": planned.seconds}
    figures = {name: _milliseconds(name, each) for name, each in times.items() if each is not None}
    for name, unit, value in (
        ("answer_rate", "tokens/s", planned.tokens_per_s),
        ("request_rate", "requests/s", planned.requests_per_s),
    ):
        figures[name] = schema.Figure(definition="ended in the window / its seconds", unit=unit, n=1, value=value)
    return figures


def _milliseconds(name: str, times: Quantiles) -> schema.Figure:
    mean, p50, p95 = (1e3 * seconds for seconds in (times.mean, times.p50, times.p95))
    return schema.Figure(definition=DEFINITIONS[name], unit="ms", n=times.n, mean=mean, p50=p50, p95=p95)


def _limit(planned: PlannedPoint) -> schema.Limit:
    sheet, counted = planned.arrangement.place.product is not None, planned.arrangement.counted
    links = "" if planned.arrangement.devices == 1 else "; exchanges among devices are not in the limit"
    return schema.Limit(
        seconds=planned.limit_seconds,
        bound="memory" if planned.bound == "memory" else "compute",
        flops=planned.flops * counted,
        weight_bytes=planned.weight_bytes * counted,
        kv_bytes=planned.kv_bytes * counted,
        tokens_per_s=planned.limit_tokens_per_s,
        share_of_sheet=planned.share if sheet else None,
        share_of_measured=None if sheet else planned.share,
        assumptions=[f"{in_words(planned.calibration)} ({planned.calibration.source}){links}"],
    )


def _cost(plan: Plan, planned: PlannedPoint) -> schema.Cost | None:
    price = plan.case.price
    if price is None or planned.usd_per_mtok is None:
        return None
    return schema.Cost(
        usd_per_hour=price.usd_per_hour * plan.place.count,
        source=price.source,
        date=price.date,
        usd_per_million_tokens=planned.usd_per_mtok,
    )
