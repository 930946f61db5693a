"""Prometheus families under vLLM's names, so that existing dashboards work unchanged, and our own beside them."""

from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from roofline.common.json_types import JsonObject
from roofline.engine.facade import AsyncEngine

# vLLM's own bucket edges (seconds; tokens), for the same reason.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
WHOLE_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)

# family: (meaning, field of the engine's statistics)
GAUGES = {
    "vllm:num_requests_running": ("Answers in the running batch.", "running"),
    "vllm:num_requests_waiting": ("Answers that wait for room.", "waiting"),
}
COUNTERS = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found there.", "prefix_hits"),
    "vllm:spec_decode_num_drafts": ("Drafts that were verified.", "drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Tokens in them.", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Those of them that were right.", "accepted_tokens"),
    "roofline:spec_decode_num_held": ("Drafts left aside because they would have lost time.", "drafts_held"),
    "vllm:num_preemptions": ("Answers that lost their pages and were computed again.", "preemptions"),
}


# Of each of several engines that share the requests; the families above are of all together.
REPLICA_GAUGES = {
    "roofline:replica_up": ("1 while this engine answers.", "ready"),
    "roofline:replica_requests_running": ("Answers in its running batch.", "running"),
    "roofline:replica_requests_waiting": ("Answers that wait for room there.", "waiting"),
    "roofline:replica_outstanding_tokens": ("Tokens it has to compute, as far as known.", "outstanding_tokens"),
    "roofline:replica_restarts": ("Processes it lost.", "restarts"),
}


def engine_figures(engine: AsyncEngine) -> JsonObject:
    """An engine's counters with what follows from them, and under `replicas` those of each of several engines."""
    stats = engine.stats()
    rates = ("generated_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "share_of_roof", "acceptance")
    figures = asdict(stats) | {name: getattr(stats, name) for name in rates}
    figures |= {"restarts": engine.restarts, "pid": engine.pid}
    replicas = [
        {**engine_figures(each), "ready": each.ready, "failure": each.failure, "outstanding_tokens": each.outstanding}
        for each in engine.engines
    ]
    return figures | ({"replicas": replicas} if replicas else {})


class Metrics:
    """One server's families, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._model = ""
        self._last: dict[tuple[int, str], float] = {}

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(name, meaning, ["model_name", *labels], registry=self.registry)

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, meaning, ["model_name"], buckets=buckets, registry=self.registry)

        self._gauges = {name: gauge(name, meaning) for name, (meaning, _) in GAUGES.items()}
        self._replica_gauges = {name: gauge(name, meaning, "replica") for name, (meaning, _) in REPLICA_GAUGES.items()}
        self._counters = {name: counter(name, meaning) for name, (meaning, _) in COUNTERS.items()}
        self._cache = gauge("vllm:kv_cache_usage_perc", "Used part of the key-value cache; 1 is full.")
        self._share = gauge("roofline:share_of_roof", "Time of all steps at the measured roofs / measured time.")
        self._up = gauge("roofline:engine_up", "1 while an engine answers.")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = counter("vllm:generation_tokens", "Generated tokens that were sent.")
        self._success = counter("vllm:request_success", "Finished answers.", "finished_reason")
        self._failed = counter("roofline:request_failure", "Answers that ended in an error.")
        self._first = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self._between = histogram("vllm:inter_token_latency_seconds", "Token to next token.", BETWEEN_TOKENS)
        self._latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", WHOLE_REQUEST)
        self._prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._answer_size = histogram("vllm:request_generation_tokens", "Generated tokens of an answer.", TOKENS)

    def bind(self, model: str) -> None:
        """Set the model name; families without reasons then show 0 instead of nothing."""
        self._model = model
        for family in (*self._gauges.values(), *self._counters.values(), self._prompt, self._generated, self._failed):
            family.labels(model)
        for histogram in (self._first, self._between, self._latency, self._prompt_size, self._answer_size):
            histogram.labels(model)
        for reason in ("stop", "length", "abort"):
            self._success.labels(model, reason)

    def first_token(self, seconds: float) -> None:
        self._first.labels(self._model).observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.labels(self._model).observe(seconds)

    def sent(self, tokens: int) -> None:
        self._generated.labels(self._model).inc(tokens)

    def answer_ended(self, reason: str, tokens: int) -> None:
        """One answer (a choice) ended; `reason` is a finish reason."""
        if reason == "error":
            self._failed.labels(self._model).inc()
        else:
            self._success.labels(self._model, reason).inc()
        self._answer_size.labels(self._model).observe(tokens)

    def request_ended(self, prompt_tokens: int, seconds: float) -> None:
        """All answers of a request ended."""
        self._prompt.labels(self._model).inc(prompt_tokens)
        self._prompt_size.labels(self._model).observe(prompt_tokens)
        self._latency.labels(self._model).observe(seconds)

    def exposition(self, stats: JsonObject, up: bool) -> bytes:
        """Everything in Prometheus' text form; `stats` are the engine's, empty while there is none."""
        self._up.labels(self._model).set(1 if up else 0)
        for name, (_, field) in GAUGES.items():
            self._gauges[name].labels(self._model).set(stats.get(field, 0))
        total = stats.get("pages_total") or 0
        self._cache.labels(self._model).set(stats.get("pages_used", 0) / total if total else 0)
        if stats.get("share_of_roof") is not None:
            self._share.labels(self._model).set(stats["share_of_roof"])
        replicas = stats.get("replicas", [])
        for number, each in enumerate(replicas):
            for name, (_, field) in REPLICA_GAUGES.items():
                self._replica_gauges[name].labels(self._model, str(number)).set(each[field])
        for number, each in enumerate(replicas or [stats]):
            self._count(number, each)
        return generate_latest(self.registry)

    def _count(self, number: int, stats: JsonObject) -> None:
        """What one engine has counted since it was asked last."""
        for name, (_, field) in COUNTERS.items():
            now = float(stats.get(field, 0))
            before = self._last.get((number, name), 0.0)
            # A fresh engine counts from 0; a counter of ours never goes back.
            self._counters[name].labels(self._model).inc(now - before if now >= before else now)
            self._last[number, name] = now
