"""An engine of this process behind RemoteEngine, for models that live in this process's memory.

The messages are the same and cross the same kind of socket pair; a thread is at its other end. A native step leaves
the interpreter to the event loop, a step in Python does not.
"""

import socket
import threading

from roofline.common import log
from roofline.engine.local import LocalEngine
from roofline.engine.process.main import Channel, ready, work
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine


def engine_in_thread(name: str, engine: LocalEngine) -> RemoteEngine:
    """A RemoteEngine over `engine`, never restarted: when the engine fails, its requests fail with it.

    The engine is used by the thread alone from `start` until this is closed, and is left without requests.
    """
    spec = EngineSpec(source=name, config=engine.config)
    return RemoteEngine(spec, max_restarts=0, worker=ThreadWorker(name, engine))


class ThreadWorker:
    """A thread that works for the owner of a socket pair; see `worker.Worker`."""

    pid = None

    def __init__(self, name: str, engine: LocalEngine) -> None:
        self._name, self._engine = name, engine
        self._thread: threading.Thread | None = None

    def spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._work, args=(theirs,), name="roofline-engine", daemon=True)
        self._thread.start()
        return ours

    def kill(self) -> None:
        """A thread cannot be killed: it ends after its step."""

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _work(self, sock: socket.socket) -> None:
        with sock:  # closed however this ends: the owner sees it as the engine's death
            channel = Channel(sock)
            try:
                channel.send(ready(self._name, self._engine, 0.0))
                work(channel, self._engine, [])
                self._engine.abort_all()
                self._engine.step()  # takes the events of what was aborted
            except Exception:
                log.get("engine").exception("the engine failed")
