"""`roofline serve` with a real model: the openai client, disconnects, keys, drain."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from e2e_serving import ASK, ROOFLINE, open_stream, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=120)


def test_chat(client):
    answer = client.chat.completions.create(model="small", messages=ASK, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content.strip()
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 16
    assert len(answer.system_fingerprint) >= 16


def test_stream_equals_whole(client):
    fields = {"model": "small", "messages": ASK, "temperature": 0.8, "seed": 11, "max_tokens": 20}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_and_models(client):
    answer = client.completions.create(
        model="small", prompt=["The sky is", "Once upon a"], temperature=0, max_tokens=8, n=2, logprobs=3
    )
    assert len(answer.choices) == 4
    assert answer.choices[0].text == answer.choices[1].text  # greedy
    assert len(answer.choices[0].logprobs.tokens) == 8
    assert [m.id for m in client.models.list()] == ["small"]


def test_the_same_seed_gives_the_same_answer_in_company(client):
    def ask(out):
        fields = {"model": "small", "messages": ASK, "seed": 5, "temperature": 1.0, "max_tokens": 12}
        out.append(client.chat.completions.create(**fields).choices[0].message.content)

    alone: list[str] = []
    ask(alone)
    together: list[str] = []
    threads = [threading.Thread(target=ask, args=(together,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone * 12


def test_stop_string_never_leaks(client):
    fields = {"model": "small", "prompt": "one two three four five six", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**fields).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
    cut = client.completions.create(**fields, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_too_long_is_refused_with_counts(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="small", prompt=[100] * 9000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert "9000" in refused.value.message


@pytest.mark.parametrize("penalty", [1e-9, 1e9])
def test_the_least_and_the_most_repetition_penalty_leave_logits_numbers(client, penalty):
    """Sampled, so that all probabilities are looked at; 1e-38 had made all of them NaN."""
    fields = {"model": "small", "messages": ASK, "temperature": 1.0, "seed": 5, "max_tokens": 12, "logprobs": True}
    answer = client.chat.completions.create(**fields, extra_body={"repetition_penalty": penalty})
    assert answer.usage.completion_tokens > 0
    assert all(-1e6 < token.logprob <= 0 for token in answer.choices[0].logprobs.content)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**fields, extra_body={"repetition_penalty": 1e-38})


def test_megabytes_of_digits_are_refused_and_leave_the_server_small(served):
    """Each digit is a token of its own; to encode them had taken a gigabyte of this process."""
    status = Path(f"/proc/{served.process.pid}/status")

    def peak() -> int:
        return int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024

    before = peak()
    body = {"model": "small", "prompt": "1234567890" * 60_000, "max_tokens": 1}  # as large as its context may bear
    answer = httpx.post(f"{served.address}/v1/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert peak() - before < 60


@pytest.mark.slow
def test_a_long_prompt_tells_how_far_it_is(client):
    stream = client.completions.create(
        model="small", prompt=[100] * 1500, max_tokens=2, stream=True, extra_body={"return_progress": True}
    )
    told = [event.model_extra["prompt_progress"] for event in stream if "prompt_progress" in event.model_extra]
    assert len(told) > 1
    assert [each["processed"] for each in told] == sorted({each["processed"] for each in told})
    assert (told[-1]["processed"], told[-1]["total"]) == (1500, 1500)
    assert told[-1]["time_ms"] > 0


def leave_in_mid_answer(served, clients):
    for _ in range(clients):
        connection = open_stream(served)
        assert connection.recv(10)
        connection.close()


def test_disconnects_free_every_page_and_are_counted(served):
    served.eventually(served.idle)
    before = served.stats()["finished"].get("abort", 0)
    leave_in_mid_answer(served, 20)
    served.eventually(served.idle)
    assert served.stats()["finished"]["abort"] == before + 20


def test_a_server_whose_engine_has_not_read_of_a_request_and_its_end_is_not_idle(served):
    served.eventually(served.idle)
    before = served.stats()
    os.kill(before["pid"], signal.SIGSTOP)
    leave_in_mid_answer(served, 2)
    idle = served.idle()
    os.kill(before["pid"], signal.SIGCONT)
    assert not idle
    served.eventually(served.idle)
    assert served.stats()["finished"]["abort"] == before["finished"].get("abort", 0) + 2


def test_metrics(served):
    text = served.get("/metrics").text
    for family in ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket", "roofline:engine_up"):
        assert family in text


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on, of IPv4 and IPv6."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # LISTEN
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_class_a_only_the_port_of_http_is_listened_on(served):
    assert listening_ports(served.process.pid) == {int(served.address.rpartition(":")[2])}
    assert listening_ports(served.stats()["pid"]) == set()


@pytest.mark.slow
def test_api_key(environment, model):
    with serving(environment, model, "--api-key", "s3cret", "--cache-tokens", "1024") as running:
        for path in ("/v1/models", "/ready", "/metrics", "/stats", "/none"):
            assert running.get(path).status_code == 401
        assert running.get("/health").status_code == 200
        assert running.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.slow
def test_a_span_of_each_request_reaches_the_collector_before_the_server_ends(environment, model):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otlp is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
    from collector import collecting

    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with collecting() as collector:
        options = ("--otlp-endpoint", collector.address, "--cache-tokens", "1024")
        with serving(environment, model, *options) as running:
            body = {"model": "small", "messages": ASK, "temperature": 0, "max_tokens": 4}
            answer = httpx.post(f"{running.address}/v1/chat/completions", json=body, headers=parent, timeout=60)
            assert answer.status_code == 200
        # A probe that came before the first token was answered with 503, and that has a span too.
        ((span, resource),) = [each for each in collector.spans() if each[0].name == "chat small"]
    told = {each.key: each.value for each in span.attributes}
    assert (span.name, resource["service.name"]) == ("chat small", "roofline")
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert told["gen_ai.usage.output_tokens"].int_value == answer.json()["usage"]["completion_tokens"]
    assert told["gen_ai.latency.time_in_model_prefill"].double_value > 0


def refuses_soon(running) -> bool:
    """Whether new connections are refused within two seconds."""
    for _ in range(100):
        try:
            running.get("/health")
        except httpx.TransportError:
            return True
        time.sleep(0.02)
    return False


def test_sigterm_lets_running_requests_finish(environment, model):
    with serving(environment, model, "--cache-tokens", "1024") as running:
        connection = open_stream(running, max_tokens=60)
        received = connection.recv(10)
        running.process.terminate()
        time.sleep(0.05)
        assert refuses_soon(running)
        while data := connection.recv(65536):
            received += data
        assert b'"finish_reason":"length"' in received
        assert running.process.wait(30) == 0


def run_serve(environment, model: str, port: str) -> subprocess.CompletedProcess:
    command = [*ROOFLINE, "serve", model, "--port", port]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_taken_port_and_a_missing_model_are_said_in_one_line(environment, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [*ROOFLINE, "serve", str(model), "--port", port],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr
    missing = str(Path("no") / "model.gguf")
    result = run_serve(environment, missing, "0")
    assert result.returncode == 1
    assert missing in result.stderr
    assert "Traceback" not in result.stderr
