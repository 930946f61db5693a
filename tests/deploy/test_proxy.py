"""What clients see of the proxy: the real HAProxy with configurations of ours."""

import http.client
import http.server
import os
import shutil
import signal
import ssl
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx
import pytest

from roofline.common.errors import ConfigError
from roofline.deploy.haproxy import router
from roofline.deploy.haproxy.config import ProxyDescription, ProxyServer, haproxy_configuration
from tests.deploy.conftest import HAPROXY
from tests.deploy.load import ask, load_on

ABOUT = ProxyDescription(
    bind="127.0.0.1:1",
    statistics_bind="127.0.0.1:2",
    runtime_socket=Path("/tmp/haproxy.sock"),
    connections=100,
    servers=(ProxyServer("r1", "127.0.0.1", 8001), ProxyServer("r2", "127.0.0.1", 8002, enabled=False)),
)


@pytest.fixture
def accepted(tmp_path):
    """accepted(description) -> what HAProxy says of its configuration, which it must take."""
    if HAPROXY is None:
        pytest.skip("HAProxy is not installed")

    def check(description: ProxyDescription) -> str:
        path = tmp_path / "haproxy.cfg"
        path.write_text(haproxy_configuration(description))
        done = subprocess.run([HAPROXY, "-c", "-f", str(path)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return check


def test_haproxy_takes_every_configuration_without_a_warning(accepted):
    keys, addresses = (None, "a'b\"c%d\\e$f"), ("", "127.0.0.1:3")
    for balance, key, metrics in product(("leastconn", "roundrobin", "prefix", "key"), keys, addresses):
        said = accepted(replace(ABOUT, balance=balance, check_key=key, metrics=metrics))
        assert "WARNING" not in said, said


def test_what_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match="visible ASCII"):
        haproxy_configuration(replace(ABOUT, check_key="a\nserver evil"))


def test_what_is_missing_is_said_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(router.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"HAProxy is not installed.*apt-get install haproxy"):
        router.find_haproxy()
    old = tmp_path / "haproxy"
    old.write_text("#!/bin/sh\necho 'HAProxy version 2.4.22 2023/02/14'\n")
    old.chmod(0o755)
    monkeypatch.setattr(router.shutil, "which", lambda *_, **__: str(old))
    with pytest.raises(ConfigError, match=r"HAProxy version 2\.4\.22.*2\.6 or later is needed"):
        router.find_haproxy()


def test_health_is_asked_with_the_key(accepted, tmp_path):
    """What arrives is the key itself, whatever characters it has."""
    key, seen, told = "a'b\"c%d\\e$f{g}", [], threading.Event()

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["Authorization"], self.headers["Host"]))
            self.send_response(200)
            self.end_headers()
            told.set()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        about = replace(
            ABOUT,
            bind=f"unix@{tmp_path}/front.sock",
            statistics_bind=f"unix@{tmp_path}/statistics.sock",
            runtime_socket=tmp_path / "runtime.sock",
            servers=(ProxyServer("r1", *server.server_address),),
            check_key=key,
        )
        accepted(about)
        with subprocess.Popen([HAPROXY, "-db", "-f", str(tmp_path / "haproxy.cfg")], stderr=subprocess.PIPE) as process:
            said = told.wait(10)
            process.kill()
            assert said, process.stderr.read().decode()
        server.shutdown()
    assert seen[0] == ("/ready", f"Bearer {key}", "localhost")


@pytest.fixture
def fleet(start_fleet):
    started = start_fleet("small?gap=0.05&queue=2", "--replicas=1")
    started.wait_ready(1)
    return started


