"""What every route works with, made once and never edited."""

from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from roofline.common.errors import RequestError
from roofline.engine.facade import AsyncEngine
from roofline.engine.pooling import Pooling, check_able
from roofline.engine.process.messages import Ready
from roofline.engine.receipts.signing import Signer
from roofline.server.adapters import ServedAdapters
from roofline.server.golden import GoldenState
from roofline.server.key_metrics import KeyMetrics
from roofline.server.keys import Keys, Principal
from roofline.server.limits import Limits
from roofline.server.metrics import Metrics
from roofline.server.text_side import TextSide


@dataclass(frozen=True)
class Context:
    """The served model and the means to answer."""

    engine: AsyncEngine
    text: TextSide
    name: str  # of the model: requests must give it, or one of `aliases`
    created: int  # Unix time of the start, as /v1/models reports it
    aliases: tuple[str, ...] = ()  # further names of the model
    other_names: tuple[str, ...] = ()  # of models that are served beside it
    host: str = "127.0.0.1"  # the server's address; on a loopback one without a key only local Host names are served
    stall_seconds: float = 10.0  # without a step while something waits: the engine is not ready
    canary_seconds: float = 0.0  # without a token: /ready asks for one; 0: never
    access_log: bool = False  # a line for each request
    waits_for_engine: bool = False  # requests wait while an engine is started again; else they are answered with 503
    page: bool = True  # whether the chat page is served
    ping_seconds: float = 15.0  # of silence in a stream, before a comment is sent; 0: never
    pooling: Pooling | None = None  # what embeddings are made of; None: what the loaded model says
    keys: Keys = field(default_factory=Keys)  # none leave all routes open
    open_probes: bool = False  # whether /ready answers without a key
    allowed_origins: frozenset[str] = frozenset()  # of pages of other sites that may read answers
    response_store: Path | None = None  # the file of responses that are kept; None: they are kept in memory
    batch_folder: Path | None = None  # where files and batches are kept; None: their routes are off
    batch_at_once: int = 16  # lines of a key's batch that are computed at a time
    limits: Limits = field(default_factory=Limits)
    signer: Signer | None = None  # of receipts
    metrics: Metrics = field(default_factory=Metrics)
    key_metrics: KeyMetrics = field(default_factory=KeyMetrics)
    golden: GoldenState = field(default_factory=GoldenState)  # what came of comparing golden prompts
    adapters: ServedAdapters = None  # type: ignore[assignment]  # None: none yet, and room for those of later requests

    def __post_init__(self) -> None:
        if self.adapters is None:
            object.__setattr__(self, "adapters", ServedAdapters(self.engine, self.names, self.limits.adapter_bytes))

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may call the model, its own name first."""
        return (self.name, *self.aliases)

    def window(self) -> int:
        """Prompt tokens that the engines are given before the first tokens of their answers: those of two steps, so
        that the next step is there when one ends, and all else waits here in the order of fair shares."""
        description = self.engine.description
        return 2 * (description.step_tokens if description else 512) * max(1, len(self.engine.engines))

    def loaded(self) -> Ready:
        """The description of the loaded model. Raises RequestError 503 while no engine is ready; where requests wait
        for one that is started again (`waits_for_engine`), only before the first one was."""
        description = self.engine.description
        if description is None or not (self.engine.ready or self.waits_for_engine):
            raise RequestError(503, "engine_not_ready", "The engine is not ready. Try again in a moment.")
        return description

    def generating(self) -> Ready:
        """As `loaded`, for routes that answer. Raises also UnsupportedError, where the model is an encoder."""
        loaded = self.loaded()
        check_able(None, loaded.gives_hidden, encoder=loaded.encoder)
        return loaded


def of(request: Request) -> Context:
    """The context of the model that answers `request`: of the first one, unless another was chosen."""
    chosen: Context | None = getattr(request.state, "context", None)
    return request.app.state.context if chosen is None else chosen


def principal_of(request: Request) -> Principal:
    """Who sent `request`, as the gate identified them."""
    return request.state.principal
