"""Profiles as a picture: arithmetic intensity against achieved rate, under the measured roofs. One SVG, no scripts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from roofline.bench.svg import CHARACTER, FONT, Box, Labels, along, around
from roofline.common.units import human_bytes, human_rate, human_seconds

if TYPE_CHECKING:
    from roofline.bench.profile.profile import OpTime, Profile
    from roofline.hardware.roofs import Roofs

WIDTH, HEIGHT = 960, 560  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 56  # margins of the plot inside it
COLOURS = {"memory": "#0b6fa4", "int8": "#c2570c", "bf16": "#7a3fb0", "f32": "#2f7d32", "latency": "#6b6b6b"}
STYLE = (
    "text{font:12px Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.faint{fill:#666}.grid{stroke:#e6e6e6}.roof{stroke:#444;stroke-width:1.5}"
    ".leader{stroke:#999;stroke-width:.8}.dot{stroke:#fff;stroke-width:1}"
)


FRAME = Box(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)


@dataclass(frozen=True)
class Axes:
    """Decimal logarithms at the edges, and where a value lies between them."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, intensity: float, rate: float) -> tuple[float, float]:
        right = (math.log10(intensity) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(rate) - self.y[0]) / (self.y[1] - self.y[0])
        return FRAME.x + right * FRAME.width, FRAME.y + (1 - up) * FRAME.height


@dataclass
class Panel:
    """One step's picture while it is drawn: elements, and the labels, with what they must keep off."""

    axes: Axes
    drawn: list[str] = field(default_factory=list)
    labels: Labels = field(default_factory=lambda: Labels(FRAME))

    def label(
        self, text: str, point: tuple[float, float, float], spots: Iterator[tuple[float, float]], style: str = ""
    ) -> None:
        """Write `text` at the first free one of `spots`, as `Labels.place` does; without one the dot keeps its
        tooltip."""
        label = self.labels.place(text, point, spots)
        if label is None:
            return
        if label.leader is not None:
            self.drawn.insert(0, _line(*label.leader, "leader"))
        box = label.box
        self.drawn.append(f'<text x="{box.x:.1f}" y="{box.y + FONT - 1:.1f}"{style}>{escape(text)}</text>')


def draw(profiles: Sequence["Profile"], title: str) -> str:
    """The text of an SVG file: a panel for each profile, one below the other."""
    panels = []
    for number, profile in enumerate(profiles):
        inner = "\n".join(_panel(profile, title))
        panels.append(f'<g transform="translate(0,{number * HEIGHT})">\n{inner}\n</g>')
    size = f'width="{WIDTH}" height="{HEIGHT * len(profiles)}" viewBox="0 0 {WIDTH} {HEIGHT * len(profiles)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<title>{escape(title)}</title>\n<style>{STYLE}</style>'
    return "\n".join((head, '<rect width="100%" height="100%" fill="#fff"/>', *panels, "</svg>\n"))


def _panel(profile: "Profile", title: str) -> list[str]:
    roofs = profile.roofs
    timed_ops = [op for op in profile.ops if op.flops and op.seconds > 0]
    panel = Panel(_axes(timed_ops, roofs))
    reads = [
        (f"reads of {human_bytes(profile.working_set)}", roofs.read_bytes_per_s(profile.working_set)),
        (f"reads of {human_bytes(roofs.reads[0][0])}, in cache", roofs.reads[0][1]),
    ]
    if reads[1][1] < 1.1 * reads[0][1]:  # the step itself fits: one line, not two on each other
        del reads[1]
    _grid(panel)
    dots = _dots(panel, timed_ops, profile.step_seconds)
    _roofs(panel, reads, roofs.computes)
    _label_dots(panel, dots)
    share = f"{human_seconds(profile.step_seconds)}, {profile.share:.0%} of the roof"
    head = [
        f'<text class="title" x="{LEFT}" y="24">{escape(f"{title}: {profile.step.name}")}</text>',
        f'<text class="faint" x="{LEFT}" y="46">{escape(share)}; a dot\'s area is its part of the step</text>',
        *_colours_used(timed_ops),
    ]
    words = "operations for each byte of weights, KV and activations"
    if left_out := dict.fromkeys(op.op for op in profile.ops if not op.flops):
        words += f"; not shown, for they have none: {', '.join(left_out)}"
    middle = FRAME.x + FRAME.width / 2
    head.append(f'<text class="faint" x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(words)}</text>')
    return head + panel.drawn


def _axes(ops: Sequence["OpTime"], roofs: "Roofs") -> Axes:
    """All dots, the ridges and the highest roof, with room round them."""
    top = max(rate for _, rate in roofs.computes)
    ridge = top / min(rate for _, rate in roofs.reads)
    xs = [op.intensity for op in ops] + [1.0, ridge]
    ys = [op.flops / op.seconds for op in ops] + [top / 100, top]

    def span(values: Sequence[float]) -> tuple[float, float]:
        return math.log10(min(values)) - 0.35, math.log10(max(values)) + 0.35

    return Axes(span(xs), span(ys))


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _grid(panel: Panel) -> None:
    for power in range(math.ceil(panel.axes.x[0]), math.floor(panel.axes.x[1]) + 1):
        x, _ = panel.axes.at(10.0**power, 10.0 ** panel.axes.y[0])
        panel.drawn.append(_line(x, FRAME.y, x, FRAME.y + FRAME.height, "grid"))
        panel.drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(math.ceil(panel.axes.y[0]), math.floor(panel.axes.y[1]) + 1):
        _, y = panel.axes.at(10.0 ** panel.axes.x[0], 10.0**power)
        rate = human_rate(10.0**power, "").replace(".0", "").removesuffix("/s").strip()
        panel.drawn.append(_line(FRAME.x, y, FRAME.x + FRAME.width, y, "grid"))
        panel.drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rate}</text>')
    up = FRAME.y + FRAME.height / 2
    turn = f'transform="translate(16,{up}) rotate(-90)" text-anchor="middle"'
    panel.drawn.append(f'<text class="faint" {turn}>operations a second</text>')


