"""What the server needs of an engine and of the text side: small interfaces that tests fill with fakes."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roofline.engine.events import Event
from roofline.engine.params import SamplingParams


@dataclass(frozen=True)
class EngineFacts:
    """What is known once the engine is up. exact: an answer does not depend on what else the engine computes.

    replicas: where several engines share the requests, which of them are up.
    """

    fingerprint: str
    vocab_size: int
    max_model_len: int
    exact: bool
    replicas: tuple[bool, ...] = ()


class Engine(Protocol):
    """The engine as the HTTP process sees it."""

    def facts(self) -> EngineFacts | None:
        """None while the engine is loading, restarting or gone."""

    def submit(
        self, ids: Sequence[int], params: SamplingParams, *, eos_ids: Sequence[int], request_id: str
    ) -> AsyncIterator[Event]:
        """The events of one request. Raises RequestError or CapacityError when it can never run."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one of its n answers, within one step. Unknown or finished ids are fine."""

    async def stats(self) -> Mapping[str, Any]:
        """Counters and gauges of the engine, empty while it is not there."""


class TextSide(Protocol):
    """Strings to ids and back."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a raw completion's prompt, with the model's beginning-of-sequence id where it wants one."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins. Raises RequestError."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for."""

    def stream(self, stop: Sequence[str], *, at_start: bool) -> "AnswerText":
        """A fresh stream of text that looks for `stop`; `at_start`: the ids do not go on from a text."""


class Delta(Protocol):
    """Certain text, the stop string met, and how many of the pushed ids were used up to it."""

    @property
    def text(self) -> str: ...
    @property
    def stopped(self) -> str | None: ...
    @property
    def used(self) -> int: ...


class AnswerText(Protocol):
    """The text of one answer in the making; `roofline.text.streaming.stops.TextStream` is one."""

    @property
    def stopped(self) -> str | None:
        """The stop string met, None before."""

    def push(self, ids: Sequence[int]) -> Delta:
        """Add ids."""

    def finish(self) -> str:
        """What was held back, when no more ids come."""
