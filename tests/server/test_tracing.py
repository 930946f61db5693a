"""Spans of requests: their attributes, whose children they are, and how they reach a collector."""

import asyncio
import sys
import threading
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otlp is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otlp is not installed")
sys.path.insert(0, str(Path(__file__).parent))
from collector import collecting
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.engine.events import Event, Usage
from roofline.server import tracing as module
from roofline.server.app import create_app
from roofline.server.record import RequestRecord
from roofline.server.tracing import Tracing, provider_of, tracing

SECRET = "Xylophone-4711"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in (*module.ENDPOINTS, *module.PROTOCOLS, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


def request(context, spans, method, path, **options):
    async def once():
        transport = httpx.ASGITransport(create_app(context, spans), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **options)

    return asyncio.run(once())


@pytest.fixture
def traced(make_context):
    """traced(method, path, **options) -> (response, the spans so far)."""
    exporter = InMemorySpanExporter()
    provider = provider_of(exporter)
    spans, context = Tracing(provider), make_context()

    def run(*arguments, **options):
        response = request(context, spans, *arguments, **options)
        provider.force_flush()
        return response, exporter.get_finished_spans()

    yield run
    spans.close()


def test_a_span_says_what_was_asked_how_much_it_was_and_how_long_it_took(traced, engine):
    times = [(0.25, 0.5, 1.0), (0.75, 0.125, None)]

    async def events(ids, params, request_id):
        for index, parts in enumerate(times):
            yield Event(request_id, index, [72, 105], None, "length", None, None, Usage(len(ids), 2, 3, 7, *parts))

    engine._events = events
    fields = {"n": 2, "max_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 9, "seed": 7, "stop": [SECRET]}
    response, (span,) = traced("POST", "/v1/chat/completions", json=CHAT | fields, headers={"x-request-id": "a7"})
    assert response.status_code == 200
    assert (span.name, span.kind, span.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    told, prompt = dict(span.attributes), len(f"<user>{SECRET}")
    assert SECRET not in str(told)
    seconds, first = told.pop("gen_ai.latency.e2e"), told.pop("gen_ai.latency.time_to_first_token")
    assert 0 < first <= seconds
    assert span.end_time - span.start_time == pytest.approx(seconds * 1e9, abs=2)
    assert told == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "roofline",
        "gen_ai.request.id": "a7",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": response.json()["id"].removeprefix("chatcmpl-"),
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.latency.time_in_queue": 0.75,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.0,
        "gen_ai.latency.time_in_model_inference": 1.5,
    }
    assert span.resource.attributes["service.name"] == "roofline"


def test_a_span_is_the_child_of_the_clients(traced):
    _, (span,) = traced("GET", "/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    _, (_, alone) = traced("GET", "/v1/models", headers={"traceparent": "nonsense"})
    assert alone.parent is None
    assert f"{alone.context.trace_id:032x}" != TRACE


def test_refusals_are_spans_and_probes_are_not(traced):
    traced("POST", "/v1/completions", content=f'{{"model": "{SECRET}"')
    for path in ("/health", "/ready", "/metrics"):
        traced("GET", path)
    _, (refused,) = traced("GET", "/stats")
    assert (refused.name, refused.attributes["http.response.status_code"]) == ("POST", 400)
    assert refused.status.status_code is StatusCode.UNSET, "the client's mistake"
    assert "gen_ai.request.model" not in refused.attributes
    assert SECRET not in str(dict(refused.attributes))


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_server_did_wrong_is_an_error_of_the_span(traced, engine, stream):
    engine.error = "out of luck"
    _, (span,) = traced("POST", "/v1/completions", json={"model": "tiny", "prompt": "Hi", "stream": stream})
    assert span.name == "text_completion tiny"
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == ("engine_failed" if stream else "503")
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ((0.25, 0.5, 1.0), {"queue": 0.25, "model_prefill": 0.5, "model_decode": 1.0, "model_inference": 1.5}),
        ((0.25, 0.5, None), {"queue": 0.25, "model_prefill": 0.5}),
        ((0.25, None, None), {"queue": 0.25}),
        ((None, None, None), {}),
    ],
)
def test_a_time_that_an_answer_does_not_have_is_no_attribute(traced, engine, parts, shown):
    async def events(ids, params, request_id):
        yield Event(request_id, 0, [72], None, "length", None, None, Usage(len(ids), 1, 0, 0, *parts))

    engine._events = events
    response, (span,) = traced("POST", "/v1/chat/completions", json=CHAT)
    assert response.status_code == 200
    prefix = "gen_ai.latency.time_in_"
    assert {n[len(prefix) :]: value for n, value in span.attributes.items() if n.startswith(prefix)} == shown


def test_a_span_lies_where_the_request_lay_and_its_words_are_cut():
    exporter = InMemorySpanExporter()
    spans = Tracing(provider_of(exporter))
    method, path = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "/" + "".join(chr(97 + i % 26) for i in range(300))
    spans(RequestRecord("7", method, path, {}, began_at=1_700_000_000.5, seconds=2.25, status=405))
    spans.close()
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1_700_000_000_500_000_000, 1_700_000_002_750_000_000)
    assert span.name == span.attributes["http.request.method"] == method[:16]
    assert span.attributes["url.path"] == path[:200]


@pytest.mark.parametrize(("status", "error"), [(200, None), (429, None), (499, None), (500, "500"), (504, "504")])
def test_a_status_from_500_on_is_the_servers_mistake(status, error):
    assert module._error(RequestRecord("7", "GET", "/", {}, status=status)) == error


@pytest.mark.parametrize("by", ["option", "environment"])
def test_spans_reach_a_collector(make_context, monkeypatch, by):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with collecting() as collector:
        if by == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        spans = tracing(collector.address + "/" if by == "option" else None)
        request(make_context(), spans, "POST", "/v1/chat/completions", json=CHAT)
        spans.close()
        assert [path for path, _ in collector.messages] == ["/v1/traces"]
        ((span, resource),) = collector.spans()
    assert (span.name, resource["service.name"]) == ("chat tiny", "ours")
    assert SECRET.encode() not in collector.messages[0][1]


def test_without_an_endpoint_there_are_no_spans(monkeypatch, caplog):
    assert tracing(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert tracing(None) is None
    assert not caplog.records
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert tracing(None) is None, "it may be meant for other programs"
    assert "sent by http/protobuf, not by 'grpc'" in caplog.text
    with pytest.raises(ConfigError, match="not by 'grpc'"):
        tracing("http://127.0.0.1:1")


def test_an_endpoint_that_is_no_address_and_a_missing_package_are_named(monkeypatch):
    with pytest.raises(ConfigError, match="'localhost:4318' is no address"):
        tracing("localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UnsupportedError, match=r"roofline\[otlp\]"):
        tracing("http://localhost:4318")


def test_a_collector_that_is_gone_keeps_no_server_from_ending(monkeypatch):
    waited, gone = [], threading.Event()

    class Closing(threading.Thread):
        def join(self, timeout=None):
            waited.append((timeout, self.daemon))

    spans = Tracing(provider_of(InMemorySpanExporter()))
    monkeypatch.setattr(spans._provider, "shutdown", gone.wait)
    with monkeypatch.context() as patch:
        patch.setattr(module.threading, "Thread", Closing)
        spans.close()
    gone.set()
    assert waited == [(3.0, True)], "seconds, by a thread that ends with the process"
