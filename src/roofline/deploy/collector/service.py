"""The collector's own HTTP server: /metrics for Prometheus, /replicas for people and programs, /health for whoever
starts it."""

import asyncio
import contextlib
import errno
import hmac
import json
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roofline.common.errors import ConfigError
from roofline.common.loopback import LOOPBACK
from roofline.deploy.collector.collector import MetricsCollector, render
from roofline.server.options import is_loopback
from roofline.server.protocol import BoundedProtocol

TEXT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text form
KeyCheck = Callable[[bytes], bool]  # whether a key, as a client sends it, may read metrics
MAX_CONNECTIONS = 64  # at a time, beyond which 503 is answered: who scrapes has one each
END_SECONDS = 2.0  # for answers that are under way at the end
WRITE_SECONDS = 30.0  # for the last files of a series


class CollectorApp:
    """The routes. admits: asked about the key of all requests but those for /health; None: no key is needed, and where
    `host` is a loopback address only local names are served, so that no page of a foreign site reads them."""

    def __init__(self, collector: MetricsCollector, host: str, admits: KeyCheck | None) -> None:
        self._collector, self._host, self._admits = collector, host, admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI has it."""
        if scope["type"] == "http":
            response = await self._answer(scope["method"], scope["path"], Headers(scope=scope))
            await response(scope, receive, send)

    async def _answer(self, method: str, path: str, headers: Headers) -> Response:
        if path == "/health":
            return _text(200, "up")
        refusal = self._refusal(headers)
        if refusal is not None:
            return refusal
        if path not in ("/metrics", "/replicas"):
            return _text(404, "There is no such page: /metrics, /replicas and /health are.")
        if method not in ("GET", "HEAD"):
            return _text(405, f"{path} is read with GET.", {"Allow": "GET, HEAD"})
        if path == "/replicas":
            return Response(json.dumps({"replicas": self._collector.shown()}), media_type="application/json")
        await self._collector.first_round()  # sums that grow from one replica to all would look like load
        return Response(await asyncio.to_thread(render, self._collector.families()), media_type=TEXT)

    def _refusal(self, headers: Headers) -> Response | None:
        if self._admits is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._admits(key.strip().encode("latin-1")):
                return _text(401, "Give the key as: Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"})
        elif is_loopback(self._host):
            host = headers.get("host", "")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if host and name.lower() not in (*LOOPBACK, self._host):
                return _text(403, "Without a key only local host names are served.")
        return None


class CollectorServer(uvicorn.Server):
    """uvicorn's server within a program that has its own handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield


async def serve_collector(
    collector: MetricsCollector, listening: socket.socket, host: str = "127.0.0.1", admits: KeyCheck | None = None
) -> None:
    """Read all replicas and serve what they have together, until this is cancelled.

    listening: a socket that is bound (`listen_on`), which is closed at the end; host: at which clients reach it, behind
    a load balancer that one's; admits: whose keys may read, None: no key is needed.
    """
    config = uvicorn.Config(
        CollectorApp(collector, host, admits),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        loop="none",  # we are inside one
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than Prometheus waits between two scrapes
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(END_SECONDS),
    )
    server = CollectorServer(config)
    tasks = [asyncio.create_task(server.serve(sockets=[listening])), asyncio.create_task(collector.run())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        server.should_exit = True
        tasks[1].cancel()
        await asyncio.wait(tasks, timeout=END_SECONDS + WRITE_SECONDS)
        listening.close()


def single_key(key: str) -> KeyCheck:
    """Return what admits one key."""
    return lambda sent: hmac.compare_digest(sent, key.encode())


def listen_on(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises ConfigError for one that is taken, or that there is not."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()  # who is told of the address may connect at once
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        reason = error.strerror or error
        raise ConfigError(f"the collector cannot listen on {host}:{port}: {reason}. Choose another {option}") from error
    return listening


def _text(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return Response(sentence + "\n", status, headers, "text/plain; charset=utf-8")
