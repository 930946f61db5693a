"""The server of OpenVINO's pipeline as a target, over a package of the tests that takes the place of OpenVINO's."""

import sys
from pathlib import Path

import httpx
import pytest

from roofline.bench.load.targets import open_target
from roofline.bench.traffic.traffic import TrafficRequest
from roofline.common.errors import ConfigError

FAKE = Path(__file__).parent / "fake_openvino"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model's folder; the fake is what servers import as openvino_genai."""
    info = tmp_path / "openvino_genai-2026.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openvino-genai\nVersion: 2026.9\n")
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{tmp_path}")
    folder = tmp_path / "tiny-ov"
    folder.mkdir()
    return folder


def requests(*prompts, most=5):
    return [TrafficRequest(prompt=prompt, prompt_tokens=len(prompt), max_tokens=most) for prompt in prompts]


def log_of(model):
    return (model / "log").read_text().splitlines()


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_load(model, make_plan, generate, route):
    name = f"openvino:{model} --python {sys.executable} --max-num-seqs 3 --threads 2"
    with open_target(name) as target:
        assert (target.model, target.engine, target.version) == ("tiny-ov", "openvino-genai", "2026.9")
        assert target.options == {"max-num-seqs": "3", "threads": "2"}
        prompts = ("abc", "bcd", "cde", "def", "efg", "fgh")
        plan = make_plan(target.url, requests(*prompts), route=route, keep_text=True, concurrency=3)
        events = generate(plan)
    assert [each.error for each in events.requests] == [None] * 6
    for record in events.requests:
        prompt = prompts[record.request]
        rendered = f"<{prompt}>" if route == "chat" else f"\1{prompt}"  # a token in front that has no text
        assert record.text == (rendered * 5)[:5].replace("\1", "")
        assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (len(rendered), 5, 0)
        assert (record.finish, len(record.chunks)) == ("length", len(record.text))
    first, *steps = log_of(model)
    assert first == "CPU {'INFERENCE_NUM_THREADS': 2} 3 False"
    assert "step 3" in steps, "requests that come together are computed together"


def test_a_request_joins_those_that_run(model, make_plan, generate):
    """One that arrives during a step is in the next one or the one behind it, and not only when others have ended."""
    with open_target(f"openvino:{model}") as target:
        plan = make_plan(target.url, requests("abc", "bcd", most=60), arrivals="constant", rate=30.0)
        first, second = generate(plan).requests
    assert second.first_text < first.end - 20e6


def test_characters_are_whole(model, make_plan, generate):
    with open_target(f"openvino:{model}") as target:
        (record,) = generate(make_plan(target.url, requests("é€", most=12), keep_text=True)).requests
    assert record.text == "é€é€"
    assert (len(record.chunks), record.completion_tokens) == (4, 12)


def test_an_answer_that_may_end_does(model):
    with open_target(f"openvino:{model} --enable-prefix-caching true") as target:
        body = {"prompt": "abc", "max_tokens": 9, "temperature": 0, "stream": True}
        text = httpx.post(f"{target.url}/completions", json=body).text
        assert '"finish_reason": "stop"' in text
        assert '"completion_tokens": 3' in text
        assert "cached_tokens" not in text, "what a cache had is not known"
    assert log_of(model)[0] == "CPU {} 256 True"


def test_what_is_refused(model):
    with open_target(f"openvino:{model}") as target:
        for change, message in (
            ({"temperature": 1}, "greedy answers"),
            ({"stream": False}, "greedy answers"),
            ({"top_p": 1}, "does not know top_p"),
            ({"max_tokens": 0}, "max_tokens must be"),
            ({"prompt": [1]}, "prompt must be a text"),
            ({"prompt": "crash"}, "does not like this prompt"),
        ):
            body = {"prompt": "a", "max_tokens": 2, "temperature": 0, "stream": True, **change}
            response = httpx.post(f"{target.url}/completions", json=body)
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
        body = {"prompt": "a" * 200, "max_tokens": 2, "stream": True}
        assert "ended this request: IGNORED" in httpx.post(f"{target.url}/completions", json=body).text


def test_a_client_that_leaves_is_forgotten(model):
    with open_target(f"openvino:{model}") as target:
        body = {"prompt": "abc", "max_tokens": 10_000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{target.url}/completions", json=body) as response:
            next(response.iter_bytes())
        httpx.post(f"{target.url}/completions", json={"prompt": "a", "max_tokens": 9, "stream": True})
    assert log_of(model)[-1] == "step 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-num-sequences 2", "SchedulerConfig has no number or switch 'max_num_sequences'"),
        ("--enable-prefix-caching yes", "write true or false, not 'yes'"),
        ("--max-num-seqs many", "max_num_seqs is a number, not 'many'"),
        ("--device NPU", "no device NPU"),
        ("--max-num-seqs", "options are --NAME VALUE"),
        ("--python", "behind --python an interpreter"),
        ("--python /none/python", "/none/python cannot be started"),
    ],
)
def test_what_cannot_be_started(model, words, message):
    with pytest.raises(ConfigError, match=message), open_target(f"openvino:{model} {words}"):
        pass


def test_a_missing_package_and_a_missing_model(tmp_path, model, monkeypatch):
    with pytest.raises(ConfigError, match="there is no /none/x: name a folder"), open_target("openvino:/none/x"):
        pass
    monkeypatch.setenv("PYTHONPATH", str(FAKE.parent))
    with (
        pytest.raises(ConfigError, match=r"openvino-genai is not installed in .*--python"),
        open_target(f"openvino:{model}"),
    ):
        pass


def test_llama_cpp_starts_its_own_server(tmp_path, monkeypatch):
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m roofline.bench.load.null_server --port "$4"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with open_target("llama.cpp:x.gguf --parallel 4") as target:
        assert (target.model, target.options) == ("null", {"parallel": "4"})
    monkeypatch.setenv("PATH", "/none")
    with (
        pytest.raises(ConfigError, match=r"llama-server is not on the PATH.*-m x\.gguf --port \{port\}"),
        open_target("llama.cpp:x.gguf"),
    ):
        pass
