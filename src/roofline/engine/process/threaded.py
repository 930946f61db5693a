"""ThreadedEngine: RemoteEngine's interface over an engine of this process, for models that live in its memory.

The same messages cross the same kind of socket pair; the other end is a thread. A native step leaves the interpreter
to the event loop; a step in Python does not.
"""

import asyncio
import socket
import threading

from roofline.common import log
from roofline.engine.local import LocalEngine
from roofline.engine.process.main import Channel, ready, work
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine


class ThreadedEngine(RemoteEngine):
    """Keeps no engine alive: one that fails is gone, and its requests fail with it.

    Args:
        name: what the model is called.
        engine: used by the thread alone from `start` until this is closed; it is left without requests.
    """

    def __init__(self, name: str, engine: LocalEngine) -> None:
        super().__init__(EngineSpec(source=name, config=engine.config), max_restarts=0)
        self._engine = engine
        self._thread: threading.Thread | None = None

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._work, args=(theirs,), name="roofline-engine", daemon=True)
        self._thread.start()
        self._socket = ours

    def _work(self, sock: socket.socket) -> None:
        with sock:  # closed however this ends: the owner sees it as the engine's death
            channel = Channel(sock)
            try:
                channel.send(ready(self.spec.source, self._engine, 0.0))
                work(channel, self._engine, [])
                self._engine.abort_all()
                self._engine.step()  # takes the events of what was aborted
            except Exception:
                log.get("engine").exception("the engine failed")

    async def _reap(self) -> int | None:
        await super()._reap()
        if self._thread is not None:  # it ends after its step, as its socket is closed
            await asyncio.to_thread(self._thread.join)
        return None
