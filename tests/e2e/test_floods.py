"""A flood of bodies that take long to read: small requests are answered meanwhile, and a killed engine comes back."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
from e2e_serving import Served, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

LARGE = 32  # requests at once
TEXT = "The bridge is designed to withstand a storm. " * 20_000
ASK = {"model": "small", "prompt": "The bridge is", "max_tokens": 4, "temperature": 0}
PADDED = json.dumps(ASK).encode() + b" " * 20_000  # a body that is not read in the loop


class Flood:
    """Large requests for tokens, all at once. answered: how many have their answer."""

    def __init__(self, served: Served) -> None:
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._ask, args=(served,)) for _ in range(LARGE)]
        for thread in self._threads:
            thread.start()

    def _ask(self, served: Served) -> None:
        answer = httpx.post(f"{served.address}/tokenize", json={"prompt": TEXT}, timeout=280)
        self.statuses.append(answer.status_code)

    def end(self) -> list[int]:
        for thread in self._threads:
            thread.join()
        return self.statuses


@pytest.fixture(scope="module")
def served(environment, model) -> Iterator[Served]:
    with serving(environment, model, "--cache-tokens", "8192") as running:
        yield running


def ask(served: Served) -> str:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{served.address}/v1/completions", content=PADDED, headers=headers, timeout=280)
    assert answer.status_code == 200
    return answer.json()["choices"][0]["text"]


def test_a_small_request_overtakes_a_flood_of_large_ones(served):
    alone = ask(served)
    flood = Flood(served)
    served.eventually(lambda: bool(flood.statuses), 120)
    assert ask(served) == alone
    assert len(flood.statuses) < LARGE // 2, "it waited for most of them"
    assert set(flood.end()) == {200}


def test_a_killed_engine_comes_back_under_a_flood(served):
    alone, pid = ask(served), served.stats()["pid"]
    flood = Flood(served)
    served.eventually(lambda: bool(flood.statuses), 120)
    os.kill(pid, signal.SIGKILL)
    served.eventually(lambda: served.stats()["pid"] not in (None, pid) and served.get("/ready").status_code == 200, 120)
    assert ask(served) == alone
    assert set(flood.end()) <= {200, 503}
