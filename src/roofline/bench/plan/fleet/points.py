"""A fleet's figures as points of the schema of results."""

import roofline
from roofline.bench.plan.assumptions import in_words
from roofline.bench.plan.fleet.figures import FleetFigures, Times
from roofline.bench.plan.fleet.fleet import FleetPlan
from roofline.bench.plan.points import DEFINITIONS, SIMULATED, device_of, host_of
from roofline.bench.results import point as schema
from roofline.common.units import now_utc
from roofline.hardware.detect import detect


def points_of(plan: FleetPlan, run: str) -> list[schema.Point]:
    """A point for each pair of policies. run: a name that all of them have."""
    return [_point(plan, figures, run) for figures in plan.figures]


def _point(plan: FleetPlan, figures: FleetFigures, run: str) -> schema.Point:
    now, spec, arrangement = now_utc(), plan.spec, plan.arrangement
    model = spec.model
    return schema.Point(
        id="",
        run=run,
        kind="fleet",
        preset=spec.name,
        started=now,
        ended=now,
        system=schema.System(
            label=f"{spec.name}: {figures.routing}, {figures.scaling}",
            target=f"simulated:{model.name}",
            engine="roofline",
            version=roofline.__version__,
            options={"max_batch_tokens": str(model.max_batch_tokens), "max_running": str(model.max_running)},
            model=model.name,
            weight_formats=model.dtype,
            replicas=round(figures.replicas),
            devices_per_replica=model.devices,
        ),
        host=host_of(detect()),
        devices=[device_of(arrangement, arrangement.weights, round(figures.replicas) * model.devices)],
        workload=None,
        load=schema.Load(arrivals="poisson", offered=spec.traffic.rate, achieved=figures.requests / figures.seconds),
        client=None,
        window=schema.Window(method="none is cut off", warm_up_s=0.0, measured_s=figures.seconds, cool_down_s=0.0),
        counts=None,
        metrics=_metrics(figures),
        validity=schema.Validity(grade="A", flags=[SIMULATED, in_words(plan.calibration)]),
        extra={
            "routing": figures.routing,
            "scaling": figures.scaling,
            "method": figures.method,
            "requests": figures.requests,
            "answered": figures.answered,
            "refused": figures.refused,
            "resent": figures.resent,
            "used": figures.used,
            "replicas": figures.replicas,
            "least_replicas": figures.least_replicas,
            "most_replicas": figures.most_replicas,
            "failures": figures.failures,
            "started": figures.started,
            "prefix_hits": figures.hits,
            "wall_seconds": figures.wall_seconds,
            "usd": figures.usd,
            "usd_per_million_tokens": figures.usd_per_mtok,
        },
    )


def _metrics(figures: FleetFigures) -> dict[str, schema.Figure]:
    return {
        "ttft": _milliseconds("ttft", figures.ttft),
        "tpot": _milliseconds("tpot", figures.tpot),
        "answer_rate": schema.Figure(
            definition="tokens of ended answers / seconds", unit="tokens/s", n=1, value=figures.tokens_per_s
        ),
        "request_rate": schema.Figure(
            definition="ended answers / seconds", unit="requests/s", n=1, value=figures.answered / figures.seconds
        ),
    }


def _milliseconds(name: str, times: Times) -> schema.Figure:
    p50, p90, p95, p99 = (1e3 * times.percentile(percent) for percent in (50, 90, 95, 99))
    mean = 1e3 * times.mean
    return schema.Figure(
        definition=DEFINITIONS[name], unit="ms", n=times.count, mean=mean, p50=p50, p90=p90, p95=p95,
        p99=p99 if times.count >= 299 else None,
    )  # fmt: skip
