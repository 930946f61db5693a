"""What /ready, /stats and /metrics tell of several engines: all together, and each."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from roofline.engine.stats import EngineStats
from roofline.server.metrics import Metrics, engine_figures

FAMILY = 'vllm:prefix_cache_queries_total{model_name="tiny"}'


class Engine:
    def __init__(self, ready=True, **stats):
        self.ready, self.failure, self.restarts, self.pid, self.engines = ready, None, 1, 7, ()
        self.description = SimpleNamespace(num_pages=8, page_bytes=1024)
        self.outstanding = 64 if ready else 0
        self.known = EngineStats(pages_total=8, **stats)

        self.trouble_said = None

    def trouble(self, patience):
        return self.trouble_said

    def stats(self):
        return self.known


@pytest.fixture
def replicas():
    from roofline.engine.stats import total

    engines = (Engine(running=2, prefix_queries=10), Engine(ready=False, running=1, prefix_queries=5))
    return SimpleNamespace(
        engines=engines,
        ready=True,
        description=SimpleNamespace(
            fingerprint="feedc0de", vocab_size=300, max_model_len=1000, exact=True, num_pages=8, page_bytes=1024
        ),
        restarts=2,
        checked=None,
        trouble=lambda patience: None,
        problem=None,
        pid=None,
        stats=lambda: total(engine.known for engine in engines),
        outstanding=64,
    )


def test_ready_tells_which_are_up(call, make_context, replicas):
    context = make_context(engine=replicas)
    answer = call("GET", "/ready", context=context)
    assert (answer.status_code, answer.json()["replicas"]) == (200, [True, False])
    replicas.engines[0].trouble_said = "it hangs"
    assert call("GET", "/ready", context=context).json()["replicas"] == [False, False]
    replicas.ready = False
    assert call("GET", "/ready", context=context).status_code == 503


def test_one_engine_tells_of_no_replicas(call):
    assert "replicas" not in call("GET", "/ready").json()
    assert "replicas" not in call("GET", "/stats").json()["engine"]
    assert "replica=" not in call("GET", "/metrics").text


def test_stats_have_all_and_each(call, make_context, replicas):
    engine = call("GET", "/stats", context=make_context(engine=replicas)).json()["engine"]
    assert (engine["running"], engine["prefix_queries"], engine["restarts"], engine["pid"]) == (3, 15, 2, None)
    assert engine["outstanding_tokens"] == 64
    assert [(each["ready"], each["running"], each["outstanding_tokens"]) for each in engine["replicas"]] == [
        (True, 2, 64),
        (False, 1, 0),
    ]
    assert [each["pid"] for each in engine["replicas"]] == [7, 7]


def test_metrics_count_each_on_from_where_a_fresh_process_begins(replicas):
    metrics = Metrics()
    metrics.bind("tiny")

    def shown():
        text = metrics.exposition(engine_figures(replicas), up=True).decode()
        return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    first = shown()
    assert first[FAMILY] == "15.0"
    assert first['vllm:num_requests_running{model_name="tiny"}'] == "3.0"
    assert first['roofline:replica_up{model_name="tiny",replica="1"}'] == "0.0"
    assert first['roofline:replica_outstanding_tokens{model_name="tiny",replica="0"}'] == "64.0"
    cache = '{block_bytes="1024",block_size="16",engine="1",model_name="tiny",num_gpu_blocks="8"}'
    assert first[f"vllm:cache_config_info{cache}"] == "1.0"
    replicas.engines[0].known = replace(replicas.engines[0].known, prefix_queries=3)  # a fresh process
    replicas.engines[1].known = replace(replicas.engines[1].known, prefix_queries=6)
    assert shown()[FAMILY] == "19.0"