def _roofs(panel: Panel, reads: Sequence[tuple[str, float]], computes: Sequence[tuple[str, float]]) -> None:
    """Slanted lines for reads up to the highest roof, level ones for arithmetic from the fastest reads on."""
    axes, top = panel.axes, max(rate for _, rate in computes)
    slope = math.degrees(math.atan2(
        FRAME.height / (axes.y[1] - axes.y[0]), FRAME.width / (axes.x[1] - axes.x[0])
    ))  # fmt: skip
    fastest = max(rate for _, rate in reads)
    for name, rate in reads:
        first = max(10.0 ** axes.x[0], 10.0 ** axes.y[0] / rate)
        x1, y1 = axes.at(first, first * rate)
        x2, y2 = axes.at(top / rate, top)
        panel.drawn.append(_line(x1, y1, x2, y2, "roof"))
        text = f"{name}: {human_rate(rate, 'B')}"
        side = -6 if rate == fastest else 16  # above the upper line, below the lower one
        turn = f"translate({x1:.1f},{y1:.1f}) rotate({-slope:.2f})"
        panel.drawn.append(f'<text transform="{turn}" x="14" y="{side}">{escape(text)}</text>')
        _keep_off(panel, x1, y1, slope, side, len(text) * CHARACTER + 14)
        panel.labels.occupied += along(x1, y1, x2, y2)
    right = FRAME.x + FRAME.width
    heights = [(f"{name}: {human_rate(rate, 'op')}", *axes.at(rate / fastest, rate)) for name, rate in computes]
    for _, x1, y1 in heights:
        panel.drawn.append(_line(x1, y1, right, y1, "roof"))
        panel.labels.occupied.append(Box(x1, y1 - 1, right - x1, 2))
    for text, _, y1 in heights:
        start = right - len(text) * CHARACTER - 4
        spots = ((start - 30 * step, y) for step in range(20) for y in (y1 - FONT - 6, y1 + 4))
        panel.label(text, (right, y1, math.inf), spots)


def _keep_off(panel: Panel, x: float, y: float, slope: float, side: float, length: float) -> None:
    """Take the room of a text that runs along a slanted line, in small squares."""
    cos, sin = math.cos(math.radians(slope)), math.sin(math.radians(slope))
    for step in range(0, int(length) + 6, 6):
        for across in (side, side - FONT / 2, side - FONT):
            panel.labels.occupied.append(
                Box(x + step * cos + across * sin - 3, y - step * sin + across * cos - 3, 6, 6)
            )


@dataclass(frozen=True)
class Dot:
    """A kind of op in the picture."""

    op: "OpTime"
    x: float
    y: float
    radius: float


def _dots(panel: Panel, ops: Sequence["OpTime"], step_seconds: float) -> list[Dot]:
    """Their room, which is taken before any label's. The largest is drawn first, so that none hides another."""
    dots = []
    for op in ops:
        x, y = panel.axes.at(op.intensity, op.flops / op.seconds)
        radius = 3.5 + 14 * math.sqrt(min(1.0, op.seconds / step_seconds))
        dots.append(Dot(op, x, y, radius))
        panel.labels.occupied.append(Box(x - radius, y - radius, 2 * radius, 2 * radius))
    return sorted(dots, key=lambda dot: -dot.radius)


def _label_dots(panel: Panel, dots: Sequence[Dot]) -> None:
    """Draw them, with labels: those of the longest ops are placed first, nearest to their dots."""
    for dot in dots:
        op = dot.op
        tip = f"{op.section} {op.op} {op.shape} {op.format}: {human_seconds(op.seconds)}, bound by {op.bound}"
        circle = f'cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="{dot.radius:.1f}" fill="{COLOURS[op.bound]}"'
        title = f"<title>{escape(tip)}</title>"
        panel.drawn.append(f'<circle class="dot" {circle} fill-opacity=".8">{title}</circle>')
    for dot in dots:
        text = f"{dot.op.op} {dot.op.shape} {dot.op.share:.0%}"
        spots = around(dot.x, dot.y, dot.radius, len(text) * CHARACTER)
        panel.label(text, (dot.x, dot.y, dot.radius), spots, f' style="fill:{COLOURS[dot.op.bound]}"')


def _colours_used(ops: Sequence["OpTime"]) -> list[str]:
    """What the colours mean, right of the title."""
    used = [bound for bound in COLOURS if any(op.bound == bound for op in ops)]
    out, right = [], float(WIDTH - RIGHT)
    for bound in reversed(used):
        text = f"bound by {bound}" if bound == used[0] else bound
        out.append(f'<text x="{right:.1f}" y="46" text-anchor="end">{text}</text>')
        right -= len(text) * CHARACTER + 10
        out.append(f'<circle cx="{right:.1f}" cy="42" r="4.5" fill="{COLOURS[bound]}"/>')
        right -= 14
    return out
