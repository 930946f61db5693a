"""Figures that others published, beside the limits of what they ran on and what a plan says: `python -m
benchmarks.published`.

The table of docs/how-to/plan.md is what this prints: nothing in it was measured here. A share is the least time at the
data sheet's roofs over the time that was published, so what a plan would have had to assume to foresee it. The spreads
that plans print (`bench/plan/assumptions.py`) are computed here too, of the same figures.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from roofline.backends.fit import split_on_product
from roofline.backends.simulated.step_times import LinkTraffic
from roofline.bench.plan.arrangements import Arrangement, arrangements, link_between, place_of
from roofline.bench.plan.assumptions import Kind, assumed, class_of
from roofline.bench.plan.closed_loop import Lengths
from roofline.bench.plan.plan import Case, run_copy, shape_of
from roofline.hardware.chips.products import sheet_roofs, titled
from roofline.program.passes.price import in_file
from roofline.program.rates import ProgramSpeeds

ROCM = "ROCm blog, LLM inference optimizations on AMD GPUs, best of its techniques"
MLC = "MLC, Making AMD GPUs competitive for LLM inference, August 2023"
MLC_TWO = "MLC, the same, October 2023"
MLC_LATER = "mlc-ai/llm-perf-bench, October 2023"
FAST = "pytorch-labs/gpt-fast, README"
ORACLE = "Oracle, vLLM on 8 x MI300X in FP8, 128 + 128 tokens"
AMD = "AMD, vLLM 0.8.5 on 8 x MI300X in FP8, 128 + 2,048 tokens"
TENSORRT = "NVIDIA, TensorRT-LLM 1.0 in FP8"
SGLANG = "LMSYS, SGLang v0.2, ShareGPT taken as 220 + 194 tokens"
TENSORRT_FP4 = "NVIDIA, TensorRT-LLM 0.20 in NVFP4, taken as MXFP4 and 1,024 at a time"
LLAMA_CPP = "llama.cpp, pull requests 7676 and 7860, batches of 512"
MOSAIC = "Databricks, LLM training at scale with AMD MI250, October 2023"
DECODED = 32  # tokens in the context of a decode whose prompt is a token; it moves the limit by less than a per cent
NEAR = 1.25  # a plan is near where it is off by no more than this factor
# Student's t that 9 of 10 values are below, by degrees of freedom; between it and its negative lie 8 of 10.
T90 = {1: 3.078, 2: 1.886, 3: 1.638, 4: 1.533, 5: 1.476, 6: 1.440, 7: 1.415, 8: 1.397, 9: 1.383, 10: 1.372}
T90_MANY = 1.33
LEAST_SPREAD = 0.1  # of the logarithm: figures of one publication are more alike than those of two


@dataclass(frozen=True)
class Published:
    """A published figure. seconds: of a step, or of a token; least: these at the roofs of the data sheet; planned: as
    plans said before they knew kinds of steps, and say now; kind, several, four: as `assumptions.SPREADS` has them."""

    model: str
    place: str
    what: str
    figure: str
    seconds: float
    least: float
    source: str
    kind: Kind | None = None
    several: bool = False
    four: bool = False
    planned: float = 0.0


def bits_of(dtype: str) -> float:
    """Of a weight in a format that the figures have."""
    return {"f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "fp8": 8.25, "q4_0": 4.5, "q4_k": 4.5, "q6_k": 6.56}[dtype]


def _step(
    model: str, dtype: str, chip: str, devices: int, kind: Kind, sequences: int, context: int
) -> tuple[float, float]:
    """The least time of a step, and the one that a plan has."""
    product = titled(chip)
    roofs = sheet_roofs(product)
    assert roofs is not None, "every product has a bandwidth"
    program = split_on_product(*shape_of(model, dtype), product, devices).parts[0].program
    speeds = ProgramSpeeds(program, roofs)
    decode = kind == "decode"
    rate = speeds.decode(sequences, context) if decode else speeds.prefill(context, sequences)
    calibration = assumed(bits=bits_of(dtype), devices=devices)
    planned = rate.seconds / (calibration.reads if decode else calibration.arithmetic)
    if devices > 1:
        links, rows = LinkTraffic.of(program), sequences * (1 if decode else context)
        received = np.dot(links.received, (1, rows, sequences))
        planned += links.exchanges * calibration.link_seconds + received / (link_between(product, devices) or math.inf)
    return rate.seconds, float(planned)


def _decode(model: str, dtype: str, chip: str, devices: int, sequences: int, context: int) -> float:
    return _step(model, dtype, chip, devices, "decode", sequences, context)[0]


@cache
def _arrangement(model: str, dtype: str, chip: str, devices: int, longest: int, running: int) -> Arrangement:
    ways = arrangements(*shape_of(model, dtype), place_of(chip, devices, None), longest, (2048, running))
    return next(each for each in ways if each.devices == devices)


def _served(model: str, dtype: str, chip: str, devices: int, concurrency: int, lengths: Lengths) -> tuple[float, float]:
    """Seconds for each generated token: the least that these requests take at the roofs, as `bench load` sets beside a
    measured figure and `bench replay` beside a published one; and by a plan, from the real scheduler."""
    running = max(256, concurrency)
    arrangement = _arrangement(model, dtype, chip, devices, lengths.prompt + lengths.answer, running)
    step = 2048, running
    case = Case(model, dtype, chip, devices, (concurrency,), (lengths,), "published", step, devices)
    calibration = assumed(bits=arrangement.weight_bits, devices=devices)
    planned = run_copy(case, arrangement, concurrency, calibration)
    program = in_file(arrangement.split.parts[0].program)
    least = ProgramSpeeds(program, arrangement.place.roofs).requests(concurrency, lengths.prompt, lengths.answer)
    return 1 / least.tokens_per_s, 1 / planned.tokens_per_s


def _steps() -> list[Published]:
    """Prefills and decodes."""
    seven, thirteen, thirty, seventy = "llama-2-7b", "llama-2-13b", "codellama-34b", "llama-2-70b"
    table: list[Published] = []

    def add(model: str, dtype: str, chip: str, devices: int, kind: Kind, count: int, context: int, ms: float, source: str) -> None:  # fmt: skip  # noqa: E501
        least, planned = _step(model, dtype, chip, devices, kind, count, context)
        dies = titled(chip).dies > 1
        place = f"{devices} {'die' if dies else 'x'}{'s' * (dies and devices > 1)}{' of' * dies} {chip}"
        place = chip if devices == 1 and not dies else place
        four = class_of(bits_of(dtype)) == 4
        what = f"{kind} {count}" + (f" x {context:,}" if kind == "prefill" else "")
        what += ", 4 bits" if four else ", 8 bits" if class_of(bits_of(dtype)) == 8 else ""
        figure = f"{ms:,} ms" if source == ROCM else f"{1e3 / ms:,.1f} tokens/s"
        figure = f"{ms:,.3g} ms" if source == LLAMA_CPP else figure
        several = devices > 1
        four = four and not several
        table.append(Published(model, place, what, figure, ms / 1e3, least, source, kind, several, four, planned))

    for count, ms in ((1, 254), (8, 2222), (16, 4456)):
        add(seven, "f16", "MI210", 1, "prefill", count, 2048, ms, ROCM)
    for count, ms in ((1, 13), (8, 15), (16, 18)):
        add(seven, "f16", "MI210", 1, "decode", count, DECODED, ms, ROCM)
    for devices, prefills, decodes in ((4, (923, 1818, 3724), (58, 59, 59)), (8, (675, 1181, 2124), (48, 50, 49))):
        for count, prefill, decode in zip((1, 2, 4), prefills, decodes, strict=True):
            add(seventy, "f16", "MI250", devices, "prefill", count, 2048, prefill, ROCM)
            add(seventy, "f16", "MI250", devices, "decode", count, DECODED, decode, ROCM)
    for model, dtype, chip, devices, rate, source in (
        (seven, "q4_0", "RX 7900 XTX", 1, 130.9, MLC),
        (thirteen, "q4_0", "RX 7900 XTX", 1, 74.7, MLC),
        (seven, "q4_0", "RTX 4090", 1, 159.4, MLC),
        (thirteen, "q4_0", "RTX 4090", 1, 90.7, MLC),
        (seven, "q4_0", "RTX 3090 Ti", 1, 138.5, MLC),
        (thirteen, "q4_0", "RTX 3090 Ti", 1, 80.3, MLC),
        (seven, "q4_0", "Steam Deck", 1, 13.2, MLC),
        (seven, "q4_0", "RTX 4090", 1, 204.8, MLC_LATER),
        (thirteen, "q4_0", "RTX 4090", 1, 113.5, MLC_LATER),
        (seven, "q4_0", "RTX 3090 Ti", 1, 186.7, MLC_LATER),
        (thirteen, "q4_0", "RTX 3090 Ti", 1, 107.4, MLC_LATER),
        (thirty, "q4_0", "RTX 4090", 2, 64.9, MLC_TWO),
        (seventy, "q4_0", "RTX 4090", 2, 34.5, MLC_TWO),
        (thirty, "q4_0", "RX 7900 XTX", 2, 56.5, MLC_TWO),
        (seventy, "q4_0", "RX 7900 XTX", 2, 29.9, MLC_TWO),
        (seventy, "f16", "A100 80GB", 2, 17.0, MLC_TWO),
        (seventy, "f16", "A100 80GB", 4, 26.6, MLC_TWO),
        (seventy, "f16", "A100 80GB", 8, 38.8, MLC_TWO),
        (seventy, "q4_0", "A100 80GB", 2, 40.9, MLC_TWO),
        (seventy, "q4_0", "A100 80GB", 4, 55.8, MLC_TWO),
        (seven, "bf16", "A100 80GB", 1, 104.9, FAST),
        (seven, "q8_0", "A100 80GB", 1, 155.6, FAST),
        (seven, "q4_0", "A100 80GB", 1, 196.8, FAST),
        (seventy, "q4_0", "A100 80GB", 1, 25.3, FAST),
        (seventy, "bf16", "A100 80GB", 8, 62.5, FAST),
        (seven, "bf16", "MI250X", 1, 76.3, FAST),
        (seven, "q8_0", "MI250X", 1, 101.9, FAST),
    ):
        add(model, dtype, chip, devices, "decode", 1, 256, 1e3 / rate, source)
    for dtype, chip, context, rate in (
        ("q4_0", "RTX 4090", 512, 10358.75),
        ("q4_k", "RTX 4090", 2048, 9278.55),
        ("q6_k", "RTX 3090", 2048, 3491.20),
    ):
        add("llama-3-8b", dtype, chip, 1, "prefill", 1, context, 1e3 * context / rate, LLAMA_CPP)
    return table


def _servings() -> list[Published]:
    """What servers gave under load."""
    table = []
    cases = [
        ("llama-3.1-405b", "fp8", "MI300X", 8, concurrency, Lengths(128, 128), rate, ORACLE)
        for concurrency, rate in ((1, 36), (8, 258), (32, 798), (64, 1184), (128, 1585), (256, 1846))
    ]
    cases += [
        ("llama-3.1-405b", "fp8", "MI300X", 8, 256, Lengths(128, 2048), 4380, AMD),
        ("llama-3.1-70b", "fp8", "H200", 1, 512, Lengths(128, 128), 3803, TENSORRT),
        ("llama-3.1-70b", "fp8", "H200", 1, 128, Lengths(2048, 128), 442, TENSORRT),
        ("llama-3.1-8b", "fp8", "H100 SXM", 1, 1024, Lengths(128, 128), 28312, TENSORRT),
        ("llama-3.1-8b", "fp8", "H100 SXM", 1, 256, Lengths(2048, 128), 3450, TENSORRT),
        ("llama-3.1-8b", "bf16", "A100 80GB", 1, 256, Lengths(220, 194), 4788, SGLANG),
        ("llama-3.1-70b", "mxfp4", "B200", 1, 1024, Lengths(128, 128), 10994, TENSORRT_FP4),
    ]
    for model, dtype, chip, devices, concurrency, lengths, rate, source in cases:
        least, planned = _served(model, dtype, chip, devices, concurrency, lengths)
        place = chip if devices == 1 else f"{devices} x {chip}"
        what = f"serving {concurrency:,}, {lengths.prompt:,} + {lengths.answer:,}" + f", {dtype}" * (dtype != "bf16")
        figure, several = f"{rate:,} tokens/s", devices > 1
        table.append(
            Published(model, place, what, figure, 1 / rate, least, source, "serving", several, planned=planned)
        )
    return table


def _trainings() -> list[Published]:
    table = []
    peak = titled("MI250").bf16
    assert peak is not None, "it has a rate"
    for nodes, tflops in ((4, 166), (128, 159)):
        figure, place = f"{tflops} TFLOP/s each", f"{nodes} x MI250"
        table.append(Published("mpt-7b", place, "training", figure, 1 / tflops, 1e12 / peak.value, MOSAIC))
    return table


@cache
def rows() -> tuple[Published, ...]:
    """All of them."""
    return (*_steps(), *_servings(), *_trainings())


def kinds(figures: Sequence[Published]) -> dict[tuple[Kind, bool, bool], list[float]]:
    """Published over planned time of each kind of figure."""
    out: dict[tuple[Kind, bool, bool], list[float]] = defaultdict(list)
    for row in figures:
        if row.kind is not None:
            out[row.kind, row.several, row.four].append(row.seconds / row.planned)
    return dict(out)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which 8 of 10 further ratios lie, if their logarithms are spread as those of these, by Student's t."""
    logs, count = np.log(ratios), len(ratios)
    spread = max(LEAST_SPREAD, float(np.std(logs, ddof=1)) if count > 1 else 0.0)
    around = T90.get(count - 1, T90_MANY) * spread * math.sqrt(1 + 1 / count)
    middle = float(np.mean(logs))
    return math.exp(middle - around), math.exp(middle + around)


