"""The generator, the null server and targets as processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from roofline.bench.load import targets
from roofline.bench.load.events import read_events
from roofline.bench.load.plan import read_plan
from roofline.bench.load.progress import Progress, Tally
from roofline.bench.load.run import run_plan
from roofline.bench.load.targets import open_target
from roofline.bench.serving.certificate import NullServerPace, added, certify, laps_of, null_server
from roofline.bench.traffic.traffic import TrafficRequest
from roofline.common.errors import ConfigError
from tests.bench.load.answers import STREAM, end, part

ATTEMPTS = 5  # at what takes its time: other programs may hold it up
NULL = "python -m roofline.bench.load.null_server --port {port}"


def test_a_plan_runs_and_its_events_are_what_the_null_server_says(make_plan):
    with null_server(first_ms=5, gap_ms=2) as url:
        events = run_plan(make_plan(url, 6, concurrency=2, keep_text=True, route="chat"))
    assert [each.completion_tokens for each in events.requests] == [3] * 6
    ttft, gaps = added(events.requests)
    assert (ttft > 0).all()
    assert sorted(ttft)[2] < 50
    assert len(gaps) == 12
    for each in events.requests:
        received = [int(word.partition(".")[0]) for word in each.text.split()]
        assert len(set(received)) == 1
        assert (each.chunks[0] - each.dispatched) * 1e-6 >= 5


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_leaves_a_valid_file(make_plan, tmp_path, number):
    with null_server(first_ms=50, gap_ms=50) as url:
        plan = make_plan(url, 400, concurrency=2)
        path = tmp_path / "plan.json"
        path.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "roofline.bench.load", str(path), "--progress"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            while msgspec.json.decode(process.stdout.readline(), type=Progress).completed < 2:
                pass
            process.send_signal(number)
        assert process.returncode == 130
    events = read_events(Path(plan.events))
    assert events.head.interrupted
    assert sum(each.completed for each in events.requests) >= 2
    assert [each for each in events.requests if each.end is None]  # what was under way


def test_plans_that_cannot_run_are_told(make_plan, tmp_path):
    plan = make_plan("http://127.0.0.1:9/v1", 2, traffic=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"the load generator could not run: .*none.jsonl cannot be read"):
        run_plan(plan)
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, rate=0.0)))
    with pytest.raises(ConfigError, match=r"rate is 0\.0; give a number above 0"):
        read_plan(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no plan of a load"):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "other.json")
    plan = make_plan("http://127.0.0.1:99999/v1", 2)
    with pytest.raises(ConfigError, match=r"could not run: http://127\.0\.0\.1:99999/v1: its port is no number"):
        run_plan(plan)
    plan = make_plan("http://127.0.0.1:9/v1", 1, events="/dev/full")
    with pytest.raises(ConfigError, match="could not run: /dev/full: the disk is full"):
        run_plan(plan)


def test_progress_is_told_while_it_runs(make_plan):
    def expected(told):
        return [round(each.elapsed * 2) for each in told] == [1, 2][: len(told)] and all(
            0 < each.completed < 40 and each.in_flight == 2 and 20 < each.tokens_per_s < 3 * 2 / 0.07 * 1.3
            for each in told
        )

    with null_server(first_ms=50, gap_ms=10) as url:
        for _ in range(ATTEMPTS):
            told = []
            run_plan(make_plan(url, 40, concurrency=2), on_progress=told.append)
            assert told
            assert all(each.elapsed > 0.4 * count for count, each in enumerate(told, 1))
            assert all(each.failed == 0 and 0 <= each.cpu < 1 for each in told)
            if expected(told):
                break
    assert expected(told)


def test_tokens_are_counted_as_they_arrive():
    tally = Tally()
    tally.under_way[1] = parts = [1, 2, 3]
    assert tally.report(0.5, 0.1).tokens_per_s == pytest.approx(6)
    parts += [4, 5]
    assert tally.report(1.0, 0.2).tokens_per_s == pytest.approx(4)
    del tally.under_way[1]
    tally.tokens += 6  # of which the server says that there was one more
    assert tally.report(1.5, 0.3).tokens_per_s == pytest.approx(2)


def test_an_answer_under_way_is_in_what_is_told(make_plan):
    """One answer of more than a second: no report says that nothing comes."""
    told = []
    requests = [TrafficRequest(prompt="a", prompt_tokens=1, max_tokens=120)]
    with null_server(first_ms=5, gap_ms=10) as url:
        run_plan(make_plan(url, requests), on_progress=told.append)
    assert len(told) >= 2
    assert all(each.tokens_per_s > 20 for each in told)


def test_a_key_is_sent_and_stands_in_no_file(scripted, make_plan, monkeypatch):
    async def answer(body, writer, number):
        writer.write(STREAM + part("a") + end())

    plans = []
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: plans.append(data) or path.write_text(data.decode()))
    events = run_plan(make_plan(scripted(answer), 1), key="top secret")
    assert events.requests[0].completed
    assert scripted.heads[0].startswith("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nAuthorization: Bearer top secret\r\n" in scripted.heads[0]
    assert len(plans) == 1
    assert b"secret" not in plans[0]


def test_more_streams_than_the_first_limit_of_files(make_plan, tmp_path):
    """A shell's soft limit does not end a sweep: the hard one counts."""
    with null_server(first_ms=300, gap_ms=1) as url:
        path = tmp_path / "plan.json"
        path.write_bytes(msgspec.json.encode(make_plan(url, 80, concurrency=80)))
        words = f"ulimit -S -n 40 && exec {sys.executable} -m roofline.bench.load {path}"
        subprocess.run(["bash", "-c", words], check=True, timeout=60)
    assert all(each.completed for each in read_events(tmp_path / "events.jsonl").requests)


