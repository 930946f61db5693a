"""The engine of a real `roofline serve` is killed while streams are open: clients see a pause and nothing else."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_serving import Served, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOKENS = 64


def body(number: int) -> dict:
    """Requests of several kinds: greedy and sampled, with penalties, of two answers, with log-probabilities."""
    return {
        "model": "small",
        "prompt": f"{number}. The history of the city of {'ABCDEFGH'[number % 8]}" + " and its river" * (number % 5),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0 if number % 3 == 0 else 0.9,
        "seed": number,
        "n": 2 if number % 8 == 1 else 1,
        **({"frequency_penalty": 0.7, "presence_penalty": 0.2} if number % 4 == 2 else {}),
        **({"logprobs": 2} if number % 8 == 3 else {}),
    }


class Client:
    """Reads a stream; `events` and `characters` grow meanwhile."""

    def __init__(self, served: Served, number: int) -> None:
        self.served, self.number, self.events = served, number, list[dict]()
        self.characters = 0  # of text

    def read(self) -> dict:
        """What came of it: texts, log-probabilities and why it ended of each answer, and the tokens that are billed."""
        address = f"{self.served.address}/v1/completions"
        with httpx.stream("POST", address, json=body(self.number), timeout=600) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self.characters += sum(len(choice["text"]) for choice in self.events[-1].get("choices", ()))
        assert line == "data: [DONE]" or not line
        result: dict = {"errors": [event["error"] for event in self.events if "error" in event]}
        for event in self.events:
            for choice in event.get("choices", ()):
                answer = result.setdefault(choice["index"], {"text": "", "logprobs": [], "ends": []})
                answer["text"] += choice["text"]
                answer["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
                answer["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            if event.get("usage"):
                result["billed"] = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "kills"), [(8, 2), pytest.param(64, 10, marks=pytest.mark.soak)])
def test_streams_survive_the_death_of_the_engine(environment, model, streams, kills):
    with serving(environment, model, "--cache-tokens", "16384", "--max-running", "80") as served:
        alone = [Client(served, number) for number in range(streams)]
        expected = [client.read() for client in alone]
        for number, answers in enumerate(expected):
            assert answers["errors"] == []
            assert answers["billed"][1] == TOKENS * body(number)["n"]
            assert all(answers[index]["ends"] == ["length"] for index in range(body(number)["n"]))
        clients = [Client(served, number) for number in range(streams)]

        def text() -> int:
            return sum(client.characters for client in clients)

        with ThreadPoolExecutor(streams) as pool:
            reading = [pool.submit(client.read) for client in clients]
            for kill in range(1, kills + 1):
                # Sometimes all answers have gone on since the last process was killed, sometimes only those in front.
                enough = text() + 1 + (kill % 4) * 3 * streams
                served.eventually(lambda enough=enough: text() >= enough, 300)
                # Text that was on its way may arrive while the next process still starts; `pid` is null until it has.
                served.eventually(lambda: served.stats()["pid"] is not None, 60)
                assert not any(each.done() for each in reading), "all streams are open"
                os.kill(served.stats()["pid"], signal.SIGKILL)
            results = [each.result() for each in reading]
        assert served.stats()["restarts"] == kills
        assert results == expected
        served.eventually(served.idle)
