"""Reads throughput cards of runs and shows them as rows of LLM Foundry's tables."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.units import human_bytes
from roofline.hardware.roofs import TOLERANCE
from roofline.train.run_folder import CARD

VERSION = 1
TOO_LOW = "no share: the run was faster than the roof, however often that was measured"


def read(place: str) -> JsonObject:
    """The card in a run's folder or in a file. Raises ConfigError."""
    path = Path(place) / CARD if Path(place).is_dir() else Path(place)
    try:
        card = json.loads(path.read_text("utf-8"))
        card = card.get("card", card)  # a record of `bench train` contains a card
        fits = card["version"] == VERSION
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no card; a run writes one at its checkpoints and at its end") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no card of a run: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error
    if not fits:
        raise ConfigError(f"{path}: a card of version {card['version']}, this is version {VERSION}: run it again")
    return dict(card)


def check(cards: Sequence[JsonMapping], names: Sequence[str]) -> None:
    """Raise ConfigError if cards count FLOPs differently, so that their figures cannot be compared."""
    for card, name in zip(cards[1:], names[1:], strict=True):
        for key in sorted({*cards[0]["conventions"], *card["conventions"]}):
            a, b = cards[0]["conventions"].get(key), card["conventions"].get(key)
            if a != b:
                raise ConfigError(
                    f"{names[0]} and {name} count FLOPs differently: {key!r} is {a!r} there and {b!r} here"
                )


def row(card: JsonMapping, convention: str) -> dict[str, str]:
    """A card as a row of LLM Foundry's tables, with more columns. convention: for FLOPs, MFU and HFU.

    Raises ConfigError if the card does not count so.
    """
    if convention not in card["flops"]:
        raise ConfigError(f"{card['run']}: FLOPs are counted as {', '.join(card['flops'])}, not as {convention}")
    return {name: show(card, card["flops"][convention]) for name, show in _COLUMNS.items()}


def _share(value: float | None) -> str:
    return "-" if value is None or value > TOLERANCE else f"{100 * value:.2f}"


def _per_device(card: JsonMapping, rate: float, form: str) -> str:
    """The rate, also for a package that torch counts as several devices and vendors as one."""
    peak = card["peak"]
    if peak is None or peak["devices"] == 1:
        return form.format(rate)
    return f"{form.format(rate)} ({form.format(rate * peak['devices'])} a {peak['package']})"


def _predicted(card: JsonMapping) -> str:
    predicted, measured = card["memory"]["predicted"], card["memory"]["measured"]
    sizes = (predicted and predicted["total"], measured)
    return " / ".join("-" if size is None else human_bytes(size) for size in sizes)


def _roof(card: JsonMapping) -> str:
    roof = card["roof"]
    if roof is None:
        return "-"
    impossible = roof["share"] is None or roof["share"] > TOLERANCE  # the latter in cards of older versions
    return TOO_LOW if impossible else f"{100 * roof['share']:.1f} of {roof['measured']}"


_COLUMNS: dict[str, Callable[[JsonMapping, JsonMapping], str]] = {
    "Model": lambda card, _: str(card["model"]["name"]),
    "SeqLen (T)": lambda card, _: str(card["seq_len"]),
    "# Devices": lambda card, _: str(card["devices"]),
    "Device": lambda card, _: card["device"]["name"],
    "MFU": lambda _, flops: _share(flops["mfu"]),
    "HFU": lambda _, flops: _share(flops["hfu"]),
    "Model TFLOP/s/device": lambda card, flops: _per_device(card, flops["tflops_per_device"], "{:.4g}"),
    "MicroBatchSize": lambda card, _: str(card["microbatch"]),
    "GradAccum": lambda card, _: str(card["grad_accum"]),
    "GlobalBatchSize": lambda card, _: str(card["global_batch"]),
    "Throughput (S/s)": lambda card, _: f"{card['speed']['rows_per_s']:.4g}",
    "Throughput (T/s)": lambda card, _: f"{card['speed']['tokens_per_s']:.0f}",
    "Throughput (T/s/device)": lambda card, _: _per_device(card, card["speed"]["tokens_per_s_per_device"], "{:.0f}"),
    "GlobalBatchSize (T)": lambda card, _: str(card["global_batch"] * card["seq_len"]),
    "Precision": lambda card, _: card["precision"],
    "MP Mode": lambda card, _: card["mp_mode"] or "-",
    "Sharding Strategy": lambda card, _: card["sharding"] or "-",
    "Activation Checkpointing": lambda card, _: card["checkpointing"] or "no",
    "Compile": lambda card, _: "yes" if card["compile"] else "no",
    "NumParams": lambda card, _: str(card["model"]["parameters"]),
    "Step p50 / p95 (s)": lambda card, _: " / ".join(f"{card['speed']['step_seconds'][p]:.4g}" for p in ("p50", "p95")),
    "Data wait (%)": lambda card, _: f"{100 * card['speed']['wait_share']:.1f}",
    "Memory predicted / measured": lambda card, _: _predicted(card),
    "Measured roof (%)": lambda card, _: _roof(card),
}
