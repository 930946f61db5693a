"""SVG of a chart: lines, intervals, markers of different shapes, and labels that do not overlap. The colours are the
page's (page.html): classes s0 to s7 are those of series, `grey` that of what is not trusted."""

from collections.abc import Iterator
from html import escape
from itertools import pairwise

from roofline.bench.report.chart import Axis, Chart, Mark, Rule, Series, scale
from roofline.bench.svg import CHARACTER, FONT, Box, Labels, along, around

LOOKS = 8  # colours and markers
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2")  # of lines without markers
WIDE, NARROW = 860, 350  # pixels; the page shows one of the two
ROW = 34  # height of a category
MOST_LABELS = 120  # of marks: with more of them nobody finds one, and each keeps its tooltip
RADIUS = 4.5  # of a marker


def draw(chart: Chart, width: int) -> str:
    """The chart as an SVG element of that width."""
    return _Drawing(chart, width).svg()


def legend(series: Series) -> str:
    """A piece of the series' line with its marker, for a list of names."""
    line = _path("M1 7H27", _dash(series))
    marker = _marker(14, 7, series.look, "") if series.kind in ("curve", "dots") else ""
    if series.kind == "bars":
        line = '<rect class="bar" x="6" y="2" width="16" height="10"/>'
    elif series.kind == "dots":
        line = ""
    inner = f'<g class="s{series.look % LOOKS}">{line}{marker}</g>'
    return f'<svg width="28" height="14" viewBox="0 0 28 14" aria-hidden="true">{inner}</svg>'


def doubted() -> str:
    """The marker of what is not trusted, for a list of names."""
    return f'<svg width="28" height="14" viewBox="0 0 28 14" aria-hidden="true">{_marker(14, 7, 0, " hollow")}</svg>'


