"""`roofline serve --extra-model` with real engines: models come and go under requests, and answers keep their bits."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_serving import Served, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def answer(served: Served, name: str) -> str:
    body = {"model": name, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = httpx.post(f"{served.address}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.slow
def test_models_that_do_not_fit_together_take_turns(environment, model):
    extra = ("--extra-model", f"a={model}", "--extra-model", f"b={model}", "--golden-check", "off")
    with serving(environment, model, "--cache-tokens", "1024", *extra) as served:  # first one, with room for all
        expected = answer(served, "small")
        answer(served, "a")
        (size,) = (each["bytes"] for each in served.get("/ready").json()["models"] if each["name"] == "a")
    budget = str((2 * size + size // 2) >> 20)  # the first one and one more
    with serving(environment, model, "--cache-tokens", "1024", *extra, "--model-megabytes", budget) as served:
        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(lambda name: answer(served, name), ["a", "b", "small"] * 4))
        assert texts == [expected] * 12
        statuses = sorted(each["status"] for each in served.get("/ready").json()["models"])
        assert statuses == ["absent", "loaded"]
