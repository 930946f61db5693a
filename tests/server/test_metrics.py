"""Every figure of /metrics against a value that the test computes, under a clock that the test moves."""

import asyncio

import pytest

from roofline.engine.events import Event, Usage
from roofline.engine.stats import EngineStats
from roofline.server import admission, answers
from roofline.server.limits import Limits
from roofline.server.metrics import Metrics

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def pass_on(self, seconds: float) -> None:
        """Let time pass once everything that waits for an event has seen the last one."""
        for _ in range(10):
            await asyncio.sleep(0)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (admission, answers):
        monkeypatch.setattr(module, "time", clock)
    return clock


def figures_of(text: str, prefix: str = "") -> dict[str, float]:
    """Sample name with its labels but the model's -> value."""
    lines = [line for line in text.splitlines() if line.startswith(prefix) and not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name.replace('model_name="tiny"', "").replace("{}", ""): float(value) for name, value in pairs}


def test_times_of_a_request_are_those_between_its_steps(call, engine, make_context, clock):
    """Steps of 0.5 s, then 0.25 and 1.5 s, the last with two tokens: 0.75 s each; the end of the text after 2 s."""
    steps = [(0.5, [72], None), (0.25, [105], None), (1.5, [46, 46], None), (2.0, [256], "stop")]

    async def events(ids, params, request_id):
        for seconds, new, reason in steps:
            await clock.pass_on(seconds)
            stop_id, usage = (256, Usage(len(ids), 5, 3, 7, 0.375, 0.125, 3.0)) if reason else (None, None)
            yield Event(request_id, 0, new, None, reason, stop_id, None, usage)

    engine._events, context = events, make_context()
    answer = call("POST", "/v1/chat/completions", json=CHAT, context=context).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    figures = figures_of(call("GET", "/metrics", context=context).text, "vllm:")
    for family, values in {
        "time_to_first_token_seconds": [0.5],
        "inter_token_latency_seconds": [0.25, 0.75, 0.75, 2.0],
        "e2e_request_latency_seconds": [4.25],
        "request_prompt_tokens": [8],
        "request_generation_tokens": [5],
        "request_queue_time_seconds": [0.375],
        "request_prefill_time_seconds": [0.125],
        "request_decode_time_seconds": [3.0],
        "request_inference_time_seconds": [3.125],
        "request_time_per_output_token_seconds": [0.75],
        "request_params_n": [1],
        "request_params_max_tokens": [],
    }.items():
        assert figures[f"vllm:{family}_sum"] == sum(values), family
        assert figures[f"vllm:{family}_count"] == len(values), family
        buckets = {n: v for n, v in figures.items() if n.startswith(f"vllm:{family}_bucket")}
        assert len(buckets) > 5
        for name, count in buckets.items():
            edge = float(name.split('le="')[1].split('"')[0].replace("+Inf", "inf"))
            assert count == sum(value <= edge for value in values), name
    assert figures["vllm:generation_tokens_total"] == 5
    assert figures["vllm:prompt_tokens_total"] == 8


def test_times_that_an_answer_does_not_have_are_not_counted(call, engine, make_context):
    """One token has none after it; an answer that was never scheduled has no times at all."""
    parts = [(0.5, 0.25, 0.0), (2.0, None, None), (None, None, None), (0.25, 0.5, None)]

    async def events(ids, params, request_id):
        for index, times in enumerate(parts):
            tokens = 0 if times[1] is None else 1
            yield Event(request_id, index, [72] * tokens, None, "length", None, None, Usage(8, tokens, 0, 0, *times))

    engine._events, context = events, make_context()
    call("POST", "/v1/chat/completions", json={**CHAT, "n": 4, "max_tokens": 40}, context=context)
    figures = figures_of(call("GET", "/metrics", context=context).text, "vllm:request_")
    sums = {name[: -len("_sum")][len("vllm:request_") :]: value for name, value in figures.items() if "_sum" in name}
    counts = {name: figures[f"vllm:request_{name}_count"] for name in sums}
    assert (sums["queue_time_seconds"], counts["queue_time_seconds"]) == (2.75, 3)
    assert (sums["prefill_time_seconds"], counts["prefill_time_seconds"]) == (0.75, 2)
    assert (sums["inference_time_seconds"], counts["inference_time_seconds"]) == (0.25, 1)
    assert (sums["decode_time_seconds"], counts["decode_time_seconds"]) == (0, 1)
    assert counts["time_per_output_token_seconds"] == 0
    assert (sums["params_n"], sums["params_max_tokens"], counts["params_max_tokens"]) == (4, 40, 1)


@pytest.mark.parametrize(("tokens", "each"), [(1, []), (2, [3.0]), (3, [1.5])])
def test_time_by_token_is_that_of_the_tokens_after_the_first(tokens, each):
    metrics = Metrics()
    metrics.bind("tiny")
    metrics.answer_computed(Usage(8, tokens, 0, 0, 0.5, 0.25, 3.0))
    figures = figures_of(metrics.exposition({}, up=True).decode(), "vllm:request_time_per_output_token_seconds")
    sums = [value for name, value in figures.items() if name.endswith(("_sum", "_count"))]
    assert sorted(sums) == sorted([sum(each), len(each)])


