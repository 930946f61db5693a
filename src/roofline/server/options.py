"""The options of serving a model over HTTP. Cheap to import: the engine process is started before HTTP is."""

import contextlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.common.errors import ConfigError
from roofline.common.options import Options, declared, option
from roofline.engine.config import EngineConfig, with_places_for_adapters
from roofline.server.limits import Limits

CALL_PARSERS = (
    "auto",
    "hermes",
    "llama3",
    "mistral",
    "mistral_args",
    "json",
    "xml",
    "seed_xml",
    "glm",
    "minimax",
    "dsml",
    "dsml_v4",
    "kimi",
    "deepseek_v3",
    "deepseek_v31",
    "hy_v3",
    "solar",
    "gemma",
    "harmony",
    "lfm2",
    "pythonic",
)

if TYPE_CHECKING:
    from roofline.engine.pooling import Pooling
    from roofline.text.replies.reply_format import ReplyFormat
    from roofline.weights.vectors import VectorKind

TOPIC = "Serving"
SECURITY = "Who may use the server"
ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")  # as browsers send it
UDS_MODE = re.compile(r"0?[0-7]{3}")
KEY = re.compile(r"[!-~]{1,1024}")  # what a header can hold


@dataclass(frozen=True)
class ServeOptions(Options):
    """What to serve, and where.

    Args:
        model: a name, hub id or path.
        load: how the model is loaded. engine: how each engine runs; `draft` is the name, hub id or path of the draft
            model that it may guess with.
    """

    model: str = DEFAULT_MODEL
    host: str = option("127.0.0.1", "Address to listen on.", topic=TOPIC)
    port: int = option(8000, "Port; 0 takes a free one.", minimum=0, maximum=65535, topic=TOPIC)
    api_key: str | None = option(
        None,
        "Needed on every route but /health and the chat page. Default: ROOFLINE_API_KEY.",
        topic=SECURITY,
        secret=True,
    )
    served_model_name: list[str] | None = option(
        None, "A name that requests give. The first one is what answers, logs and metrics say. Default: MODEL.",
        topic=TOPIC,
    )  # fmt: skip
    page: bool = option(True, "Serve a chat page at /, which needs no key itself.", topic=TOPIC)
    uds: Path | None = option(
        None, "Listen on a unix socket at this path in place of --host and --port; one of a server that is gone is "
        "replaced.",
        topic=TOPIC,
    )  # fmt: skip
    uds_mode: str = option(
        "600", "Who may connect to the unix socket, as chmod has it: 600 its owner alone, 660 its group too.",
        topic=TOPIC,
    )  # fmt: skip
    api_keys: Path | None = option(
        None, "File of named keys (`roofline keys new`), read again when it changes.", topic=SECURITY
    )
    open_probes: bool = option(
        False, "/ready answers without a key too: to those without one whether it is ready, and nothing else.",
        topic=SECURITY,
    )  # fmt: skip
    tls_certificate: Path | None = option(
        None,
        "Certificate (PEM, with its chain): speak TLS, with --tls-key. Read again when it changes.",
        topic=SECURITY,
    )
    receipt_key: Path | None = option(
        None, "Private key (Ed25519, PEM) that receipts are signed with; without it they have a checksum alone.",
        topic=SECURITY,
    )  # fmt: skip
    tls_key: Path | None = option(None, "Private key of --tls-certificate (PEM).", topic=SECURITY)
    allow_origin: list[str] | None = option(
        None, "Origin whose pages in browsers may use the API, such as https://chat.example.org.", topic=SECURITY
    )
    max_queued_requests: int = option(
        Limits.queued, "Requests that may wait for their first token; more are answered with 429 and Retry-After.",
        minimum=1, unit="requests", topic=TOPIC,
    )  # fmt: skip
    stall_seconds: float = option(
        10.0, "/ready answers 503 once requests have waited so long without a step of the engine.",
        minimum=0.1, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    canary_seconds: float = option(
        30.0, "Where no token was computed for so long, /ready has the engine compute one; 0: never.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    golden_check: Literal["later", "off"] = option(
        "later",
        "Compare logits of a few golden prompts with those of a slow reference on the original file's bytes. later: "
        "once, in idle time, from 20 s after it is ready on; /ready and /metrics say what came of it.",
        topic=TOPIC,
    )
    access_log: bool = option(
        True, "A log line for each request, whatever ROOFLINE_LOG says; those of probes that succeed at debug.",
        topic=TOPIC,
    )  # fmt: skip
    ping_seconds: float = option(
        15.0, "A stream that is silent for so long says `: ping`, so that proxies leave it open; 0: never.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    tool_call_parser: str = option(
        "auto", "How the model writes calls of tools: auto tells it from the chat template.",
        choices=CALL_PARSERS, topic=TOPIC,
    )  # fmt: skip
    reasoning_parser: str = option(
        "auto", "How the model writes reasoning: think, between <think> marks; auto: where its chat template has them.",
        choices=("auto", "think", "none"), topic=TOPIC,
    )  # fmt: skip
    pooling: str = option(
        "auto", "What embeddings are made of: the hidden state of a text's last token, of its first, or the mean over "
        "all of them; auto: what the model's files say, or else the mean of an encoder and the last of other models.",
        choices=("auto", "last", "mean", "first"), topic=TOPIC,
    )  # fmt: skip
    otlp_endpoint: str | None = option(
        None, "Collector of OpenTelemetry that is sent a span for each request, as http://localhost:4318. "
        "Default: what OTEL_EXPORTER_OTLP_ENDPOINT says.",
        topic=TOPIC,
    )  # fmt: skip
    max_streams: int = option(
        Limits.streams, "Requests that a key may have open at a time, unless its entry says otherwise; more: 429.",
        flags=("--max-streams-per-key",), minimum=1, unit="requests", topic=TOPIC,
    )  # fmt: skip
    first_token_timeout: float = option(
        Limits.first_token_seconds, "A request without a token so long is ended with 503; 0: never.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    request_timeout: float = option(
        Limits.total_seconds,
        "A request that is not complete by then is ended with 504, or an error event; 0: never. A request's own "
        "X-Request-Timeout shortens it.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    drain_seconds: int = option(
        Limits.drain_seconds, "Answers may still take so long when the server is told to end (SIGTERM); what is not "
        "complete by then ends with an error.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    response_store: Path | None = option(
        None, "File that keeps the responses of /v1/responses beyond the server's end. Default: kept in memory.",
        topic=TOPIC,
    )  # fmt: skip
    max_stored_responses: int = option(
        Limits.stored_responses, "Responses that are kept, of all keys; 0: none.",
        minimum=0, unit="responses", topic=TOPIC,
    )  # fmt: skip
    max_stored_bytes: int = option(
        Limits.stored_bytes, "Size of the responses that are kept, of all keys.", minimum=1, unit="bytes", topic=TOPIC,
    )  # fmt: skip
    stored_response_days: float = option(
        Limits.stored_seconds / 86400, "A response is kept for so long since it was last gone on from.",
        minimum=0, unit="days", topic=TOPIC,
    )  # fmt: skip
    batch_folder: Path | None = option(
        None, "Keep files and batches (/v1/files, /v1/batches) in this folder; without it those routes are off.",
        topic=TOPIC,
    )  # fmt: skip
    batch_at_once: int = option(
        16, "Lines of a key's batch that are computed at a time, while no other request is.",
        minimum=1, unit="lines", topic=TOPIC,
    )  # fmt: skip
    data_parallel: int = option(
        1, "Replicas of the model that share the requests, and the cores.",
        flags=("--data-parallel", "--dp"), minimum=1, unit="replicas", topic="Several ranks",
    )  # fmt: skip
    adapter: list[str] | None = option(
        None, "A LoRA adapter to serve beside the model, as NAME=PATH: a folder of PEFT's files, or a GGUF file. "
        "Requests give NAME as their model. May be given several times.",
        topic=TOPIC,
    )  # fmt: skip
    extra_model: list[str] | None = option(
        None, "A further model, as NAME=MODEL, loaded when a request gives NAME as its model, with the options of the "
        "first one. May be given several times. The least recently used leaves when another needs its memory.",
        topic=TOPIC,
    )  # fmt: skip
    pin_model: list[str] | None = option(
        None, "Name of an extra model that is loaded at the start and never leaves. May be given several times.",
        topic=TOPIC,
    )  # fmt: skip
    model_megabytes: int = option(
        0, "Memory of all loaded models with their caches, where there are extra ones; 0: three quarters of the "
        "machine's.",
        minimum=0, unit="MiB", topic=TOPIC,
    )  # fmt: skip
    draft: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.engine.speculate == "draft") != (self.draft is not None):
            raise ConfigError("speculating with a draft model needs both --speculate draft and --draft MODEL")
        if self.api_key is not None and not KEY.fullmatch(self.api_key):
            raise ConfigError("the API key must be 1 to 1024 visible ASCII characters")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both --tls-certificate and --tls-key")
        if self.extra_model and self.data_parallel > 1:
            raise ConfigError("extra_model and data_parallel: a server has replicas of one model, or several models")
        self._check_unix_socket()
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ConfigError(f"served_model_name={twice!r} is there twice: leave one of the two out")
        if (self.pin_model or self.model_megabytes) and not self.extra_model:
            raise ConfigError("pin_model and model_megabytes are about extra_model, of which there is none")
        for origin in self.allow_origin or ():
            if not ORIGIN.fullmatch(origin):  # `*` and `null` are none
                raise ConfigError(f"allow_origin={origin!r} is no origin: give it as https://name or https://name:port")

    def _check_unix_socket(self) -> None:
        default = declared(ServeOptions)
        if self.uds is not None:
            for name in ("host", "port"):
                if getattr(self, name) != default[name].default:
                    raise ConfigError(f"--uds and --{name}: a server listens in one place; leave one of the two out")
        elif self.uds_mode != default["uds_mode"].default:
            raise ConfigError("--uds-mode is about --uds, of which there is none")
        if not UDS_MODE.fullmatch(self.uds_mode):
            raise ConfigError(f"uds_mode={self.uds_mode!r} cannot be used: give three octal digits, such as 660")

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model; the first one is what it is called everywhere else."""
        return tuple(filter(None, self.served_model_name or ())) or (self.model,)

    def reply_format(self, template: str) -> "ReplyFormat":
        """How a model with this chat template writes reasoning and calls of tools."""
        from roofline.text.replies.reply_format import reply_format

        calls = None if self.tool_call_parser == "auto" else self.tool_call_parser
        thinks = None if self.reasoning_parser == "auto" else self.reasoning_parser == "think"
        return reply_format(template, calls, thinks)

    @property
    def embedding_pooling(self) -> "Pooling | None":
        """What embeddings are made of; None: what the loaded model says."""
        from roofline.engine.pooling import Pooling

        return None if self.pooling == "auto" else Pooling(cast("VectorKind", self.pooling))

    def effective_limits(self) -> Limits:
        """`limits` with those that are options of their own."""
        return replace(
            self.limits,
            adapter_bytes=self.engine.adapter_bytes,
            queued=self.max_queued_requests,
            streams=self.max_streams,
            first_token_seconds=self.first_token_timeout,
            total_seconds=self.request_timeout,
            stored_responses=self.max_stored_responses,
            stored_bytes=self.max_stored_bytes,
            stored_seconds=self.stored_response_days * 86400,
            drain_seconds=self.drain_seconds,
        )

    def with_room_for_adapters(self) -> "ServeOptions":
        """The options with places for the adapters that are named. Raises as `with_places_for_adapters`."""
        load, engine = with_places_for_adapters(self.load, self.engine, len(self.adapter or ()))
        return replace(self, load=load, engine=engine)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    import ipaddress

    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
