"""Charts as data. `draw.py` makes SVG of them, `page.py` and `text.py` put them beside their tables."""

import math
from dataclasses import dataclass
from typing import Literal

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A value in a chart. x_interval, y_interval: 95 % intervals; note: what a pointer over it shows; label: written
    beside it; trusted: False is drawn in grey; doubt: why it is not."""

    x: float
    y: float
    x_interval: Interval | None = None
    y_interval: Interval | None = None
    note: str = ""
    label: str = ""
    trusted: bool = True
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Marks of one kind.

    look: the number of its colour and of its marker; kind: "curve": markers joined by a line, "dots": markers alone,
    "line": a line alone, "steps": level from each mark to the next, "bars": from the ends of each x_interval, at y;
    dashed: the line; band: intervals of y are a filled band instead of bars.
    """

    name: str
    marks: tuple[Mark, ...]
    look: int
    kind: Literal["curve", "dots", "line", "steps", "bars"] = "curve"
    dashed: bool = False
    band: bool = False


@dataclass(frozen=True)
class Rule:
    """A straight line across the chart at a value of an axis, with its name."""

    axis: Literal["x", "y"]
    value: float
    text: str


@dataclass(frozen=True)
class Area:
    """A shaded range of an axis, with its name. None: to the chart's edge."""

    axis: Literal["x", "y"]
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """title: with the unit; log: a logarithmic one; doubling: its ticks are powers of two; integral: they are whole
    numbers; zero: begins at 0; categories: names of the values 0, 1, ..., which are drawn from top to bottom; of a y
    axis alone; least, most: what it shows at least."""

    title: str
    log: bool = False
    doubling: bool = False
    integral: bool = False
    zero: bool = False
    categories: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart. Without marks it is not drawn."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()
    areas: tuple[Area, ...] = ()

    @property
    def empty(self) -> bool:
        return not any(series.marks for series in self.series)


@dataclass(frozen=True)
class Table:
    """Texts in rows. The first column names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ReportSection:
    """A part of a report: what is shown, how it is to be read, and the same in figures."""

    title: str
    text: str
    charts: tuple[Chart, ...]
    table: Table | None


@dataclass(frozen=True)
class Scale:
    """Where values of an axis lie between `start` and `end`, in pixels."""

    low: float
    high: float
    log: bool
    start: float
    end: float
    doubling: bool = False
    integral: bool = False

    def at(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)  # an interval may reach below 0
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, most: int) -> list[float]:
        """At most so many values of one to two digits, between the ends."""
        return self._log_ticks(most) if self.log else self._even_ticks(most)

    def _even_ticks(self, most: int) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * (1 - 1e-9))
        step = max(step, 1.0) if self.integral else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        if self.doubling:
            first, last = math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9)
            doubles = [2.0**power for power in range(first, last + 1)]
            if doubles:
                return doubles[:: math.ceil(len(doubles) / most)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0**power for power in powers for step in steps if self.holds(step * 10.0**power)]
            if len(ticks) <= most:
                break
        if len(ticks) < 3:  # much less than a decade, which none of these divides
            return [tick for tick in Scale(self.low, self.high, False, 0, 1)._even_ticks(most) if tick > 0]
        return ticks[:: math.ceil(len(ticks) / most)]


def scale(axis: Axis, values: list[float], start: float, end: float) -> Scale:
    """The scale that shows all values, with a little room round them. values: at least one; positive ones alone count
    where the axis is logarithmic."""
    if axis.categories:
        return Scale(-0.5, len(axis.categories) - 0.5, False, start, end)
    values = [*values, *(bound for bound in (axis.least, axis.most) if bound is not None)]
    if axis.log:
        values = [value for value in values if value > 0] or [1.0]
        low, high = min(values), max(values)
        room = max((high / low) ** 0.06, 1.05)
        return Scale(low=low / room, high=high * room, log=True, start=start, end=end, doubling=axis.doubling)
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    if axis.zero and low >= 0:
        low = room
    return Scale(low - room, high + room, False, start, end, integral=axis.integral)
