"""A collector over real sockets: replicas that answer, restart, come and go, and some that misbehave."""

import asyncio
import gzip
import re
import ssl
import time

import pytest
import trustme

from roofline.common.errors import ConfigError
from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.targets import CollectorTarget, read_targets
from tests.deploy.collector.fake_replicas import (
    TEXT,
    FakeReplica,
    full_page,
    listening,
    read_head,
    replies,
    shows,
    until,
)

TOKENS = 'vllm:generation_tokens_total{model_name="tiny"}'


def figures(collector: MetricsCollector) -> dict[str, float]:
    lines = [line for line in collector.exposition().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def target(name: str, address: str, **fields: object) -> CollectorTarget:
    return CollectorTarget(name=name, address=address, **fields)


def test_sums_stand_under_the_replicas_names_and_each_replica_under_one_of_its_own():
    async def run() -> None:
        a, b = FakeReplica("a"), FakeReplica("b")
        a.answer(5, 0.3), b.answer(7, 0.02)
        a.stats["running"], b.stats["running"] = 2, 3
        async with listening(shows(a)) as first, listening(shows(b)) as second:
            collector = MetricsCollector([target("a", first), target("b", second)])
            await collector.scrape()
            shown = figures(collector)
            assert shown[TOKENS] == 12
            assert shown['replica:vllm:generation_tokens_total{model_name="tiny",replica="a"}'] == 5
            assert shown['vllm:num_requests_running{model_name="tiny"}'] == 5
            assert shown['vllm:time_to_first_token_seconds_bucket{le="0.25",model_name="tiny"}'] == 1
            assert shown['vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="tiny"}'] == 2
            # No name has series of single replicas and of the fleet, so that no sum counts twice.
            names = {True: set(), False: set()}
            for series in shown:
                name, _, labels = series.partition("{")
                names["replica=" in labels].add(name)
            assert names[True] & names[False] == set()
            a.begin_anew(), a.answer(100, 0.1)
            await collector.scrape()
            assert figures(collector)[TOKENS] == 112
            assert figures(collector)["roofline_fleet_restarts_total"] == 1
            await collector.close()

    asyncio.run(run())


def test_a_label_that_has_the_name_already_is_called_otherwise():
    page = full_page()  # of a server with --data-parallel, whose engines are replicas of its own

    async def run() -> None:
        async with listening(replies(page)) as address:
            collector = MetricsCollector([target("a", address)])
            await collector.scrape()
            name = "replica:roofline:replica_up"
            assert figures(collector)[f'{name}{{exported_replica="0",model_name="tiny",replica="a"}}'] == 1
            await collector.close()

    asyncio.run(run())


def test_a_replica_that_ends_is_down_its_counts_stay_and_its_gauges_do_not():
    async def run() -> None:
        a, b = FakeReplica("a"), FakeReplica("b")
        a.answer(5, 0.1), b.answer(7, 0.1)
        a.stats["running"] = b.stats["running"] = 1
        async with listening(shows(a)) as first:
            async with listening(shows(b)) as second:
                collector = MetricsCollector([target("a", first), target("b", second)])
                await collector.scrape()
            await collector.scrape()
            shown = figures(collector)
            assert (shown['up{replica="a"}'], shown['up{replica="b"}']) == (1, 0)
            assert shown['roofline_fleet_replicas{state="up"}'] == shown['roofline_fleet_replicas{state="down"}'] == 1
            assert shown[TOKENS] == 12
            assert shown['vllm:num_requests_running{model_name="tiny"}'] == 1
            assert 'replica:vllm:generation_tokens_total{model_name="tiny",replica="b"}' not in shown
            assert shown['roofline_fleet_scrape_failures_total{replica="b"}'] == 1
            assert "it cannot be read: " in str(collector.shown()[1]["problem"])
            await collector.close()

    asyncio.run(run())


def test_connections_are_kept_and_the_key_is_sent():
    heads: list[bytes] = []
    connections: list[int] = []

    async def answer(reader, writer):
        connections.append(1)
        while head := await read_head(reader):
            heads.append(head)
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: 4\r\n\r\nx 1\n".encode())

    async def run() -> None:
        async with listening(answer) as address:
            collector = MetricsCollector(read_targets([f"a={address}"], {"Authorization": "Bearer secret"}))
            for _ in range(3):
                await collector.scrape()
            await collector.close()

    asyncio.run(run())
    assert len(connections) == 1
    assert len(heads) == 3
    assert all(
        head.startswith(b"GET /metrics HTTP/1.1\r\n") and b"Authorization: Bearer secret" in head for head in heads
    )


def test_a_unix_socket_is_read(tmp_path):
    async def run() -> None:
        path = str(tmp_path / "r1.sock")
        async with listening(replies(b"# TYPE x_total counter\nx_total 4\n"), path) as address:
            collector = MetricsCollector(read_targets([address], {}))
            await collector.scrape()
            assert figures(collector)['replica:x_total{replica="r1"}'] == figures(collector)["x_total"] == 4
            await collector.close()

    asyncio.run(run())


def test_a_certificate_is_checked_with_what_is_trusted(tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    for name, made in (("ours", authority), ("other", other)):
        made.cert_pem.write_to_path(str(tmp_path / name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def run() -> None:
        answer = replies(b"x 1\n")
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        targets = [target("ours", address, trust=tmp_path / "ours"), target("other", address, trust=tmp_path / "other")]
        collector = MetricsCollector(targets)
        await collector.scrape()
        assert [row["state"] for row in collector.shown()] == ["up", "down"]
        assert "certificate" in str(collector.shown()[1]["problem"]).lower()
        await collector.close()
        server.close()

    asyncio.run(run())
    (tmp_path / "none").write_text("nothing")
    with pytest.raises(ConfigError, match="holds no certificates"):
        MetricsCollector([target("a", "https://127.0.0.1:1", trust=tmp_path / "none")])


async def endless(reader, writer):
    await read_head(reader)
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\n\r\n".encode())
    while True:
        writer.write(b"x 1\n" * 10_000)
        await writer.drain()


async def dripping(reader, writer):
    await read_head(reader)
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: 1000000\r\n\r\n".encode())
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silent(reader, writer):
    await reader.read()


async def endless_headers(reader, writer):
    await read_head(reader)
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"h" * 1000 + b"\r\n")
        await writer.drain()


async def cut_off(reader, writer):
    await read_head(reader)
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: 1000\r\n\r\nx 1\n".encode())


async def no_http(reader, writer):
    await read_head(reader)
    writer.write(b"SSH-2.0-OpenSSH_9\r\n")


BOMB = gzip.compress(b"x 1\n" * 1_000_000)
HOSTILE = {
    "endless": (endless, "more than 4,194,304 bytes|longer than"),  # whichever comes first
    "dripping": (dripping, "longer than 1 s"),
    "silent": (silent, "longer than 1 s"),
    "headers": (endless_headers, "cannot be read"),
    "cut": (cut_off, "cannot be read"),
    "no-http": (no_http, "cannot be read"),
    "bomb": (replies(BOMB, headers="Content-Encoding: gzip\r\n"), "sends its metrics as gzip"),
    "html": (replies(b"<html>", "text/html"), "answers with text/html"),
    "redirect": (replies(b"", headers="Location: http://127.0.0.1/\r\n", status="302 Found"), "answers 302: Found"),
    "key": (replies(b"", status="401 Unauthorized"), r"answers 401: it asks for a key \(--replica-key\)"),
    "error": (replies(b"", status="500 Broken"), "answers 500: Broken"),
    "twice": (replies(b"x 1\nx 1\n"), "x is there twice"),
    "nan": (replies(b"# TYPE x_total counter\nx_total NaN\n"), "which no count can be"),
    "terminal": (replies(b'x{a="\\n\x1b[2J"} 1\n' * 2), r"^x\{a=\"\?\?\[2J\"\} is there twice$"),
    "huge-label": (replies(b'x{a="' + b"l" * 100_000 + b'"} 1\n'), "a line of"),
}


def test_replicas_that_misbehave_are_down_in_words_and_hold_up_nobody():
    async def run() -> None:
        good = FakeReplica("good")
        good.answer(3, 0.1)
        async with listening(shows(good)) as address:
            servers = [listening(answer) for answer, _ in HOSTILE.values()]
            addresses = [await server.__aenter__() for server in servers]
            targets = [target(name, place) for name, place in zip(HOSTILE, addresses, strict=True)]
            collector = MetricsCollector([*targets, target("good", address)], interval=0.2, timeout=1.0)
            running = asyncio.create_task(collector.run())
            await until(lambda: all(row["state"] != "starting" for row in collector.shown()))
            scrapes = {row["replica"]: row["scrapes"] for row in collector.shown()}
            assert scrapes["good"] >= scrapes["silent"]  # which took its whole second
            rows = {str(row["replica"]): row for row in collector.shown()}
            assert rows.pop("good")["state"] == "up"
            assert figures(collector)[TOKENS] == 3
            for name, row in rows.items():
                assert row["state"] == "down", name
                assert re.search(HOSTILE[name][1], str(row["problem"])), (name, row["problem"])
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 60


def test_targets_change_while_it_runs():
    async def run() -> None:
        a, b = FakeReplica("a"), FakeReplica("b")
        async with listening(shows(a)) as first, listening(shows(b)) as second:
            collector = MetricsCollector([target("a", first)], interval=0.05, timeout=2)
            running = asyncio.create_task(collector.run())
            a.answer(5, 0.1)
            await until(lambda: figures(collector).get(TOKENS) == 5)
            collector.set_targets([target("a", first), target("b", second)])
            b.answer(7, 0.1)
            await until(lambda: figures(collector).get(TOKENS) == 12)
            collector.set_targets([target("b", second)])  # a leaves: its counts stay
            assert figures(collector)[TOKENS] == 12
            assert 'up{replica="a"}' not in figures(collector)
            a.answer(1, 0.1)
            collector.set_targets([target("a", first), target("b", second)])  # and comes back, the same process
            await until(lambda: figures(collector).get(TOKENS) == 13)
            with pytest.raises(ConfigError, match="both called 'a'"):
                collector.set_targets([target("a", first), target("a", second)])
            assert len(collector.shown()) == 2
            assert figures(collector)["roofline_fleet_replicas_wanted"] == 2
            collector.set_wanted(4)
            assert figures(collector)["roofline_fleet_replicas_wanted"] == 4
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_sums_do_not_wait_for_a_replica_that_joined_later():
    async def run() -> None:
        async with listening(shows(FakeReplica("a"))) as first, listening(silent) as second:
            collector = MetricsCollector([target("a", first)], interval=0.05, timeout=20)
            running = asyncio.create_task(collector.run())
            await until(lambda: bool(collector.pages()))
            collector.set_targets([target("a", first), target("b", second)])
            async with asyncio.timeout(5):
                await collector.first_round()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_a_replica_that_is_reached_late_does_not_bring_its_past():
    """Its counters in one step would look like an enormous load; what it counts from then on is added."""

    async def run() -> None:
        old = FakeReplica("old")
        old.born = time.time() - 3600
        old.answer(1000, 0.1)
        async with listening(shows(old)) as address:
            collector = MetricsCollector([])
            await collector.scrape()  # the first sums were shown
            young = FakeReplica("young")
            young.answer(10, 0.1)
            async with listening(shows(young)) as other:
                collector.set_targets([target("old", address), target("young", other)])
                await collector.scrape()
                assert figures(collector)[TOKENS] == 10
                old.answer(3, 0.1)
                await collector.scrape()
                assert figures(collector)[TOKENS] == 13
                await collector.close()
            began_later = MetricsCollector([target("old", address)])
            await began_later.scrape()  # of those that are there when it begins, sums are what they say
            assert figures(began_later)[TOKENS] == 1003
            await began_later.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ftp://127.0.0.1:1", "no address of a server"),
        ("unix:run/r1.sock", "its whole path"),
        ("http://me:secret@127.0.0.1:1", "the address of '127.0.0.1:1' has a name or password in it"),
        ("a b=http://127.0.0.1:1", "cannot name a replica"),
    ],
)
def test_what_is_no_target_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        read_targets([word], {})


def test_names_of_targets_are_their_hosts_and_ports_unless_they_have_one():
    targets = read_targets(["http://127.0.0.1:8001/", "r2=https://[::1]:8002/other/metrics", "unix:/run/r3.sock"], {})
    assert [(each.name, each.url) for each in targets] == [
        ("127.0.0.1:8001", "http://127.0.0.1:8001/metrics"),
        ("r2", "https://[::1]:8002/other/metrics"),
        ("r3", "http://localhost/metrics"),
    ]


def test_what_a_replica_answers_after_it_has_left_is_not_taken_in():
    asked, released = asyncio.Event(), asyncio.Event()
    body = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\n"

    async def answer(reader, writer):
        await read_head(reader)
        asked.set()
        await released.wait()
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def run() -> None:
        async with listening(answer) as address:
            collector = MetricsCollector([target("a", address)], timeout=20)
            scraping = asyncio.create_task(collector.scrape())
            await asked.wait()
            collector._replicas.clear()  # as `set_targets` does, without closing the connection that answers yet
            released.set()
            await scraping
            assert "vllm:num_requests_running" not in figures(collector)

    asyncio.run(run())


def test_a_page_is_read_up_to_a_size_and_no_further():
    async def run() -> None:
        async with listening(endless) as address:
            collector = MetricsCollector([target("a", address)], timeout=60)
            await collector.scrape()
            assert collector.shown()[0]["problem"] == "its metrics have more than 4,194,304 bytes"
            await collector.close()

    asyncio.run(run())
