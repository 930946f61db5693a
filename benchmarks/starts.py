"""How long a process takes from its start to its first token, and a server to its first ready answer."""

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.processes import Missing, last_line

QUESTION = "What is the capital of France?"
READY_TIMEOUT, RUN_TIMEOUT = 60.0, 120.0
POLL = 0.002


def first_token_commands(
    roofline: Sequence[str], model: str, python: Path, adapters: Path, gguf: Path
) -> list[list[str]]:
    """Ours and llama.cpp's bindings': each loads, answers the same chat with one token, and ends."""
    ours = [*roofline, "generate", QUESTION, "--model", model, "--max-tokens", "1", "--temperature", "0"]
    return [ours, [str(python), str(adapters / "first_token_llamacpp.py"), str(gguf)]]


def run_seconds(command: Sequence[str], log: Path) -> float:
    """Seconds from start to end of a process. Raises Missing when it fails."""
    started = time.perf_counter()
    try:
        with open(log, "ab") as errors:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=errors, timeout=RUN_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(str(error)) from error
    seconds = time.perf_counter() - started
    if done.returncode:
        raise Missing(f"it failed with {done.returncode}: {last_line(log)}")
    return seconds


def ready_seconds(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> float:
    """Seconds from the start of `roofline serve` until /ready answers 200; the server is then ended. Raises Missing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(log, "ab") as output:
        started = time.perf_counter()
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=output, stderr=output, env={**os.environ, **(env or {})}
        )
        try:
            while time.perf_counter() - started < READY_TIMEOUT:
                if _ready(port):
                    return time.perf_counter() - started
                if server.poll() is not None:
                    raise Missing(f"the server ended with {server.returncode}: {last_line(log)}")
                time.sleep(POLL)
            raise Missing(f"not ready within {READY_TIMEOUT:.0f} s")
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
