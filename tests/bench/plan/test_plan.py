"""Plans: figures by hand, the closed loop on a virtual clock, the command."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.backends.gpu.backend import RESERVED
from roofline.backends.simulated.calibration import Calibration
from roofline.bench.plan.arrangements import Arrangement, Place, arrangements, place_of
from roofline.bench.plan.assumptions import (
    HOST_ARITHMETIC,
    HOST_READS,
    HOST_SPREADS,
    SPREADS,
    assumed,
    in_words,
    spread,
)
from roofline.bench.plan.closed_loop import Lengths
from roofline.bench.plan.plan import Case, Price, most_simulated, plan, run_copy, shape_of, with_queue
from roofline.bench.report import cost, throughput
from roofline.bench.report.cost import Prices
from roofline.bench.report.gather import gather
from roofline.bench.report.throughput import Slo
from roofline.bench.report.words import digits
from roofline.bench.results.store import read_points
from roofline.bench.traffic.traffic import Traffic, TrafficRequest, write_traffic
from roofline.bundle import load
from roofline.common.errors import CapacityError, ConfigError
from roofline.common.units import human_seconds
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import PAGE_TOKENS
from roofline.program.rates import ProgramSpeeds
from tests.command_line import CommandResult, call_roofline
from tests.models import latent_config

REPOSITORY = Path(__file__).parents[3]
STEP = (2048, 256)
CASE = Case("llama-3.2-1b", "", "MI300X", 1, (1, 8), (Lengths(128, 32),), "128+32", STEP)


@functools.cache
def ways(model: str, dtype: str, chip: str, count: int, longest: int = 768) -> list[Arrangement]:
    return arrangements(*shape_of(model, dtype), place_of(chip, count, None), longest, STEP)


@pytest.mark.parametrize("chip", ["", "H100 SXM"])
def test_the_cache_of_compressed_rows_is_counted_as_a_load_takes_it(tmp_path: Path, chip: str) -> None:
    """On this machine, whose roofs are made up, and on a GPU."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(latent_config.DEEPSEEK), encoding="utf-8")
    case = replace(CASE, model=str(path), chip=chip, concurrency=(1,), lengths=(Lengths(16, 4),))
    roofs = Roofs(None, 1e12, 1e11, ((1 << 30, 1e11),), threads=1, chip="a host")
    host = Place(name="a host", product=None, count=1, memory=1 << 34, roofs=roofs)
    planned = plan(case, place_of(chip, 1, None) if chip else host, Calibration())
    assert planned.kv_token_bytes == latent_config.ROW_BYTES
    if chip:  # a load there is in tests/backends/gpu/test_latent_models.py
        return
    executable = load(str(path), weights="random:1", text=False, cache_tokens=64, max_model_len=64).executable
    assert executable.page_bytes == PAGE_TOKENS * planned.kv_token_bytes
    executable.close()


@pytest.mark.slow
def test_405b_lies_on_eight_and_in_8_bits_on_four() -> None:
    fitting = ways("llama-3.1-405b", "f16", "mi300x", 8)
    assert [each.name for each in fitting] == ["TP 8 x 1"]
    (shared,) = fitting
    assert shared.weights == pytest.approx(811.7e9 / 8, rel=0.01)
    room = 192 * 2**30 - shared.weights - shared.workspace
    # 126 layers, keys and values of one of the 8 heads of 128 on each device, two bytes each.
    assert shared.cache_tokens == room // (16 * 126 * 2 * 128 * 2) * 16
    fitting = ways("llama-3.1-405b", "fp8", "mi300x", 8)
    assert [each.name for each in fitting] == ["TP 4 x 2", "TP 8 x 1"]
    # Of seven links of 64 GB/s to a device and as many from it.
    assert (fitting[0].link_bytes_per_s, fitting[1].link_bytes_per_s) == (
        pytest.approx(3 * 64e9),
        pytest.approx(7 * 64e9),
    )