@pytest.mark.slow
def test_certificate_of_few_streams():
    for pace, rate, apart in [
        (NullServerPace(), 2 / 0.33, 0.3),
        (NullServerPace(first_ms=8, gap_ms=2, chunks=5), 2 / 0.016, 0.4),
    ]:
        for _ in range(ATTEMPTS):
            certificate = certify(2, pace)
            assert certificate.streams in (0, 1, 2)
            assert certificate.ttft_added_ms > 0
            assert certificate.gap_added_ms >= 0
            expected = certificate.rate in (0, pytest.approx(rate, rel=apart)) and certificate.ttft_added_ms < 50
            if expected:
                break
        assert expected, certificate


@pytest.mark.parametrize(
    ("streams", "pace", "laps"),
    [
        (1, NullServerPace(), 5),  # of 0.33 s
        (64, NullServerPace(first_ms=0.05, gap_ms=0.0, chunks=1), 156),
        (1, NullServerPace(first_ms=0.0, gap_ms=0.0, chunks=1), 10_000),
        (4096, NullServerPace(first_ms=9000, gap_ms=1, chunks=1), 2),
        (20_000, NullServerPace(), 2),
    ],
)
def test_a_certificate_takes_a_moment_whatever_the_pace(streams, pace, laps):
    assert laps_of(streams, pace) == laps


def test_targets_are_started_and_ended():
    with open_target(f"{NULL} --first-ms 3 --gap-ms=2") as target:
        assert target.options.pop("first-ms") == "3"
        assert target.options.pop("gap-ms") == "2"
        assert (target.model, target.url[:17]) == ("null", "http://127.0.0.1:")
        assert target.options == {}
        assert httpx.get(f"{target.url}/models").status_code == 200
        with open_target(target.url.removesuffix("/v1"), model="other") as same:
            assert (same.url, same.model, same.pid) == (target.url, "other", None)
        assert os.path.exists(f"/proc/{target.pid}")
    assert not os.path.exists(f"/proc/{target.pid}")


@pytest.mark.parametrize(
    ("ready", "fingerprint", "replicas"),
    [
        ({"system_fingerprint": "f1", "replicas": [True, False]}, "f1", 2),
        ({"system_fingerprint": "f1"}, "f1", 1),
        ({"replicas": 3}, "", 1),
        (["no object"], "", 1),
        (None, "", 1),
    ],
)
def test_what_a_server_tells_of_itself(monkeypatch, ready, fingerprint, replicas):
    told = {
        "/v1/models": {"data": [{"id": "m", "owned_by": "roofline"}]},
        "/version": {"version": "9"},
        "/ready": ready,
    }

    def get(url, **_):
        answer = told[url.removeprefix("http://host")]
        return httpx.Response(404 if answer is None else 200, json=answer)

    monkeypatch.setattr(targets.httpx, "get", get)
    with open_target("http://host") as target:
        assert (target.engine, target.version) == ("roofline", "9")
        assert (target.fingerprint, target.replicas) == (fingerprint, replicas)


def test_several_addresses_are_one_target(monkeypatch):
    models = {"a": "m", "b": "m", "c": "other"}

    def get(url, **_):
        host, _, route = url.removeprefix("http://").partition("/")
        told = {
            "v1/models": {"data": [{"id": models[host]}]},
            "version": {"version": "2" if host == "b" else "1"},
            "ready": {"system_fingerprint": "same", "replicas": [True] * (3 if host == "b" else 1)},
        }
        return httpx.Response(200, json=told[route])

    monkeypatch.setattr(targets.httpx, "get", get)
    with open_target("http://a, http://b/v1") as target:
        assert (target.url, target.further_urls) == ("http://a/v1", ("http://b/v1",))
        assert (target.version, target.fingerprint, target.replicas) == ("1+2", "same", 4)
    with (
        pytest.raises(ConfigError, match="http://c/v1 lists the model 'other' first"),
        open_target("http://a,http://c"),
    ):
        pass
    with open_target("http://a,http://c", model="m") as target:
        assert target.model == "m"
    assert targets.is_local("http://127.0.0.1:1,http://localhost:2")
    assert not targets.is_local("http://127.0.0.1:1,http://elsewhere:2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "is no target: give an address"),
        ("", "a target is empty"),
        ("'open", "is no command line"),
        ("/no/such/program {port}", "/no/such/program cannot be started"),
        ("python -c 'raise SystemExit(\"no weights\")' {port}", r"ended at its start \(exit status 1\): no weights"),
        ("http://127.0.0.1:9", "cannot be asked"),
    ],
)
def test_targets_that_cannot_be_had(name, message):
    with pytest.raises(ConfigError, match=message), open_target(name):
        pass


def test_the_null_server_refuses_what_is_no_request():
    with null_server() as url:
        assert httpx.post(f"{url}/completions", content=b"{").status_code == 400
        answer = httpx.post(f"{url}/completions", json={"prompt": "a b", "max_tokens": 1}).text
    events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 1}
