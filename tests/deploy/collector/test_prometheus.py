"""What the real Prometheus makes of a collector over two replicas."""

import asyncio
from pathlib import Path

from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.service import listen_on, serve_collector
from roofline.deploy.collector.targets import CollectorTarget
from roofline.deploy.prometheus.files import PrometheusOptions, monitoring_files
from tests.deploy.collector.fake_replicas import FakeReplica, listening, shows
from tests.deploy.collector.prometheus_process import needs_prometheus, prometheus

TOKENS = "vllm:generation_tokens_total"


def written(port: int, folder: Path, every: str = "500ms") -> str:
    """The configuration that `roofline deploy prometheus` writes, but for times; its rules go into the folder. every:
    time between two scrapes."""
    files = monitoring_files(PrometheusOptions(collector=[f"127.0.0.1:{port}"]))
    for name in ("roofline.recording.yml", "roofline.alerts.yml"):
        (folder / name).write_text(files[name].replace("interval: 15s", "interval: 200ms"))
    return files["prometheus.yml"].replace(
        "scrape_interval: 5s", f"scrape_interval: {every}\n  scrape_timeout: {every}"
    )


@needs_prometheus
def test_prometheus_has_the_fleets_sums_once_and_each_replica(tmp_path):
    async def run() -> None:
        a, b = FakeReplica("a"), FakeReplica("b")
        a.answer(5, 0.3), b.answer(7, 0.3)
        a.stats["running"], b.stats["running"] = 2, 3
        async with listening(shows(a)) as first, listening(shows(b)) as second:
            targets = [CollectorTarget(name="a", address=first), CollectorTarget(name="b", address=second)]
            collector = MetricsCollector(targets, interval=0.1, timeout=5)
            socket = listen_on("127.0.0.1", 0)
            port = socket.getsockname()[1]
            serving = asyncio.create_task(serve_collector(collector, socket))
            async with prometheus(written(port, tmp_path), tmp_path) as judge:
                await judge.becomes(f"sum by (model_name) ({TOKENS})", 12)
                assert await judge.value(f"sum by (model_name) (replica:{TOKENS})") == 12
                assert await judge.value(f'replica:{TOKENS}{{replica="b"}}') == 7
                assert await judge.value("sum(vllm:num_requests_running)") == 5
                # Its own `up` of the collector stands beside those of the replicas.
                assert await judge.query('up{job="roofline"}') == {
                    frozenset(
                        {*{"__name__": "up", "job": "roofline", "instance": f"127.0.0.1:{port}"}.items(), *more}
                    ): 1
                    for more in ((), (("replica", "a"),), (("replica", "b"),))
                }
                await rules_run(judge, b)
                await rates_survive_a_restart(judge, a)
                collector.set_targets(targets[1:])
                await judge.becomes('count(up{replica!=""})', 1)
                assert await judge.value(f"sum({TOKENS})") == 25  # of a that left, too
                assert await judge.value(f"resets({TOKENS}[10m])") == 0
                quantile = "histogram_quantile(0.5, sum by (le) (vllm:time_to_first_token_seconds_bucket))"
                assert 0.25 < (await judge.value(quantile) or 0) <= 0.5
                metadata = (await judge.get("/api/v1/metadata"))["data"]
                assert metadata["vllm:time_to_first_token_seconds"][0]["type"] == "histogram"
                assert metadata[TOKENS][0]["type"] == metadata[f"replica:{TOKENS}"][0]["type"] == "counter"
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def rules_run(judge, b: FakeReplica) -> None:
        """All rules are evaluated, and an alert fires that has no time to wait."""
        await judge.becomes("sum(model:vllm_num_requests_running:sum)", 5)
        b.stats["golden"] = {"status": "failed", "kl": 3.0, "top1_agreement": 0.1, "fallback": None}
        await judge.becomes('count(ALERTS{alertname="RooflineGoldenCheckFailed",alertstate="firing",replica="b"})', 1)
        groups = (await judge.get("/api/v1/rules"))["data"]["groups"]
        health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        assert len(health) == 25
        assert set(health.values()) == {"ok"}

    async def rates_survive_a_restart(judge, a: FakeReplica) -> None:
        """a begins anew, and its 13 tokens are the increase, not what is left of a sum that fell."""
        await judge.becomes(f"count_over_time({TOKENS}[10m]) >= bool 2", 1)
        a.begin_anew(), a.answer(13, 0.3)
        await judge.becomes(f"sum({TOKENS})", 25)
        await judge.becomes(f'replica:{TOKENS}{{replica="a"}}', 13)
        assert await judge.value(f"max_over_time({TOKENS}[10m]) - min_over_time({TOKENS}[10m])") == 13
        assert (await judge.value(f"sum(rate({TOKENS}[1m]))") or 0) > 0

    asyncio.run(run())
