"""What is asked of a GPU's figures, and whether they reach it; shares are of what the same device was measured at."""

from collections.abc import Iterator
from typing import Any

PREFILL_SHEET, PREFILL_PRODUCT = 0.60, 0.76  # of the data sheet's bf16 FLOP/s, or of the measured product
DECODE, FOUR_BIT, FOUR_BIT_BEYOND = 0.80, 0.55, 0.65  # of the measured copy
OURS = ("graphs", "paged")  # rungs that are ours, the better one first


def judged(part: str, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target of a part with its figure; met: None where there is no figure."""
    makers = {"grid": _grid, "grid_compiled": _grid, "four_bit": _four_bit, "exact": _exact}
    return list(makers[part](rows)) if part in makers else []


def _target(what: str, least: float, measured: float | None) -> dict[str, Any]:
    met = None if measured is None else measured >= least
    return {"figure": what, "at_least": least, "measured": measured, "met": met}


def _grid(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A prefill reaches its target by either share; the data sheet's is left out where there is none."""
    peak = rows.get("datasheet", {}).get("bf16")
    for cell in rows.get("cells", []):
        name = next((rung for rung in OURS if rung in cell["rungs"]), None)
        if name is None:
            continue
        rung, prompts = cell["rungs"][name], cell["new"] == 1
        if not prompts:
            yield _target(f"{cell['cell']}, {name}: share of the copy", DECODE, rung["share"])
            continue
        sheet = cell["limit"]["flops"] / peak / rung["latency"]["median"] if peak else None
        reached = max((rung["share"] or 0.0) / PREFILL_PRODUCT, (sheet or 0.0) / PREFILL_SHEET)
        yield {
            "figure": f"{cell['cell']}, {name}: share of the data sheet's bf16, or of the measured product",
            "at_least": [PREFILL_SHEET, PREFILL_PRODUCT],
            "measured": [sheet, rung["share"]],
            "met": reached >= 1,
        }


def _four_bit(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, row in rows.get("rows", {}).items():
        if not name.startswith("BF16"):
            yield _target(f"{name}: share of the copy", FOUR_BIT, row["share_of_copy"])
            yield _target(f"{name}: share of the copy, beyond", FOUR_BIT_BEYOND, row["share_of_copy"])
        else:
            yield _target(f"{name}: share of the copy", DECODE, row["share_of_copy"])


def _exact(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Equal bits are promised where exact results were asked for."""
    for name, row in rows.get("rows", {}).items():
        if name.endswith(" exact"):
            for what in ("in company", "in chunks", "decoding"):
                yield _target(f"{name}: equal {what}", row["of"], row[f"equal {what}"])
