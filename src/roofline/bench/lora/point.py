"""The point of a batch size: what its run's card says, as records of results have it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import roofline
from roofline.bench.lora.rows import Samples
from roofline.bench.report import words
from roofline.bench.results import point as schema
from roofline.bench.results.statistics import bootstrap_interval, percentile, percentile_interval
from roofline.common.json_types import JsonObject
from roofline.common.units import now_utc

if TYPE_CHECKING:
    from roofline.bench.lora.sweep import Settings

REAL, STEP = words.TRAIN, words.STEP
COMPUTED, MEMORY, MFU, LOSS = "computed_rate", "peak_memory", "mfu", "loss"
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
    settings: "Settings", batch: int, samples: Samples, outcome: Outcome, *, run: str, started: str, host: schema.Host
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
        devices=_devices(card),
        workload=_workload(settings, samples, batch),
        load=None,
        client=None,
        window=_window(settings, card),
        counts=None,
        metrics={} if card is None else _metrics(card, outcome),
        validity=schema.Validity(grade="A", flags=[] if card is not None else [OUT_OF_MEMORY]),
        limit=None if card is None else _limit(card, batch),
        extra=_extra(settings, batch, card, outcome),
    )


def _system(settings: "Settings", card: JsonObject | None) -> schema.System:
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


def _devices(card: JsonObject | None) -> list[schema.Device]:
    if card is None:
        return []
    peak, roof = card["peak"], card["roof"]
    return [
        schema.Device(
            name=card["device"]["name"],
            vendor="",
            count=card["devices"],
            sheet_flops=peak["flops"] if peak else 0.0,
            sheet_source=peak["source"] if peak else "",
            measured_flops=roof["flops"] if roof else 0.0,
            measured_at=roof["measured"] if roof else "",
        )
    ]


def _workload(settings: "Settings", samples: Samples, batch: int) -> schema.Workload:
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


def _window(settings: "Settings", card: JsonObject | None) -> schema.Window:
    if card is None:
        return schema.Window(method=OUT_OF_MEMORY, warm_up_s=0.0, measured_s=0.0, cool_down_s=0.0)
    speed = card["speed"]
    seconds = (speed["steps"][1] - speed["steps"][0] + 1) * card["global_batch"] / speed["rows_per_s"]
    return schema.Window(
        method=f"without the first {speed['left_out']['steps']} steps: {speed['left_out']['why']}",
        warm_up_s=0.0,
        measured_s=seconds,
        cool_down_s=0.0,
    )


def _metrics(card: JsonObject, outcome: Outcome) -> dict[str, schema.Figure]:
    speed, memory = card["speed"], card["memory"]
    counted = np.array(outcome.steps[speed["left_out"]["steps"] :])  # [steps, 3]
    milliseconds = 1e3 * counted[:, 0]
    values = {
        REAL: ("tokens of samples, without padding / seconds of steps", "tokens/s", speed["tokens_per_s"]),
        COMPUTED: ("tokens computed, with padding / seconds of steps", "tokens/s", computed_rate(card)),
        LOSS: ("mean over the targets of the last step", "nats", outcome.steps[-1][2]),
    }
    if memory["measured"] is not None:
        values[MEMORY] = (f"of a process: {memory['measured_as']}", "bytes", float(memory["measured"]))
    for label, loss in outcome.held_out.items():
        values[f"{LOSS}_{label}"] = ("mean over the targets of the held-out rows", "nats", loss)
    name, flops = convention(card)
    of, against = _against(card)
    if of:
        definition = f"{name}: {card['conventions'][name]}; of {against}"
        values[MFU] = (definition, "1", flops * computed_rate(card) / of)
    count = len(counted)
    metrics = {key: schema.Figure(definition=d, unit=u, n=count, value=v) for key, (d, u, v) in values.items()}
    metrics[REAL].ci95 = bootstrap_interval(counted, lambda steps: float(steps[:, 1].sum() / steps[:, 0].sum()))
    metrics[STEP] = schema.Figure(
        definition="end - begin of a step",
        unit="ms",
        n=count,
        p50=float(np.median(milliseconds)),
        p95=percentile(milliseconds, 0.95),
        ci95=percentile_interval(milliseconds, 0.5),
    )
    return metrics


def computed_rate(card: JsonObject) -> float:
    """Tokens a second of all devices, with padding."""
    return float(card["speed"]["computed_per_s_per_device"] * card["devices"])


def convention(card: JsonObject) -> tuple[str, float]:
    """By which FLOPs are counted, and the FLOPs of a token: LoRA's where matrices are frozen."""
    name = "lora" if "lora" in card["flops"] else "matmul"
    return name, float(card["flops"][name]["model_flops_per_token"])


def _against(card: JsonObject) -> tuple[float, str]:
    """FLOP/s of all devices that a run is compared with, and where they are from; 0 where nothing is known."""
    if card["peak"]:
        return card["peak"]["flops"] * card["devices"], card["peak"]["source"]
    if card["roof"] and card["roof"]["share"] is not None:
        return card["roof"]["flops"] * card["devices"], card["roof"]["measured"]
    return 0.0, ""


def _limit(card: JsonObject, batch: int) -> schema.Limit | None:
    """The least time of a step at the measured roof, or at the peak of the data sheet."""
    of, against = _against(card)
    if not of:
        return None
    name, flops = convention(card)
    step = computed_rate(card) * batch / card["speed"]["rows_per_s"]  # tokens
    share = flops * computed_rate(card) / of
    return schema.Limit(
        seconds=flops * step / of,
        bound="compute",
        flops=flops * step,
        weight_bytes=0.0,
        kv_bytes=0.0,
        tokens_per_s=of / flops,
        share_of_sheet=share if card["peak"] else None,
        share_of_measured=None if card["peak"] else share,
        assumptions=[f"{name}: {card['conventions'][name]}", f"of {against}", "a step, with its padding"],
    )


def _extra(
    settings: "Settings", batch: int, card: JsonObject | None, outcome: Outcome
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
