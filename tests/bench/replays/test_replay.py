"""Published figures: every one with a source, its limit by the data sheet, and points of ours beside them."""

import json
import re
from html import escape
from importlib import resources
from pathlib import Path

import pytest

from roofline.bench.replays.own import read_own
from roofline.bench.replays.published import NAMES, limit_of, publication
from roofline.bench.replays.replay import replay
from roofline.bench.report.draw import NARROW, draw
from roofline.bench.report.page import page
from roofline.bench.results.store import append_points
from roofline.common.errors import ConfigError
from tests.bench.report import made


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    published = publication(name)
    rows = [row for chart in published.charts for row in chart.rows]
    assert rows
    assert all(row.source and row.value > 0 for row in rows)
    assert published.again.startswith("roofline bench")
    text = (resources.files("roofline.bench.replays") / f"{name}.toml").read_text("utf-8")
    assert len(re.findall(r"\bvalue = ", text)) == len(rows)
    names = re.findall(r"^(\w+) = ", text.partition("[sources]")[2].partition("[[chart]]")[0], re.M)
    used = set(re.findall(r'source = "(\w+)"', text))
    assert used <= set(names)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="mlc-amd"):
        publication("mlc")


def shares(name: str, chart: int) -> dict[str, float]:
    published = publication(name).charts[chart]
    return {
        row.name or f"{row.series} {row.sequences}": limit.share
        for row in published.rows
        if (limit := limit_of(row, published.unit)) is not None
    }


def test_limits_of_decoding_agree_with_arithmetic_by_hand() -> None:
    """Llama 2 7B in fp16: 13.2 GB of weights at 1638.4 GB/s take 8.07 ms; in 4 bits about 3.7 GB at 960 GB/s 3.9 ms,
    without the cache of 257 tokens, 0.13 GB."""
    decode = shares("rocm-llm-opt", 1)
    assert decode["paged attention, tuned GEMMs 1"] == pytest.approx(8.07 / 13, rel=0.005)
    assert decode["eager 1"] == pytest.approx(8.07 / 33, rel=0.005)
    mlc = shares("mlc-amd", 0)
    assert mlc["7B on RX 7900 XTX"] == pytest.approx(0.507, rel=0.05)
    assert mlc["13B on RTX 4090"] == pytest.approx(0.65, rel=0.05)
    assert mlc["7B on RTX 4090, again"] == pytest.approx(0.755, rel=0.05)


def test_limits_of_prefill_and_of_several_devices() -> None:
    """27.6 TFLOP at 181 TFLOP/s take 152 ms, of which the head's rows but one are not needed."""
    prefill = shares("rocm-llm-opt", 0)
    assert prefill["flash attention 2, tuned GEMMs 1"] == pytest.approx(0.601, rel=0.03)
    assert prefill["flash attention 2, tuned GEMMs 16"] == pytest.approx(0.548, rel=0.03)
    dies = shares("rocm-llm-opt", 2)
    assert dies["4 dies 1"] == pytest.approx(0.36, rel=0.03)
    assert dies["8 dies 1"] == pytest.approx(0.22, rel=0.03)
    assert shares("dell-mi300x", 0)["vLLM (Oracle) 1"] == pytest.approx(0.34, rel=0.06)


def test_training_is_of_the_peak_of_a_package() -> None:
    training = shares("mosaic-mi250", 0)
    assert training["4 x MI250, October 2023"] == pytest.approx(166 / 362.1)
    assert training["8 x A100 80GB"] == pytest.approx(200 / 312)


def test_nothing_published_exceeds_its_limit_and_ratios_have_none() -> None:
    for name in NAMES:
        for number in range(len(publication(name).charts)):
            assert all(share < 1 for share in shares(name, number).values()), name
    assert shares("flywheel", 0) == {}


@pytest.fixture
def points(tmp_path: Path) -> Path:
    append_points([*made.curve((1, 4)), made.point(8, share=3.0)], tmp_path / "points.jsonl")
    return tmp_path / "points.jsonl"


def test_theirs_ours_and_the_limit_are_drawn(points: Path) -> None:
    report = replay(publication("rocm-llm-opt"), *read_own([points]))
    first, prefill, *_ = report.sections
    published, ours, *_ = first.charts[0].series
    assert [mark.x for mark in ours.marks] == pytest.approx([16, 40]), "% of the limit"
    assert first.charts[0].y.categories[-1] == "here: ours 1.0, m, 4 workers"
    assert len(published.marks) + len(ours.marks) == len(first.charts[0].y.categories)
    assert prefill.title == "prefill of 2048 tokens, Llama 2 7B fp16 on MI210"
    limits = [series for series in prefill.charts[0].series if series.name == "limit"]
    assert [mark.y for mark in limits[0].marks] == pytest.approx([150, 1199, 2398], rel=0.01)
    assert report.sections[-1].title == "measured here"
    assert "300% of the limit" in report.refused[0]
    assert len(page(report)) < 2_000_000


def test_without_points_there_is_nothing_of_ours() -> None:
    report = replay(publication("flywheel"), [])
    assert [section.title for section in report.sections] == ["throughput ratios"]
    assert "roofline bench curve" in report.about
    assert report.sections[0].table is not None
    assert report.sections[0].table.headings == ("what", "published, ratio", "source"), "ratios have no limit"


