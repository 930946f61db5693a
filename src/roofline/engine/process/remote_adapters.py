"""The adapters of an engine process, as its owner knows them: what a fresh process must load before it goes on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from roofline.common import log
from roofline.common.errors import RequestError
from roofline.engine.adapter_info import AdapterInfo, unknown_adapter
from roofline.engine.process import messages
from roofline.engine.process.messages import AdapterLoaded, LoadAdapter, UnloadAdapter


@dataclass(eq=False)
class _Loaded:
    """An adapter of the engine. users: how many loads there were without an unload."""

    info: AdapterInfo
    users: int


class RemoteAdapters:
    """Loads and unloads adapters in an engine process, over its lives.

    An adapter is unloaded when nobody wants it any more and no request with it is open; until then a process that takes
    a dead one's place loads it again, before it is sent any request. While the process loads something nothing is
    unloaded: only its answer tells which content that was, and whose loads it counts to.

    Args:
        send: sends the present process a message.
        used: gives the adapters of open requests.
    """

    def __init__(self, send: Callable[[LoadAdapter | UnloadAdapter], None], used: Callable[[], set[str]]) -> None:
        self._send, self._used = send, used
        self._loaded: dict[str, _Loaded] = {}
        self._pending: dict[int, asyncio.Future[AdapterInfo]] = {}  # by the number of the load
        self._number = 0

    async def load(self, path: str, max_bytes: int | None) -> AdapterInfo:
        """Load a folder. Raises what loading raised, and RequestError 503 where the process dies meanwhile."""
        self._number += 1
        answer = self._pending[self._number] = asyncio.get_running_loop().create_future()
        self._send(LoadAdapter(self._number, path, None, max_bytes))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:  # it came in the same moment
                self.unload(answer.result().digest)
            raise

    def unload(self, digest: str) -> None:
        """One who loaded it does not use it any more."""
        if digest in self._loaded:
            self._loaded[digest].users -= 1
            self.forget_idle()

    def check(self, digest: str) -> None:
        """Raises RequestError 404 for an adapter that nobody has loaded, or that is being unloaded."""
        if digest and (digest not in self._loaded or self._loaded[digest].users < 1):
            raise unknown_adapter()

    def forget_idle(self) -> None:
        """Unload what has no user and no open request, unless something is being loaded."""
        idle = [digest for digest, entry in self._loaded.items() if entry.users < 1]
        if not idle or self._pending:
            return
        for digest in set(idle) - self._used():
            del self._loaded[digest]
            self._send(UnloadAdapter(digest))

    def told(self, message: AdapterLoaded) -> None:
        """The answer to a load, or to one of `restore`, which have no number."""
        refused = messages.as_error(message.refused) if message.refused is not None else None
        answer = self._pending.pop(message.number, None)
        if answer is None:
            if refused is not None:
                log.get("engine").error("an adapter could not be loaded again: %s", refused)
            return
        if message.info is not None:
            loaded = self._loaded.setdefault(message.info.digest, _Loaded(message.info, 0))
            if not answer.done():  # who asked has not gone
                loaded.users += 1
                answer.set_result(message.info)
        elif not answer.done():
            assert refused is not None, "an adapter, or why there is none"
            answer.set_exception(refused)
        self.forget_idle()

    def restore(self) -> None:
        """A fresh process has none: load them all again, as they were."""
        for digest, entry in self._loaded.items():
            self._send(LoadAdapter(0, entry.info.path, digest))

    def died(self) -> None:
        """The process is gone, and with it what it was loading."""
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(
                    RequestError(503, "engine_unavailable", "The engine died while it loaded the adapter.")
                )
        self.forget_idle()