@pytest.mark.slow
def test_a_plan_leaves_memory_to_the_driver() -> None:
    """405B in 16 bits took 190.6 of the 192 GiB of each of four MI300X: no driver would have left that."""
    for way in ways("llama-3.1-405b", "f16", "mi300x", 8) + ways("llama-3.1-70b", "", "MI300X", 1):
        used = way.weights + way.workspace + way.cache_tokens * way.split.parts[0].needs.token
        left_to_the_driver = RESERVED * way.place.memory
        assert way.workspace > left_to_the_driver
        assert used <= way.place.memory
    assert [way.devices for way in ways("llama-3.1-405b", "f16", "mi300x", 8)] == [8]


def test_each_arrangement_has_its_own_rate_of_exchanges() -> None:
    shown = call("llama-3.2-1b", "--chip", "mi300x", "--count", 8, "--concurrency", 1, "--prompt", 64, "--answer", 8)
    assert "64.0 GB/s (TP 2 x 4), 192.0 GB/s (TP 4 x 2), 448.0 GB/s (TP 8 x 1)" in shown.stdout


def test_a_copy_on_several_hosts_exchanges_over_their_network() -> None:
    """Links of the data sheet join the devices of a host, and no others."""
    shape = shape_of("llama-3.2-1b", "")
    rates = {way.devices: way for way in arrangements(*shape, place_of("MI300X", 32, None), 768, STEP)}
    assert [rates[count].link_bytes_per_s for count in (8, 16, 32)] == pytest.approx([448e9, 50e9, 50e9])
    assert [rates[count].crosses_hosts for count in (8, 16)] == [False, True]
    elsewhere = {way.devices: way for way in arrangements(*shape, place_of("MI300X", 8, None, 4, 7e9), 768, STEP)}
    assert [elsewhere[count].link_bytes_per_s for count in (4, 8)] == pytest.approx([192e9, 7e9])
    cards = {way.devices: way for way in arrangements(*shape, place_of("L40S", 16, None), 768, STEP)}
    assert [cards[count].link_bytes_per_s for count in (8, 16)] == [None, 50e9]


def test_a_copy_on_several_hosts_says_what_was_assumed_of_the_network() -> None:
    words = ("llama-3.2-1b", "--chip", "mi300x", "--count", 16, "--devices", 16, "--concurrency", 1)
    shown = call(*words, "--prompt", 64, "--answer", 8, "--network", 12.5).stdout
    assert "at most 12.5 GB/s (TP 16 x 1)" in shown
    assert "TP 16 x 1: over several hosts of 8 (--per-host), whose network is assumed to give a device 12.5" in shown
    assert "public figures of such steps" not in shown


def test_a_million_devices_are_copies() -> None:
    place = place_of("MI300X", 1_000_000, None)
    found = arrangements(*shape_of("llama-3.2-1b", ""), place, 768, STEP)
    assert max(way.devices for way in found) <= 64
    assert all(way.devices * way.replicas == 1_000_000 for way in found)


def test_requests_that_only_wait_are_not_simulated() -> None:
    """What is computed from a full copy is what the real scheduler does with as many requests."""
    case = replace(CASE, step=(64, 8), lengths=(Lengths(32, 16), Lengths(48, 8)))
    (arrangement,) = arrangements(*shape_of("llama-3.2-1b", ""), place_of("MI300X", 1, None), 768, case.step)
    assert [most_simulated(running) for running in (8, 64, 256, 1024)] == [32, 256, 1024, 2048]
    real = run_copy(case, arrangement, 32, Calibration())
    assert not real.simulated
    assert real.requests_per_s == pytest.approx(real.tokens_per_s / 12, rel=0.02), "answers of 16 and of 8 in turn"
    estimate = with_queue(run_copy(case, arrangement, 16, Calibration()), 32)
    assert estimate.tokens_per_s == pytest.approx(real.tokens_per_s, rel=0.03)
    for figure in ("ttft", "seconds"):
        times = [np.mean([getattr(each, figure) for each in run.requests]) for run in (estimate, real)]
        assert times[0] == pytest.approx(times[1], rel=0.05)
    many = run_copy(case, arrangement, 100_000, Calibration())
    assert (many.concurrency, many.simulated) == (100_000, 16)
    assert many.requests[0].ttft == pytest.approx(100_000 / real.requests_per_s, rel=0.05)