def test_steps_are_counted_on_where_the_engine_begins_anew():
    metrics = Metrics()
    metrics.bind("tiny")
    empty = [0] * 14

    def shown(tokens, **counts):
        sizes = [counts.get(f"at{i}", 0) for i in range(14)]
        text = metrics.exposition({"step_sizes": sizes, "step_tokens": tokens}, up=True).decode()
        figures = figures_of(text, "vllm:iteration_tokens_total")
        buckets = [value for name, value in figures.items() if "_bucket" in name]
        return buckets, figures["vllm:iteration_tokens_total_sum"], figures["vllm:iteration_tokens_total_count"]

    assert shown(0) == (empty, 0, 0)
    assert shown(70, at0=6, at4=1) == ([6] * 4 + [7] * 10, 70, 7)
    assert shown(70, at0=6, at4=1) == ([6] * 4 + [7] * 10, 70, 7), "no step since the last look"
    assert shown(71, at0=7, at4=1) == ([7] * 4 + [8] * 10, 71, 8)
    assert shown(2, at0=2) == ([9] * 4 + [10] * 10, 73, 10), "a fresh process"


def test_steps_of_before_the_first_look_are_counted():
    metrics = Metrics()
    metrics.bind("tiny")
    text = metrics.exposition({"step_sizes": [2] * 14, "step_tokens": 900}, up=True).decode()
    figures = figures_of(text, "vllm:iteration_tokens_total")
    assert [value for name, value in figures.items() if "_bucket" in name] == [2 * (i + 1) for i in range(14)]
    assert figures["vllm:iteration_tokens_total_sum"] == 900


FIRST_TOKEN = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40),
    *(80, 160, 640, 2560),
]
BETWEEN_TOKENS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
REQUEST = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000]
EDGES = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": BETWEEN_TOKENS,
    "request_time_per_output_token_seconds": BETWEEN_TOKENS,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_params_n": [1, 2, 5, 10, 20],
    "request_params_max_tokens": TOKENS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
}


def test_buckets_are_those_that_dashboards_of_vllm_know(call):
    text = call("GET", "/metrics").text
    for family, edges in EDGES.items():
        prefix = f'vllm:{family}_bucket{{le="'
        shown = [line[len(prefix) :].split('"')[0] for line in text.splitlines() if line.startswith(prefix)]
        assert [float(edge) for edge in shown] == [*edges, float("inf")]


def test_each_choice_has_a_first_token_and_times_of_its_own(call, engine, make_context, clock):
    async def events(ids, params, request_id):
        for index, seconds in ((0, 1.0), (1, 2.0), (1, 4.0), (0, 8.0)):
            await clock.pass_on(seconds)
            reason = "length" if seconds > 2 else None
            yield Event(
                request_id, index, [72], None, reason, None, None, Usage(8, 2, 5 - index, 0) if reason else None
            )

    engine._events, context = events, make_context()
    answer = call("POST", "/v1/chat/completions", json={**CHAT, "n": 2}, context=context).json()
    # Choices of one prompt share what the cache had of it: it is counted once.
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    figures = figures_of(call("GET", "/metrics", context=context).text, "vllm:")
    assert figures["vllm:time_to_first_token_seconds_sum"] == 1 + (1 + 2)
    assert figures["vllm:inter_token_latency_seconds_sum"] == 4 + (2 + 4 + 8)
    assert figures["vllm:e2e_request_latency_seconds_sum"] == 15
    assert figures['vllm:request_success_total{finished_reason="length",}'] == 2


