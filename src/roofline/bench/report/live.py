"""What a terminal shows while a curve is measured: finished points against the limit, the one that runs, time left.

Whoever measures calls, in this order:

    with LiveView("typical, ours", points=8, seconds=30) as view:
        for each load:
            view.started("16 workers")
            while it runs:
                view.progress(what the generator tells of itself)
            view.finished(point)

`progress` may be called as often as is convenient: the terminal is drawn at most twice a second, and only from within
these calls, because a thread that draws would take time from the client that is measured beside it.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from roofline.bench.report import words
from roofline.bench.results.point import INTERRUPTED, Point
from roofline.common.units import human_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

BETWEEN_DRAWS, BETWEEN_LINES = 0.5, 10.0  # seconds, on a terminal and elsewhere
BAR = 12  # characters of a full limit
HEADINGS = (
    "load",
    "requests/s",
    "tokens/s",
    "TTFT ms",
    "TPOT ms",
    "latency ms",
    "of the limit",
    "client",
    "grade",
)


class LiveProgress(Protocol):
    """How far the running point is: what the process that sends requests tells of itself.

    elapsed: seconds since its beginning; completed, failed, in_flight: requests; tokens_per_s: of answers, lately; cpu:
    share of a core that the client uses; slip_ms: how much later than planned requests are sent, lately. None where
    that is not known.
    """

    @property
    def elapsed(self) -> float: ...
    @property
    def completed(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def in_flight(self) -> int | None: ...
    @property
    def tokens_per_s(self) -> float | None: ...
    @property
    def cpu(self) -> float | None: ...
    @property
    def slip_ms(self) -> float | None: ...


class LiveView:
    """See above. points: how many there will be at most; seconds: that each is planned to take, None where that is not
    known; console: of rich, standard output where None; clock: for tests."""

    def __init__(
        self,
        title: str,
        *,
        points: int | None = None,
        seconds: float | None = None,
        console: "Console | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self._title, self._planned, self._seconds, self._clock = title, points, seconds, clock
        self._console = console if console is not None else Console()
        self._points: list[Point] = []
        self._running: str | None = None
        self._limit: float | None = None
        self._progress: LiveProgress | None = None
        self._began = self._drawn = -1e9
        self._durations: list[float] = []  # seconds of each finished point
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(self._view(), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        else:
            self._line(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The table of what was measured stays; a point that was under way is no longer shown."""
        self._running = None
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None
        elif kind is not None:
            count = sum(INTERRUPTED not in point.validity.flags for point in self._points)
            ended = f", {len(self._points) - count} interrupted" if count < len(self._points) else ""
            self._line(f"ended early: {count} point{'s are' if count != 1 else ' is'} complete{ended}")

    def started(self, load: str, limit_tokens_per_s: float | None = None) -> None:
        """The measurement of a point begins. load: what is offered, such as "16 workers"; limit_tokens_per_s: the most
        that is possible under it, where that is known."""
        self._running, self._progress, self._began = load, None, self._clock()
        self._limit = limit_tokens_per_s
        if self._live is not None:
            self._draw()
        else:
            self._line(f"{load} ...{self._time_left()}")
            self._drawn = self._clock()

    def progress(self, now: LiveProgress) -> None:
        """How far it is. Cheap where nothing is drawn."""
        self._progress = now
        if self._clock() - self._drawn < (BETWEEN_DRAWS if self._live is not None else BETWEEN_LINES):
            return
        if self._live is not None:
            self._draw()
        else:
            self._drawn = self._clock()
            self._line(f"  {self._running_text(now)}")

    def finished(self, point: Point) -> None:
        """The point is measured (and written, if it is: the view keeps nothing)."""
        self._points.append(point)
        self._durations.append(self._clock() - self._began)
        self._running = self._progress = None
        if self._live is not None:
            self._draw()
        else:
            promised = words.GOODPUT in point.metrics
            named = zip(_headings(promised), _cells(point, promised), strict=True)
            self._line("  " + ", ".join(f"{name} {cell}" for name, cell in named))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        assert self._live is not None
        self._drawn = self._clock()
        self._live.update(self._view(), refresh=True)

    def _view(self) -> "RenderableType":
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(self._title), title_justify="left", box=None, padding=(0, 2, 0, 0))
        promised = any(words.GOODPUT in point.metrics for point in self._points)
        headings, rows = _headings(promised), [_cells(point, promised) for point in self._points]
        for number, heading in enumerate(headings):
            of_words = heading in ("load", "of the limit", "client", "grade")
            widest = max(len(row[number]) for row in (headings, *rows))
            breaks = heading == "grade"  # its flags are what a narrow terminal breaks; figures are never cut
            table.add_column(
                heading,
                justify="left" if of_words else "right",
                no_wrap=not breaks,
                min_width=None if breaks else widest,
            )
        for point, row in zip(self._points, rows, strict=True):
            table.add_row(*map(escape, row), style="" if words.trusted(point) else "dim")
        if self._running is None:
            return table
        text = f"{self._running}: {self._running_text(self._progress)}{self._time_left()}"
        return Group(table, escape(text))

    def _running_text(self, now: LiveProgress | None) -> str:
        """What is known of the running point, in one line."""
        if now is None:
            return "starting"
        parts = [f"{now.elapsed:.0f} s" + ("" if self._seconds is None else f" of {self._seconds:.0f} s")]
        parts.append(f"{now.completed:,} requests" + (f", {now.failed:,} failed" if now.failed else ""))
        if now.in_flight is not None:
            parts.append(f"{now.in_flight:,} in flight")
        if now.tokens_per_s is not None:
            parts.append(f"{words.digits(now.tokens_per_s)} tokens/s")
            if self._limit:
                parts.append(f"{words.percent(now.tokens_per_s / self._limit)} of the limit")
        if now.cpu is not None:
            parts.append(f"client {now.cpu:.0%} of a core")
        if now.slip_ms is not None:
            parts.append(f"{words.digits(now.slip_ms)} ms late")
        return ", ".join(parts)

    def _time_left(self) -> str:
        """How long the rest takes, if every point takes as long as those before, or as is planned."""
        seconds_per_point = sum(self._durations) / len(self._durations) if self._durations else self._seconds
        if self._planned is None or seconds_per_point is None or self._running is None:
            return ""
        rest = seconds_per_point * (self._planned - len(self._points)) - (self._clock() - self._began)
        return f"; {human_seconds(max(rest, 1.0))} left"