def test_a_cpu_reaches_what_cpus_reached() -> None:
    """Shares and ranges are those of the rows of our own engine that were recorded on CPUs."""
    rows = json.loads((REPOSITORY / "benchmarks/records/2026-11-21-peers.json").read_text())["rows"]
    shares: dict[str, list[float]] = {"prefill": [], "decode": [], "serve": []}
    for name, row in rows.items():
        kind = name.partition("/")[2].partition("_")[0]
        if kind in shares:
            shares[kind].append(row["engines"]["roofline"]["share_of_roof"])
    assert assumed(host=True).reads == pytest.approx(np.median(shares["decode"]), abs=0.005)
    assert assumed(host=True).arithmetic == pytest.approx(np.median(shares["prefill"]), abs=0.005)
    ends = {
        "prefill": (HOST_ARITHMETIC / max(shares["prefill"]), HOST_ARITHMETIC / min(shares["prefill"])),
        "decode": (HOST_READS / max(shares["decode"]), HOST_READS / min(shares["decode"])),
        # The steps of a service reach between the two shares.
        "serving": (HOST_READS / max(shares["serve"]), HOST_ARITHMETIC / min(shares["serve"])),
    }
    for kind, (low, high) in ends.items():
        assert HOST_SPREADS[kind] == pytest.approx((low, high), abs=0.006)  # type: ignore[index]
        assert spread(assumed(host=True), kind, 1, 4.5) == HOST_SPREADS[kind]  # type: ignore[arg-type,index]
    assert spread(assumed(reads=0.5, host=True), "decode", 1, 4.5) is None


def test_a_plan_for_this_machine_says_the_evidence_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    roofs = Roofs(int8_ops=1e12, bf16_flops=1e11, f32_flops=1e11, reads=((1 << 30, 5e10),))
    monkeypatch.setattr("roofline.backends.cpu.roofs.stored_roofs", lambda: roofs)
    shown = call("smollm2-135m", "--dtype", "q4_1", "--concurrency", 1, "--prompt", 64, "--answer", 8).stdout
    assert "assumed: 47% of the read roof, 57% of the roof of arithmetic" in shown
    assert "as measured on CPUs" in shown
    assert "all rows of ours on CPUs lie within" in shown
    assert "public figures" not in shown


def test_a_chip_without_bf16_is_said_to_compute_in_f16() -> None:
    for chip, rate in (("T4", 65e12), ("V100S", 130e12)):
        (way,) = ways("llama-3.2-1b", "", chip, 1)
        assert way.arithmetic == ("f16", pytest.approx(rate))
    assert ways("llama-3.2-1b", "", "MI300X", 1)[0].arithmetic[0] == "bf16"


def test_what_does_not_fit_is_refused() -> None:
    assert [each.name for each in ways("mixtral-8x7b", "", "A100 80GB", 2)] == ["TP 2 x 1"]
    with pytest.raises(CapacityError, match="smaller format"):
        ways("mixtral-8x7b", "f16", "RTX 4090", 2)
    with pytest.raises(ConfigError, match="shorten prompt or answer"):
        ways("llama-3-8b", "", "MI300X", 1, longest=9000)


def test_one_request_at_a_time_is_prefill_and_decode() -> None:
    arrangement = ways("llama-3.2-1b", "", "MI300X", 1)[0]
    run = run_copy(CASE, arrangement, 1, Calibration())
    speeds = ProgramSpeeds(arrangement.split.parts[0].program, arrangement.place.roofs)
    prefill = speeds.prefill(128).seconds
    decode = sum(speeds.decode(1, context).seconds for context in range(129, 160))
    assert len(run.requests) == 4
    for request in run.requests:
        assert request.ttft == pytest.approx(prefill, rel=1e-6)
        assert request.tpot == pytest.approx(decode / 31, rel=1e-6)
    assert run.tokens_per_s == pytest.approx(32 / (prefill + decode), rel=1e-6)
    assert run.stats.limit_seconds == pytest.approx(run.seconds, rel=1e-6)


