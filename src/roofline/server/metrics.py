"""Prometheus families under vLLM's names, so that existing dashboards work unchanged, and our own beside them."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import generate_latest

from roofline.common.json_types import JsonObject
from roofline.engine.events import Usage
from roofline.engine.facade import AsyncEngine
from roofline.engine.stats import STEP_EDGES
from roofline.ops.batch import PAGE_TOKENS

# vLLM's own bucket edges (seconds; tokens), for the same reason.
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
WHOLE_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ANSWERS = (1, 2, 5, 10, 20)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)

# family: (meaning, field of the engine's statistics)
GAUGES = {
    "vllm:num_requests_running": ("Answers in the running batch.", "running"),
    "vllm:num_requests_waiting": ("Answers that wait for room.", "waiting"),
    "roofline:state_slots": ("Slots of recurrent state; 0 where the model has none.", "state_slots"),
    "roofline:state_slots_used": ("Slots of recurrent state that answers hold.", "state_slots_used"),
}
COUNTERS = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hits"),
    "vllm:spec_decode_num_drafts": ("Drafts that were verified.", "drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Tokens of the drafts that were verified.", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Tokens of drafts that were right.", "accepted_tokens"),
    "roofline:spec_decode_num_held": ("Drafts left aside because they would have lost time.", "drafts_held"),
    "roofline:snapshot_hits": ("Answers that began with a snapshot of recurrent state.", "snapshot_hits"),
    "roofline:snapshot_lost_tokens": (
        "Prompt tokens found in the prefix cache in vain, for want of a snapshot of recurrent state.",
        "snapshot_lost",
    ),
    "vllm:num_preemptions": ("Answers that lost their pages and were computed again.", "preemptions"),
    "roofline:engine_restarts": ("Engine processes that ended and had another one started in their place.", "restarts"),
}
# Of an answer, by the engine's clock; in the order of `Metrics.answer_computed`.
PARTS = {
    "vllm:request_queue_time_seconds": "The engine has it, to the first step that computes it.",
    "vllm:request_prefill_time_seconds": "First step that computes it, to its first token.",
    "vllm:request_decode_time_seconds": "First token to last, of an answer.",
    "vllm:request_inference_time_seconds": "First step that computes it, to its last token.",
}
# Of the start-up check on golden prompts, once it has ended.
GOLDEN = {
    "roofline:golden_kl": (
        "KL divergence from the slow reference on golden prompts, in nats, the mean over their positions.",
        "kl",
    ),
    "roofline:golden_top1_agreement": (
        "Part of the golden prompts' positions with the reference's most likely token.",
        "top1_agreement",
    ),
    "roofline:golden_within_thresholds": ("1 where golden prompts are within the thresholds, 0: beyond.", "within"),
    "roofline:golden_fallback": ("1 while the fall-back runs that golden prompts asked for.", "fell_back"),
}
STEP_TOKENS = "vllm:iteration_tokens_total", "Tokens that a step computed."

# Of each of several engines that share the requests; the families above are of all together.
REPLICA_GAUGES = {
    "roofline:replica_up": ("1 while this replica answers.", "ready"),
    "roofline:replica_requests_running": ("Answers in the running batch of a replica.", "running"),
    "roofline:replica_requests_waiting": ("Answers that wait for room in a replica.", "waiting"),
    "roofline:replica_outstanding_tokens": (
        "Tokens that a replica has to compute, as far as known.",
        "outstanding_tokens",
    ),
    "roofline:replica_restarts": ("Processes that a replica lost.", "restarts"),
}


def engine_figures(engine: AsyncEngine) -> JsonObject:
    """An engine's counters with what follows from them, and under `replicas` those of each of several engines.

    The counters are those of the engine's last report; `outstanding_tokens` counts requests from when they are sent to
    it, until a report has told of their end. Where it is 0, no answer is missing in `finished`.
    """
    stats = engine.stats()
    rates = ("generated_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "share_of_roof", "acceptance")
    figures = asdict(stats) | {name: getattr(stats, name) for name in (*rates, "experts_per_layer")}
    loaded = engine.description
    cache = {"pages": loaded.num_pages, "page_bytes": loaded.page_bytes} if loaded is not None else None
    figures |= {"restarts": engine.restarts, "pid": engine.pid, "cache": cache}
    figures["outstanding_tokens"] = engine.outstanding
    replicas = [{**engine_figures(each), "ready": each.ready, "failure": each.failure} for each in engine.engines]
    return figures | ({"replicas": replicas} if replicas else {})


class Metrics:
    """One server's families, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._model = ""
        self._last: dict[tuple[int, str], float] = {}
        self._last_of: dict[str, dict[tuple[int, str], float]] = {}  # of other models

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
        cache_labels = "engine", "block_size", "num_gpu_blocks", "block_bytes"
        self._caches = gauge(
            "vllm:cache_config_info", "Sizes of the key-value cache, as labels; always 1.", *cache_labels
        )
        self._share = gauge("roofline:share_of_roof", "Time of all steps at the measured roofs / measured time.")
        self._up = gauge("roofline:engine_up", "1 while an engine answers.")
        self._golden = {name: gauge(name, meaning) for name, (meaning, _) in GOLDEN.items()}
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens that were computed, of cancelled requests too.")
        self._generated = counter("vllm:generation_tokens", "Generated tokens that were sent.")
        self._success = counter("vllm:request_success", "Finished answers.", "finished_reason")
        self._failed = counter("roofline:request_failure", "Answers that ended in an error.")
        self._responses = Counter(
            "roofline:http_responses",
            "Requests but probes by the class of their status.",
            ["status"],
            registry=self.registry,
        )
        for status in ("2xx", "4xx", "5xx"):
            self._responses.labels(status)
        self._first = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self._between = histogram("vllm:inter_token_latency_seconds", "Token to next token.", BETWEEN_TOKENS)
        self._latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", WHOLE_REQUEST)
        self._parts = {name: histogram(name, meaning, WHOLE_REQUEST) for name, meaning in PARTS.items()}
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "First token to last, by the tokens after the first; of answers with more than one.",
            BETWEEN_TOKENS,
        )
        self._n = histogram("vllm:request_params_n", "Answers that a request asks for to each prompt.", ANSWERS)
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "Longest answer that a request allows, where it says so.", TOKENS
        )
        self._steps = _StepSizes()
        self.registry.register(self._steps)
        self._prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS)
        self._answer_size = histogram("vllm:request_generation_tokens", "Generated tokens of an answer.", TOKENS)

    def of_model(self, model: str) -> "Metrics":
        """The same families in the same registry, for another model."""
        families = copy(self)
        families._last = self._last_of.setdefault(model, {})
        families.bind(model)
        return families

    def engine_left(self, stats: JsonObject) -> None:
        """The model's engine is about to end: what it has counted stays, what it has is no longer there."""
        self.observe(stats, up=False)
        self.observe({}, up=False)

    def bind(self, model: str) -> None:
        """Set the model name; families without reasons then show 0 instead of nothing."""
        self._model = model
        for family in (*self._gauges.values(), *self._counters.values(), self._prompt, self._generated, self._failed):
            family.labels(model)
        sizes = self._prompt_size, self._answer_size, self._n, self._max_tokens
        for histogram in (self._first, self._between, self._latency, self._per_token, *self._parts.values(), *sizes):
            histogram.labels(model)
        self._steps.bind(model)
        for reason in ("stop", "length", "abort"):
            self._success.labels(model, reason)

    def responded(self, status: int) -> None:
        """A request has ended, whatever came of it."""
        self._responses.labels(f"{status // 100}xx").inc()

    def request_taken(self, n: int, max_tokens: int | None) -> None:
        """A request was checked and goes to the engine."""
        self._n.labels(self._model).observe(n)
        if max_tokens is not None:
            self._max_tokens.labels(self._model).observe(max_tokens)

    def prompt_computed(self, tokens: int) -> None:
        """The first token, or the vector, of a prompt's answers has come."""
        self._prompt.labels(self._model).inc(tokens)

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

    def answer_computed(self, usage: Usage) -> None:
        """The engine is done with an answer: what it says of the times of it."""
        queue, prefill, decode = usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds
        inference = None if prefill is None or decode is None else prefill + decode
        for family, seconds in zip(self._parts.values(), (queue, prefill, decode, inference), strict=True):
            if seconds is not None:
                family.labels(self._model).observe(seconds)
        if decode is not None and usage.completion_tokens > 1:
            self._per_token.labels(self._model).observe(decode / (usage.completion_tokens - 1))

    def request_ended(self, prompt_tokens: int, seconds: float) -> None:
        """All answers of a request ended."""
        self._prompt_size.labels(self._model).observe(prompt_tokens)
        self._latency.labels(self._model).observe(seconds)

    def exposition(self, stats: JsonObject, up: bool) -> bytes:
        """Everything in Prometheus' text form, after `observe`; of other models as they were observed last."""
        self.observe(stats, up)
        return generate_latest(self.registry)

    def observe(self, stats: JsonObject, up: bool) -> None:
        """Take in the figures of the model's engine, which are empty while there is none."""
        self._up.labels(self._model).set(1 if up else 0)
        for name, (_, field) in GAUGES.items():
            self._gauges[name].labels(self._model).set(stats.get(field, 0))
        total = stats.get("pages_total") or 0
        self._cache.labels(self._model).set(stats["pages_used"] / total if total else 0)
        if stats.get("share_of_roof") is not None:
            self._share.labels(self._model).set(stats["share_of_roof"])
        self._show_golden(stats.get("golden", {}))
        replicas = stats.get("replicas", [])
        self._show_caches(replicas or [stats])
        for number, replica in enumerate(replicas):
            for name, (_, field) in REPLICA_GAUGES.items():
                self._replica_gauges[name].labels(self._model, str(number)).set(replica[field])
        for number, replica in enumerate(replicas or [stats]):
            self._count(number, replica)
            self._steps.count(self._model, number, replica)

    def _show_caches(self, engines: Sequence[JsonObject]) -> None:
        """The label set of each engine's cache, once it is known."""
        for number, each in enumerate(engines):
            if each.get("cache") is not None:
                pages, page_bytes = each["cache"]["pages"], each["cache"]["page_bytes"]
                labels = str(number), str(PAGE_TOKENS), str(pages), str(page_bytes)
                self._caches.labels(self._model, *labels).set(1)

    def _show_golden(self, golden: JsonObject) -> None:
        """What came of golden prompts, once anything has."""
        status = golden.get("status")
        ended = {"within": float(status == "passed"), "fell_back": float(bool(golden.get("fallback")))}
        values = golden | (ended if status in ("passed", "failed") else {})
        for name, (_, field) in GOLDEN.items():
            if values.get(field) is not None:
                self._golden[name].labels(self._model).set(values[field])

    def _count(self, number: int, stats: JsonObject) -> None:
        """What one engine has counted since it was asked last."""
        for name, (_, field) in COUNTERS.items():
            now = float(stats.get(field, 0))
            before = self._last.get((number, name), 0.0)
            # A fresh engine counts from 0; a counter of ours never goes back.
            self._counters[name].labels(self._model).inc(now - before if now >= before else now)
            self._last[number, name] = now


