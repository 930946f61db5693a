"""A span for each request, for collectors of OpenTelemetry. The attributes are those of its conventions for generative
models and, beside them, vLLM's, so that dashboards of either work.

The SDK reads the variables that it defines (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, ...)
by itself. Neither prompts nor answers, nor stop strings, are among the attributes.
"""

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from roofline.common import env, log
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.extras import named_packages
from roofline.engine.events import Usage
from roofline.server.access_log import is_probe
from roofline.server.answers import Answers
from roofline.server.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

LOG = log.get("server")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
LAST_SPANS_SECONDS = 3.0  # for the last spans to reach a collector that may be gone


class Tracing:
    """Makes a span of each record that it is called with, and hands it to an exporter in the background."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("roofline")
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        if is_probe(record):
            return
        sent = {
            name: record.headers[name.encode()].decode("latin-1") for name in PARENT if name.encode() in record.headers
        }
        began, answers = int(record.began_at * 1e9), record.answers
        span = self._tracer.start_span(
            record.method[:16] if answers is None else f"{_operation(answers)} {answers.generation.model}",
            context=self._propagator.extract(sent),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes(record).items() if value is not None},
            start_time=began,
        )
        error = _error(record)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(began + int(record.seconds * 1e9))

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(LAST_SPANS_SECONDS)


PARENT = ("traceparent", "tracestate")


def tracing(endpoint: str | None) -> Tracing | None:
    """What sends spans to a collector: to `endpoint`, or where the environment says. None where neither does.

    Raises ConfigError and UnsupportedError for an endpoint that cannot be used; one of the environment, which may be
    meant for other programs, is left alone with a warning.
    """
    if endpoint is not None:
        return Tracing(_provider(endpoint))
    disabled = (env.foreign("OTEL_SDK_DISABLED") or "").lower() == "true" or env.foreign(
        "OTEL_TRACES_EXPORTER"
    ) == "none"
    if disabled or not any(env.foreign(name) for name in ENDPOINTS):
        return None
    try:
        return Tracing(_provider(None))
    except RooflineError as error:
        LOG.warning("no spans are sent to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names: %s", error)
        return None


@named_packages()
def _provider(endpoint: str | None) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    protocol = next(filter(None, map(env.foreign, PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigError(f"spans are sent by http/protobuf, not by {protocol!r}: unset OTEL_EXPORTER_OTLP_PROTOCOL")
    if endpoint is None:
        return provider_of(OTLPSpanExporter())
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint={endpoint!r} is no address: give it as http://localhost:4318")
    return provider_of(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces"))


def provider_of(exporter: "SpanExporter") -> "TracerProvider":
    """A provider, not a global one, that gives its spans to `exporter`, from a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = env.foreign("OTEL_SERVICE_NAME") or "service.name=" in (env.foreign("OTEL_RESOURCE_ATTRIBUTES") or "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "roofline"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def attributes(record: RequestRecord) -> "dict[str, AttributeValue | None]":
    """What a span says of a request; None: nothing."""
    about: dict[str, AttributeValue | None] = {
        "http.request.method": record.method[:16],
        "url.path": record.path[:200],
        "http.response.status_code": record.status,
        "gen_ai.request.id": record.id,
        "enduser.id": record.principal,
    }
    return about if record.answers is None else about | _of_answers(record.answers, record.seconds)


def _of_answers(answers: Answers, seconds: float) -> "dict[str, AttributeValue | None]":
    generation, usage = answers.generation, answers.usage()
    params, times = generation.params, answers.usages
    prefill, decode = (
        _longest(times, lambda usage: usage.prefill_seconds),
        _longest(times, lambda usage: usage.decode_seconds),
    )
    return {
        "gen_ai.operation.name": _operation(answers),
        "gen_ai.provider.name": "roofline",
        "gen_ai.request.model": generation.model,
        "gen_ai.response.model": generation.model,
        "gen_ai.response.id": answers.id,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in answers.choices],
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": answers.cached_tokens,
        "gen_ai.usage.num_sequences": len(answers.choices),
        "gen_ai.latency.e2e": seconds,
        "gen_ai.latency.time_to_first_token": answers.first_token_seconds,
        "gen_ai.latency.time_in_queue": _longest(times, lambda usage: usage.queue_seconds),
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": None if prefill is None or decode is None else prefill + decode,
    }


def _longest(usages: Iterable[Usage], seconds_of: Callable[[Usage], float | None]) -> float | None:
    """Of several answers the one that took longest."""
    return max((seconds for usage in usages if (seconds := seconds_of(usage)) is not None), default=None)


def _operation(answers: Answers) -> str:
    return "chat" if answers.generation.at_start else "text_completion"


def _error(record: RequestRecord) -> str | None:
    """What the server did wrong, as a word; a client's mistakes and its leaving are no errors of a server's span."""
    if record.status >= 500:
        return str(record.status)
    failed = record.answers is not None and any(choice.finish_reason == "error" for choice in record.answers.choices)
    return "engine_failed" if failed else None
