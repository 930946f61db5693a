"""The point of a batch size: what its run's card says, as records of results have it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import roofline
from roofline.bench import train_points
from roofline.bench.lora.rows import Samples
from roofline.bench.results import point as schema
from roofline.common.json_types import JsonObject
from roofline.common.units import now_utc

if TYPE_CHECKING:
    from roofline.bench.lora.sweep import LoraSweepSettings

REAL, COMPUTED, LOSS = train_points.RATE, "computed_rate", "loss"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Outcome:
    """What a run left, or why memory ran out.

    steps: seconds, tokens without padding, and loss of each step; held_out: the last losses on held-out rows.
    """

    card: JsonObject | None = None
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    out_of_memory: str | None = None


def point_of(
    settings: "LoraSweepSettings",
    batch: int,
    samples: Samples,
    outcome: Outcome,
    *,
    run: str,
    started: str,
    host: schema.Host,
) -> schema.Point:
    """run: a name that all points of a command have."""
    card = outcome.card
    return schema.Point(
        id="",
        run=run,
        kind="train",
        preset=settings.preset(batch),
        started=started,
        ended=now_utc(),
        system=_system(settings, card),
        host=host,
        devices=[] if card is None else train_points.devices_of(card),
        workload=_workload(settings, samples, batch),
        load=None,
        client=None,
        window=_window(card),
        counts=None,
        metrics={} if card is None else _metrics(card, outcome),
        validity=schema.Validity(grade="A", flags=[] if card is not None else [OUT_OF_MEMORY]),
        limit=None if card is None else train_points.limit_of(card),
        extra=_extra(settings, batch, card, outcome),
    )


def _system(settings: "LoraSweepSettings", card: JsonObject | None) -> schema.System:
    of = settings.options
    options = {"method": of.method, "max_seq_len": str(of.max_seq_len), "pack": str(of.pack).lower()}
    if of.method != "full":
        options |= {"rank": str(of.rank), "base": of.base}
    return schema.System(
        label=f"roofline {settings.model}",
        target=f"train:{settings.model}",
        engine="roofline",
        version=roofline.__version__,
        options=options | {change.partition("=")[0]: change.partition("=")[2] for change in settings.changes},
        model=settings.model,
        parameters=0 if card is None else card["model"]["parameters"],
    )


def _workload(settings: "LoraSweepSettings", samples: Samples, batch: int) -> schema.Workload:
    options = settings.options
    prompts = [length - answer for length, answer in zip(samples.lengths, samples.answers, strict=True)]
    rows = options.epochs * samples.rows if options.epochs is not None else options.steps * batch
    return schema.Workload(
        name=samples.name,
        sha256=samples.sha256,
        requests=round(rows * len(samples.lengths) / samples.rows),
        prompt=_lengths(prompts),
        answer=_lengths(samples.answers),
        stop="the end of the sample",
        prefix_cache="off",
    )


def _lengths(values: Sequence[int]) -> schema.Lengths:
    p50, p95 = np.percentile(values, (50, 95))
    return schema.Lengths(mean=float(np.mean(values)), p50=float(p50), p95=float(p95), most=max(values))


def _window(card: JsonObject | None) -> schema.Window:
    if card is None:
        return schema.Window(method=OUT_OF_MEMORY, warm_up_s=0.0, measured_s=0.0, cool_down_s=0.0)
    return train_points.window_of(card)


def _metrics(card: JsonObject, outcome: Outcome) -> dict[str, schema.Figure]:
    metrics = train_points.metrics_of(card, [(seconds, tokens) for seconds, tokens, _ in outcome.steps])
    values = {
        COMPUTED: (
            "tokens computed, with padding / seconds of steps",
            "tokens/s",
            train_points.computed_rate(card),
        ),
        LOSS: ("mean over the targets of the last step", "nats", outcome.steps[-1][2]),
    }
    for label, loss in outcome.held_out.items():
        values[f"{LOSS}_{label}"] = ("mean over the targets of the held-out rows", "nats", loss)
    count = metrics[REAL].n
    return metrics | {key: schema.Figure(definition=d, unit=u, n=count, value=v) for key, (d, u, v) in values.items()}


def _extra(
    settings: "LoraSweepSettings", batch: int, card: JsonObject | None, outcome: Outcome
) -> dict[str, float | int | str | bool | None]:
    """What only these points have. out_of_memory: what the run said, "" where there was enough."""
    common: dict[str, float | int | str | bool | None] = {
        "batch": batch,
        "out_of_memory": outcome.out_of_memory or "",
        "command": settings.command,
    }
    if card is None:
        return common
    speed = card["speed"]
    return common | {
        "microbatch": card["microbatch"],
        "padding_share": speed["padding_share"],
        "trained_share": speed["trained_share"],
        "epochs": settings.options.epochs,
        "steps": speed["steps"][1],
        "first_loss": outcome.steps[0][2],
        "precision": card["precision"],
        "torch": card["versions"]["torch"],
        "commit": card["versions"]["commit"],
    }
