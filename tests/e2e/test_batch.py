"""`roofline batch` with a real model: ended by SIGKILL and run again, its answers are those of `roofline serve`."""

import json
import signal
import subprocess
import time

import httpx
import pytest
from e2e_serving import ROOFLINE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
LINES = 24


def requests() -> list[dict]:
    bodies = [
        {
            "prompt": f"Once upon a time there were {i} bears, and",
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(LINES)
    ]
    bodies[1] |= {"temperature": 0.8, "seed": 7, "logprobs": 2}
    return [
        {"custom_id": f"bear {i}", "method": "POST", "url": "/v1/completions", "body": {"model": "small", **body}}
        for i, body in enumerate(bodies)
    ]


def test_a_run_that_was_killed_goes_on_and_answers_as_the_server_does(environment, model, served, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = requests()
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    words = [*ROOFLINE, "batch", str(source), "-o", str(out), "-m", str(model), "--served-model-name", "small"]
    words += ["--cache-tokens", "8192", "--at-once", "2"]
    first = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    kept = out.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < LINES
    second = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=240)
    assert second.returncode == 0, second.stderr
    assert out.read_bytes().startswith(kept)
    answers = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert len(answers) == out.read_bytes().count(b"\n") == LINES
    with httpx.Client(base_url=served.address, timeout=120) as client:
        for each in lines[:8]:
            whole = client.post(each["url"], json=each["body"]).json()
            body = answers[each["custom_id"]]["response"]["body"]
            assert body["choices"] == whole["choices"]
            assert body["system_fingerprint"] == whole["system_fingerprint"]