def test_a_curve_says_its_share_of_the_limit() -> None:
    case = replace(CASE, concurrency=(1, 8, 64), price=Price(3.6, "a list", "2026-01-01"))
    place = place_of("MI300X", 1, None)
    answer = plan(case, place, assumed(reads=0.5, arithmetic=0.5))
    rates = [point.tokens_per_s for point in answer.points]
    assert rates == sorted(rates)
    assert [point.share for point in answer.points] == pytest.approx([0.5] * 3)
    for point in answer.points:
        assert point.limit_tokens_per_s == pytest.approx(2 * point.tokens_per_s)
        assert point.usd_per_mtok == pytest.approx(3.6 / 3600 / point.tokens_per_s * 1e6)
        assert point.requests >= 4 * point.concurrency
    assert answer.points[0].bound == "memory"
    faster = plan(case, place, assumed(reads=1.0, arithmetic=1.0))
    assert faster.points[2].tokens_per_s == pytest.approx(2 * rates[2])
    assert answer.kv_token_bytes == 16 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("dtype", "devices", "reads", "arithmetic", "link_us"),
    [("", 1, 0.62, 0.55, 0), ("q8_0", 2, 0.52, 0.55, 25), ("q4_0", 8, 0.56, 0.22, 75)],
)
def test_shares_are_of_the_kind_of_step_and_of_the_format(
    dtype: str, devices: int, reads: float, arithmetic: float, link_us: int
) -> None:
    (way,) = (each for each in ways("llama-3.1-8b", dtype, "MI300X", devices) if each.devices == devices)
    calibration = assumed(bits=way.weight_bits, devices=devices)
    assert (calibration.reads, calibration.arithmetic) == (reads, arithmetic)
    assert round(calibration.link_seconds * 1e6) == link_us


def test_each_sequence_of_a_step_takes_what_was_asked_for() -> None:
    """Steps that generate: 250 us for each of the 8 sequences, once a token."""
    case, place = replace(CASE, concurrency=(8,)), place_of("MI300X", 1, None)
    plain, slower = (plan(case, place, assumed(reads=0.6, row_us=row_us)).points[0] for row_us in (0, 250))
    assert plain.tpot is not None
    assert slower.tpot is not None
    assert slower.tpot.mean - plain.tpot.mean == pytest.approx(8 * 250e-6, rel=0.2)
    assert "250.0 us a row" in in_words(slower.calibration)


def test_each_figure_has_a_range_of_its_kind() -> None:
    case = replace(CASE, concurrency=(1, 4, 64))
    alone, few, many = plan(case, place_of("MI300X", 1, None), assumed()).points
    for point in (alone, few, many):
        assert point.tpot is not None
        low, high = SPREADS["serving", False, False]
        assert point.rate_range == pytest.approx((point.tokens_per_s / high, point.tokens_per_s / low))
        prefill = SPREADS["prefill", False, False] if point is alone else (low, high)
        assert point.ttft_range == pytest.approx([point.ttft.p50 * each for each in prefill])
        decode = SPREADS["decode", False, False] if point is not many else (low, high)
        assert point.tpot_range == pytest.approx([point.tpot.p50 * each for each in decode])
    # What was asked for, or measured, has no range of public figures.
    (point,) = plan(replace(case, concurrency=(1,)), place_of("MI300X", 1, None), assumed(reads=0.6)).points
    assert (point.rate_range, point.ttft_range, point.tpot_range) == (None, None, None)


def test_ranges_are_printed_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "points.jsonl"
    words = ("llama-3.2-1b", "--chip", "mi300x", "--concurrency", 1, "--prompt", 64, "--answer", 8)
    shown = call(*words, "-o", out).stdout
    (point,) = json.loads(call(*words, "--json").stdout)["points"]
    low, high = point["tokens_per_s_range"]
    assert low < point["tokens_per_s"] < high
    assert f"{point['tokens_per_s']:,.1f} ({float(f'{low:.2g}'):,.0f} to {float(f'{high:.2g}'):,.0f})" in shown
    (kept_point,) = read_points(out)
    assert (kept_point.extra["answer_rate_low"], kept_point.extra["answer_rate_high"]) == (low, high)
    assert " to " not in call(*words, "--reads", 0.6).stdout.partition("assumed:")[0]


