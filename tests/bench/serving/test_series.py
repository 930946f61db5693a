"""Which points a series measures, and when it ends."""

from types import SimpleNamespace

import msgspec
import pytest

from roofline.bench.results.store import append_points
from roofline.bench.serving import series
from roofline.bench.serving.series import Sizes, curve, levels, levels_of, sweep, unlike_levels
from roofline.bench.traffic.presets import preset_traffic
from roofline.common.errors import ConfigError
from tests.bench.report import made


class Points:
    """Takes the place of measuring: a point for each plan, with the rates that a test says."""

    def __init__(self, rate=lambda workers: workers, failed=lambda workers: 0, empty=lambda workers: 0):
        self.rate, self.failed, self.empty, self.plans, self.points = rate, failed, empty, [], 0

    def plan(self, requests, **load):
        return SimpleNamespace(requests=requests, **load)

    def measure(self, test, kind, plan):
        self.plans.append(plan)
        workers = getattr(plan, "concurrency", 0)
        figures = {name: SimpleNamespace(value=self.rate(workers)) for name in ("answer_rate", "request_rate")}
        failed = self.failed(workers)
        counts = SimpleNamespace(failed=failed, empty=self.empty(workers), completed=plan.requests - failed)
        return SimpleNamespace(metrics=figures, counts=counts, plan=plan)


@pytest.fixture
def measured(monkeypatch):
    def run(way, points, *arguments):
        monkeypatch.setattr(series, "measure", points.measure)
        return [point.plan for point in way(points, *arguments)]

    return run


def test_levels():
    assert levels(1) == [1]
    assert levels(8) == [1, 2, 4, 8]
    assert levels(12) == [1, 2, 4, 8, 12]


def test_a_curve_has_an_open_loop_beside_each_level(measured):
    plans = measured(curve, Points(lambda workers: 10 * workers), 4, Sizes(4, 6, 9.0), True)
    assert [(getattr(plan, "concurrency", None), getattr(plan, "rate", None)) for plan in plans] == [
        (1, None),
        (None, 9.0),
        (2, None),
        (None, 18.0),
        (4, None),
        (None, 36.0),
    ]
    assert [plan.requests for plan in plans] == [6, 6, 8, 8, 16, 16]
    assert {plan.seconds for plan in plans} == {9.0}
    assert len(measured(curve, Points(), 4, Sizes(), False)) == 3


def test_a_curve_takes_the_levels_and_rates_of_an_earlier_one(measured, tmp_path):
    """Of the last run of the file, whatever this one reaches, up to as many workers as are asked for."""
    path = tmp_path / "old.jsonl"
    older = [msgspec.structs.replace(made.point(5), run="older")]
    run = [made.point(3), made.point(3, rate=1.25), made.point(6), made.point(24), made.point(24, rate=4.5)]
    append_points([*older, *run, msgspec.structs.replace(made.point(2), kind="sweep")], path)
    rates = levels_of(path)
    assert rates == {3: 1.25, 6: None, 24: 4.5}
    plans = measured(curve, Points(lambda workers: 99 * workers), 8, Sizes(), True, rates)
    assert [(getattr(plan, "concurrency", None), getattr(plan, "rate", None)) for plan in plans] == [
        (3, None),
        (None, 1.25),
        (6, None),
    ]
    append_points([msgspec.structs.replace(made.point(2), kind="sweep")], tmp_path / "sweep.jsonl")
    with pytest.raises(ConfigError, match="has no point of a closed loop of `bench curve`"):
        levels_of(tmp_path / "sweep.jsonl")


def test_clients_that_do_not_read_come_with_every_level(measured):
    sizes = Sizes(beside={"unread": 0.25, "unread_tokens": 9})
    for plans in (measured(curve, Points(), 4, sizes, True), measured(sweep, Points(lambda _: 1), 8, sizes)):
        assert {(plan.unread, plan.unread_tokens) for plan in plans} == {(0.25, 9)}


@pytest.mark.parametrize(
    ("rate", "failed", "last"),
    [
        (lambda workers: min(workers, 16), lambda workers: 0, 64),  # two levels without gain
        (lambda workers: workers, lambda workers: 0, 256),
        (lambda workers: workers, lambda workers: int(workers >= 8), 8),  # 1 of 16
        (lambda workers: workers if workers != 8 else 4, lambda workers: 0, 256),  # one level without gain is chance
    ],
)
def test_a_sweep_ends_where_more_brings_nothing(measured, rate, failed, last):
    plans = measured(sweep, Points(rate, failed), 256, Sizes(2, 16))
    assert [plan.concurrency for plan in plans] == levels(last)


def test_answers_without_text_end_a_sweep_as_failures_do(measured):
    plans = measured(sweep, Points(empty=lambda workers: int(workers >= 8)), 256, Sizes(2, 16))
    assert [plan.concurrency for plan in plans] == [1, 2, 4, 8]


def test_another_traffic_than_the_earlier_curve_had_is_told(tmp_path):
    """Before anything is sent, as `check` would refuse what comes of it."""
    path, traffic = tmp_path / "old.jsonl", preset_traffic("typical", 40)
    old = made.point(4)
    work = msgspec.structs.replace(old.workload, sha256=traffic.sha256, stop="ignored", requests=32)
    name = f"typical@{traffic.version}"
    append_points([msgspec.structs.replace(old, workload=work, kind="curve", preset=name)], path)
    assert unlike_levels(path, traffic, Sizes(), 8) == []
    natural = preset_traffic("typical", 40, 0, "natural")
    (told,) = unlike_levels(path, natural, Sizes(), 8)
    assert "answers end as 'ignored' there and 'natural' here" in told
    (told,) = unlike_levels(path, preset_traffic("typical", 40, seed=1), Sizes(), 8)
    assert "another seed or file" in told
    (told,) = unlike_levels(path, preset_traffic("long", 40), Sizes(), 8)
    assert "typical@1 there and long@1 here" in told
    (told,) = unlike_levels(path, traffic, Sizes(fewest=24), 8)
    assert "at 4 workers there were 32 requests, and here there are 24" in told
    assert unlike_levels(path, traffic, Sizes(fewest=24), 2) == [], "that level is not measured"
