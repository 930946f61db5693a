"""`roofline serve --cache-file` with a real model: a prefix outlives the server, and the answer keeps its bits."""

import signal
import stat

import httpx
import pytest
from e2e_serving import Served, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPT = "The history of the city begins at its river, " * 20


def ask(served: Served, **changes) -> tuple[int, object]:
    """Cached tokens of a request for a greedy answer, and its text with all log-probabilities."""
    body = {"model": "small", "prompt": PROMPT, "temperature": 0, "max_tokens": 16, "logprobs": 3, **changes}
    answer = httpx.post(f"{served.address}/v1/completions", json=body, timeout=120).json()
    choice = answer["choices"][0]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], (choice["text"], choice["logprobs"])


@pytest.mark.slow
def test_a_prefix_outlives_the_server(environment, model, tmp_path):
    path = tmp_path / "prefixes"
    options = ("--cache-tokens", "2048", "--cache-file", str(path), "--golden-check", "off")
    with serving(environment, model, *options) as served:
        cached, expected = ask(served)
        assert cached == 0
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with serving(environment, model, *options) as served:
        assert ask(served, cache_salt="another's") == (0, expected)
        cached, answer = ask(served)
        assert answer == expected
        assert cached > 100
    lines: list[str] = []
    with serving(environment, model, *options, "--kv-cache-dtype", "int8", lines=lines) as served:
        assert ask(served)[0] == 0
    assert sum("no pages of the prefix cache were restored" in line for line in lines) == 1
