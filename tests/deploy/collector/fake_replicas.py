"""Replicas that a collector reads: real metrics of `roofline serve` that a test moves, and servers that misbehave."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from roofline.server.metrics import Metrics

TEXT = "text/plain; version=0.0.4; charset=utf-8"
STATS = {"cache": {"pages": 8, "page_bytes": 1024}, "step_sizes": [0] * 14, "step_tokens": 0}
GOLDEN = {"status": "passed", "kl": 0.003, "top1_agreement": 1.0, "fallback": None}
ENGINE = {"ready": True, "running": 0, "waiting": 0, "outstanding_tokens": 0, "restarts": 0}
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def full_page() -> bytes:
    """/metrics of a server in which every family has a sample."""
    metrics = Metrics()
    metrics.bind("tiny")
    stats = {**STATS, "share_of_roof": 0.5, "golden": GOLDEN, "replicas": [{**STATS, **ENGINE}]}
    return metrics.exposition(stats, up=True)


class FakeReplica:
    """The metrics of a server without the server. tokens: that it has generated since its process began; born: when
    that was, as it says it, None: it says nothing of it."""

    def __init__(self, name: str) -> None:
        self.name, self.stats = name, {**STATS, "running": 0, "waiting": 0, "pages_used": 0, "pages_total": 8}
        self.born: float | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another process takes its place, which counts from 0."""
        self.metrics = Metrics()
        self.metrics.bind("tiny")
        self.tokens = self.answers = 0

    def answer(self, tokens: int, seconds: float) -> None:
        """Count an answer."""
        self.metrics.sent(tokens)
        self.metrics.first_token(seconds)
        self.metrics.answer_ended("stop", tokens)
        self.tokens, self.answers = self.tokens + tokens, self.answers + 1

    def page(self) -> bytes:
        text = self.metrics.exposition(self.stats, up=True)
        return text if self.born is None else text + f"process_start_time_seconds {self.born}\n".encode()


def replies(body: bytes, content_type: str = TEXT, headers: str = "", status: str = "200 OK") -> Answer:
    """A server that sends this body for whatever it is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_head(reader):
            head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
            writer.write(head.encode() + body)
            await writer.drain()

    return answer


def shows(replica: FakeReplica) -> Answer:
    """A server that sends a replica's page as it is when it is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_head(reader):
            body = replica.page()
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()

    return answer


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """The head of the next request; b"" at the end of the connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@asynccontextmanager
async def listening(answer: Answer, path: str | None = None) -> AsyncIterator[str]:
    """A server while the block runs, on a free port or on a Unix socket; its address. Then its connections end."""

    writers: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await answer(reader, writer)
        except ConnectionError:
            pass
        finally:
            writers.discard(writer)
            writer.close()

    if path is not None:
        server, address = await asyncio.start_unix_server(handle, path), f"unix:{path}"
    else:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield address
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.01)
