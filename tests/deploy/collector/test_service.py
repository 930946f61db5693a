"""The collector's HTTP server, and the command that runs it."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable

import httpx
import pytest

from roofline.common.errors import ConfigError
from roofline.deploy.collector import service
from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.options import CollectOptions
from roofline.deploy.collector.service import TEXT, listen_on, serve_collector, single_key
from roofline.deploy.collector.targets import CollectorTarget
from tests.command_line import call_roofline
from tests.deploy.collector.fake_replicas import FakeReplica, listening, shows

TOKENS = 'vllm:generation_tokens_total{model_name="tiny"}'
Ask = Callable[..., Awaitable[httpx.Response]]


def served(check: Callable[[Ask], Awaitable[None]], key: str | None = None) -> None:
    """Have a check ask the server of a collector over one replica, which has generated five tokens, and one that is
    not there."""

    async def run() -> None:
        replica = FakeReplica("a")
        replica.answer(5, 0.1)
        async with listening(shows(replica)) as address:
            collector = MetricsCollector(
                [CollectorTarget(name="a", address=address), CollectorTarget(name="b", address="http://127.0.0.1:9")]
            )
            socket = listen_on("127.0.0.1", 0)
            port = socket.getsockname()[1]
            serving = asyncio.create_task(serve_collector(collector, socket, admits=single_key(key) if key else None))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

                async def ask(path: str, method: str = "GET", **headers: str | bytes) -> httpx.Response:
                    return await client.request(method, path, headers=headers)

                await check(ask)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            with pytest.raises(OSError, match=r"refused|failed"):
                await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(run())


def test_the_first_answer_has_all_replicas_in_it():
    async def check(ask: Ask) -> None:
        answer = await ask("/metrics")
        assert (answer.status_code, answer.headers["content-type"]) == (200, TEXT)
        assert f"{TOKENS} 5.0" in answer.text
        assert 'roofline_fleet_replicas{state="starting"} 0.0' in answer.text

    served(check)


def test_replicas_are_told_with_what_is_wrong_with_them():
    async def check(ask: Ask) -> None:
        await ask("/metrics")
        a, b = json.loads((await ask("/replicas")).text)["replicas"]
        assert (a["state"], a["problem"], a["refused"]) == ("up", None, [])
        assert (b["state"], b["failures"]) == ("down", 1)
        assert b["problem"].startswith("it cannot be read: ")

    served(check)


def test_other_paths_methods_and_hosts_are_refused():
    async def check(ask: Ask) -> None:
        assert (await ask("/health")).status_code == 200
        assert (await ask("/")).status_code == 404
        assert (await ask("/metrics", "POST")).status_code == 405
        assert (await ask("/metrics", host="attacker.example")).status_code == 403
        assert (await ask("/metrics", host="localhost:9081")).status_code == 200
        assert (await ask("/metrics", host="[::1]:9081")).status_code == 200

    served(check)


def test_a_key_is_asked_for():
    async def check(ask: Ask) -> None:
        for path in ("/metrics", "/replicas"):
            assert (await ask(path)).status_code == 401
            assert (await ask(path, authorization="Bearer wrong")).status_code == 401
            assert (await ask(path, authorization="Basic right")).status_code == 401
            assert (await ask(path, authorization=b"Bearer r\xedght")).status_code == 401
            assert (await ask(path, authorization="Bearer right", host="metrics.example")).status_code == 200
        assert (await ask("/health")).status_code == 200

    served(check, key="right")


def test_a_collector_of_collectors_has_their_sums_and_not_their_replicas():
    async def run() -> None:
        replica = FakeReplica("a")
        replica.answer(5, 0.1)
        async with listening(shows(replica)) as address:
            below = MetricsCollector([CollectorTarget(name="a", address=address)])
            socket = listen_on("127.0.0.1", 0)
            port = socket.getsockname()[1]
            serving = asyncio.create_task(serve_collector(below, socket))
            above = MetricsCollector([CollectorTarget(name="machine-1", address=f"http://127.0.0.1:{port}")])
            await above.scrape()
            text = above.exposition().decode()
            assert f"{TOKENS} 5.0" in text
            assert "replica:replica:" not in text
            assert text.count("# TYPE up gauge") == text.count("# TYPE roofline_fleet_replicas gauge") == 1
            await above.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(run())


def test_an_address_that_is_taken_is_named():
    with listen_on("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .* Choose another --port"):
            listen_on("127.0.0.1", port)


def test_the_command_serves_until_it_is_told_to_end():
    """In a process of its own: the address it tells is asked, and SIGTERM ends it with status 0."""

    async def run() -> tuple[str, int, str]:
        replica = FakeReplica("a")
        replica.answer(5, 0.1)
        async with listening(shows(replica)) as address:
            command = [sys.executable, "-m", "roofline", "collect", f"a={address}", "--port", "0", "--interval", "0.2"]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            try:
                line = await asyncio.to_thread(process.stderr.readline)
                async with httpx.AsyncClient(trust_env=False) as client:
                    text = (await client.get(line.split()[-1])).text
                process.send_signal(signal.SIGTERM)
                status = await asyncio.to_thread(process.wait, 20)
            finally:
                process.kill()
        return text, status, line + process.stderr.read()

    text, status, told = asyncio.run(run())
    assert f"{TOKENS} 5.0" in text, told
    assert status == 0, told
    assert told.count("\n") == 1, told  # and says nothing more


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ADDRESSES is missing"),
        (["127.0.0.1:8001"], "is no address of a server"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1"], "are both called '127.0.0.1:1': write NAME=ADDRESS"),
        (["http://127.0.0.1:1", "--replica-key", "a b"], "replica-key is no key"),
        (["http://127.0.0.1:1", "--interval", "0"], "at least 0.1"),
        (["http://127.0.0.1:1", "--trust", "x.pem"], "has no TLS"),
    ],
)
def test_what_the_command_cannot_do_is_said(words, message):
    result = call_roofline(["collect", *words])
    assert result.exit_code != 0
    assert message in result.output.replace("\n", " ")


def test_a_scrape_takes_the_interval_at_most_unless_it_is_told():
    assert CollectOptions(interval=2).scrape_seconds == 2
    assert CollectOptions(interval=600).scrape_seconds == 10
    assert CollectOptions(interval=2, timeout=5).scrape_seconds == 5


@pytest.mark.parametrize(
    ("words", "warns"), [(["--host", "0.0.0.0"], True), (["--api-key", "k", "--host", "0.0.0.0"], False)]
)
def test_a_collector_that_anybody_can_read_is_warned_of(monkeypatch, words, warns):
    async def serve(*arguments) -> None:
        """Ends at once."""

    monkeypatch.setattr(service, "serve_collector", serve)
    result = call_roofline(["collect", "http://127.0.0.1:1", "--port", "0", *words])
    assert result.exit_code in (None, 0), result.output
    assert ("can be reached from other machines and there is no --api-key" in result.stderr) is warns
