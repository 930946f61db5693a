"""A model in memory behind the HTTP server, in one process."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the model is transformers'")

from roofline.common.errors import ConfigError

SCRIPT = """
import torch_models
from roofline.engine.params import SamplingParams
from roofline.torch import from_model, serve

model = from_model(torch_models.build("llama"), torch_models.tokenizer(), threads=1)
params = SamplingParams(temperature=0, max_tokens=12)
print(repr(model.generate("the cat", params)[0].text), flush=True)
serve(model, port=0, name="in-memory")
print(repr(model.generate("the cat", params)[0].text), flush=True)
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_a_model_in_memory_is_served_and_usable_afterwards(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    server = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        said, address = server.stdout.readline(), None
        for line in server.stderr:
            found = re.match(r"Listening on (http://127\.0\.0\.1:\d+)$", line)
            address = found.group(1) if found else address
            if line.startswith("Ready: "):
                break
        assert address is not None
        body = {"model": "in-memory", "prompt": "the cat", "temperature": 0, "max_tokens": 12}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=30).json()
        assert repr(answer["choices"][0]["text"]) == said.strip()
        streamed = httpx.post(f"{address}/v1/completions", json={**body, "stream": True, "n": 3}, timeout=30)
        assert streamed.text.rstrip().endswith("data: [DONE]")
        wrong = httpx.post(f"{address}/v1/completions", json={**body, "model": "other"}, timeout=30)
        assert wrong.status_code == 404
        assert httpx.get(f"{address}/ready", timeout=30).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.stdout.readline() == said  # the model stays the caller's
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.communicate()


def test_serving_needs_a_tokenizer():
    import torch_models as models

    from roofline.torch import from_model, serve

    with pytest.raises(ConfigError, match="tokenizer"):
        serve(models.build("llama"))
    with from_model(models.build("llama"), threads=1) as ours:
        with pytest.raises(ConfigError, match="tokenizer"):
            serve(ours)
        with pytest.raises(ConfigError, match="options"):
            serve(ours, threads=2)
