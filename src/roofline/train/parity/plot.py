"""Draws the losses of two runs and their difference as one SVG, for light and dark pages, without scripts or fonts."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roofline.train.parity.findings import Parity
from roofline.train.parity.recorded_run import RecordedRun

WIDTH = 960
LEFT, RIGHT = 84, 24
UPPER, LOWER = (122, 250), (422, 220)  # top and height of the two plots, pixels
HEIGHT = LOWER[0] + LOWER[1] + 56
POINTS = 420  # parts of a long line, each of which is drawn by its least and its greatest value
CHARACTER = 7.3  # width of a character in pixels, in all of the fonts below
STYLE = (
    "svg{--back:#fff;--ink:#222;--faint:#666;--grid:#e6e6e6;--a:#0b6fa4;--b:#c2570c;--d:#7a3fb0;--m:#2f7d32}"
    "@media(prefers-color-scheme:dark){svg{--back:#16181c;--ink:#e8e8e8;--faint:#a8a8a8;--grid:#33363c;"
    "--a:#5cb8ea;--b:#f59a52;--d:#c79bf2;--m:#7fce84}}"
    ".back{fill:#fff;fill:var(--back)}"
    "text{font:12px Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace;fill:#222;fill:var(--ink)}"
    ".title{font-size:15px;font-weight:bold}.faint{fill:#666;fill:var(--faint)}"
    ".grid{stroke:#e6e6e6;stroke:var(--grid)}.zero{stroke:#666;stroke:var(--faint)}"
    ".a{stroke:#0b6fa4;stroke:var(--a)}.b{stroke:#c2570c;stroke:var(--b)}.d{stroke:#7a3fb0;stroke:var(--d)}"
    ".m{stroke:#2f7d32;stroke:var(--m)}.mf{fill:#2f7d32;fill:var(--m);fill-opacity:.12;stroke:none}"
    ".nf{fill:#666;fill:var(--faint);fill-opacity:.22;stroke:none}"
    ".line{fill:none;stroke-width:1.4;stroke-linejoin:round}.thin{fill:none;stroke-width:1;stroke-opacity:.5}"
    ".under{stroke-width:4;stroke-opacity:.45}"
    ".dash{stroke-dasharray:6 4}.hand{stroke:#666;stroke:var(--faint);stroke-dasharray:2 4}"
)

Values = NDArray[np.float64]


@dataclass(frozen=True)
class StepAxes:
    """The frame of a plot in pixels, with steps from left to right and values from bottom to top."""

    top: float
    height: float
    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        begin, end = self.steps
        return LEFT + (step - begin) / max(1.0, end - begin) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        return self.top + (1 - (value - low) / (high - low)) * self.height


def draw(a: RecordedRun, b: RecordedRun, parity: Parity) -> str:
    """The text of an SVG file with two plots: both losses, and their difference."""
    steps = float(min(a.steps[0], b.steps[0])), float(max(a.steps[-1], b.steps[-1]))
    parts = [
        f'<text class="title" x="{LEFT}" y="28">{escape(parity.verdict)}: {escape(_names(parity))}</text>',
        *_reason(parity.why),
        *_losses(a, b, parity, steps),
        *_differences(a, b, parity, steps),
        f'<text class="faint" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>',
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<title>{escape(_names(parity))}</title>'
    back = '<rect class="back" width="100%" height="100%"/>'
    return "\n".join((head, f"<style>{STYLE}</style>", back, *parts, "</svg>\n"))


def _names(parity: Parity) -> str:
    return f"{Path(parity.a).name} and {Path(parity.b).name}"


def _reason(text: str) -> Iterator[str]:
    """The text in at most three lines under the title."""
    room = int((WIDTH - LEFT - RIGHT) / CHARACTER)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    if len(lines) > 3:
        lines[2] = lines[2][: room - 1] + "…"
    for number, line in enumerate(lines[:3]):
        yield f'<text class="faint" x="{LEFT}" y="{48 + 16 * number}">{escape(line)}</text>'


def _losses(a: RecordedRun, b: RecordedRun, parity: Parity, steps: tuple[float, float]) -> Iterator[str]:
    values = np.concatenate([run.loss[np.isfinite(run.loss)] for run in (a, b)])
    axes = StepAxes(*UPPER, steps, _range(values))
    yield from _grid(axes, "loss, nats", False)
    yield from _handovers(axes, parity, True)
    names = []
    for run, kind, folder in ((a, "a under", parity.a), (b, "b", parity.b)):
        yield _line(axes, run.steps, run.loss, f"line {kind}")
        names.append((kind, f"{kind[0].upper()} {Path(folder).name}"[-48:]))
    x = WIDTH - RIGHT - 8 - CHARACTER * max(len(name) for _, name in names)
    for row, (kind, name) in enumerate(names):
        y = axes.top + 18 + 18 * row
        yield f'<line class="line {kind}" x1="{x - 30:.1f}" x2="{x - 8:.1f}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{x:.1f}" y="{y + 4}">{escape(name)}</text>'


def _differences(a: RecordedRun, b: RecordedRun, parity: Parity, steps: tuple[float, float]) -> Iterator[str]:
    common, mine, theirs = np.intersect1d(a.steps, b.steps, return_indices=True)
    values = b.loss[theirs] - a.loss[mine]
    finite = np.isfinite(values)
    common, values = common[finite], values[finite]
    bands = parity.noise.bands if parity.noise is not None else ()
    reach = 1.25 * max(parity.margin, *(band[2] for band in bands), float(np.abs(values).max(initial=0.0)))
    if len(values) > 20:  # a few outliers may be outside of the picture, but not the margin
        reach = min(reach, 1.25 * max(parity.margin, 2 * float(np.quantile(np.abs(values), 0.98))))
    axes = StepAxes(*LOWER, steps, (-reach, reach))
    yield from _grid(axes, "B - A, nats", True)
    yield from _margin(axes, parity.margin)
    if bands:
        yield _band(axes, bands)
    yield from _handovers(axes, parity, False)
    clip = f"M{LEFT} {axes.top}H{WIDTH - RIGHT}V{axes.top + axes.height}H{LEFT}Z"
    yield f'<clipPath id="lower"><path d="{clip}"/></clipPath><g clip-path="url(#lower)">'
    yield _line(axes, common, values, "thin d")
    if len(values) > 40:
        width = max(5, len(values) // 50)
        kernel = np.ones(width) / width
        middle = common[(width - 1) // 2 : len(common) - width // 2]
        yield _line(axes, middle, np.convolve(values, kernel, "valid"), "line d")
    yield "</g>"
    yield from _legend(axes, len(values) > 40, bool(bands))


def _margin(axes: StepAxes, margin: float) -> Iterator[str]:
    top, bottom, width = axes.y(margin), axes.y(-margin), WIDTH - LEFT - RIGHT
    yield f'<rect class="mf" x="{LEFT}" y="{top:.1f}" width="{width}" height="{bottom - top:.1f}"/>'
    for y in (top, bottom):
        yield f'<line class="m dash" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _band(axes: StepAxes, bands: Sequence[tuple[int, int, float]]) -> str:
    """The band that holds 95 % of the differences between repeats."""
    upper = [(axes.x((first + last) / 2), axes.y(value), axes.y(-value)) for first, last, value in bands]
    points = [f"{x:.1f},{y:.1f}" for x, y, _ in upper] + [f"{x:.1f},{y:.1f}" for x, _, y in reversed(upper)]
    return f'<polygon class="nf" points="{" ".join(points)}"/>'


def _legend(axes: StepAxes, smoothed: bool, repeats: bool) -> Iterator[str]:
    """The names of the lines, above the lower plot."""
    x, y = float(LEFT), axes.top - 12
    entries = [("thin d", "each step")] + ([("line d", "running mean")] if smoothed else []) + [("m dash", "margin")]
    for kind, name in entries:
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x + 22:.1f}" y1="{y - 4}" y2="{y - 4}"/>'
        yield f'<text x="{x + 28:.1f}" y="{y}">{name}</text>'
        x += 28 + len(name) * CHARACTER + 20
    if repeats:
        yield f'<rect class="nf" x="{x:.1f}" y="{y - 10}" width="22" height="12"/>'
        yield f'<text x="{x + 28:.1f}" y="{y}">95 % of repeats</text>'


def _handovers(axes: StepAxes, parity: Parity, with_names: bool) -> Iterator[str]:
    """The hand-overs, with the name of who took over if there is room."""
    free = float(LEFT)
    for place, at in enumerate(parity.handovers):
        x = axes.x(at.step)
        yield f'<line class="hand" x1="{x:.1f}" x2="{x:.1f}" y1="{axes.top}" y2="{axes.top + axes.height}"/>'
        behind = parity.handovers[place + 1].step if place + 1 < len(parity.handovers) else axes.steps[1]
        if with_names and at.name and x >= free and len(at.name) * CHARACTER + 8 < axes.x(behind) - x:
            yield f'<text class="faint" x="{x:.1f}" y="{axes.top - 6:.1f}">{escape(at.name)}</text>'
            free = x + len(at.name) * CHARACTER + 12


def _grid(axes: StepAxes, label: str, numbered: bool) -> Iterator[str]:
    bottom = axes.top + axes.height
    for value in _ticks(*axes.values, 6):
        y = axes.y(value)
        kind = "zero" if value == 0 and numbered else "grid"
        yield f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
    for step in _ticks(*axes.steps, 9):
        x = axes.x(step)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{axes.top}" y2="{bottom}"/>'
        if numbered:
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step:,.0f}</text>'
    turn = f'transform="translate(16,{axes.top + axes.height / 2}) rotate(-90)" text-anchor="middle"'
    yield f'<text class="faint" {turn}>{label}</text>'


def _line(axes: StepAxes, steps: NDArray[np.int64], values: Values, kind: str) -> str:
    """A line, with gaps where a value is not finite."""
    path, pen = [], "M"
    for step, value in _points(steps, values):
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{axes.x(step):.1f} {axes.y(value):.1f}")
        pen = "L"
    return f'<path class="{kind}" d="{"".join(path)}"/>'


def _points(steps: NDArray[np.int64], values: Values) -> Iterator[tuple[float, float]]:
    """All points, or the least and the greatest of each of POINTS parts, in order."""
    if len(steps) <= 2 * POINTS:
        yield from zip(steps.tolist(), values.tolist(), strict=True)
        return
    for part in np.array_split(np.arange(len(steps)), POINTS):
        inside = values[part]
        for at in sorted({int(np.nanargmin(inside)), int(np.nanargmax(inside))} if np.isfinite(inside).any() else {0}):
            yield float(steps[part[at]]), float(inside[at])


def _range(values: Values) -> tuple[float, float]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside a range."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [round(number * step, 12) + 0.0 for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"
