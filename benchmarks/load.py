"""A server under load from clients that vanish: are finished answers those of quiet hours, and what does it cost?

python -m benchmarks.load --model smollm2-135m --streams 256 --seconds 600 --threads 2

Starts `roofline serve` on a free port of this machine, has each of several requests answered alone, and then keeps so
many streams open for so long; one client in five leaves in the middle of its answer. Every answer that ends is compared
with the one of its request alone. Exits with 1 where a target is missed: an answer differs or is refused, something is
left behind, memory or open files grew by more than LEAK_MIB and LEAK_FILES, the 99th percentile of the time between
tokens is more than MOST_RATIO times the median, or the processor time outside the kernels is more than MOST_OUTSIDE.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

TICKS = os.sysconf("SC_CLK_TCK")
REQUESTS = 32  # different ones
LEAK_MIB, LEAK_FILES = 32, 8  # of both processes together, after the warm-up
MOST_RATIO, MOST_OUTSIDE = 4.0, 0.15
SUBJECTS = ("the sea", "a clock", "bread", "the moon", "glass", "a river", "snow", "a letter")


@dataclass
class Tally:
    """What clients saw. gaps: seconds between the events of a stream, after its first."""

    finished: int = 0
    left: int = 0
    different: int = 0
    refused: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)


def request_of(number: int) -> bytes:
    """The head and body of one of the requests: prompts, lengths and temperatures differ."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": f"{number}: what is {SUBJECTS[number % len(SUBJECTS)]}?"}],
        "stream": True,
        "seed": number,
        "temperature": (0.0, 0.8)[number % 2],
        "max_tokens": 24 + 8 * (number % 8),
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def events(port: int, request: bytes) -> AsyncGenerator[str, None]:
    """The data of a stream's events; ends early where the server refuses. The connection closes with the iteration."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if b" 200 " not in await reader.readline():
            return
        async for line in reader:
            if line.startswith(b"data: "):
                yield line[6:].strip().decode()
    finally:
        writer.close()


async def answer(port: int, request: bytes, leave_after: int | None, gaps: list[float]) -> str | None:
    """The text of an answer; None: refused, broken off, or left after so many events."""
    text: list[str] = []
    before, count = None, 0
    async with contextlib.aclosing(events(port, request)) as stream:
        async for data in stream:
            if data == "[DONE]":
                return "".join(text)
            now = time.perf_counter()
            content = json.loads(data)["choices"][0]["delta"].get("content")
            if content:
                text.append(content)
                if before is not None:
                    gaps.append(now - before)
                before = now
                count += 1
            if leave_after is not None and count >= leave_after:
                return None
    return None


async def client(
    port: int, requests: list[bytes], alone: list[str], end: float, chance: random.Random, tally: Tally
) -> None:
    while time.perf_counter() < end:
        number = chance.randrange(len(requests))
        leave_after = chance.randrange(1, 20) if chance.random() < 0.2 else None
        gaps: list[float] = []
        text = await answer(port, requests[number], leave_after, gaps)
        tally.gaps += gaps
        tally.tokens += len(gaps) + 1
        if text is not None:
            tally.finished += 1
            tally.different += text != alone[number]
        elif leave_after is not None:
            tally.left += 1
        else:
            tally.refused += 1


async def load(port: int, requests: list[bytes], alone: list[str], streams: int, seconds: float, seed: int) -> Tally:
    tally, end = Tally(), time.perf_counter() + seconds
    each = (client(port, requests, alone, end, random.Random(seed * 1000 + i), tally) for i in range(streams))
    await asyncio.gather(*each)
    return tally


@dataclass(frozen=True)
class Reading:
    """A server and its engine at a moment. cpu: processor seconds so far; memory: bytes that are theirs alone."""

    engine: dict
    cpu: tuple[float, float]
    memory: tuple[int, int]
    files: tuple[int, int]

    @classmethod
    def of(cls, port: int, server: int) -> "Reading":
        with urlopen(f"http://127.0.0.1:{port}/stats", timeout=60) as response:
            engine = json.load(response)["engine"]
        pids = (server, engine["pid"])
        cpu, memory, files = ((read(pids[0]), read(pids[1])) for read in (cpu_seconds, private_bytes, open_files))
        return cls(engine, cpu, memory, files)  # type: ignore[arg-type]

    @property
    def idle(self) -> bool:
        return not any(self.engine[name] for name in ("running", "waiting", "pages_used", "restarts"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def wait_until_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/ready", timeout=60):
            return
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(port, pid) of a server."""
    command = [Path(sys.executable).with_name("roofline"), "serve", options.model, "--port", "0"]
    command += [
        "--served-model-name",
        "model",
        "--cache-tokens",
        str(options.streams * 160),
        "--max-running",
        str(options.streams),
    ]
    if options.threads:
        command += ["--threads", str(options.threads)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r"Listening on http://\S+:(\d+)", line):
                break
        else:
            raise SystemExit("the server did not start")
        # Its access log would fill the pipe, and a server that cannot write its log stands still.
        threading.Thread(target=collections.deque, args=(process.stderr, 0), daemon=True).start()
        port = int(match[1])
        wait_until_ready(port)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run(options: argparse.Namespace) -> bool:
    """Run the load and print what was seen: whether all held."""
    with serving(options) as (port, server):
        requests = [request_of(number) for number in range(REQUESTS)]
        alone = [asyncio.run(answer(port, request, None, [])) or "" for request in requests]
        assert all(alone), "each request is answered alone"
        asyncio.run(load(port, requests, alone, options.streams, options.warm_up, seed=1))
        before = Reading.of(port, server)
        tally = asyncio.run(load(port, requests, alone, options.streams, options.seconds, seed=2))
        after = Reading.of(port, server)
        time.sleep(2)
        rest = Reading.of(port, server)
    return report(tally, options.seconds, before, after, rest)


