"""Runs `roofline serve` in a process of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

ASK = [{"role": "user", "content": "What is the capital of France?"}]
ROOFLINE = [sys.executable, "-c", "import sys; from roofline.cli.main import main; sys.exit(main())"]


class Served:
    """A running `roofline serve`."""

    def __init__(self, process: subprocess.Popen, address: str, model: str) -> None:
        self.process, self.address, self.model = process, address, model

    def get(self, path: str, **kwargs) -> httpx.Response:
        return httpx.get(self.address + path, timeout=60, **kwargs)

    def stats(self) -> dict:
        return self.get("/stats").json()["engine"]

    def idle(self) -> bool:
        """Whether all requests so far have ended, are counted and have no pages.

        Gauges of the engine alone do not tell: they are of its last report, and there may be requests and aborts that
        it has not read. `outstanding_tokens` is above 0 until it has reported their ends.
        """
        reading = self.get("/stats").json()
        engine, gauges = reading["engine"], ("outstanding_tokens", "running", "waiting", "pages_used")
        return reading["queued"] == 0 and all(engine[name] == 0 for name in gauges)

    def eventually(self, check, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if check():
                    return
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.05)


@contextlib.contextmanager
def serving(
    environment: dict[str, str], model: Path, *options: str, lines: list[str] | None = None
) -> Iterator[Served]:
    """Run `roofline serve` on a free port until the block ends. lines: grows by what it writes to standard error."""
    command = [*ROOFLINE, "serve", str(model), "--port", "0", "--served-model-name", "small", *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines = [] if lines is None else lines
    try:
        address = None
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"Listening on (http://\S+)", line)
            if found:
                address = found[1]
                break
        assert address is not None, "".join(lines)
        # Somebody must read what it writes, or it stops when the pipe is full.
        threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
        served = Served(process, address, "small")

        def ready() -> bool:
            assert process.poll() is None, "".join(lines)
            return httpx.get(f"{address}/health", timeout=5).status_code == 200 and _ready(address, options)

        served.eventually(ready, 120)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def kill_until_one_loads(
    served: Served, present: Callable[[], int | None], loading: Callable[[], bool]
) -> tuple[list[int], int]:
    """Kill an engine's process, and those in its place until one was stopped before it had its model. Return the ids of
    those that were killed, and of the one that is stopped.

    present: the id of the engine's process, None while there is none; loading: whether it has no model yet.
    """
    killed, process = list[int](), present()
    while True:
        os.kill(process, signal.SIGKILL)
        killed.append(process)
        served.eventually(lambda: present() not in (*killed, None), 60)
        process = present()
        os.kill(process, signal.SIGSTOP)
        if loading() and loading():  # what it had sent before is read between the two
            return killed, process


def _ready(address: str, options: tuple[str, ...]) -> bool:
    headers = {}
    if "--api-key" in options:
        headers["authorization"] = f"Bearer {options[options.index('--api-key') + 1]}"
    return httpx.get(f"{address}/ready", headers=headers, timeout=5).status_code == 200


def streaming_request(model: str, **changes) -> bytes:
    """The bytes of a request for a long streamed answer."""
    body = {"model": model, "messages": ASK, "stream": True, "ignore_eos": True, "max_tokens": 2000, **changes}
    content = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def open_stream(served: Served, **changes) -> socket.socket:
    """A connection that has asked for a long streamed answer."""
    host, port = served.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(streaming_request(served.model, **changes))
    return connection