class _Drawing:
    """One chart while it is drawn. x, y: its scales; out: the elements so far."""

    def __init__(self, chart: Chart, width: int) -> None:
        rows = len(chart.y.categories)
        self.chart, self.width, self.narrow = chart, width, width < 500
        self.height = 56 + ROW * rows if rows else 300 if self.narrow else 380
        margin = 10 if rows else 52
        self.frame = Box(margin, 12, width - margin - 14, self.height - 12 - 44)
        frame = self.frame
        self.x = scale(chart.x, _values(chart, "x"), frame.x, frame.x + frame.width)
        up = (frame.y, frame.y + frame.height) if rows else (frame.y + frame.height, frame.y)
        self.y = scale(chart.y, _values(chart, "y"), *up)
        self.out: list[str] = []
        self.labels = Labels(frame)

    def svg(self) -> str:
        for series in self.chart.series:
            self._room(series)
        self._areas()
        self._grid()
        for series in self.chart.series:
            self.out.append(f'<g class="s{series.look % LOOKS}">{"".join(self._series(series))}</g>')
        for rule in self.chart.rules:
            self._rule(rule)
        if sum(bool(mark.label) for series in self.chart.series for mark in series.marks) <= MOST_LABELS:
            for series in self.chart.series:
                self._names(series)
        size = f'viewBox="0 0 {self.width} {self.height}" class="{"narrow" if self.narrow else "broad"}"'
        return f'<svg {size} role="img" aria-label="{escape(self.chart.title)}">{"".join(self.out)}</svg>'

    def _areas(self) -> None:
        frame = self.frame
        for area in self.chart.areas:
            own, start, end = (
                (self.x, frame.x, frame.x + frame.width)
                if area.axis == "x"
                else (self.y, frame.y, frame.y + frame.height)
            )
            ends = sorted(
                edge if value is None else min(max(own.at(value), start), end)
                for value, edge in ((area.low, own.start), (area.high, own.end))
            )
            box = Box(ends[0], frame.y, ends[1] - ends[0], frame.height)
            if area.axis == "y":
                box = Box(frame.x, ends[0], frame.width, ends[1] - ends[0])
            place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
            self.out.append(f'<rect class="area" {place}><title>{escape(area.text)}</title></rect>')
            down = (box.y + 4 + 16 * step for step in range(int(frame.height / 16)))
            self._text(area.text, ((max(box.x + 4, frame.x + 4), y) for y in down), "soft", inside=box)

    def _grid(self) -> None:
        frame, chart = self.frame, self.chart
        bottom, right = frame.y + frame.height, frame.x + frame.width
        for value in self.x.ticks(4 if self.narrow else 8):
            at = self.x.at(value)
            self.out.append(_line(at, frame.y, at, bottom, "grid"))
            anchor = "end" if at > right - 12 else "middle"
            self.out.append(_text(at + (12 if anchor == "end" else 0), bottom + 16, tick(value), anchor))
        if chart.y.categories:
            for number, name in enumerate(chart.y.categories):
                at = self.y.at(number)
                self.out.append(_line(frame.x, at + ROW / 2, right, at + ROW / 2, "grid"))
                max_characters = int((frame.width - 8) / (0.9 * CHARACTER))
                short = name if len(name) <= max_characters else f"{name[: max_characters - 1]}…"
                self.out.append(_text(frame.x, at - 5, short, "start"))
                self.labels.occupied.append(Box(frame.x, at - 5 - FONT, 0.85 * CHARACTER * len(short), FONT))
        else:
            for value in self.y.ticks(6):
                at = self.y.at(value)
                self.out.append(_line(frame.x, at, right, at, "grid"))
                self.out.append(_text(frame.x - 6, at + 4, tick(value), "end"))
        middle = (frame.x + right) / 2
        self.out.append(_text(middle, self.height - 6, axis_title(chart.x), "middle"))
        if not chart.y.categories:
            turn = f'transform="translate(11,{(frame.y + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle"'
            self.out.append(f"<text {turn}>{escape(axis_title(chart.y))}</text>")

    def _room(self, series: Series) -> None:
        """What labels must keep off: markers, lines, intervals."""
        places = [self._at(mark) for mark in series.marks]
        if series.kind in ("curve", "line"):
            for (x1, y1), (x2, y2) in pairwise(places):
                self.labels.occupied += along(x1, y1, x2, y2)
        elif series.kind == "steps":
            for (x1, y1), (x2, y2) in pairwise(places):
                self.labels.occupied += [*along(x1, y1, x2, y1), *along(x2, y1, x2, y2)]
        for mark, (x, y) in zip(series.marks, places, strict=True):
            if series.kind in ("curve", "dots"):
                self.labels.occupied.append(Box(x - RADIUS, y - RADIUS, 2 * RADIUS, 2 * RADIUS))
            if mark.y_interval and not series.band:
                self.labels.occupied += along(x, self.y.at(mark.y_interval[0]), x, self.y.at(mark.y_interval[1]))
            if mark.x_interval and series.kind != "bars":
                self.labels.occupied += along(self.x.at(mark.x_interval[0]), y, self.x.at(mark.x_interval[1]), y)

    def _at(self, mark: Mark) -> tuple[float, float]:
        lower = 6.0 if self.chart.y.categories else 0.0  # the category's name stands above
        return self.x.at(mark.x), self.y.at(mark.y) + lower

    def _series(self, series: Series) -> Iterator[str]:
        places = [self._at(mark) for mark in series.marks]
        joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        ends = [(x, mark.y_interval) for mark, (x, _) in zip(series.marks, places, strict=True) if mark.y_interval]
        if series.band and ends:
            edges = [(x, self.y.at(high)) for x, (_, high) in ends] + [
                (x, self.y.at(low)) for x, (low, _) in ends[::-1]
            ]
            yield f'<path class="band" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in edges)}Z"/>'
        if series.kind in ("curve", "line") and len(places) > 1:
            yield _path(f"M{joined}", _dash(series))
        if series.kind == "steps" and places:
            moves = "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
            yield _path(f"M{places[0][0]:.1f} {places[0][1]:.1f}{moves}", _dash(series))
        for mark, (x, y) in zip(series.marks, places, strict=True):
            yield from self._mark(series, mark, x, y)

    def _mark(self, series: Series, mark: Mark, x: float, y: float) -> Iterator[str]:
        grey = "" if mark.trusted else ' class="grey"'
        parts = []
        if mark.x_interval and series.kind == "bars":
            low, high = (self.x.at(end) for end in mark.x_interval)
            parts.append(f'<rect class="bar" x="{low:.1f}" y="{y - 3:.1f}" width="{high - low:.1f}" height="10"/>')
        elif mark.x_interval:
            low, high = (self.x.at(end) for end in mark.x_interval)
            parts.append(f'<path class="span" d="M{low:.1f} {y - 3:.1f}v6m0 -3H{high:.1f}m0 -3v6"/>')
        if mark.y_interval and not series.band and series.kind != "bars":
            low, high = (self.y.at(end) for end in mark.y_interval)
            parts.append(f'<path class="span" d="M{x - 3:.1f} {low:.1f}h6m-3 0V{high:.1f}m-3 0h6"/>')
        if series.kind in ("curve", "dots"):
            parts.append(_marker(x, y, series.look, "" if mark.trusted else " hollow"))
        if parts:
            note = f"<title>{escape(mark.note)}</title>" if mark.note else ""
            yield f"<g{grey}>{note}{''.join(parts)}</g>"

    def _rule(self, rule: Rule) -> None:
        frame, own = self.frame, self.x if rule.axis == "x" else self.y
        if not own.holds(rule.value):
            return
        at = own.at(rule.value)
        x1, y1, x2, y2 = (at, frame.y, at, frame.y + frame.height)
        if rule.axis == "y":
            x1, y1, x2, y2 = frame.x, at, frame.x + frame.width, at
        self.out.append(_line(x1, y1, x2, y2, "rule"))
        length = len(rule.text) * CHARACTER
        if rule.axis == "y":
            across = [frame.x + 4 + 20 * step for step in range(int(frame.width / 20))]
            spots = ((x, y) for x in across for y in (at - FONT - 5, at + 4))
        else:
            down = [frame.y + 4 + 14 * step for step in range(int(frame.height / 14))]
            spots = ((x, y) for y in down for x in (at + 4, at - length - 4))
        self.labels.occupied += along(x1, y1, x2, y2)
        self._text(rule.text, spots, "soft")

    def _names(self, series: Series) -> None:
        """The labels of marks: the last ones first, for these are often the ones that matter."""
        for mark in reversed(series.marks):
            if mark.label:
                x, y = self._at(mark)
                spots = around(x, y, RADIUS, len(mark.label) * CHARACTER, 60)
                look = f"s{series.look % LOOKS} name" if mark.trusted else "grey name"
                self._text(mark.label, spots, look, (x, y, RADIUS))

    def _text(
        self,
        text: str,
        spots: Iterator[tuple[float, float]],
        look: str,
        point: tuple[float, float, float] = (0, 0, float("inf")),
        inside: Box | None = None,
    ) -> None:
        if not text or (inside is not None and inside.width < len(text) * CHARACTER):
            return  # its tooltip has it
        label = self.labels.place(text, point, spots)
        if label is None:
            return
        if label.leader is not None:
            self.out.append(_line(*label.leader, "leader"))
        self.out.append(_text(label.box.x, label.box.y + FONT - 1, text, "start", look))