LATENCY = {
    "schema": "x", "bench": "latency", "device": {"name": "A CPU"}, "model": {"name": "smol"},
    "cells": [
        {
            "cell": "prefill 1 x 256", "new": 1, "limit": {"bound": "compute"},
            "rungs": {"eager": {"ttft": {"median": 0.5}, "tpot": None, "share": 0.25}},
        },
        {
            "cell": "decode 8 x 2", "new": 2, "limit": {"bound": "memory"},
            "rungs": {"paged": {"ttft": {"median": 0.5}, "tpot": {"median": 0.02}, "share": None}},
        },
    ],
}  # fmt: skip
TRAINING = {
    "bench": "train",
    "card": {
        "model": {"name": "mpt-125m"}, "precision": "bf16", "devices": 2, "device": {"name": "A CPU"},
        "flops": {"foundry": {"tflops_per_device": 0.31}}, "speed": {"tokens_per_s": 400.0}, "roof": {"share": 0.4},
    }
}  # fmt: skip


def test_records_of_other_commands_are_read_too(tmp_path: Path, points: Path) -> None:
    (tmp_path / "latency.json").write_text(json.dumps(LATENCY, indent=1))
    (tmp_path / "train.json").write_text(json.dumps(TRAINING))
    own, refused = read_own([tmp_path / "latency.json", tmp_path / "train.json", points])
    assert [(each.name, each.figure, each.share, each.bound) for each in own[2:]] == [
        ("smol, prefill 1 x 256, eager", "500 ms", 0.25, "compute"),
        ("smol, decode 8 x 2, paged", "20 ms a token", None, "memory"),
        ("mpt-125m, bf16", "0.31 TFLOP/s a device, 400 tokens/s", 0.4, "compute"),
    ]
    assert own[1].figure == "240 [233, 247] tokens/s, TPOT 16.7 ms"
    assert len(refused) == 1


@pytest.mark.parametrize(
    "text", ["cake", "{}", '{"bench": "train", "card": {}}', json.dumps({"schema": "x", "bench": "latency"})]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"a\.json"):
        read_own([tmp_path / "a.json"])


def test_shares_stand_in_the_order_of_their_rows(points: Path) -> None:
    report = replay(publication("rocm-llm-opt"), *read_own([points]))
    chart = report.sections[0].charts[0]
    theirs, ours = chart.series
    assert [mark.y for mark in (*theirs.marks, *ours.marks)] == list(range(len(chart.y.categories)))
    assert chart.y.categories[0] == "eager, batch 1: prefill of 2048 tokens, Llama 2 7B fp16 on MI210"
    assert theirs.marks[0].x == pytest.approx(34.9, abs=0.1), "%"
    assert theirs.marks[0].label == "35%"
    assert [mark.trusted for mark in ours.marks] == [True, True]


@pytest.mark.parametrize("name", NAMES)
def test_a_phone_shows_which_row_is_which(name: str) -> None:
    """Names that are too long for it are cut, and no two rows of a chart are called the same after that."""
    for section in replay(publication(name), []).sections:
        for chart in section.charts:
            names = [escape(each, quote=False) for each in chart.y.categories]
            texts = re.findall(r"<text[^>]*>([^<]+)</text>", draw(chart, NARROW))
            shown = [text for text in texts if any(each.startswith(text.removesuffix("…")) for each in names)]
            assert len(set(shown)) == len(names), chart.title


def test_curves_over_sequences_have_a_limit_for_each_arrangement() -> None:
    _, prefill, decode, dies, _ = replay(publication("rocm-llm-opt"), []).sections
    assert [series.name for series in decode.charts[0].series][-1] == "limit"
    assert [(mark.x, mark.y) for mark in decode.charts[0].series[0].marks] == [(1, 33), (8, 35), (16, 35)]
    assert [mark.y for mark in decode.charts[0].series[-1].marks] == pytest.approx([8.07, 8.11, 8.16], abs=0.01), "ms"
    named = {series.name: series for series in dies.charts[0].series}
    assert list(named) == ["4 dies", "8 dies", "limit of 4 dies", "limit of 8 dies"]
    assert named["limit of 8 dies"].look == named["8 dies"].look != named["4 dies"].look
    assert named["limit of 8 dies"].dashed
    assert all(
        4 < mark.y / other.y < 10
        for mark, other in zip(named["8 dies"].marks, named["limit of 8 dies"].marks, strict=True)
    )
    assert prefill.table is not None
    assert prefill.table.rows[1][:4] == ("eager, batch 8", "3,509", "1,199", "34%")


def test_rows_beside_each_other_have_their_values_and_limits() -> None:
    report = replay(publication("mlc-amd"), [])
    chart = report.sections[1].charts[0]
    named = {series.name: series for series in chart.series}
    assert list(named) == ["MLC", "MLC, weeks later", "ExLlama", "limit by the data sheet"]
    assert [(mark.x, mark.y) for mark in named["ExLlama"].marks] == [(152.6, 11), (93.9, 12)]
    assert len(named["limit by the data sheet"].marks) == 13
    assert chart.x.least == 0
    ratios = replay(publication("flywheel"), []).sections[0].charts[0]
    assert [series.name for series in ratios.series] == ["stated"]
    assert [(rule.value, rule.text) for rule in ratios.rules] == [(1.0, "as fast")]
    assert chart.rules == ()


def test_a_row_without_a_count_is_of_one_device() -> None:
    row = publication("mlc-amd").charts[0].rows[0]
    assert (row.count, row.sequences, row.package) == (1, 1, False)


def test_a_published_figure_has_one_limit_wherever_it_is_told() -> None:
    """405B at 64 requests: the replay's limit is the one that the guide of plans sets beside the same figure."""
    (row,) = [row for row in publication("dell-mi300x").charts[0].rows if row.sequences == 64]
    limit = limit_of(row, "tokens/s")
    assert limit is not None
    guide = (Path(__file__).parents[3] / "docs/how-to/plan.md").read_text()
    (line,) = [line for line in guide.splitlines() if "serving 64, 128 + 128" in line]
    assert f"| {limit.value:,.0f} tokens/s |" in line
