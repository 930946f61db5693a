"""The facade: what every engine offers, called step by step (`Engine`) or from an event loop (`AsyncEngine`)."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats

if TYPE_CHECKING:
    from roofline.engine.process.messages import Ready
    from roofline.engine.process.remote import RemoteEngine
    from roofline.engine.process.stream import Stream


class Engine(Protocol):
    """Token ids to token ids in the caller's thread, step by step; `LocalEngine` is the one there is."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to tell."""

    @property
    def lost(self) -> str | None:
        """Why no step can succeed any more, None while they can."""

    def submit(
        self,
        ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        eos_ids: Iterable[int] = (),
        request_id: str | None = None,
        salt: str = "",
    ) -> str:
        """Queue a prompt and return the request's id.

        Args:
            eos_ids: the model's own end-of-generation ids.
            request_id: a name of the caller's, not in use; None makes one.
            salt: prefixes are shared only between requests of the same salt (a tenant).

        Raises:
            RequestError: a field that cannot be used.
            CapacityError: prompt and answer can never fit; the message has the numbers.
        """

    def step(self) -> list[Event]:
        """Run one step, if there is work, and return what happened since the last call."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its n answers. A request that has ended, or never was, is left alone."""

    def abort_all(self) -> None:
        """End every request now."""

    def stats(self) -> EngineStats:
        """A reading of the counters."""

    def close(self) -> None:
        """Abort everything and free what is held."""


class AsyncEngine(Protocol):
    """Token ids to token ids for asyncio programs: `RemoteEngine`, one engine, or `Replicas`, several as one.

    Use it from one event loop, whose thread must live as long as the engine.
    """

    @property
    def description(self) -> "Ready | None":
        """What the model is; None until it is loaded."""

    @property
    def ready(self) -> bool:
        """Whether requests are being computed now."""

    @property
    def engines(self) -> "Sequence[RemoteEngine]":
        """The engines that share the requests; none where a single one computes all."""

    @property
    def outstanding(self) -> int:
        """Tokens still to be computed, as far as is known here."""

    @property
    def restarts(self) -> int:
        """How many processes were started in place of ones that died."""

    @property
    def pid(self) -> int | None:
        """The engine process's id, None when there is none, or more than one."""

    def launch(self) -> None:
        """Start loading, while the caller prepares its event loop; `start` goes on from there."""

    async def start(self) -> "Ready":
        """Wait until the model is loaded.

        Raises:
            ConfigError, UnsupportedError, CapacityError, RooflineError: what loading raised.
        """

    async def submit(
        self,
        ids: Iterable[int],
        params: SamplingParams | None = None,
        *,
        eos_ids: Iterable[int] = (),
        request_id: str | None = None,
        salt: str = "",
    ) -> "Stream":
        """Send a request, as for `Engine.submit`, and return its stream. While the engine restarts this waits.

        Raises:
            RequestError: a field that cannot be used; status 503 when there is no engine any more.
            CapacityError: prompt and answer can never fit.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one answer of it, within one step. One that has ended, or never was, is left alone."""

    def stats(self) -> EngineStats:
        """The counters after the last step of the present process or processes."""

    async def close(self, timeout: float = 5.0) -> None:
        """End every request with one last event, and the engine; after `timeout` seconds by force."""
