"""What points say of a run of training: its devices, its window, its figures and its limit, as its card has them."""

from collections.abc import Sequence

import numpy as np

from roofline.bench.report import words
from roofline.bench.results import point as schema
from roofline.bench.results.statistics import bootstrap_interval, percentile, percentile_interval
from roofline.common.json_types import JsonObject

RATE, STEP = words.TRAIN, words.STEP
MEMORY, MFU = "peak_memory", "mfu"


def devices_of(card: JsonObject) -> list[schema.Device]:
    """The devices of a run: one for each process, but of a CPU, which its processes share, one with the roof of all."""
    peak, roof = card["peak"], card["roof"]
    shared = card["devices"] if card["device"]["kind"] == "cpu" else 1
    return [
        schema.Device(
            name=card["device"]["name"],
            vendor="",
            count=card["devices"] // shared,
            sheet_flops=shared * peak["flops"] if peak else 0.0,
            sheet_source=peak["source"] if peak else "",
            measured_flops=shared * roof["flops"] if roof else 0.0,
            measured_at=roof["measured"] if roof else "",
        )
    ]


def window_of(card: JsonObject) -> schema.Window:
    """The steps that count."""
    speed = card["speed"]
    return schema.Window(
        method=f"without the first {speed['left_out']['steps']} steps: {speed['left_out']['why']}",
        warm_up_s=0.0,
        measured_s=(speed["steps"][1] - speed["steps"][0] + 1) * card["global_batch"] / speed["rows_per_s"],
        cool_down_s=0.0,
    )


def metrics_of(card: JsonObject, steps: Sequence[tuple[float, int]]) -> dict[str, schema.Figure]:
    """The figures of a run. steps: seconds and tokens without padding of each step, those before the window too."""
    speed, memory = card["speed"], card["memory"]
    counted = np.array(steps[speed["left_out"]["steps"] :])  # [steps that count, 2]
    count, milliseconds = len(counted), 1e3 * counted[:, 0]
    figures = {
        RATE: schema.Figure(
            definition="tokens of samples, without padding / seconds of steps",
            unit="tokens/s",
            n=count,
            value=speed["tokens_per_s"],
            ci95=bootstrap_interval(counted, lambda rows: float(rows[:, 1].sum() / rows[:, 0].sum())),
        ),
        STEP: schema.Figure(
            definition="end - begin of a step",
            unit="ms",
            n=count,
            p50=float(np.median(milliseconds)),
            p95=percentile(milliseconds, 0.95),
            ci95=percentile_interval(milliseconds, 0.5),
        ),
    }
    if memory["measured"] is not None:
        text = f"of a process: {memory['measured_as']}"
        figures[MEMORY] = schema.Figure(definition=text, unit="bytes", n=count, value=float(memory["measured"]))
    name, flops = convention(card)
    of, against = roof_of(card)
    if of:
        text = f"{name}: {card['conventions'][name]}; of {against}"
        figures[MFU] = schema.Figure(definition=text, unit="1", n=count, value=flops * computed_rate(card) / of)
    return figures


def computed_rate(card: JsonObject) -> float:
    """Tokens a second of all devices, with padding."""
    return float(card["speed"]["computed_per_s_per_device"] * card["devices"])


def convention(card: JsonObject) -> tuple[str, float]:
    """By which FLOPs are counted, and the FLOPs of a token: LoRA's where matrices are frozen."""
    name = "lora" if "lora" in card["flops"] else "matmul"
    return name, float(card["flops"][name]["model_flops_per_token"])


def roof_of(card: JsonObject) -> tuple[float, str]:
    """FLOP/s of all devices that a run is compared with, and where they are from; 0 where nothing is known."""
    if card["peak"]:
        return card["peak"]["flops"] * card["devices"], card["peak"]["source"]
    if card["roof"] and card["roof"]["share"] is not None:
        return card["roof"]["flops"] * card["devices"], card["roof"]["measured"]
    return 0.0, ""


def limit_of(card: JsonObject) -> schema.Limit | None:
    """The least time of a step at the measured roof, or at the peak of the data sheet."""
    of, against = roof_of(card)
    if not of:
        return None
    name, flops = convention(card)
    step = computed_rate(card) * card["global_batch"] / card["speed"]["rows_per_s"]  # tokens
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
