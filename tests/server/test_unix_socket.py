"""`--uds`: a server on a unix socket, who may connect, and what becomes of its file."""

import json
import os
import queue
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest

from roofline.cli.parser import Parser
from roofline.cli.run.serve import command
from roofline.common.errors import ConfigError
from roofline.server import serve as module
from roofline.server.listening import MOST_PATH_BYTES, listening_on
from roofline.server.options import ServeOptions
from tests.command_line import call_roofline
from tests.server.proxies import program, proxy

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def visited(monkeypatch, engine, make_context):
    """visited(visit, **options) -> what visit(path) returned in a thread, while this one served on a unix socket."""

    def serve(visit, path: Path, **options):
        lines: queue.Queue[str] = queue.Queue()
        monkeypatch.setattr(module.log, "say", lines.put)
        outcome = []

        def visiting() -> None:
            try:
                assert lines.get(timeout=60) == f"Listening on unix:{path}"
                assert lines.get(timeout=60).startswith("Ready: tiny, ")
                outcome.append(visit(path))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        def fail(*_):
            raise AssertionError("the signal did not reach the server")

        before = signal.signal(signal.SIGTERM, fail)
        visitor = threading.Thread(target=visiting)
        visitor.start()
        chosen = ServeOptions("m", uds=path, served_model_name=["tiny"], **options)
        try:
            module.serve_engine(chosen, engine, make_context().text)
        finally:
            visitor.join(60)
            signal.signal(signal.SIGTERM, before)
        return outcome[0]

    return serve


def curl(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["curl", "-s", "-w", " %{http_code}", "--max-time", "20", "--unix-socket", str(path), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_curl_openai_and_its_stream_over_the_socket(visited, tmp_path):
    def visit(path):
        mode = stat.S_IMODE(path.stat().st_mode)
        ready = curl(path, "http://localhost/ready").stdout
        foreign = curl(path, "http://chat.example.org/ready").stdout
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as http:
            client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
            answer = client.chat.completions.create(**CHAT).choices[0].message.content
            events = list(client.chat.completions.create(**CHAT, stream=True))
        return mode, ready, foreign, answer, "".join(each.choices[0].delta.content or "" for each in events)

    path = tmp_path / "roofline.sock"
    mode, ready, foreign, answer, streamed = visited(visit, path)
    assert mode == 0o600
    assert json.loads(ready.rpartition(" ")[0])["status"] == "ready"
    assert ready.endswith(" 200")
    assert '"host_not_allowed"' in foreign  # a proxy's users are not this machine's: without keys they are refused
    assert foreign.endswith(" 403")
    assert answer == streamed == "Hello, world."
    assert not path.exists()


def test_with_a_key_any_host_is_served_and_the_mode_is_chosen(visited, tmp_path):
    def visit(path):
        answers = [
            curl(path, *words, "http://chat.example.org/ready").stdout[-3:]
            for words in ((), ("-H", "Authorization: Bearer k"))
        ]
        return stat.S_IMODE(path.stat().st_mode), answers

    assert visited(visit, tmp_path / "s", uds_mode="0660", api_key="k") == (0o660, ["401", "200"])


def test_tls_over_the_socket(visited, tmp_path):
    trustme = pytest.importorskip("trustme", reason="it makes the certificates")
    authority, files = trustme.CA(), (tmp_path / "chain.pem", tmp_path / "key.pem")
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(files[0])
    issued.private_key_pem.write_to_path(files[1])
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    def visit(path):
        transport = httpx.HTTPTransport(uds=str(path), verify=trust)
        with httpx.Client(base_url="https://localhost", transport=transport, timeout=60) as client:
            return client.get("/ready").json()["model"], curl(path, "http://localhost/ready").stdout[-3:]

    assert visited(visit, tmp_path / "s", tls_certificate=files[0], tls_key=files[1]) == ("tiny", "000")


def test_haproxy_passes_requests_and_streams_on(visited, tmp_path):
    if program("haproxy") is None:
        pytest.skip("haproxy is not installed")

    def visit(path):
        with proxy("haproxy", f"unix@{path}", tmp_path) as address, httpx.Client(base_url=address, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", http_client=http, max_retries=0)
            events = list(client.chat.completions.create(**CHAT, stream=True))
            return http.get("/ready").status_code, "".join(each.choices[0].delta.content or "" for each in events)

    assert visited(visit, tmp_path / "s") == (200, "Hello, world.")


def test_a_socket_that_somebody_listens_on_is_not_taken(tmp_path):
    path = tmp_path / "s"
    with listening_on(ServeOptions("m", uds=path)) as first:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"another process listens there\. Choose another --uds"):
                listening_on(ServeOptions("m", uds=path)).__enter__()
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))  # also while the server starts
            assert first.accept()
    assert not path.exists()


def test_one_whose_backlog_is_full_is_somebody_s_too(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as client:
        busy.bind(str(path))
        busy.listen(0)
        client.connect(str(path))
        with pytest.raises(ConfigError, match="another process listens there"):
            listening_on(ServeOptions("m", uds=path)).__enter__()


def test_a_stale_socket_is_replaced_and_anything_else_is_left(tmp_path):
    path = tmp_path / "s"
    code = "import socket, sys, os; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert path.is_socket()
    with listening_on(ServeOptions("m", uds=path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("mine")
    with pytest.raises(ConfigError, match="it is there and is no socket"):
        listening_on(ServeOptions("m", uds=path)).__enter__()
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="it is there and is no socket"):
        listening_on(ServeOptions("m", uds=path)).__enter__()
    assert path.is_symlink()


def test_the_file_of_another_server_is_left_at_the_end(tmp_path):
    path = tmp_path / "s"
    with listening_on(ServeOptions("m", uds=path)), socket.socket(socket.AF_UNIX) as other:
        path.rename(tmp_path / "moved")
        other.bind(str(path))
    assert path.is_socket()


def test_paths_that_cannot_be(tmp_path):
    long = tmp_path / ("x" * (MOST_PATH_BYTES - len(str(tmp_path)) - 1))
    with listening_on(ServeOptions("m", uds=long)):
        assert long.is_socket()
    for path, problem in (
        (Path(f"{long}x"), f"a unix socket's path has at most {MOST_PATH_BYTES} bytes"),
        (tmp_path / "none" / "s", "No such file or directory. Choose another --uds"),
    ):
        with pytest.raises(ConfigError, match=problem):
            listening_on(ServeOptions("m", uds=path)).__enter__()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--uds", "s", "--port", "8000"], "--uds and --port: a server listens in one place"),
        (["--uds", "s", "--host", "127.0.0.1"], "--uds and --host: a server listens in one place"),
        (["--uds", "s", "--port", "81"], "--uds and --port: a server listens in one place"),
        (["--uds-mode", "660"], "--uds-mode is about --uds"),
        (["--uds", "s", "--uds-mode", "999"], "--uds-mode '999' cannot be used: give three octal digits"),
    ],
)
def test_options_that_do_not_go_together(words, message):
    result = call_roofline(["serve", *words])
    assert (result.exit_code, message in result.stderr) == (1, True), result.stderr


def test_a_unix_socket_is_local_and_nothing_is_warned_of(tmp_path, caplog):
    options = Parser("serve", command).parse(["--uds", str(tmp_path / "s")])["options"]
    assert isinstance(options, ServeOptions)
    assert options.local
    with listening_on(options):
        assert not caplog.records
