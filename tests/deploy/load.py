"""Load on a server, with an account of every request: each is complete, or its error is told."""

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Outcome:
    """What came of one request. error: None where its answer is complete; moments: at which events came; events: of a
    stream, or the whole answer alone; replica: that answered, as it says itself."""

    error: str | None = None
    status: int = 0
    replica: str | None = None
    events: list[dict] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


def ask(address: str, body: dict, path: str = "/v1/completions", headers: dict[str, str] | None = None) -> Outcome:
    """Send one request, and read its answer to the end."""
    outcome, parts = Outcome(), urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        outcome.status, outcome.headers = answer.status, {name.lower(): value for name, value in answer.getheaders()}
        outcome.replica = answer.headers.get("X-Replica")
        if answer.status != 200:
            outcome.error = f"status {answer.status}: {answer.read().decode()[:200]}"
        elif body.get("stream"):
            _read_stream(answer, outcome)
        else:
            outcome.events.append(json.loads(answer.read()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return outcome


def _read_stream(answer: http.client.HTTPResponse, outcome: Outcome) -> None:
    done = False
    while line := answer.readline():
        if line.startswith(b"data: {"):
            outcome.events.append(json.loads(line[6:]))
            outcome.moments.append(time.monotonic())
            if "error" in outcome.events[-1]:
                outcome.error = f"error event: {outcome.events[-1]['error']}"
        done = done or line.startswith(b"data: [DONE]")
    if not done:
        outcome.error = outcome.error or "the stream ended without [DONE]"


class Load:
    """Threads that send one request after the other until told to stop. body: of the number-th request."""

    def __init__(self, address: str, body, workers: int) -> None:
        self.address, self.body = address, body
        self.outcomes: list[Outcome] = []
        self._begun, self._lock, self._stop = 0, threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number, self._begun = self._begun, self._begun + 1
            self.outcomes.append(ask(self.address, self.body(number)))

    def wait_for(self, count: int, seconds: float = 60.0) -> None:
        """Wait until so many more requests have ended."""
        goal, end = len(self.outcomes) + count, time.monotonic() + seconds
        while len(self.outcomes) < goal:
            assert time.monotonic() < end, f"only {len(self.outcomes)} of {goal} requests ended"
            time.sleep(0.01)

    @property
    def failed(self) -> list[str]:
        """The errors of requests that failed."""
        return [outcome.error for outcome in self.outcomes if outcome.error is not None]

    def by_replica(self) -> Counter:
        return Counter(outcome.replica for outcome in self.outcomes)


@contextmanager
def load_on(
    address: str, body=lambda number: {"prompt": f"{number}", "max_tokens": 3}, workers: int = 4
) -> Iterator[Load]:
    """A load that goes on while the block runs; behind it all of its requests have ended."""
    load = Load(address, body, workers)
    for thread in load._threads:
        thread.start()
    try:
        yield load
    finally:
        load._stop.set()
        for thread in load._threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in load._threads), "requests hang"
    assert len(load.outcomes) == load._begun, "each request has its outcome"