class _StepSizes:
    """A histogram that engines have counted already; a fresh engine counts from 0, this goes on."""

    def __init__(self) -> None:
        self._of: dict[str, _ModelSteps] = {}

    def bind(self, model: str) -> None:
        """A model whose steps will be counted."""
        self._of.setdefault(model, _ModelSteps())

    def count(self, model: str, number: int, stats: JsonObject) -> None:
        """What one engine has counted since it was asked last."""
        if "step_sizes" in stats:
            self._of[model].count(number, list(stats["step_sizes"]), int(stats["step_tokens"]))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As the registry asks for it."""
        edges = [*(str(float(edge)) for edge in STEP_EDGES), "+Inf"]
        family = HistogramMetricFamily(*STEP_TOKENS, labels=["model_name"])
        for model, steps in self._of.items():
            family.add_metric([model], list(zip(edges, accumulate(steps.sizes), strict=True)), steps.tokens)
        yield family


class _ModelSteps:
    """The steps of one model's engines: how many of each size, and their tokens."""

    def __init__(self) -> None:
        self.sizes, self.tokens = [0] * (len(STEP_EDGES) + 1), 0
        self._last: dict[int, tuple[list[int], int]] = {}

    def count(self, number: int, sizes: list[int], tokens: int) -> None:
        """What an engine has counted so far."""
        last_sizes, last_tokens = self._last.get(number, ([0] * len(sizes), 0))
        if sum(sizes) < sum(last_sizes):
            last_sizes, last_tokens = [0] * len(sizes), 0
        self.sizes = [count + new - old for count, new, old in zip(self.sizes, sizes, last_sizes, strict=True)]
        self.tokens += tokens - last_tokens
        self._last[number] = sizes, tokens