def covered(figures: Sequence[Published]) -> tuple[int, int]:
    """How many figures lie within the interval that the others of their kind give, and of how many."""
    within = total = 0
    for ratios in kinds(figures).values():
        for at, ratio in enumerate(ratios):
            low, high = interval([*ratios[:at], *ratios[at + 1 :]])
            within, total = within + (low <= ratio <= high), total + 1
    return within, total


def near(figures: Sequence[Published]) -> int:
    """How many plans are off by no more than NEAR."""
    ratios = [row.seconds / row.planned for row in figures if row.kind is not None]
    return sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| model | on | what | published | limit | share to assume | planned | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *table_lines(rows())])


def table_lines(figures: Sequence[Published]) -> list[str]:
    """The lines of figures in the table."""
    lines = []
    for row in figures:
        share = row.least / row.seconds
        planned = _in_unit(row, row.planned) if row.planned else "-"
        limit = _in_unit(row, row.least)
        cells = (row.model, row.place, row.what, row.figure, limit, f"{share:.0%}", planned, row.source)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spreads() -> str:
    """What `assumptions.SPREADS` has to be, in Markdown and as Python."""
    lines = ["| figures | of them | published over planned time |", "|---|---|---|"]
    for (kind, several, four), ratios in kinds(rows()).items():
        low, high = interval(ratios)
        name = f"{kind}, {'several devices' if several else 'one device'}" + (", 4 bits" if four else "")
        lines.append(f"| {name} | {len(ratios)} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def summary() -> str:
    """How good plans are by these figures, in a sentence."""
    within, total = covered(rows())
    return f"{near(rows())} of {total} plans are within 25 %; {within} of {total} lie within what the others say"


def _in_unit(row: Published, seconds: float) -> str:
    """A time in the unit of the published figure."""
    if row.figure.endswith("ms"):
        return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"
    unit = row.figure.partition(" ")[2]
    return f"{1 / seconds:,.1f} {unit}" if 1 / seconds < 1000 else f"{1 / seconds:,.0f} {unit}"


if __name__ == "__main__":
    print(table(), spreads(), summary(), sep="\n\n")
    for key, of_kind in kinds(rows()).items():
        print(key, tuple(round(end, 2) for end in interval(of_kind)), file=sys.stderr)
    sys.exit(0)
