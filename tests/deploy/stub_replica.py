"""A server that speaks to its supervisor as `roofline serve` does, and computes nothing.

    stub_replica.py NAME?start=SECONDS&gap=SECONDS&fail=MESSAGE&on=NUMBER&queue=N NUMBER

Completions have `max_tokens` words, one each `gap` seconds; `X-Replica` says which replica answers. fail: it ends with
this message before it is ready, where it has the number of `on`; queue: requests beyond so many at a time are answered
with 429; slots: those beyond so many count as waiting.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from urllib.parse import parse_qsl


class StubReplica:
    """Answers on an inherited socket."""

    def __init__(self, model: str, number: str) -> None:
        self.name, _, query = model.partition("?")
        self.fields = dict(parse_qsl(query))
        self.number, self.open, self.served, self.tokens = number, 0, 0, 0
        self.last = asyncio.Event()
        self.writers = set[asyncio.StreamWriter]()

    async def run(self) -> None:
        await asyncio.sleep(float(self.fields.get("start", 0)))
        if "fail" in self.fields and self.fields.get("on", self.number) == self.number:
            sys.exit(f"roofline: {self.fields['fail']}")
        assert os.environ["LISTEN_PID"] == str(os.getpid())
        server = await asyncio.start_server(self.serve, sock=socket.socket(fileno=3))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
        ending = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
        await ending.wait()
        server.close()
        while self.open:
            await asyncio.sleep(0.01)
        for writer in self.writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.open += 1
                try:
                    await self.answer(line.split()[1].decode(), headers, body, writer)
                    await writer.drain()
                finally:
                    self.open -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/stats":
            slots = int(self.fields.get("slots", 1000))
            engine = {"running": min(self.open - 1, slots), "waiting": max(0, self.open - 1 - slots)}
            engine |= {"generated_tokens": self.tokens, "finished": {"length": self.served}}
            return self.write(writer, 200, {"engine": engine, "queued": 0, "oldest_waiting_seconds": 0.0})
        if path == "/metrics":
            return self.write_text(writer, f"# TYPE served counter\nserved_total {self.served}\n")
        if path.startswith("/v1/"):
            if self.open > int(self.fields.get("queue", 1000)):
                error = {"error": {"message": "The queue is full.", "code": "queue_full"}}
                return self.write(writer, 429, error, {"Retry-After": "7"})
            return await self.complete(json.loads(body), headers, writer)
        return self.write(writer, 200, {"status": "ready"})

    def write(
        self, writer: asyncio.StreamWriter, status: int, content: dict, more: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(content).encode()
        head = {"Content-Type": "application/json", "Content-Length": str(len(body)), "X-Replica": self.number}
        lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in {**head, **(more or {})}.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    def write_text(self, writer: asyncio.StreamWriter, text: str) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())

    async def complete(self, body: dict, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        gap, count = float(self.fields.get("gap", 0)), body.get("max_tokens", 3)
        received = {
            name: headers.get(name) for name in ("host", "x-request-id", "x-forwarded-for", "x-forwarded-proto")
        }
        if not body.get("stream"):
            await asyncio.sleep(gap * count)
            self.served, self.tokens = self.served + 1, self.tokens + count
            usage = {"completion_tokens": count}
            answer = {"model": self.name, "replica": self.number, "pid": os.getpid(), "received": received}
            return self.write(writer, 200, {**answer, "usage": usage})
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Replica: {self.number}\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for number in range(count):
            await asyncio.sleep(gap)
            event = {"choices": [{"index": 0, "text": f"{number} "}], "moment": time.monotonic(), "model": self.name}
            self.chunk(writer, f"data: {json.dumps(event)}\n\n")
            await writer.drain()
        self.chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        self.served, self.tokens = self.served + 1, self.tokens + count
        return None

    def chunk(self, writer: asyncio.StreamWriter, text: str) -> None:
        writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())


if __name__ == "__main__":
    asyncio.run(StubReplica(*sys.argv[1:]).run())
