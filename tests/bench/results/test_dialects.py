"""The same events in the definitions of other tools."""

import pytest

from roofline.bench.results.dialects import DIALECTS, recompute
from roofline.bench.results.metrics import figures
from roofline.common.errors import ConfigError
from tests.bench.results.events import MS, request, run

# A chat: the role comes 20 ms after the request, reasoning 30 ms after it, text 50 ms after it; then 10 ms a part.
ONE = request(
    at=100,
    first=30,
    gap=10,
    tokens=6,
    scheduled=60,
    first_byte=120 * MS,
    first_reasoning=130 * MS,
    first_text=150 * MS,
)
RUN = run([ONE] * 5, begin=0, end=200)


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("vllm", {"ttft": 20, "tpot": 10, "e2el": 80, "itl": 10}),
        (
            "guidellm",
            {
                "time_to_first_token": 30,
                "time_per_output_token": 80 / 6,
                "inter_token_latency": 10,
                "request_latency": 80,
            },
        ),
        ("aiperf", {"time_to_first_token": 30, "inter_token_latency": 10, "request_latency": 80}),
        (
            "inference-perf",
            {"time_to_first_token": 50, "time_per_output_token": 10, "normalized_time_per_output_token": 80 / 6},
        ),
        ("mlperf", {"first_token_latency": 70, "time_per_output_token": 10, "sample_latency": 120}),
    ],
)
def test_each_tool(name, means):
    metrics = recompute(RUN, name)
    assert {key: metrics[key].mean for key in means} == pytest.approx(means)
    assert DIALECTS[name].notes


def test_windows_differ():
    """Others divide by the time from the first request to the last end, we by the time that a round or a lap takes."""
    for name in DIALECTS:
        assert recompute(RUN, name)["output_throughput"].value == pytest.approx(30 / 0.08)
    later = request(at=200, first=30, gap=10, tokens=6)
    two = run([ONE, later], end=280)
    assert recompute(two, "vllm")["output_throughput"].value == pytest.approx(12 / 0.18)
    assert figures(two)["answer_rate"].value == pytest.approx(12 / 0.16 * 0.8), (
        "busy for 80 of 100 ms, as a loop of one"
    )


def test_guidellm_counts_a_request_as_often_as_it_has_tokens():
    metrics = recompute(
        run([request(at=0, first=40, gap=10, tokens=2), request(at=0, first=40, gap=20, tokens=9)]), "guidellm"
    )
    assert metrics["inter_token_latency"].mean == pytest.approx((10 + 8 * 20) / 9)
    assert metrics["time_per_output_token"].mean == pytest.approx((50 + 200) / 11)
    assert metrics["time_per_output_token"].p50 == pytest.approx(200 / 9)


def test_mlperf_is_valid_only_in_ten_minutes():
    assert recompute(RUN, "mlperf")["valid llama2-70b"].value == 0
    late = request(at=600_100, first=30)
    assert recompute(run([ONE, late]), "mlperf")["valid llama2-70b"].value == 1
    slow = request(at=600_100, first=3000)
    assert recompute(run([ONE, slow]), "mlperf")["valid llama2-70b"].value == 0


def test_a_tool_that_is_not_here():
    with pytest.raises(ConfigError, match="no dialect 'vlm'; did you mean 'vllm'"):
        recompute(RUN, "vlm")


def test_nothing_completed():
    for name in ("ours", *DIALECTS):
        assert not any(figure.n for figure in recompute(run([], end=100), name).values())


def test_parts_of_a_request_that_failed_are_in_no_tools_throughput():
    broken = request(at=100, first=30, gap=10, tokens=6, error="lost", end=None)
    for name in DIALECTS:
        assert recompute(run([ONE, broken], end=200), name)["output_throughput"].value == pytest.approx(6 / 0.08)


def test_guidellms_latency_ends_with_the_stream():
    late = request(at=0, first=40, gap=10, tokens=2, end=70 * MS)
    assert recompute(run([late]), "guidellm")["request_latency"].mean == pytest.approx(70)
    assert recompute(run([late]), "vllm")["e2el"].mean == pytest.approx(50)
