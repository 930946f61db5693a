"""Published figures as data (one TOML file a publication), and the limit of each by the chip's data sheet."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.names import unknown
from roofline.program.ir import Share
from roofline.program.rates import ProgramSpeeds, StepRate

NAMES = ("mlc-amd", "rocm-llm-opt", "flywheel", "mosaic-mi250", "dell-mi300x")
Step = Literal["decode", "prefill", "serve", "train", ""]


@dataclass(frozen=True)
class Row:
    """A published value.

    series: whose it is, or with which technique; name: of rows that stand beside each other; sequences: of rows over a
    number of them; value: in the chart's unit; source: in words; model, chip, count, form, context, step: what its
    limit is computed of, a chip being a die of a package unless `package`; no model and no step: there is no limit;
    answer: of a step "serve", whose requests have `context` tokens of prompt, the tokens of an answer.
    """

    series: str
    value: float
    source: str
    name: str = ""
    sequences: int = 1
    model: str = ""
    chip: str = ""
    count: int = 1
    form: str = ""
    context: int = 0
    answer: int = 0
    step: Step = ""
    package: bool = False


@dataclass(frozen=True)
class PublishedChart:
    """Values of one unit. unit: "tokens/s" and "TFLOP/s" (more is better), "ms" (of a step; less is), "ratio"."""

    title: str
    unit: str
    rows: tuple[Row, ...]

    @property
    def over_sequences(self) -> bool:
        """Whether its values are curves over a number of sequences."""
        return len({row.sequences for row in self.rows}) > 1


@dataclass(frozen=True)
class Publication:
    """What was published. about: under which conditions; caveat: what it leaves open; again: the command of ours that
    measures the nearest form that a machine allows."""

    name: str
    title: str
    about: str
    caveat: str
    again: str
    charts: tuple[PublishedChart, ...]


@cache
def publication(name: str) -> Publication:
    """Raises ConfigError, with the nearest name, for one that there is not."""
    if name not in NAMES:
        raise ConfigError(unknown("replay", name, NAMES))
    table = tomllib.loads(resources.files("roofline.bench.replays").joinpath(f"{name}.toml").read_text("utf-8"))
    sources = msgspec.convert(table["sources"], dict[str, str])
    charts = tuple(_chart(chart, sources) for chart in msgspec.convert(table["chart"], list[_ChartTable]))
    return Publication(
        name=name,
        title=table["title"],
        about=table["about"],
        caveat=table["caveat"],
        again=table["again"],
        charts=charts,
    )


class _ChartTable(msgspec.Struct, forbid_unknown_fields=True):
    """A chart as its file has it. What it says beside its rows is true of each of them that does not say another."""

    title: str
    unit: str
    rows: list[dict[str, str | float | int | bool]]
    model: str = ""
    chip: str = ""
    context: int = 0
    answer: int = 0
    step: str = ""
    format: str = ""


def _chart(chart: _ChartTable, sources: dict[str, str]) -> PublishedChart:
    common = {name: getattr(chart, name) for name in ("model", "chip", "context", "answer", "step")}
    rows = ({"form": chart.format, **common, **row, "source": sources[str(row["source"])]} for row in chart.rows)
    return PublishedChart(chart.title, chart.unit, tuple(msgspec.convert(row, Row) for row in rows))


@dataclass(frozen=True)
class RowLimit:
    """The best value that the data sheet allows, in the chart's unit, and the share of it that was reached; bound:
    "memory" or "compute"."""

    value: float
    share: float
    bound: str


def limit_of(row: Row, unit: str) -> RowLimit | None:
    """None where the row has no model, or a table lacks what its limit is computed of. Raises nothing else: a chip that
    is not in the table of products has no limit, and never another one's."""
    from roofline.hardware.chips.products import titled

    if not row.step:
        return None
    if row.step == "train":
        product = titled(row.chip)
        if product.bf16 is None:
            return None
        peak = product.bf16.value / (1 if row.package else product.dies) / 1e12
        return RowLimit(peak, row.value / peak, "compute")
    rate = _rate(row.model, row.chip, row.form, row.count, (row.step, row.sequences, row.context, row.answer))
    if rate is None:
        return None
    if unit == "ms":
        return RowLimit(1000 * rate.seconds, 1000 * rate.seconds / row.value, rate.bound)
    return RowLimit(rate.tokens_per_s, row.value / rate.tokens_per_s, rate.bound)


@cache
def _rate(model: str, chip: str, form: str, count: int, step: tuple[str, int, int, int]) -> StepRate | None:
    speeds = _speeds(model, chip, form, count)
    if speeds is None:
        return None
    kind, sequences, context, answer = step
    if kind == "serve":
        return speeds.requests(sequences, context, answer)
    return speeds.decode(sequences, context) if kind == "decode" else speeds.prefill(context, sequences)


@cache
def _speeds(model: str, chip: str, form: str, count: int) -> ProgramSpeeds | None:
    """Of one of `count` dies that share the model, at their data sheet."""
    from roofline.backends.gpu.program import compile_for_gpu
    from roofline.bundle.shape import as_loaded, shape_in
    from roofline.hardware.chips.chips import chips
    from roofline.hardware.chips.products import sheet_roofs, titled
    from roofline.models.registry import configure
    from roofline.program.passes.price import in_file

    product, shape = titled(chip), as_loaded(shape_in(model, form), "gpu")
    roofs = sheet_roofs(product)
    if roofs is None:
        return None
    config = configure(shape.config)[1]
    try:
        options, share = LoadOptions(backend="gpu"), Share(0, count)
        program = in_file(compile_for_gpu(shape, config, options, chips().get(product.chip), share))
    except (CapacityError, UnsupportedError):  # matrices of such a format that so many cannot share
        return None
    return ProgramSpeeds(program, roofs)
