"""A server that computes nothing: it answers every request with as many chunks as it may, at a planned cadence.

    python -m roofline.bench.load.null_server --port 0 --first-ms 20 --gap-ms 10

Each chunk's text is two moments of this machine's monotonic clock in nanoseconds: when the request had come in, and
when the chunk was written. A client on the same machine so knows what it and the network added.
"""

import argparse
import asyncio
import math
import signal
import sys
import time

import httptools
import msgspec

from roofline.common.processes import allow_all_files, die_with_parent

MODEL = "null"


class _Body(msgspec.Struct):
    prompt: str = ""
    messages: list[dict[str, object]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class Cadence(msgspec.Struct, frozen=True):
    """Seconds from a request to its first chunk, and from chunk to chunk."""

    first: float
    gap: float


class NullServer(asyncio.Protocol):
    """A connection to a client."""

    def __init__(self, cadence: Cadence) -> None:
        self._cadence = cadence
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            content = msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            self._answer(b"200 OK", content)
            return
        try:
            body = msgspec.json.decode(self._body, type=_Body)
        except msgspec.MsgspecError as error:
            self._answer(b"400 Bad Request", msgspec.json.encode({"error": {"message": str(error)}}))
            return
        _Answer(self._transport, self._cadence, body, chat=self._url.endswith(b"/chat/completions")).begin()

    def _answer(self, status: bytes, content: bytes) -> None:
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, len(content)) + content)


class _Answer:
    """A streamed answer under way."""

    def __init__(self, transport: asyncio.WriteTransport, cadence: Cadence, body: _Body, chat: bool) -> None:
        self._transport, self._cadence = transport, cadence
        self._received = time.perf_counter_ns()
        text = body.prompt or " ".join(str(message.get("content")) for message in body.messages)
        most = body.max_tokens or body.max_completion_tokens or 16
        self._prompt, self._most, self._sent = len(text.split()), max(most, 1), 0
        self._form = (
            b'data: {"choices":[{"index":0,"delta":{"content":"%d.%d "}}]}\n\n'
            if chat
            else b'data: {"choices":[{"index":0,"text":"%d.%d "}]}\n\n'
        )
        self._loop = asyncio.get_running_loop()
        self._due = self._received + round(cadence.first * 1e9)  # of the next chunk

    def begin(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self._wait()

    def _wait(self) -> None:
        """Until the next chunk is due, in whole milliseconds: the event loop's timers know no smaller ones."""
        milliseconds = math.ceil((self._due - time.perf_counter_ns()) / 1e6)
        self._loop.call_later(max(milliseconds, 0) / 1e3, self._chunk)

    def _chunk(self) -> None:
        if self._transport.is_closing():
            return
        if time.perf_counter_ns() < self._due:  # the loop's clock is as old as what it does at the moment
            self._wait()
            return
        self._sent += 1
        self._write(self._form % (self._received, time.perf_counter_ns()))
        if self._sent < self._most:
            self._due += round(self._cadence.gap * 1e9)
            self._wait()
            return
        usage = {"prompt_tokens": self._prompt, "completion_tokens": self._sent}
        last = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}], "usage": usage}
        self._write(b"data: %s\n\ndata: [DONE]\n\n" % msgspec.json.encode(last))
        self._transport.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _serve(port: int, cadence: Cadence) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NullServer(cadence), "127.0.0.1", port)
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    print(server.sockets[0].getsockname()[1], flush=True)  # for whoever started this with port 0
    await end.wait()
    server.close()


def main(words: list[str]) -> None:
    """Serve until a signal ends it; prints the port."""
    parser = argparse.ArgumentParser(prog="python -m roofline.bench.load.null_server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--parent", type=int, help="end with the process of this id")
    options = parser.parse_args(words)
    allow_all_files()
    if options.parent:
        die_with_parent(options.parent)
    work = _serve(options.port, Cadence(options.first_ms / 1e3, options.gap_ms / 1e3))
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])
