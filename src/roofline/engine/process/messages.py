"""What the engine process and its owner say to each other: typed messages in MessagePack, each after its length.

owner -> engine   EngineSpec, then Submit, Abort, LoadAdapter, UnloadAdapter, Ping, Close
engine -> owner   Ready or LoadRefused, then one StepReport a step, and Checked once the weights were compared with
                  their hash; a Pong for each Ping; AdapterLoaded for each LoadAdapter; EngineLost, if it has to end
"""

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from roofline.common.errors import CapacityError, ConfigError, RooflineError, UnsupportedError
from roofline.engine.adapter_info import AdapterInfo
from roofline.engine.config import EngineConfig
from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats
from roofline.weights.facts import ModelFacts
from roofline.weights.vectors import VectorKind

if TYPE_CHECKING:
    from asyncio import StreamReader

LENGTH = struct.Struct("<I")
MAX_MESSAGE = 1 << 28  # bytes; more is a broken stream, not a message


class EngineSpec(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """What the engine process loads: `factory(source, **options)`, an object with `executable`, `name` and
    `pooling`.

    factory: "module:function"; options: plain values; draft: the source of a draft model, which the module's
    `load_with_draft` loads the same way and compares; cores: those that the process keeps to, none: all.
    """

    source: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    config: EngineConfig = msgspec.field(default_factory=EngineConfig)
    factory: str = "roofline.bundle:load"
    draft: str | None = None
    draft_options: dict[str, Any] = msgspec.field(default_factory=dict)
    cores: list[int] = msgspec.field(default_factory=list)


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request, as for `LocalEngine.submit`, with a seed and a `max_tokens`, so that any process gives the same ids.

    answers: the ids so far of each answer that has not ended, by its index; scored: how many of its prompt's
    log-probabilities were told.
    """

    request_id: str
    ids: list[int]
    params: SamplingParams
    eos_ids: list[int]
    salt: str
    answers: dict[int, list[int]]
    scored: int = 0
    adapter: str = ""
    priority: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load an adapter, as `Adapters.load`; number: of the answer."""

    number: int
    path: str
    digest: str | None = None
    max_bytes: int | None = None


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What came of it: the adapter, or why it could not be loaded."""

    number: int
    info: AdapterInfo | None
    refused: "LoadRefused | None" = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """As `Adapters.unload`."""

    digest: str


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or one answer of it."""

    request_id: str
    index: int | None = None


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for a Pong, which comes between two steps."""


class Pong(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine is there."""


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort everything and exit."""


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded. Sizes in tokens, pages and bytes; `pid` is the engine process; `exact` as `Executable`'s;
    `weights_identity`: as `IdentifiesWeights` has it, "" where the backend does not; `gives_hidden`: whether requests
    can have vectors of hidden rows; `encoder`: whether they have these alone; `pooling`: what a vector is made of where
    nobody says; `gives_logits`: whether ids are sampled from logits; `facts`: what the model is, where that is
    known; `media_ids`: those that prompts may not have (`engine.checks.media_in`); `state_slots`, each of `slot_bytes`:
    of recurrent state, 0 where the model has none."""

    name: str
    vocab_size: int
    max_model_len: int
    fingerprint: str
    num_pages: int
    page_bytes: int
    load_seconds: float
    pid: int
    exact: bool
    step_tokens: int = 512  # that one step computes at most
    weights_identity: str = ""
    gives_hidden: bool = False
    encoder: bool = False
    pooling: VectorKind = "last"
    gives_logits: bool = True
    facts: ModelFacts | None = None
    media_ids: dict[int, str] = {}
    state_slots: int = 0
    slot_bytes: int = 0


class LoadRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model could not be loaded: which of our errors, and the arguments it was made from."""

    kind: str
    arguments: list[Any]


class StepReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One step: all its events, and the counters after it."""

    events: list[Event]
    stats: EngineStats


class EngineLost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process ends, because it can compute nothing any more: why. Its requests go on in a fresh one."""

    reason: str


class Checked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The weights were compared with their hash; problem: the sentence about weights that were changed, None: none."""

    problem: str | None


ToEngine = EngineSpec | Submit | Abort | LoadAdapter | UnloadAdapter | Ping | Close
ToOwner = Ready | LoadRefused | StepReport | Checked | AdapterLoaded | EngineLost | Pong

SAVED_PER_SECOND = 32 << 20  # bytes of a cache that a slow disk takes


def closing_seconds(spec: EngineSpec, ready: Ready | None, seconds: float) -> float:
    """How long an engine may take to close that takes so long without its cache's file."""
    if ready is None or spec.config.cache_file is None:
        return seconds
    cache_bytes = ready.num_pages * ready.page_bytes + ready.state_slots * ready.slot_bytes
    return seconds + cache_bytes / SAVED_PER_SECOND


encoder = msgspec.msgpack.Encoder()
engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
owner_decoder: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)


def frame(message: ToEngine | ToOwner) -> bytes:
    """A message as it goes over the socket."""
    body = encoder.encode(message)
    return LENGTH.pack(len(body)) + body


async def read(reader: "StreamReader") -> ToOwner:
    """The next message of an engine. Raises IncompleteReadError where it has ended."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return owner_decoder.decode(await reader.readexactly(length))


# The arguments of those of our errors that are made from more than their message.
_ARGUMENTS: dict[type[RooflineError], tuple[str, ...]] = {
    UnsupportedError: ("what", "reason", "alternatives"),
    CapacityError: ("what", "needed", "available", "unit", "remedy"),
}


def refused(error: Exception) -> LoadRefused:
    """An error of loading, as a message. Errors that are not ours arrive as RooflineError with their type's name."""
    for kind, names in _ARGUMENTS.items():
        if isinstance(error, kind):
            return LoadRefused(kind.__name__, [getattr(error, name) for name in names])
    if isinstance(error, ConfigError):
        return LoadRefused("ConfigError", [str(error)])
    text = str(error) if isinstance(error, RooflineError) else f"{type(error).__name__}: {error}"
    return LoadRefused("RooflineError", [text])


def as_error(message: LoadRefused) -> RooflineError:
    """The error that `refused` was made from."""
    kinds = {kind.__name__: kind for kind in (*_ARGUMENTS, ConfigError)}
    return kinds.get(message.kind, RooflineError)(*message.arguments)