def test_headers_go_on_streams_are_not_buffered_and_refusals_are_the_server_s(fleet):
    address = fleet.address
    received = ask(address, {"prompt": "a", "max_tokens": 0}).events[0]["received"]
    assert received["host"] == address.removeprefix("http://")
    assert received["x-forwarded-for"] == "127.0.0.1"
    assert len(received["x-request-id"]) == 36
    mine = ask(address, {"prompt": "a", "max_tokens": 0}, headers={"X-Request-ID": "mine"})
    assert mine.events[0]["received"]["x-request-id"] == "mine"

    stream = ask(address, {"prompt": "a", "max_tokens": 6, "stream": True})
    assert stream.error is None
    # The first event is here before the last one is made.
    assert stream.moments[0] < stream.events[-1]["moment"]

    with load_on(address, lambda number: {"prompt": "a", "max_tokens": 10}, workers=4) as load:
        load.wait_for(8)
    refused = [outcome for outcome in load.outcomes if outcome.status == 429]
    assert refused
    assert {outcome.headers["retry-after"] for outcome in refused} == {"7"}
    assert {outcome.status for outcome in load.outcomes} == {200, 429}

    for path, status in (("/stats", 404), ("/v1/load_lora_adapter", 403)):
        refusal = ask(address, {}, path)
        assert refusal.status == status
        assert "not_of_a_fleet" in refusal.error
    text = httpx.get(f"{address}/metrics", timeout=30).text
    assert 'replica:served_total{replica="r1"}' in text
    assert "roofline_fleet_replicas_wanted 1.0" in text


def test_a_fleet_without_a_ready_replica_says_when_to_come_again(start_fleet):
    fleet = start_fleet("small", "--replicas=1", "--max-replicas=2")
    fleet.wait_ready(1)
    socket_path = next(fleet.folder.path.glob("haproxy-*.sock"))
    import asyncio

    from roofline.deploy.haproxy.runtime import order_haproxy

    asyncio.run(order_haproxy(socket_path, "set server replicas/r1 state maint"))
    refusal = ask(fleet.address, {"prompt": "a"})
    assert (refusal.status, refusal.headers["retry-after"]) == (503, "1")
    assert "no_replica_ready" in refusal.error


def conversation(number: int, turns: int, parts: bool, system: bool) -> list[dict]:
    """The bodies of the turns of one conversation."""
    write = (lambda text: [{"type": "text", "text": text}]) if parts else (lambda text: text)
    messages = [{"role": "system", "content": write("You answer questions.")}] if system else []
    bodies = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": write(f"Question {turn} of conversation {number}.")}]
        bodies.append({"messages": messages, "max_tokens": 0})
        messages = [*messages, {"role": "assistant", "content": write(f"Answer {turn}." * 40)}]
    return bodies