def report(tally: Tally, seconds: float, before: Reading, after: Reading, rest: Reading) -> bool:
    """Print what was seen; whether all targets were met."""
    server, engine = (end - start for end, start in zip(after.cpu, before.cpu, strict=True))
    python = after.engine["python_seconds"] - before.engine["python_seconds"]
    p50, p99 = statistics.median(tally.gaps), percentile(tally.gaps, 0.99)
    outside = (server + python) / (server + engine)
    growth = [(end - start) / 2**20 for end, start in zip(rest.memory, before.memory, strict=True)]
    files = [end - start for end, start in zip(rest.files, before.files, strict=True)]
    print(f"answers: {tally.finished} finished, {tally.left} left by clients, {tally.refused} refused or broken off")
    print(f"answers that differ from the same request alone: {tally.different}")
    print(f"tokens a second: {tally.tokens / seconds:.0f}")
    print(f"between tokens: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, {p99 / p50:.2f} times p50")
    print(f"processor time: server {server:.1f} s, engine {engine:.1f} s, of which Python {python:.1f} s")
    print(f"processor time outside the kernels: {outside:.1%}")
    print(f"memory: server {growth[0]:+.1f} MiB, engine {growth[1]:+.1f} MiB; files {files[0]:+d}, {files[1]:+d}")
    print("left behind:", "nothing" if rest.idle else rest.engine)
    missed = {
        "answers are those of their requests alone": tally.different or tally.refused,
        "nothing is left behind": not rest.idle or sum(growth) > LEAK_MIB or sum(files) > LEAK_FILES,
        f"p99 is at most {MOST_RATIO:g} times p50": p99 > MOST_RATIO * p50,
        f"at most {MOST_OUTSIDE:.0%} of the processor time is outside the kernels": outside > MOST_OUTSIDE,
    }
    for target, is_missed in missed.items():
        print("missed:" if is_missed else "met:   ", target)
    return not any(missed.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--warm-up", type=float, default=30)
    parser.add_argument("--threads", type=int)
    sys.exit(0 if run(parser.parse_args()) else 1)


if __name__ == "__main__":
    main()