@pytest.mark.parametrize(("devices", "rate"), [(2, 200e9), (4, 50e9), (8, 50e9)])
def test_dies_exchange_over_the_links_of_their_package_or_between_packages(devices: int, rate: float) -> None:
    (way,) = (each for each in ways("llama-2-7b", "f16", "MI250", devices) if each.devices == devices)
    assert way.link_bytes_per_s == rate


def test_copies_share_the_requests() -> None:
    place = place_of("MI300X", 2, None)
    answer = plan(replace(CASE, count=2, devices=1, concurrency=(3,)), place, assumed())
    (point,) = answer.points
    alone = [run_copy(CASE, answer.arrangements[0], share, assumed()).tokens_per_s for share in (2, 1)]
    assert point.tokens_per_s == pytest.approx(sum(alone))
    with pytest.raises(ConfigError, match="3 devices cannot share"):
        plan(replace(CASE, count=2, devices=3), place, assumed())


def call(*words: object) -> CommandResult:
    return call_roofline(["plan", *words])


def test_the_command_tells_what_was_assumed_and_keeps_points(tmp_path: Path) -> None:
    out = tmp_path / "points.jsonl"
    words = ("llama-3.2-1b", "--chip", "mi300x", "--count", 2, "--concurrency", "1,16", "--prompt", 64, "--answer", 8)
    result = call(*words, "--price", 2.5, "--price-source", "a list", "-o", out)
    assert result.exit_code == 0, result.stderr
    for part in ("TP 1 x 2", "TP 2 x 1", "62%/55%", "TTFT p50", "USD/Mtok", "MI300X data sheet", "2.5 USD", "a list"):
        assert part in result.stdout
    points = read_points(out)
    assert [(point.kind, point.load and point.load.concurrency) for point in points] == [("plan", 1), ("plan", 16)] * 2
    first = points[0]
    assert first.limit is not None
    assert first.cost is not None
    assert (first.system.devices_per_replica, first.cost.usd_per_hour) == (1, 5.0)
    assert "62%" in str(first.extra["shares"])
    assert "simulated" in first.validity.flags[0]
    record = json.loads(call(*words, "--json").stdout)
    value = first.metrics["answer_rate"].value
    assert record["points"][0]["tokens_per_s"] == pytest.approx(value)
    assert record["assumed"]["reads"] == 0.62


WORDS = ("llama-3.1-8b", "--chip", "mi300x", "--count", 2, "--concurrency", "1,64", "--prompt", 64, "--answer", 8)


@pytest.fixture(scope="module")
def planned_points() -> list[dict[str, Any]]:
    return json.loads(call(*WORDS, "--json").stdout)["points"]


