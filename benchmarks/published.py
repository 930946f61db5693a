"""Figures that others published, beside the limits of what they ran on: `python -m benchmarks.published`.

The table of docs/how-to/plan.md is what this prints: nothing in it was measured here. A share is the least time at the
data sheet's roofs over the time that was published, so what a plan would have had to assume to foresee it.
"""

import sys
from dataclasses import dataclass

from roofline.backends.fit import split_on_product
from roofline.backends.simulated.calibration import Calibration
from roofline.bench.plan.arrangements import arrangements, place_of
from roofline.bench.plan.closed_loop import Lengths
from roofline.bench.plan.plan import Case, run_copy, shape_of
from roofline.hardware.chips.products import sheet_roofs, titled
from roofline.program.rates import Speeds

ROCM = "ROCm blog, LLM inference optimizations on AMD GPUs, best of its techniques"
MLC = "MLC, Making AMD GPUs competitive for LLM inference, August 2023"
MLC_LATER = "mlc-ai/llm-perf-bench, October 2023"
ORACLE = "Oracle, vLLM on 8 x MI300X in FP8, 128 + 128 tokens"
MOSAIC = "Databricks, LLM training at scale with AMD MI250, October 2023"
DECODED = 32  # tokens in the context of a decode whose prompt is a token; it moves the limit by less than a per cent
Q4 = "Q4_0"  # 4 bits and a 16-bit scale for 32 weights, as MLC's q4f16_1


@dataclass(frozen=True)
class Published:
    """A published figure. seconds: of a step, or of a token; least: these at the roofs of the data sheet."""

    model: str
    place: str
    what: str
    figure: str
    seconds: float
    least: float
    source: str


def _speeds(model: str, dtype: str, chip: str, devices: int) -> Speeds:
    product = titled(chip)
    roofs = sheet_roofs(product)
    assert roofs is not None, "every product has a bandwidth"
    split = split_on_product(*shape_of(model, dtype), product, devices)
    return Speeds(split.parts[0].program, roofs)


def _decode(model: str, dtype: str, chip: str, devices: int, sequences: int, context: int) -> float:
    return _speeds(model, dtype, chip, devices).decode(sequences, context).seconds


def _prefill(model: str, dtype: str, chip: str, devices: int, sequences: int, context: int) -> float:
    # Prompts side by side take their sum: a prompt of 2,048 tokens is bound by arithmetic alone.
    return sequences * _speeds(model, dtype, chip, devices).prefill(context).seconds


def _served(concurrency: int) -> float:
    """Seconds for each generated token of 405B on eight devices at the roofs alone, from the real scheduler."""
    case = Case("llama-3.1-405b", "fp8", "MI300X", 8, (concurrency,), (Lengths(128, 128),), "128+128", (2048, 256), 8)
    ways = arrangements(*shape_of(case.model, case.dtype), place_of("MI300X", 8, None), 256, case.step)
    eight = next(each for each in ways if each.devices == 8)
    return 1 / run_copy(case, eight, concurrency, Calibration()).tokens_per_s


def rows() -> list[Published]:
    """All of them."""
    seven, seventy = "llama-2-7b", "llama-2-70b"
    table = []
    for count, ms in ((1, 254), (8, 2222), (16, 4456)):
        least = _prefill(seven, "f16", "MI210", 1, count, 2048)
        table.append(Published(seven, "MI210", f"prefill {count} x 2,048", f"{ms:,} ms", ms / 1e3, least, ROCM))
    for count, ms in ((1, 13), (8, 15), (16, 18)):
        least = _decode(seven, "f16", "MI210", 1, count, DECODED)
        table.append(Published(seven, "MI210", f"decode {count}", f"{ms} ms", ms / 1e3, least, ROCM))
    for devices, prefill, decode in ((4, 923, 58), (8, 675, 48)):
        place = f"{devices} dies of MI250"
        least = _prefill(seventy, "f16", "MI250", devices, 1, 2048)
        table.append(Published(seventy, place, "prefill 1 x 2,048", f"{prefill} ms", prefill / 1e3, least, ROCM))
        least = _decode(seventy, "f16", "MI250", devices, 1, DECODED)
        table.append(Published(seventy, place, "decode 1", f"{decode} ms", decode / 1e3, least, ROCM))
    for model, chip, rate, source in (
        (seven, "RX 7900 XTX", 130.9, MLC),
        ("llama-2-13b", "RX 7900 XTX", 74.7, MLC),
        (seven, "RTX 4090", 159.4, MLC),
        ("llama-2-13b", "RTX 4090", 90.7, MLC),
        (seven, "RTX 4090", 204.8, MLC_LATER),
        (seven, "Steam Deck", 13.2, MLC),
    ):
        least = _decode(model, Q4, chip, 1, 1, 256)
        table.append(Published(model, chip, "decode 1, 4 bits", f"{rate} tokens/s", 1 / rate, least, source))
    for concurrency, rate in ((1, 36), (8, 258), (32, 798), (64, 1184), (128, 1585), (256, 1846)):
        what, least = f"serving {concurrency}, fp8", _served(concurrency)
        table.append(Published("llama-3.1-405b", "8 x MI300X", what, f"{rate:,} tokens/s", 1 / rate, least, ORACLE))
    for nodes, tflops in ((4, 166), (128, 159)):
        figure, place = f"{tflops} TFLOP/s each", f"{nodes} x MI250"
        peak = titled("MI250").bf16
        assert peak is not None, "it has a rate"
        table.append(Published("mpt-7b", place, "training", figure, 1 / tflops, 1e12 / peak.value, MOSAIC))
    return table


def table() -> str:
    """The table in Markdown."""
    lines = ["| model | on | what | published | limit | share to assume | source |", "|---|---|---|---|---|---|---|"]
    for row in rows():
        share = row.least / row.seconds
        cells = (row.model, row.place, row.what, row.figure, _limit(row, row.least), f"{share:.0%}", row.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _limit(row: Published, least: float) -> str:
    """The least time in the unit of the published figure."""
    if row.figure.endswith("ms"):
        return f"{least * 1e3:,.3g} ms" if least < 1 else f"{least * 1e3:,.0f} ms"
    unit = row.figure.partition(" ")[2]
    return f"{1 / least:,.1f} {unit}" if 1 / least < 1000 else f"{1 / least:,.0f} {unit}"


if __name__ == "__main__":
    print(table())
    sys.exit(0)