def test_turns_of_a_conversation_come_back_to_their_replica(start_fleet):
    fleet = start_fleet("small", "--replicas=3", "--balance=prefix")
    fleet.wait_ready(3)
    address, firsts = fleet.address, Counter()
    for number in range(24):
        bodies = conversation(number, 3, parts=number % 2 == 0, system=number % 3 == 0)
        answers = [ask(address, body, "/v1/chat/completions") for body in bodies]
        assert [answer.error for answer in answers] == [None] * 3
        assert len({answer.replica for answer in answers}) == 1, number
        firsts[answers[0].replica] += 1
    assert set(firsts) == {"r1", "r2", "r3"}, firsts
    anthropic = {"system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    assert len({ask(address, anthropic, "/v1/messages").replica for _ in range(3)}) == 1
    for sizes in ((0, 10, 1000), (90_000, 95_000, 120_000)):  # the latter are larger than HAProxy's buffer
        prompts = ["The beginning. " * 40 + "x" * size for size in sizes]
        assert len({ask(address, {"prompt": prompt, "max_tokens": 0}).replica for prompt in prompts}) == 1
    # A body without a beginning is shared as it comes.
    assert len({ask(address, {"max_tokens": 0}).replica for _ in range(6)}) > 1


@pytest.mark.slow
def test_a_beginning_that_all_have_is_shared_where_one_replica_has_too_much(start_fleet):
    fleet = start_fleet("small?gap=0.02", "--replicas=2", "--balance=prefix")
    fleet.wait_ready(2)
    body = {"messages": [{"role": "user", "content": "the same"}], "max_tokens": 5}
    assert len({ask(fleet.address, body).replica for _ in range(5)}) == 1
    with load_on(fleet.address, lambda number: body, workers=16) as load:
        load.wait_for(40)
    assert load.failed == []
    assert set(load.by_replica()) == {"r1", "r2"}


@pytest.mark.slow
def test_a_key_stays_with_its_replica(start_fleet):
    fleet = start_fleet("small", "--replicas=3", "--balance=key")
    fleet.wait_ready(3)
    replicas = Counter()
    for number in range(12):
        headers = {"Authorization": f"Bearer key-{number}"} if number % 2 else {"X-Api-Key": f"key-{number}"}
        seen = {ask(fleet.address, {"prompt": f"{turn}"}, headers=headers).replica for turn in range(3)}
        assert len(seen) == 1
        replicas.update(seen)
    assert len(replicas) == 3


@pytest.mark.slow
def test_requests_are_taken_in_turn(start_fleet):
    fleet = start_fleet("small", "--replicas=2", "--balance=roundrobin")
    fleet.wait_ready(2)
    replicas = [ask(fleet.address, {"prompt": "a"}).replica for _ in range(8)]
    assert Counter(replicas) == {"r1": 4, "r2": 4}


@pytest.mark.slow
def test_what_clients_raise_where_a_stream_breaks(start_fleet):
    """As docs/how-to/fleet.md says: the published clients do not take a broken stream for a whole answer."""
    openai = pytest.importorskip("openai")
    fleet = start_fleet("small?gap=0.05", "--replicas=1")
    fleet.wait_ready(1)

    def stream_of_openai() -> None:
        client = openai.OpenAI(base_url=f"{fleet.address}/v1", api_key="none", max_retries=0)
        for _ in client.completions.create(model="small", prompt="a", max_tokens=400, stream=True):
            begun.set()

    def stream_of_httpx() -> None:
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{fleet.address}/v1/completions", json=body, timeout=60) as response:
            for _ in response.iter_lines():
                begun.set()

    for read, error in ((stream_of_openai, openai.APIConnectionError), (stream_of_httpx, httpx.RemoteProtocolError)):
        begun = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read)
            assert begun.wait(30)
            os.kill(fleet.replica("r1")["pid"], signal.SIGKILL)
            with pytest.raises(error):
                reading.result(60)
        fleet.wait_ready(1)


@pytest.mark.slow
def test_the_proxy_speaks_tls_and_http_2(start_fleet, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def certify() -> str:
        """Write a fresh pair; the certificate."""
        words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        files = ["-keyout", f"{tmp_path}/key.pem", "-out", f"{tmp_path}/cert.pem"]
        subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True, timeout=60)
        return (tmp_path / "cert.pem").read_text()

    first = certify()
    fleet = start_fleet(
        "small", "--replicas=1", f"--tls-certificate={tmp_path}/cert.pem", f"--tls-key={tmp_path}/key.pem"
    )
    fleet.wait_ready(1)
    address = fleet.address
    assert address.startswith("https://")
    assert (fleet.folder.path / "proxy.pem").stat().st_mode & 0o777 == 0o600
    port = int(address.rpartition(":")[2])
    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=30)
    connection.request("POST", "/v1/completions", '{"prompt": "a"}')
    assert b'"x-forwarded-proto": "https"' in connection.getresponse().read()
    connection.close()
    if shutil.which("curl") is not None:
        words = [
            "curl",
            "-s",
            "--http2",
            "--cacert",
            f"{tmp_path}/cert.pem",
            "-o",
            "/dev/null",
            "-w",
            "%{http_version}",
        ]
        done = subprocess.run([*words, f"https://localhost:{port}/ready"], capture_output=True, text=True, timeout=30)
        assert done.stdout == "2", done.stderr

    assert ssl.get_server_certificate(("localhost", port)) == first
    renewed = certify()
    fleet.process.send_signal(signal.SIGHUP)
    fleet.eventually(lambda: ssl.get_server_certificate(("localhost", port)) == renewed)
