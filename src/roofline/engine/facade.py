"""The facade: what engines offer to programs with an event loop. One that is called step by step is `LocalEngine`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

from roofline.engine.adapter_info import AdapterInfo
from roofline.engine.checks import RequestOptions
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats

if TYPE_CHECKING:
    from roofline.engine.process.messages import Checked, Ready
    from roofline.engine.process.remote import RemoteEngine
    from roofline.engine.process.stream import EventStream


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
    def checked(self) -> "Checked | None":
        """What came of comparing the weights with their hash; None: not known yet, or there is no hash."""

    @property
    def engines(self) -> "Sequence[RemoteEngine]":
        """The engines that share the requests; none where a single one computes all."""

    @property
    def outstanding(self) -> int:
        """Tokens still to be computed, as far as is known here; above 0 until each request's last event has come."""

    @property
    def problem(self) -> str | None:
        """Why no requests are computed at the moment; None: they are, or the model is being loaded the first time."""

    @property
    def restarts(self) -> int:
        """How many processes were started in place of ones that died."""

    @property
    def pid(self) -> int | None:
        """The engine process's id, None when there is none, or more than one."""

    def launch(self) -> None:
        """Start loading, while the caller prepares its event loop; `start` goes on from there."""

    async def start(self) -> "Ready":
        """Wait until the model is loaded. Raises what loading raised."""

    async def submit(
        self, ids: Iterable[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> "EventStream":
        """Send a request, as for `LocalEngine.submit`, and return its stream. While the engine restarts this waits.

        Raises as that does, and RequestError with status 503 when there is no engine any more.
        """

    async def load_adapter(self, path: str, max_bytes: int | None = None) -> AdapterInfo:
        """Load a LoRA adapter; requests name it by its digest from then on. A process that takes the place of one that
        died has it too. Raises as `Adapters.load`, and RequestError with status 503 while there is no engine."""

    def unload_adapter(self, digest: str) -> None:
        """Take back one `load_adapter`. After the last one, new requests with it are refused with 404, and it is
        forgotten once those that are open have ended."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one answer of it, within one step. One that has ended, or never was, is left alone."""

    def trouble(self, patience: float) -> str | None:
        """Why no tokens can be expected though an engine is up: it has been asked for something and has computed
        nothing for more than `patience` seconds, or what it computed last failed. None: they can."""

    def prove(self, seconds: float) -> None:
        """Have one token computed, unless something runs or any was computed within so many seconds. Whether it comes
        is seen in `trouble`. Of several engines each does so."""

    def stats(self) -> EngineStats:
        """The counters after the last step of the present process or processes. What was sent to them since is not
        counted; `outstanding` tells whether there is anything."""

    async def failed(self) -> str:
        """Wait until there is no engine any more and will be none; why."""

    async def close(self, timeout: float = 5.0) -> None:
        """End every request with one last event, and the engine; after `timeout` seconds by force. Where the cache has
        a file there are as many more as a slow disk takes to write it."""