@pytest.mark.parametrize("columns", [80, pytest.param(100, marks=pytest.mark.slow)])
def test_a_terminal_shows_every_figure_whole(
    columns: int, planned_points: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then writes as to a terminal
    shown = re.sub(r"\x1b\[[0-9;]*m", "", call(*WORDS).stdout)
    assert max(map(len, shown.splitlines())) <= columns
    for point in planned_points:
        times = (point["ttft_s"]["p50"], point["ttft_s"]["p95"], point["tpot_s"]["p50"], point["tpot_s"]["p95"])
        rates = (point["tokens_per_s"], point["tokens_per_s"] / point["concurrency"])
        rows = [line for line in shown.splitlines() if line.startswith(f"{point['arrangement']} ")]
        for figure in (*(f"{rate:,.1f}" for rate in rates), *map(human_seconds, times)):
            assert any(f" {figure} " in f"{row} " for row in rows), figure


def test_points_of_a_plan_are_in_charts_and_in_cost(tmp_path: Path) -> None:
    out = tmp_path / "points.jsonl"
    words = ("llama-3.2-1b", "--chip", "mi300x", "--concurrency", "1,4,16", "--prompt", 64, "--answer", 8)
    assert call(*words, "-o", out).exit_code == 0
    gathered = gather([out])
    charts = {chart.title: chart for section in throughput.sections(gathered, Slo()) for chart in section.charts}
    rates = [point.metrics["request_rate"].value for point in gathered.points]
    assert [mark.y for mark in charts["throughput over latency"].series[0].marks] == rates
    assert len(charts["tokens/s of answers"].series[0].marks) == 3
    (section,) = cost.sections(gathered, Prices(usd_per_hour={"": 3.6}, source="a list", date="2026-11-01"))
    assert section.table is not None
    blended = [1e6 * 0.001 / (9 * (point.metrics["answer_rate"].value or 0)) for point in gathered.points]
    assert [row[3] for row in section.table.rows] == [digits(usd) for usd in blended], "64 + 8 are 9 times 8"


def test_a_plan_whose_points_cannot_be_written_is_told_all_the_same() -> None:
    result = call("llama-3.2-1b", "--chip", "mi300x", "--prompt", 64, "--answer", 8, "-o", "/dev/full")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "roofline: /dev/full: the disk is full")
    assert "TTFT p50" in result.stdout


def test_traffic_gives_the_lengths(tmp_path: Path) -> None:
    requests = [TrafficRequest(prompt="a", prompt_tokens=n, max_tokens=m) for n, m in ((40, 4), (80, 8))]
    traffic = Traffic(name="mine", version=3, seed=0, stop="ignored", source="a test", requests=requests)
    write_traffic(traffic, tmp_path / "mine.jsonl")
    words = ("llama-3.2-1b", "--chip", "mi300x", "--traffic", tmp_path / "mine.jsonl", "-o", tmp_path / "points")
    assert "mine@3" in call(*words, "--concurrency", 2).stdout
    (point,) = read_points(tmp_path / "points")
    assert point.workload is not None
    assert (point.workload.sha256, point.workload.prompt.mean) == (traffic.sha256, 60)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((), "name a model"),
        (("llama-3-8b", "--chip", "L40"), "did you mean 'L40S'"),
        (("llama-3-8b", "--chip", "Apple M2"), "no rate of arithmetic of Apple M2"),
        (("llama-3-8b", "--count", "2"), "name one with --chip"),
        (("llama-3-8b", "--chip", "mi300x", "--concurrency", "1,x"), "whole numbers"),
        (("llama-3-8b", "--chip", "mi300x", "--calibrate"), "leave --chip out"),
        (
            ("llama-3-8b", "--chip", "mi300x", "--traffic", "t.jsonl", "--prompt", "9"),
            "leave --prompt and --answer out",
        ),
        (
            ("llama-3-8b", "--chip", "mi300x", "--devices", "3"),
            "where there are 1 (--count), nor more than 64 at all; 1 can",
        ),
        (("llama-3-8b", "--chip", "mi300x", "--price-source", "me"), "--price"),
        (("llama-3-8b", "--chip", "mi300x", "--reads", "1.5"), "at least 0.01 and at most 1"),
        (("llama-3-8b", "--chip", "mi300x", "--memory", "1e30"), "at least 1 and at most 65,536"),
        (("llama-3-8b", "--chip", "mi300x", "--count", "2000000"), "at most 100,000"),
        (("llama-3-8b", "--chip", "mi300x", "--concurrency", "1000000000"), "give 1 to 1,000,000 requests at a time"),
        (("llama-3-8b", "--chip", "mi300x", "--count", "8", "--network", "10"), "of devices of several hosts"),
        (("llama-3-8b", "--per-host", "4"), "--per-host are of a chip"),
        (("llama-3-8b", "--chip", "mi300x", "--prompt", "9000"), "longer than the 8,192 positions"),
        (("llama-3-8b", "--chip", "mi300x", "--fleet", "f.toml"), "leave the other options out"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(words: tuple[str, ...], match: str) -> None:
    result = call(*words)
    assert result.exit_code != 0
    assert match in result.stderr