def test_answers_are_counted_by_how_they_ended(call, engine, make_context):
    context = make_context()

    def reasons() -> list[float]:
        figures = figures_of(call("GET", "/metrics", context=context).text)
        ended = [figures[f'vllm:request_success_total{{finished_reason="{r}",}}'] for r in ("stop", "length", "abort")]
        return [*ended, figures["roofline:request_failure_total"], figures["vllm:request_generation_tokens_sum"]]

    assert reasons() == [0, 0, 0, 0, 0]
    call("POST", "/v1/chat/completions", json=CHAT, context=context)
    assert reasons() == [1, 0, 0, 0, 14]
    call("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 3, "n": 2}, context=context)
    assert reasons() == [1, 2, 0, 0, 20]
    engine.error = "out of luck"  # at the third step, so after two tokens; the other choice ends with it
    call("POST", "/v1/chat/completions", json={**CHAT, "n": 2}, context=context)
    assert reasons() == [1, 2, 1, 1, 24]


@pytest.mark.parametrize(
    ("first", "counted"),
    [([72], 8), ([], 0)],
    ids=[
        "after its first token",
        "before it",
    ],
)
def test_the_prompt_of_a_request_that_ends_early_counts_once_it_was_computed(
    call, engine, make_context, first, counted
):
    """In the figures of the model and of the key alike: 8 tokens of a prompt whose answer passes its deadline."""

    async def events(ids, params, request_id):
        yield Event(request_id, 0, first, None, None, None, None, None)
        await asyncio.Event().wait()

    engine._events, context = events, make_context(limits=Limits(total_seconds=0.1))
    assert call("POST", "/v1/chat/completions", json=CHAT, context=context).status_code == 504
    engine._events = None
    figures = figures_of(context.metrics.exposition({}, up=True).decode())
    assert figures["vllm:prompt_tokens_total"] == counted
    assert figures["vllm:request_prompt_tokens_count"] == 0
    keys = figures_of(context.key_metrics.exposition().decode(), "roofline:key_prompt_tokens_total")
    assert sum(keys.values()) == counted


def test_each_prompt_of_a_request_counts_once(call, make_context):
    context = make_context()
    body = {"model": "tiny", "prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 3}
    call("POST", "/v1/completions", json=body, context=context)
    assert figures_of(context.metrics.exposition({}, up=True).decode())["vllm:prompt_tokens_total"] == 5


def test_gauges_are_what_the_engine_says():
    metrics = Metrics()
    metrics.bind("tiny")
    stats = {"running": 3, "waiting": 4, "pages_used": 6, "pages_total": 24, "share_of_roof": 0.625}

    def shown(stats, up=True) -> dict[str, float]:
        return figures_of(metrics.exposition(stats, up).decode())

    figures = shown(stats)
    assert figures["vllm:num_requests_running"] == 3
    assert figures["vllm:num_requests_waiting"] == 4
    assert figures["vllm:kv_cache_usage_perc"] == 0.25
    assert figures["roofline:share_of_roof"] == 0.625
    assert figures["roofline:engine_up"] == 1
    figures = shown({}, up=False)
    assert figures["roofline:engine_up"] == 0
    assert figures["vllm:num_requests_running"] == figures["vllm:kv_cache_usage_perc"] == 0
    assert shown({"pages_used": 5, "pages_total": 0})["vllm:kv_cache_usage_perc"] == 0


def test_without_roofs_there_is_no_share_of_them():
    metrics = Metrics()
    metrics.bind("tiny")
    assert "roofline:share_of_roof{" not in metrics.exposition({"share_of_roof": None}, up=True).decode()


def test_share_of_the_roof_reaches_metrics_and_stats(call, engine, make_context):
    engine.stats = lambda: EngineStats(priced_seconds=8.0, limit_seconds=5.0)
    context = make_context()
    assert figures_of(call("GET", "/metrics", context=context).text)["roofline:share_of_roof"] == 0.625
    assert call("GET", "/stats", context=context).json()["engine"]["share_of_roof"] == 0.625


def test_counters_go_on_where_the_engine_begins_anew():
    metrics = Metrics()
    metrics.bind("tiny")
    for counted, shown in ((10, 10), (10, 10), (11, 11), (4, 15), (4, 15), (0, 15), (2, 17)):
        figures = figures_of(metrics.exposition({"preemptions": counted}, up=True).decode())
        assert figures["vllm:num_preemptions_total"] == shown


def test_every_gauge_of_a_replica_is_its_own():
    metrics = Metrics()
    metrics.bind("tiny")
    first = {"ready": True, "running": 2, "waiting": 3, "outstanding_tokens": 64, "restarts": 0, "preemptions": 5}
    second = {"ready": False, "running": 7, "waiting": 11, "outstanding_tokens": 128, "restarts": 4, "preemptions": 6}
    figures = figures_of(metrics.exposition({"replicas": [first, second]}, up=True).decode())
    shown = ("up", "requests_running", "requests_waiting", "outstanding_tokens", "restarts")
    for number, values in enumerate(([1, 2, 3, 64, 0], [0, 7, 11, 128, 4])):
        assert [figures[f'roofline:replica_{name}{{,replica="{number}"}}'] for name in shown] == values
    assert figures["vllm:num_preemptions_total"] == 11


def test_statuses_are_counted_by_class_and_probes_are_not(call, make_context):
    context = make_context()
    statuses = [
        call("GET", path, context=context).status_code for path in ("/v1/models", "/nowhere", "/health", "/ready")
    ]
    assert statuses[:2] == [200, 404]
    figures = figures_of(call("GET", "/metrics", context=context).text, "roofline:http_responses_total")
    assert figures == {
        'roofline:http_responses_total{status="2xx"}': 1,
        'roofline:http_responses_total{status="4xx"}': 1,
        'roofline:http_responses_total{status="5xx"}': 0,
    }


def test_engines_that_were_started_again_are_counted_over_the_lives_of_models():
    metrics = Metrics()
    metrics.bind("tiny")
    for restarts in (0, 2, 3):
        metrics.observe({"restarts": restarts}, up=True)
    metrics.engine_left({"restarts": 4})
    text = metrics.exposition({"restarts": 1}, up=True).decode()
    assert figures_of(text, "roofline:engine_restarts_total") == {"roofline:engine_restarts_total": 5}
