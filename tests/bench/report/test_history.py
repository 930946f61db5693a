"""Trends by version, and the gate: which difference fails, which is undecided, which files are not compared."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from roofline.bench.report.gather import of_points
from roofline.bench.report.history import Allowed, check, check_pairs, trend, without_match
from roofline.bench.report.ratios import forest
from roofline.bench.report.report import report
from roofline.bench.results.metrics import figures
from roofline.bench.results.point import Point, UnreadCounts, Validity
from roofline.bench.serving.series import Sizes
from roofline.common.errors import ConfigError
from roofline.hardware.host_settings import HostSettings
from tests.bench.report import made
from tests.bench.results.simulated import closed_loop, open_loop, service


def version(name: str, most: float, day: int, spread: float = 0.02, **changes: object) -> Point:
    point = made.point(4, most=most, version=name, started=f"2026-11-{day:02}T00:00:00+00:00", **changes)
    rate = point.metrics["request_rate"]
    assert rate.value is not None
    figure = msgspec.structs.replace(rate, ci95=(rate.value * (1 - spread), rate.value * (1 + spread)))
    return msgspec.structs.replace(point, metrics={**point.metrics, "request_rate": figure})


def test_a_trend_is_by_time_with_ratios() -> None:
    points = [version("1.1", 6.0, 2), version("1.0", 5.0, 1), version("1.2", 6.0, 3)]
    section = trend(of_points(points), "request_rate")
    (chart,) = section.charts
    assert [(mark.x, mark.label) for mark in chart.series[0].marks] == [(1, "1.0"), (2, "1.1"), (3, "1.2")]
    assert section.table is not None
    ratios = [row[5:] for row in section.table.rows]
    assert ratios[0] == ("-", "-")
    assert ratios[1][0].startswith("1.2 [1.1")
    assert ratios[2][0].startswith("1 [0.9")
    assert ratios[2][1].startswith("1.2 [1.1")


def test_interrupted_points_are_marked() -> None:
    old, new = version("1.0", 5.0, 1), version("1.1", 5.0, 2)
    new = msgspec.structs.replace(new, validity=Validity(grade="A", flags=["too few", "interrupted"]))
    section = trend(of_points([old, new]), "request_rate")
    assert section.table is not None
    assert [row[3] for row in section.table.rows] == [old.started, f"{new.started}, interrupted"]
    marks = section.charts[0].series[0].marks
    assert [mark.label for mark in marks] == ["1.0", "1.1, interrupted"]
    assert f"{new.started}, interrupted: " in marks[1].note
    for pair in ((old, new), (new, old)):
        (finding,) = check([pair[0]], [pair[1]], "request_rate", Allowed(0.05))
        assert str(finding).startswith("ours, typical, 4 workers, interrupted: request rate is 1 [")


def test_hosts_that_were_run_in_another_way_are_flagged() -> None:
    old, new = (
        msgspec.structs.replace(point, host=msgspec.structs.replace(point.host, settings=HostSettings(smt=smt)))
        for point, smt in ((version("1.0", 5.0, 1), False), (version("1.1", 5.0, 2), True))
    )
    section = trend(of_points([old, new]), "request_rate")
    assert section.table is not None
    assert [row[3] for row in section.table.rows] == [old.started, f"{new.started}, settings differ: SMT on, was off"]
    (finding,) = check([new], [old], "request_rate", Allowed(0.05))
    assert finding.name == "ours, typical, 4 workers, settings differ: SMT on, was off"
    (finding,) = check([new], [new], "request_rate", Allowed(0.05))
    assert finding.name == "ours, typical, 4 workers"
    (finding,) = check([new], [version("1.0", 5.0, 1)], "request_rate", Allowed(0.05))
    assert finding.name == "ours, typical, 4 workers", "nothing is known of the older one"


def test_other_shares_of_clients_that_do_not_read_are_flagged() -> None:
    old, new = version("1.0", 5.0, 1), version("1.1", 5.0, 2)
    unread = UnreadCounts(share=0.1, clients=9, closed_by_server=7, closed_by_client=2, answered=0, failed=0)
    new = msgspec.structs.replace(new, unread=unread)
    words = "settings differ: share of requests with a client beside them that did not read 0.1, was 0"
    section = trend(of_points([old, new]), "request_rate")
    assert section.table is not None
    assert [row[3] for row in section.table.rows] == [old.started, f"{new.started}, {words}"]
    (finding,) = check([new], [old], "request_rate", Allowed(0.05))
    assert finding.name == f"ours, typical, 4 workers, {words}"
    (finding,) = check([new], [new], "request_rate", Allowed(0.05))
    assert finding.name == "ours, typical, 4 workers"
    (note,) = report(of_points([old, new])).notes
    told = "9 clients beside them did not read: 7 closed by the server, 2 closed by the client"
    assert note == f"ours 1.1, 4 workers: {told}. The figures are of the requests whose answers were read."


def test_loads_have_trends_of_their_own() -> None:
    section = trend(of_points([*made.curve((1, 2)), *made.curve((1,), label="theirs")]), "ttft")
    assert len(section.charts) == 3
    with pytest.raises(ConfigError, match="metric='cake' has no trend; choose one of request_rate"):
        trend(of_points(made.curve()), "cake")
    bare = [msgspec.structs.replace(point, metrics={}) for point in made.curve()]
    with pytest.raises(ConfigError, match=r"metric='ttft': no point has it$"):
        trend(of_points(bare), "ttft")
    other = [msgspec.structs.replace(each, metrics={"e2e": each.metrics["e2e"]}) for each in made.curve()]
    with pytest.raises(ConfigError, match=r"metric='ttft': no point has it; choose one of e2e$"):
        trend(of_points(other), "ttft")


@pytest.mark.parametrize(
    ("times", "spread", "verdict"),
    [
        (1.1, 0.01, "passes"),
        (0.97, 0.01, "passes"),
        (0.9, 0.01, "slower"),
        (0.9, 0.2, "undecided"),
        (0.951, 0.01, "passes"),
    ],
)
def test_the_gate_fails_what_is_slower_beyond_doubt(times: float, spread: float, verdict: str) -> None:
    old, new = version("1.0", 5.0, 1, spread), version("1.1", 5.0, 2, spread)
    rate = new.metrics["request_rate"]
    assert rate.value is not None
    assert rate.ci95 is not None
    scaled = msgspec.structs.replace(rate, value=rate.value * times, ci95=tuple(end * times for end in rate.ci95))
    new = msgspec.structs.replace(new, metrics={**new.metrics, "request_rate": scaled})
    (finding,) = check([new], [old], "request_rate", Allowed(0.05))
    assert finding.verdict == verdict
    assert finding.ratio.value == pytest.approx(times)
    assert str(finding).startswith(f"ours, typical, 4 workers: request rate is {times:.4g} [")
    assert str(finding).endswith(f"] of the old one, {verdict}")


def test_without_an_interval_nothing_is_slower() -> None:
    old, new = version("1.0", 5.0, 1), version("1.1", 3.0, 2)
    bare = [
        msgspec.structs.replace(
            point,
            metrics={"request_rate": msgspec.structs.replace(point.metrics["request_rate"], ci95=None)},
        )
        for point in (new, old)
    ]
    (finding,) = check([bare[0]], [bare[1]], "request_rate", Allowed(0.05))
    assert finding.verdict == "undecided"
    assert "(no interval)" in str(finding)
    plans = [msgspec.structs.replace(point, kind="plan") for point in bare]
    (finding,) = check([plans[0]], [plans[1]], "request_rate", Allowed(0.05))
    assert finding.verdict == "slower", "a simulation has no noise"
    assert "(no interval)" not in str(finding)


def measured_points(draw: np.random.Generator, kind: str, levels: Sequence[int], times: float = 1.0) -> list[Point]:
    """Points of a curve over a server whose latencies are drawn."""
    points = []
    for workers in levels:
        draws = service(kind, draw)
        loop = closed_loop(Sizes().of(workers), workers, lambda draws=draws: times * draws())
        points.append(msgspec.structs.replace(made.point(workers), metrics=figures(loop)))
    return points


@pytest.mark.parametrize(
    ("kind", "repeats"),
    [
        ("noisy", 1),
        ("phases", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("fixed", 1), ("noisy", 3), ("exponential", 1), ("correlated", 1))
        ),
    ],
)
def test_noise_fails_the_gate_in_at_most_five_of_a_hundred_cases(kind: str, repeats: int) -> None:
    draw, trials = np.random.Generator(np.random.Philox(key=repeats)), 30
    failed = {"request_rate": 0, "e2e": 0}
    for _ in range(trials):
        new, old = ([each for _ in range(repeats) for each in measured_points(draw, kind, (1, 8))] for _ in "ab")
        for metric in failed:
            failed[metric] += any(each.verdict == "slower" for each in check(new, old, metric, Allowed(0.05)))
    assert max(failed.values()) <= 0.05 * trials + 1


@pytest.mark.parametrize(
    "kind", ["noisy", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("exponential", "correlated"))]
)
def test_noise_at_the_same_offered_rates_fails_the_gate_as_seldom(kind: str) -> None:
    """Open loops beside closed ones, at the rates of the earlier run, as `bench curve --levels-from` measures them."""
    draw, trials = np.random.Generator(np.random.Philox(key=6)), 30
    failed = {"answer_rate": 0, "e2e": 0}

    def run(seed: int) -> list[Point]:
        points = measured_points(draw, kind, (2, 8))
        for rate, seed_of_rate in ((18.0, 2 * seed), (70.0, 2 * seed + 1)):
            loop = open_loop(40, rate, service(kind, draw), seed_of_rate, tokens=lambda: int(draw.integers(20, 61)))
            points.append(msgspec.structs.replace(made.point(4, rate=rate), metrics=figures(loop)))
        return points

    for trial in range(trials):
        new, old = run(2 * trial), run(2 * trial + 1)
        for metric in failed:
            findings = check(new, old, metric, Allowed(0.05))
            assert len(findings) == 4
            failed[metric] += any(each.verdict == "slower" for each in findings)
    assert max(failed.values()) <= 0.05 * trials + 1


def test_loads_that_one_file_alone_has_are_told() -> None:
    allowed = Allowed(0.05)
    old, new = [made.point(4), made.point(4, rate=3.0)], [made.point(4), made.point(4, rate=3.1)]
    told = without_match(new, old, allowed)
    assert "of the new file 3.1/s poisson; of the old file 3/s poisson" in told
    assert "--levels-from" in told
    assert without_match(old, old, allowed) == ""
    workers = without_match([made.point(4), made.point(8)], [made.point(4)], allowed)
    assert workers == "not compared, as the other file has no such load: of the new file 8 workers"


@pytest.mark.parametrize("kind", ["fixed", "noisy"])
def test_a_real_slowdown_fails_the_gate(kind: str) -> None:
    draw, trials, refused = np.random.Generator(np.random.Philox(key=4)), 20, 0
    for _ in range(trials):
        new, old = (measured_points(draw, kind, (8, 16), times) for times in (1.35, 1.0))
        refused += any(finding.verdict == "slower" for finding in check(new, old, "request_rate", Allowed(0.05)))
    assert refused >= 0.9 * trials


def test_of_latencies_higher_is_worse() -> None:
    slow, fast = made.point(4, latency=0.5), made.point(4, latency=0.25)
    (finding,) = check([slow], [fast], "ttft", Allowed(0.05))
    assert finding.ratio.value < 1, "a made-up point of which the first token comes sooner"
    assert finding.verdict == "passes"
    (other,) = check([fast], [slow], "ttft", Allowed(0.05))
    assert other.verdict == "slower"


def test_other_traffic_and_other_machines_are_not_compared_unless_told() -> None:
    old, traffic, machine = made.point(4), made.point(4, sha256="b" * 64), made.point(4, chip="Another CPU")
    with pytest.raises(ConfigError, match=r"the traffic differs \(bbbbbbbb and aaaaaaaa\).*--other-traffic"):
        check([traffic], [old], "request_rate", Allowed(0.05))
    assert check([traffic], [old], "request_rate", Allowed(0.05, other_traffic=True))
    with pytest.raises(
        ConfigError, match=r"the machines differ \(Another CPU, 2 cores and A CPU, 2 cores\).*--other-machine"
    ):
        check([machine], [old], "request_rate", Allowed(0.05))
    assert check([machine], [old], "request_rate", Allowed(0.05, other_machine=True))
    with pytest.raises(
        ConfigError, match="the two files have no load in common: the old one has ours, typical, 4 workers"
    ):
        check([made.point(8)], [old], "request_rate", Allowed(0.05))


def test_paired_ratios_need_no_other_file() -> None:
    findings = check_pairs(made.compared(0.8), 0.05)
    assert [(finding.metric, finding.verdict) for finding in findings] == [("answer_rate", "slower"), ("e2e", "slower")]
    assert {finding.verdict for finding in check_pairs(made.compared(1.01), 0.05)} == {"passes"}
    with pytest.raises(ConfigError, match="there is no paired ratio of bench compare"):
        check_pairs(made.curve(), 0.05)


def test_a_figure_that_was_named_is_judged_alone() -> None:
    (finding,) = check_pairs(made.compared(0.8), 0.05, "e2e")
    assert (finding.metric, finding.verdict) == ("e2e", "slower")
    with pytest.raises(ConfigError, match="choose one of answer_rate, e2e"):
        check_pairs(made.compared(0.8), 0.05, "ttft")
    with pytest.raises(ConfigError, match="metric='goodput' is not among"):
        check_pairs(made.compared(0.8), 0.05, "goodput")


def test_where_goodput_decided_it_is_judged() -> None:
    """B's latency is 20 % longer, and nobody asked for it: both keep the objective."""
    (finding,) = check_pairs(made.compared_by_goodput(12.0, 12.0), 0.05)
    assert (finding.metric, finding.verdict) == ("goodput", "passes")
    (finding,) = check_pairs(made.compared_by_goodput(12.0, 9.0), 0.05)
    assert (finding.verdict, finding.worse) == ("slower", pytest.approx(0.25))
    assert "goodput differs by -3 [-3.2, -2.8] requests/s from the old one, slower" in str(finding)
    (finding,) = check_pairs(made.compared_by_goodput(12.0, 11.0, reach=1.5), 0.05)
    assert finding.verdict == "undecided"
    (finding,) = check_pairs(made.compared_by_goodput(12.0, 12.0), 0.05, "e2e")
    assert (finding.metric, finding.verdict) == ("e2e", "slower")


def test_goodput_without_a_ratio_of_throughputs_is_in_the_table() -> None:
    section = forest(of_points(made.compared_by_goodput(12.0, 9.0)))
    assert section is not None
    assert section.table is not None
    assert any(row[1] == "goodput: difference in requests/s" for row in section.table.rows)