def _headings(promised: bool) -> tuple[str, ...]:
    """promised: whether a point was measured under an objective."""
    place = HEADINGS.index("of the limit")
    return (*HEADINGS[:place], "goodput requests/s", *HEADINGS[place:]) if promised else HEADINGS


def _goodput(point: Point) -> str:
    """The requests a second that keep the objective, and their share of those that were sent."""
    share = words.metric(point, "good_share")
    return f"{words.digits(words.metric(point, words.GOODPUT))}{'' if share is None else f' ({words.percent(share)})'}"


def _cells(point: Point, promised: bool = False) -> tuple[str, ...]:
    share = words.share(point)
    filled = 0 if share is None else round(min(share, 1.0) * BAR)
    bar = "-" if share is None else f"{'█' * filled}{'·' * (BAR - filled)} {words.percent(share)}"
    figures = (
        words.digits(words.metric(point, name)) for name in (words.REQUESTS, words.TOKENS, words.TTFT, words.TPOT)
    )
    grade = ", ".join((point.validity.grade, *point.validity.flags))
    side = f"{point.extra['side']}: " if "side" in point.extra else ""  # of a comparison
    latency = words.digits(words.mean(point, words.E2E))
    good = (_goodput(point),) if promised else ()
    return (f"{side}{words.load_name(point)}", *figures, latency, *good, bar, words.client(point), grade)