def axis_title(axis: Axis) -> str:
    """What stands along an axis."""
    return f"{axis.title} (log scale)" if axis.log and axis.title else axis.title


def tick(value: float) -> str:
    """A value of an axis: 0.25, 10, 5k, 2M."""
    size = abs(value)
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if prefix == 'k' else limit):.4g}{prefix}"
    return f"{value:.4g}"


def _values(chart: Chart, axis: str) -> list[float]:
    """All that an axis has to show."""
    values = [rule.value for rule in chart.rules if rule.axis == axis]
    for series in chart.series:
        for mark in series.marks:
            own, around = (mark.x, mark.x_interval) if axis == "x" else (mark.y, mark.y_interval)
            values += [own, *(around or ())]
    return values


def _dash(series: Series) -> str:
    if series.dashed:
        return "5 4"
    return DASHES[series.look % LOOKS] if series.kind in ("line", "steps") else ""


def _path(moves: str, dash: str) -> str:
    return f'<path class="curve" d="{moves}"{f" stroke-dasharray={chr(34)}{dash}{chr(34)}" if dash else ""}/>'


def _marker(x: float, y: float, look: int, kind: str) -> str:
    """Eight shapes, so that no reading depends on colours."""
    r = RADIUS
    shapes = (
        f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z",
        f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8Z",
        f"M{x:.1f} {y - 5.5:.1f}l5 9h-10Z",
        f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6Z",
        f"M{x:.1f} {y + 5.5:.1f}l5 -9h-10Z",
        f"M{x - 1.5:.1f} {y - 5.5:.1f}h3v4h4v3h-4v4h-3v-4h-4v-3h4Z",
        f"M{x - 5.5:.1f} {y - 3:.1f}h11v6h-11Z",
        f"M{x - 3:.1f} {y - 5.5:.1f}h6v11h-6Z",
    )
    return f'<path class="marker{kind}" d="{shapes[look % LOOKS]}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, look: str) -> str:
    return f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, look: str = "") -> str:
    style = f' class="{look}"' if look else ""
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{end}{style}>{escape(text)}</text>'
