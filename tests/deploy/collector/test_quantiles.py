"""Percentiles of histograms, against the real Prometheus' histogram_quantile."""

import asyncio
import random
import subprocess

import yaml

from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.quantiles import RecentQuantiles, quantile
from roofline.deploy.collector.targets import CollectorTarget
from tests.deploy.collector.fake_replicas import FakeReplica, listening, shows
from tests.deploy.collector.prometheus_process import PROMTOOL, needs_promtool

EDGES = (0.1, 0.25, 1.0, 4.0, float("inf"))
FIRST_TOKEN = "vllm:time_to_first_token_seconds"


@needs_promtool
def test_they_are_those_of_prometheus(tmp_path):
    """promtool evaluates histogram_quantile over random histograms, some with empty buckets, some all above 4 s."""
    draw, tests, cases = random.Random(1), [], []
    for number in range(40):
        counts, total = [], 0
        for _ in EDGES:
            total += draw.choice([0, 0, 1, 5, draw.randrange(100)])
            counts.append(total)
        if total:
            cases.append((number, list(zip(EDGES, counts, strict=True)), draw.choice([0.5, 0.9, 0.95, 0.99])))
    for number, buckets, share in cases:
        series = [
            {
                "series": f'h_bucket{{case="{number}",le="{"+Inf" if edge == EDGES[-1] else edge}"}}',
                "values": f"{count}",
            }
            for edge, count in buckets
        ]
        expected = [{"labels": f'{{case="{number}"}}', "value": quantile(buckets, share)}]
        asked = {"expr": f"histogram_quantile({share}, h_bucket)", "eval_time": "0m", "exp_samples": expected}
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": [asked]})
    (tmp_path / "quantiles.yml").write_text(yaml.safe_dump({"tests": tests}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "quantiles.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cases) > 30


def test_only_what_was_counted_since_the_last_call_is_in_it():
    async def run() -> None:
        a, b = FakeReplica("a"), FakeReplica("b")
        async with listening(shows(a)) as first, listening(shows(b)) as second:
            collector = MetricsCollector(
                [CollectorTarget(name="a", address=first), CollectorTarget(name="b", address=second)]
            )
            recent = RecentQuantiles(collector)
            for _ in range(100):
                a.answer(1, 30.0)
            assert recent.since_last(FIRST_TOKEN, 0.95) is None  # nothing was read yet
            await collector.scrape()
            assert recent.since_last(FIRST_TOKEN, 0.95) is None  # of no known time
            assert recent.since_last(FIRST_TOKEN, 0.95) is None  # none came since
            for _ in range(10):
                a.answer(1, 0.09), b.answer(1, 0.7)
            await collector.scrape()
            assert 0.7 < recent.since_last(FIRST_TOKEN, 0.95) <= 0.75
            a.begin_anew(), a.answer(1, 0.09)
            await collector.scrape()
            assert 0.08 < recent.since_last(FIRST_TOKEN, 0.95) <= 0.1
            assert recent.since_last("unheard_of", 0.95) is None
            await collector.close()

    asyncio.run(run())
