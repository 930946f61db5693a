"""The view of a running curve: what a terminal and a file get, in the order of the calls."""

import io
from dataclasses import dataclass

import msgspec
import pytest
from rich.console import Console

from roofline.bench.report.live import BETWEEN_LINES, LiveView
from roofline.bench.results.point import Point, Validity
from tests.bench.report import made


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a generator tells."""

    elapsed: float
    completed: int
    failed: int = 0
    tokens_per_s: float | None = None
    in_flight: int | None = None
    cpu: float | None = None
    slip_ms: float | None = None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(terminal: bool, leave: bool = False) -> str:
    """What a run of two points prints."""
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=terminal, width=140, color_system=None)
    view = LiveView("typical: [bold]ours", points=3, seconds=30.0, console=console, clock=clock)
    try:
        with view:
            for workers in (4, 8):
                view.started(f"{workers} workers", limit_tokens_per_s=400.0)
                for step in range(3):
                    clock.now += BETWEEN_LINES + 0.1
                    view.progress(
                        Progress(
                            elapsed=clock.now, completed=10 * step, failed=1, tokens_per_s=100.0,
                            in_flight=workers, cpu=0.31, slip_ms=0.2,
                        )
                    )  # fmt: skip
                if leave and workers == 8:
                    raise KeyboardInterrupt
                view.finished(made.point(workers, trusted=workers == 4))
    except KeyboardInterrupt:
        pass
    return stream.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "typical: [bold]ours"
    assert lines[1] == "4 workers ...; 90.0 s left", "three points of 30 s"
    assert lines[2] == (
        "  10 s of 30 s, 0 requests, 1 failed, 4 in flight, 100 tokens/s, 25% of the limit, "
        "client 31% of a core, 0.2 ms late"
    )
    assert lines[5].startswith("  load 4 workers, requests/s 4, tokens/s 240, TTFT ms 300, ")
    assert lines[5].endswith("█████······· 40%, client trusted, grade A")
    assert lines[6] == "8 workers ...; 60.6 s left", "two points as long as the first, 30.3 s each"
    assert lines[10].endswith("client not trusted, grade C, client used 92% of a core")
    assert "\x1b" not in "".join(lines)


def test_without_a_plan_nobody_knows_how_long_it_takes() -> None:
    for plan in ({"points": 3}, {"seconds": 5.0}, {}):
        stream = io.StringIO()
        with LiveView("a", console=Console(file=stream, width=140), **plan) as view:  # type: ignore[arg-type]
            view.started("1 worker")
        assert stream.getvalue().splitlines()[1] == "1 worker ..."


def test_a_point_without_a_limit_has_no_bar() -> None:
    stream = io.StringIO()
    with LiveView("a", console=Console(file=stream, width=140)) as view:
        view.started("4 workers")
        view.finished(msgspec.structs.replace(made.point(4), limit=None))
    assert "of the limit -, client trusted" in stream.getvalue()


def test_an_engine_in_this_process_has_no_client() -> None:
    stream = io.StringIO()
    with LiveView("a", console=Console(file=stream, width=140)) as view:
        view.started("4 workers")
        view.finished(msgspec.structs.replace(made.point(4), client=None))
    assert "client none, grade A" in stream.getvalue()


def test_few_lines_for_many_calls() -> None:
    stream, clock = io.StringIO(), Clock()
    with LiveView("a", console=Console(file=stream, width=140), clock=clock) as view:
        view.started("1 worker")
        for _ in range(1000):
            clock.now += 0.01
            view.progress(Progress(elapsed=clock.now, completed=1))
    assert stream.getvalue().count("requests") == 0, "ten seconds have not passed"


def test_a_terminal_gets_a_table_and_the_running_point() -> None:
    text = shown(terminal=True)
    assert "of the limit" in text
    assert "8 workers: 40 s of 30 s, 0 requests, 1 failed, 8 in flight" in text
    assert "█████" in text
    last = text[text.rindex("typical: [bold]ours") :]
    assert "4 workers" in last
    assert "8 workers" in last
    assert "in flight" not in last, "nothing runs any more"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_is_ended_early_keeps_its_points(terminal: bool) -> None:
    text = shown(terminal, leave=True)
    assert "4 workers" in text
    if not terminal:
        assert text.splitlines()[-1] == "ended early: 1 point is complete"


def test_a_narrow_terminal_breaks_flags_and_cuts_no_figure() -> None:
    stream = io.StringIO()
    flags = ["client not certified", "too few requests for p99"]
    point = made.point(4)
    point = msgspec.structs.replace(point, validity=msgspec.structs.replace(point.validity, flags=flags))
    with LiveView("a", console=Console(file=stream, force_terminal=True, width=118, color_system=None)) as view:
        view.started("4 workers")
        view.finished(point)
    text = stream.getvalue()
    assert "…" not in text
    assert "█████······· 40%" in text
    assert "p99" in text


def promised(point: Point) -> Point:
    """The point as one that was measured under an objective."""
    good = {"goodput": made.figure(2.5, "requests/s"), "good_share": made.figure(0.625, "1")}
    return msgspec.structs.replace(point, metrics={**point.metrics, **good})


@pytest.mark.parametrize("terminal", [False, True])
def test_goodput_is_shown_where_an_objective_was_given(terminal: bool) -> None:
    for point, shows in ((promised(made.point(4)), True), (made.point(4), False)):
        stream = io.StringIO()
        with LiveView("a", console=Console(file=stream, force_terminal=terminal, width=200, color_system=None)) as view:
            view.started("4 workers")
            view.finished(point)
        assert ("goodput requests/s" in stream.getvalue()) == shows
        assert ("2.5 (62%)" in stream.getvalue()) == shows


def test_a_point_that_was_interrupted_is_not_complete() -> None:
    stream = io.StringIO()
    point = made.point(4)
    broken = msgspec.structs.replace(point, validity=Validity(grade="D", flags=["interrupted"]))
    try:
        with LiveView("a", console=Console(file=stream, width=140)) as view:
            view.finished(point)
            view.finished(broken)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert stream.getvalue().splitlines()[-1] == "ended early: 1 point is complete, 1 interrupted"
