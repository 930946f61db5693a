"""bench report, history, check, cost, replay: files in, pages out, and sentences for what cannot be."""

import json
from pathlib import Path

import msgspec
import pytest

from roofline.bench.results.store import append_points, read_points
from roofline.cli.measure import bench_report
from tests.bench.report import made
from tests.command_line import CommandResult, call_roofline


@pytest.fixture
def points(tmp_path: Path) -> Path:
    append_points([*made.curve(), made.point(64, label="too good", share=2.2)], tmp_path / "points.jsonl")
    return tmp_path / "points.jsonl"


def call(*words: object, code: int = 0) -> CommandResult:
    result = call_roofline(["bench", *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def test_report_writes_what_it_is_told_to(points: Path, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("r.html", "r.md", "r.csv")]
    words = ["-o", names[0], "--markdown", names[1], "--csv", names[2], "--title", "a title"]
    words += ["--price", "2", "--price-source", "a list", "--price-date", "2026-11-01"]
    result = call("report", points, *words, "--slo", "e2e=3000,ttft=500")
    assert "6 points · 1 refused" in result.stdout
    assert all(f"written: {name}\n" in result.stdout for name in names)
    assert "refused: too good 1.0 on A CPU, 64 workers: 452 tokens/s" in result.stdout
    html = names[0].read_text()
    assert "<h1>a title</h1>" in html
    assert "later than promised" in html
    assert "USD a million tokens" in html
    assert names[1].read_text().startswith("# a title\n")
    assert len(names[2].read_text().splitlines()) == 7


def test_the_promises_of_mlperf_have_names() -> None:
    assert bench_report._slo("mlperf:llama2-70b-interactive") == bench_report._slo("ttft=450,tpot=40")


def test_what_was_planned_is_not_called_measured(points: Path, tmp_path: Path) -> None:
    planned, page = tmp_path / "plan.jsonl", tmp_path / "r.md"
    call_roofline(["plan", "llama-3.2-1b", "--chip", "mi300x", "--concurrency", "1", "-o", planned])
    call("report", planned, "--markdown", page)
    assert page.read_text().startswith("# 512+256 planned\n")
    assert "llama-3.2-1b on 1 x MI300X, TP 1 x 1 0.1.0, planned |" in page.read_text()
    call("report", planned, points, "--markdown", page)
    assert page.read_text().splitlines()[0].endswith(" measured and planned")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name where the report goes: -o report.html"),
        (["-o", "OUT", "--slo", "speed=3"], "'speed=3' is no limit in ms; write ttft=2000,tpot=200,e2e=30000"),
        (["-o", "OUT", "--slo", "mlperf:llama2"], "did you mean 'mlperf:llama2-70b'"),
        (["-o", "OUT", "--slo", "ttft=-1"], "'ttft=-1' is no limit in ms"),
        (["-o", "OUT", "--slo", "ttft=0"], "'ttft=0' is no limit in ms"),
        (["-o", "OUT", "--price", "2", "--price-date", "2026-11-01"], "a price needs --price-source and --price-date"),
        (["-o", "OUT", "--price", "2", "--price-source", "a"], "a price needs --price-source and --price-date"),
        (["-o", "OUT", "--price-source", "a"], "name what a machine costs: --price 2.5"),
        (["-o", "OUT", "--kwh", "0.3"], "name what a machine costs: --price 2.5"),
        (["-o", "OUT", "--price", "2"], "a price needs --price-source and --price-date"),
        (["-o", "OUT", "--price", "two", "--price-source", "a", "--price-date", "2026-11-01"], "is no price"),
        (
            ["-o", "OUT", "--price", "2", "--price-source", "a", "--price-date", "today"],
            "--price-date 'today' is no day",
        ),
    ],
)
def test_bad_options_are_told(points: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    words = [str(tmp_path / "r.html") if word == "OUT" else word for word in words]
    assert sentence in call("report", points, *words, code=1).stderr
    assert not (tmp_path / "r.html").exists()


def test_files_that_hold_no_points_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("cake\n")
    assert (
        "line 1 is no measured point" in call("report", tmp_path / "a.jsonl", "-o", tmp_path / "r.html", code=1).stderr
    )
    assert "cannot be read" in call("history", tmp_path / "b.jsonl", code=1).stderr


def test_history_prints_a_trend(tmp_path: Path) -> None:
    for day, most in ((1, 5.0), (2, 6.0)):
        point = made.point(4, most=most, version=f"1.{day}", started=f"2026-11-0{day}T00:00:00+00:00")
        append_points([point], tmp_path / "points.jsonl")
    result = call("history", tmp_path / "points.jsonl", "-o", tmp_path / "h.html")
    assert "1.2 [1.15, 1.25]" in result.stdout
    assert "request rate over time" in (tmp_path / "h.html").read_text()
    assert "has no trend" in call("history", tmp_path / "points.jsonl", "--metric", "cake", code=1).stderr


def test_check_fails_a_slower_version(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    append_points(made.curve(), old)
    append_points(made.curve(most=6.0), new)
    assert "passes" in call("check", new, "--against", new).stdout
    result = call("check", new, "--against", old, code=1)
    assert result.stdout.splitlines()[-1] == "6 of 6 loads are slower by more than 5%"
    assert call("check", new, "--against", old, "--at-most", "30%").stdout.count("passes") == 6
    record = json.loads(call("check", new, "--against", old, "--json", code=1).stdout)
    assert (record["slower"], record["at_most"]) == (6, 0.05)
    assert record["findings"][0]["verdict"] == "slower"


def test_check_takes_paired_ratios(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    append_points(made.compared(0.9), pairs)
    assert "2 of 2 loads are slower" in call("check", pairs, code=1).stdout
    assert "0.9 [0.873, 0.927] of the old one" in call("check", pairs, "--at-most", "20%").stdout


def test_check_refuses_what_is_not_comparable(points: Path, tmp_path: Path) -> None:
    old, other = tmp_path / "old.jsonl", tmp_path / "other.jsonl"
    append_points(made.curve(), old)
    append_points(made.curve(sha256="b" * 64), other)
    assert "the traffic differs" in call("check", other, "--against", old, code=1).stderr
    assert call("check", other, "--against", old, "--other-traffic").stdout.count("passes") == 6
    assert "220% of the limit" in call("check", points, "--against", old, code=1).stderr
    assert "no paired ratio" in call("check", old, code=1).stderr
    for wrong in ("5", "x%", "120%"):
        assert "is no share: write it as 5%" in call("check", old, "--against", old, "--at-most", wrong, code=1).stderr


def test_cost_prints_prices_over_load(points: Path, tmp_path: Path) -> None:
    prices = ["--price", "3.6", "--price-source", "a list", "--price-date", "2026-11-01"]
    result = call("cost", points, *prices, "-o", tmp_path / "c.html")
    assert result.stdout.startswith("typical (traffic aaaaaaaa): cost\nPrices: any machine 3.6 USD an hour")
    assert "An answer token is charged as 4 prompt tokens." in result.stdout
    assert "0.543" in result.stdout, "0.001 USD/s / 1840 tokens/s"
    assert "offered load" in (tmp_path / "c.html").read_text()
    other = ["--price", "MI300X=3.6", *prices[2:]]
    assert (
        "no point has both a price and tokens a second (machines: A CPU)" in call("cost", points, *other, code=1).stderr
    )
    trained = tmp_path / "trained.jsonl"
    append_points([msgspec.structs.replace(each, counts=None) for each in read_points(points)], trained)
    assert "no point has answers whose tokens could have a cost" in call("cost", trained, *prices, code=1).stderr
    assert "a price needs --price-source" in call("cost", points, "--price", "2", code=1).stderr
    assert "name what a machine costs: --price 2.5" in call("cost", points, code=1).stderr


BOUGHT = ["--price-capex", "147825", "--price-years", "5", "--price-utilisation", "0.5", "--kwh", "0.25"]
DATED = ["--price-source", "an invoice", "--price-date", "2026-11-01"]


def test_cost_of_a_bought_machine(points: Path) -> None:
    result = call("cost", points, *BOUGHT, *DATED)
    assert "any machine 147,825 USD once, over 5 years, in use for 50% of the hours: 6.75 USD" in result.stdout
    assert "of it capital" in result.stdout
    assert "100%" in result.stdout
    usage = call("cost", points, *BOUGHT[:5], "1.5", *BOUGHT[6:], *DATED, code=2).stderr
    assert "--price-utilisation=1.5 cannot be used: give a number, at least 0.01 and at most 1" in usage


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (BOUGHT[:4], "--price-capex needs --price-years, --price-utilisation and --kwh: its owner pays for these"),
        (BOUGHT[:6], "--price-capex needs --price-years, --price-utilisation and --kwh"),
        (["--price", "2", *BOUGHT[2:4]], "--price-years and --price-utilisation are of bought machines"),
        (["--price", "2", *BOUGHT], "any machine has both --price and --price-capex: a machine is rented or bought"),
        (["--price", "2", "--pue", "1.2"], "--pue 1.2 multiplies electricity: name its price with --kwh"),
        (["--price-capex", "2k", *BOUGHT[2:]], "--price-capex '2k' is no price: write USD of the machine"),
    ],
)
def test_prices_that_do_not_fit_together_are_told(points: Path, words: list[str], sentence: str) -> None:
    assert sentence in call("cost", points, *words, *DATED, code=1).stderr


def test_replay_draws_points_of_ours(points: Path, tmp_path: Path) -> None:
    result = call("replay", "flywheel", "--points", points, "-o", tmp_path / "f.html", "--markdown", tmp_path / "f.md")
    assert "MK1 Flywheel" in result.stdout
    assert "refused: too good" in result.stdout
    assert "measured here" in (tmp_path / "f.html").read_text()
    assert "| ours 1.0, m, 4 workers |" in (tmp_path / "f.md").read_text()
    assert "the nearest form: roofline bench curve" in call("replay", "flywheel").stdout
    assert "mlc-amd" in call("replay", "mlc", code=1).stderr
