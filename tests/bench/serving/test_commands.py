"""The commands that put a server under load, with the null server as their target."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from roofline.bench.load.events import read_events, write_events
from roofline.bench.load.generator import Generator, run_on_fast_loop
from roofline.bench.report.gather import gather
from roofline.bench.report.words import digits
from roofline.bench.results.metrics import figures
from roofline.bench.results.point import Point
from roofline.bench.results.store import append_points, read_points, with_id
from roofline.bench.serving import load_test, surroundings
from roofline.bench.serving.certificate import null_server
from roofline.bench.serving.load_test import WARM_UP
from roofline.bench.serving.measure import BEYOND
from roofline.bench.traffic.presets import preset_traffic, singles
from roofline.bench.traffic.traffic import read_traffic, write_traffic
from tests.command_line import call_roofline

NULL = "python -m roofline.bench.load.null_server --port {port} --first-ms 5 --gap-ms 1"
QUICK = ["--no-certificate", "--no-probe"]


@pytest.fixture(scope="module")
def null():
    with null_server(first_ms=5, gap_ms=1) as url:
        yield url


@pytest.fixture(scope="module")
def fast_null():
    """Answers of a quarter of the time, for tests of anything but times."""
    with null_server(first_ms=5, gap_ms=0.25) as url:
        yield url


@pytest.fixture(autouse=True)
def quick_loads(request, monkeypatch):
    """Loads of quick tests run in this process, and look at the other programs for a moment only. Those of slow tests
    have a process each, as for users."""

    def run_plan(plan, key=None, on_progress=None):
        write_events(
            run_on_fast_loop(Generator(plan, read_traffic(Path(plan.traffic)), key, on_progress)), Path(plan.events)
        )
        return read_events(Path(plan.events))

    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(surroundings, "LOAD_SECONDS", 0.01)
        monkeypatch.setattr(load_test, "run_plan", run_plan)


def test_traffic_is_written_and_named(tmp_path):
    out = tmp_path / "t.jsonl"
    result = call_roofline(["bench", "traffic", "long", "-o", out, "--requests", 9, "--seed", 4, "--stop", "natural"])
    traffic = read_traffic(out)
    assert result.exit_code == 0, result.output
    assert (len(traffic.requests), traffic.seed, traffic.stop) == (9, 4, "natural")
    assert f"sha256 {hashlib.sha256(out.read_bytes()).hexdigest()}" in result.stdout
    assert "9 requests" in result.stdout


def test_a_trace_is_written(tmp_path):
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    result = call_roofline(["bench", "traffic", "trace", "--trace", trace, "-o", tmp_path / "t.jsonl"])
    assert result.exit_code == 0, result.output
    assert read_traffic(tmp_path / "t.jsonl").requests[0].max_tokens == 44
    assert call_roofline(["bench", "traffic", "trace", "-o", tmp_path / "t.jsonl"]).exit_code == 1


@pytest.mark.slow
def test_a_curve(null, tmp_path):
    words = ["--workers", 2, "--requests", 3, "--fewest", 6, "--out", tmp_path / "r.jsonl", "--events", tmp_path / "e"]
    result = call_roofline(["bench", "curve", null, "--objective", "mlperf:llama2-70b", *words])
    assert result.exit_code == 0, result.output
    points = read_points(tmp_path / "r.jsonl")
    assert [(point.load.arrivals, point.load.concurrency) for point in points] == [
        ("closed", 1),
        ("poisson", None),
        ("closed", 2),
        ("poisson", None),
    ]
    for point in points:
        assert (point.kind, point.preset, point.counts.completed) == ("curve", "typical@1", 6)
        assert point.metrics["good_share"].value == 1.0
        assert 5 < point.metrics["ttft"].p50 < 100
        assert point.client.ttft_added_ms > 0
        assert point.fidelity.probes == 1
        assert "traffic repeated" not in point.validity.flags
        events = tmp_path / point.events
        assert hashlib.sha256(events.read_bytes()).hexdigest() == point.events_sha256
        assert figures(read_events(events))["e2e"].mean == pytest.approx(point.metrics["e2e"].mean)
    sent = [
        request.request
        for point in points
        for request in read_events(tmp_path / point.events).requests
        if not request.probe
    ]
    assert len(sent) == len(set(sent)) == 24  # no request twice
    assert points[1].load.offered == pytest.approx(points[0].metrics["request_rate"].value * 0.9)
    title, *lines, footnote = result.stdout.splitlines()
    assert title == f"typical, {points[0].system.label}"
    assert lines[0] == "1 worker ..."
    assert lines[1].startswith(f"  load 1 worker, requests/s {digits(points[0].metrics['request_rate'].value)}, ")
    assert lines[2].startswith(f"{points[1].load.offered:.3g}/s poisson ...; ")
    assert lines[2].endswith(" left")
    assert len(lines) == 8
    assert footnote.startswith(
        "times in ms, counted from the planned moment: TTFT and TPOT are medians, latency is the mean"
    )


@pytest.mark.slow
def test_a_sweep_and_json(null):
    result = call_roofline(["bench", "sweep", null, "--concurrency", 2, "--fewest", 2, "--json", *QUICK])
    points = [json.loads(line) for line in result.stdout.splitlines()]
    assert [point["load"]["concurrency"] for point in points] == [1, 2]
    assert points[0]["workload"]["name"] == "dell"
    assert points[0]["workload"]["answer"]["mean"] == 256
    assert "client not certified" in points[0]["validity"]["flags"]


def test_decode(null):
    result = call_roofline(
        ["bench", "decode", null, "--repeats", 2, "--prompts", "1,30", "--answer", 100, "--json", *QUICK]
    )
    point, deeper = [json.loads(line) for line in result.stdout.splitlines()]
    assert point["counts"]["answer_tokens"] == 200
    assert len({point["id"], deeper["id"], ""}) == 3
    assert [each["workload"]["prompt"]["most"] for each in (point, deeper)] == [1, 28]  # words of 30 tokens
    assert [each["extra"]["prompt"] for each in (point, deeper)] == [1, 30]
    assert point["load"]["arrivals"] == "batch"
    assert point["metrics"]["decode_rate"]["mean"] == pytest.approx(1000, rel=0.2)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["--arrivals", "gamma", "--rate", 40, "--burstiness", 0.3], 40),
        (["--arrivals", "batch", "--concurrency", 3], None),
    ],
)
def test_one_load(fast_null, words, offered):
    result = call_roofline(["bench", "load", fast_null, "--requests", 6, "--json", *words, *QUICK])
    (point,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert (point["load"]["arrivals"], point["load"]["offered"]) == (words[1], offered)
    assert point["counts"]["completed"] == 6


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_closed_loop_against_a_server_of_fixed_times_has_workers_over_latency(tmp_path, workers):
    write_traffic(singles((1,), 10, 40), tmp_path / "t.jsonl")
    words = ["--arrivals", "closed", "--concurrency", workers, "--requests", max(12, 4 * workers), "--json"]
    with null_server(first_ms=60, gap_ms=10) as url:
        result = call_roofline(["bench", "load", url, "--traffic", tmp_path / "t.jsonl", *words, *QUICK])
    metrics = json.loads(result.stdout)["metrics"]
    rate = metrics["request_rate"]
    # However busy this machine is: a client that takes its time between requests loses what it takes.
    assert rate["value"] == pytest.approx(workers / metrics["e2e"]["mean"] * 1000, rel=0.05)
    assert metrics["answer_rate"]["value"] == pytest.approx(10 * rate["value"])
    assert rate["ci95"][0] < rate["value"] < rate["ci95"][1]


def test_an_open_loop_that_is_kept_up_with_has_the_offered_rate(null):
    words = ["--rate", 60, "--requests", 60, "--json"]
    metrics = json.loads(call_roofline(["bench", "load", null, *words, *QUICK]).stdout)["metrics"]
    assert metrics["request_rate"]["value"] == pytest.approx(60, rel=0.02)


@pytest.mark.slow
def test_a_curve_names_the_same_traffic_however_far_it_goes(null):
    hashes = set()
    for words in (["--workers", 2], ["--workers", 1], ["--workers", 2, "--no-poisson"]):
        result = call_roofline(
            ["bench", "curve", null, *words, "--requests", 1, "--fewest", 2, "--seconds", 1, "--json", *QUICK]
        )
        hashes |= {json.loads(line)["workload"]["sha256"] for line in result.stdout.splitlines()}
    assert hashes == {preset_traffic("typical").sha256}


def test_two_servers_in_turn(fast_null, tmp_path):
    words = ["--requests", 6, "--arrivals", "closed", "--concurrency", 2, "--events", tmp_path, "--json"]
    with null_server(first_ms=5, gap_ms=0.25) as second:
        result = call_roofline(["bench", "load", f"{fast_null},{second}", *words, "--no-certificate"])
    point = json.loads(result.stdout)
    assert (point["system"]["replicas"], point["counts"]["completed"]) == (2, 6)
    (path,) = tmp_path.iterdir()
    assert {each.server for each in read_events(path).requests} == {0, 1}


def test_a_trace_is_sent_from_its_beginning_at_its_moments(fast_null, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * n, "input_length": 5, "output_length": 2} for n in (0, 1, 3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call_roofline(["bench", "traffic", "trace", "--trace", trace, "-o", tmp_path / "t.jsonl"])
    words = ["--traffic", tmp_path / "t.jsonl", "--arrivals", "trace", "--trace-speed", 2, "--events", tmp_path / "e"]
    result = call_roofline(["bench", "load", fast_null, "--json", *words, *QUICK])
    assert result.exit_code == 0, result.output
    (events,) = (tmp_path / "e").iterdir()
    assert [each.scheduled for each in read_events(events).requests] == [0, 50_000_000, 150_000_000]
    refused = call_roofline(["bench", "load", fast_null, "--arrivals", "trace", *QUICK])
    assert "does not say when its requests came" in refused.stderr


def test_clients_that_do_not_read_are_told_and_in_no_figure(fast_null, tmp_path):
    out, folder = tmp_path / "r.jsonl", tmp_path / "e"
    words = ["--arrivals", "closed", "--requests", 8, "--unread", 0.25, "--unread-tokens", 100_000, "--no-certificate"]
    result = call_roofline(["bench", "load", fast_null, *words, "--out", out, "--events", folder])
    assert result.exit_code == 0, result.output
    (point,) = read_points(out)
    assert msgspec.to_builtins(point.unread) == {
        "share": 0.25, "clients": 2, "closed_by_server": 0, "closed_by_client": 2, "answered": 0, "failed": 0,
    }  # fmt: skip
    told = "2 clients beside them did not read: 2 closed by the client"
    assert told in point.validity.flags
    assert told in result.stdout
    assert (point.counts.completed, point.counts.failed, point.counts.unfinished, point.counts.empty) == (8, 0, 0, 0)
    assert (point.workload.requests, point.metrics["e2e"].n) == (8, 8 if point.window.warm_up_s == 0 else 6)
    assert point.extra["most_in_flight"] == 1
    events = read_events(tmp_path / point.events)
    assert len(events.head.unread) == 2
    again = call_roofline(["bench", "recompute", tmp_path / point.events])
    assert told in again.stdout
    call_roofline(["bench", "report", out, "-o", tmp_path / "r.md"])
    assert f"{told}. The figures are of the requests whose answers were read." in (tmp_path / "r.md").read_text()


def test_compare_at_a_rate_decides_by_goodput_within_the_objective(fast_null, tmp_path):
    out = tmp_path / "r.jsonl"
    words = ["--rate", 200, "--block", 4, "--rounds", 2, "--objective", "ttft=60000", "--json", "--out", out]
    result = call_roofline(["bench", "compare", fast_null, fast_null, *words, "--no-certificate", "--no-probe"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["by"], told["goodput"]["a"], told["goodput"]["b"], told["goodput"]["difference"]) == (
        "goodput", 200.0, 200.0, 0.0,
    )  # fmt: skip
    assert told["goodput"]["low"] < 0 < told["goodput"]["high"]
    assert told["verdict"] == "undecided", "16 requests of each side prove little"
    call_roofline(["bench", "report", out, "--markdown", tmp_path / "r.md"])
    text = (tmp_path / "r.md").read_text()
    assert re.search(r"goodput: difference in requests/s \| 0 \|.*\| undecided \|", text)


def test_one_load_is_of_its_own_kind_and_is_compared_with_older_points(fast_null, tmp_path):
    """Points of `bench load` were called curves once; they are of the same load all the same."""
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    words = ["--arrivals", "closed", "--requests", 8, "--no-certificate", "--no-probe", "--out", new]
    assert call_roofline(["bench", "load", fast_null, *words]).exit_code == 0
    (point,) = read_points(new)
    assert point.kind == "load"
    append_points([msgspec.structs.replace(point, kind="curve")], old)
    result = call_roofline(["bench", "check", new, "--against", old, "--at-most", "5%"])
    assert (result.exit_code, "request rate is 1 [" in result.stdout) == (0, True), result.output
    assert call_roofline(["bench", "history", old, new]).exit_code == 0


def test_a_curve_measures_the_levels_of_an_earlier_one_with_clients_that_do_not_read(fast_null, tmp_path):
    """check then compares open loops too, and says that the shares of such clients differ."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    words = ["bench", "curve", fast_null, "--fewest", 6, "--requests", 3, *QUICK]
    assert call_roofline([*words, "--workers", 2, "--out", old]).exit_code == 0
    unread = ["--unread", 0.5, "--unread-seconds", 1, "--levels-from", old]
    result = call_roofline([*words, *unread, "--out", new])
    assert result.exit_code == 0, result.output
    before, after = read_points(old), read_points(new)
    assert [point.load.offered for point in after] == [point.load.offered for point in before]
    assert [point.load.concurrency for point in after if point.load.arrivals == "closed"] == [1, 2]
    assert all(point.unread is not None and point.unread.clients == 3 for point in after)
    checked = call_roofline(["bench", "check", new, "--against", old, "--at-most", "90%"])
    assert checked.stdout.count("did not read 0.5, was 0") == 4, checked.output
    none = call_roofline([*words, "--workers", 1, "--levels-from", tmp_path / "none.jsonl"])
    assert (none.exit_code, "cannot be read" in none.stderr) == (1, True)


@pytest.mark.slow
def test_traffic_that_is_too_short_is_sent_again_and_flagged(null, tmp_path):
    call_roofline(["bench", "traffic", "typical", "-o", tmp_path / "t.jsonl", "--requests", 4])
    words = ["--traffic", tmp_path / "t.jsonl", "--arrivals", "closed", "--requests", 6, "--json"]
    (line,) = call_roofline(["bench", "load", null, *words, *QUICK]).stdout.splitlines()
    assert "traffic repeated" in json.loads(line)["validity"]["flags"]


@pytest.mark.slow
def test_compare_finds_a_slower_server(null, tmp_path):
    slower = NULL.replace("--gap-ms 1", "--gap-ms 2")
    words = ["--block", 4, "--concurrency", 4, "--rounds", 8, "--out", tmp_path / "r.jsonl", "--label-b", "slow"]
    result = call_roofline(["bench", "compare", null, slower, "--json", *words, *QUICK])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["verdict"] == "A is higher"
    assert record["rounds"] in (4, 6, 8), "as many as it takes beside other programs"
    assert 0.4 < record["throughput"]["ratio"] < 0.7
    a, b = read_points(tmp_path / "r.jsonl")
    assert (a.system.label, b.system.label, a.run == b.run) == ("A", "slow", True)
    assert a.window.order == "ABBA"
    assert (a.window.repeats, a.counts.completed) == (2 * record["rounds"], 8 * record["rounds"])
    assert b.extra["verdict"] == "A is higher"
    assert b.extra["throughput_ratio"] == record["throughput"]["ratio"]


@pytest.mark.slow
def test_a_comparison_tells_rounds_and_both_sides(null):
    words = ["--block", 2, "--concurrency", 2, "--rounds", 2, "--label-b", "again", *QUICK]
    result = call_roofline(["bench", "compare", null, null, *words])
    assert result.exit_code == 0, result.output
    title, *lines = result.stdout.splitlines()
    assert title == "typical, A: A, B: again"
    beginnings = [
        "round 1 ...",
        "round 1: measured",
        "round 2 ...",
        "round 2: throughput B/A ",
        "  load A: 2 workers, ",
    ]
    beginnings += ["  load B: 2 workers, ", "by throughput: ", "throughput: ", "latency: "]
    assert [line.startswith(each) for line, each in zip(lines, beginnings, strict=True)] == [True] * 9


@pytest.mark.slow
def test_the_limit_of_a_chip(null, tmp_path):
    words = ["bench", "load", null, "--requests", 5, "--arrivals", "closed", *QUICK]
    chip = ["--chip", "MI210", "--chips", 64, "--model-here", "smollm2-135m"]
    refused = call_roofline([*words, "--chip", "MI210"])
    assert "the limit of MI210 needs the model that the server runs" in refused.stderr
    result = call_roofline([*words, *chip, "--json"])
    assert result.exit_code == 0, result.output
    point = json.loads(result.stdout)
    assert 0 < point["limit"]["share_of_sheet"] < 0.01
    assert (point["devices"][0]["name"], point["devices"][0]["count"]) == ("MI210", 64)
    assert point["system"]["parameters"] == 134_515_008


@pytest.mark.slow
def test_an_engine_in_this_process(smollm2_path, tmp_path, monkeypatch):
    monkeypatch.setattr(load_test, "certify", None)  # there is no client to certify
    words = ["--repeats", 2, "--answer", 32, "--prompts", "1,64", "--json", "--events", tmp_path / "e"]
    result = call_roofline(["bench", "decode", f"engine:{smollm2_path} --max-running 4", *words])
    assert result.exit_code == 0, result.output
    for point in [json.loads(line) for line in result.stdout.splitlines()]:
        assert point["client"] is None
        assert point["counts"]["tokens_by"] == "engine"
        assert point["counts"]["answer_tokens"] == 64
        assert 0 < point["limit"]["share_of_measured"] < 1
        assert point["system"]["options"] == {"max-running": "4"}
        assert "client not certified" not in point["validity"]["flags"]
    refused = call_roofline(["bench", "decode", f"engine:{smollm2_path} --max-runing 4", *words])
    assert "did you mean 'max_running'" in refused.stderr


def test_what_cannot_be_is_kept_and_flagged(fast_null, tmp_path):
    """Minutes of measuring are not thrown away because the wrong model was named beside them."""
    out, events = tmp_path / "r.jsonl", tmp_path / "events"
    words = ["--requests", 5, "--arrivals", "closed", "--chip", "MI210", "--model-here", "llama-3.1-8b", "--out", out]
    result = call_roofline(["bench", "load", fast_null, *words, "--events", events, *QUICK])
    assert result.exit_code == 1
    assert "of the limit cannot be. " in result.stderr
    assert "tokens/s were measured; llama-3.1-8b with" in result.stderr
    (point,) = read_points(out)
    assert BEYOND in point.validity.flags
    assert point.limit.share_of_sheet > 1
    assert (out.parent / point.events).exists()
    (refused,) = gather([out]).refused  # a report has the arithmetic in its place
    assert "of the limit" in refused


def test_a_format_of_weights_needs_their_model(fast_null):
    result = call_roofline(["bench", "load", fast_null, "--requests", 5, "--dtype", "fp8", *QUICK])
    assert (result.exit_code, "--model-here" in result.stderr) == (1, True)


@pytest.mark.slow
@pytest.mark.soak
def test_compare_of_equal_servers_and_of_one_5_percent_slower():
    """A real run of what tests/bench/results/test_compare.py simulates."""
    words = ["--block", 16, "--concurrency", 8, "--json", *QUICK]
    server = NULL.replace("--gap-ms 1", "--gap-ms 4")
    slower = server.replace("--first-ms 5", "--first-ms 5.4").replace("--gap-ms 4", "--gap-ms 4.26")
    same = json.loads(call_roofline(["bench", "compare", server, server, *words]).stdout)
    assert same["verdict"] == "no difference"
    other = json.loads(call_roofline(["bench", "compare", server, slower, *words]).stdout)
    assert other["verdict"] == "A is higher"


@pytest.mark.slow
def test_ctrl_c_leaves_valid_results(tmp_path):
    out = tmp_path / "r.jsonl"
    target = NULL.replace("--gap-ms 1", "--gap-ms 40")
    words = ["curve", target, "--workers", 1, "--requests", 99, "--out", out, *QUICK]
    status, _, complaint = interrupted(words)
    assert (status, complaint) == (130, f"Aborted! The point that was measured by then is in {out}.")
    (point,) = read_points(out)
    assert "interrupted" in point.validity.flags
    assert point.counts.completed >= 1
    assert point.counts.unfinished == 1
    running = [Path(f"/proc/{number}/cmdline") for number in os.listdir("/proc") if number.isdecimal()]
    assert not any("--gap-ms\x0040" in path.read_text() for path in running if path.exists())


def interrupted(words):
    """Status, output and complaint of a command that gets Ctrl-C when its first load is a second old."""
    command = [sys.executable, "-u", "-m", "roofline", "bench", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline(), process.stdout.readline()]  # the title, the load that begins
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest, complaint = process.communicate(timeout=30)
    return process.returncode, "".join(lines) + rest, complaint.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("load", "--arrivals", "closed", "--requests", "99"), ("sweep", "--concurrency", "1", "--requests", "99")]
)
def test_ctrl_c_shows_the_point_that_is_written_nowhere(null, words):
    status, output, complaint = interrupted([words[0], null, *words[1:], *QUICK])
    told = "Aborted! The point that was measured by then is in the output alone: there was no --out."
    assert (status, complaint) == (130, told)
    assert ", interrupted" in output


@pytest.mark.slow
def test_ctrl_c_in_the_first_block_of_a_comparison(null):
    words = ["compare", null, null, "--block", 400, *QUICK]
    status, _, complaint = interrupted(words)
    assert (status, complaint) == (130, "Aborted! No point was measured by then.")


def test_recompute(fast_null, tmp_path):
    call_roofline(["bench", "decode", fast_null, "--repeats", 1, "--events", tmp_path, *QUICK])
    (events,) = tmp_path.iterdir()
    ours = json.loads(call_roofline(["bench", "recompute", events, "--json"]).stdout)
    theirs = json.loads(call_roofline(["bench", "recompute", events, "--as", "guidellm", "--json"]).stdout)
    assert ours["notes"] == []
    assert theirs["notes"]
    tpot, over_all = ours["metrics"]["tpot"]["mean"], theirs["metrics"]["time_per_output_token"]["mean"]
    assert over_all > tpot
    table = call_roofline(["bench", "recompute", events, "--as", "vllm"]).stdout
    assert "e2el" in table
    assert "as read in vLLM" in table
    assert "did you mean 'vllm'" in call_roofline(["bench", "recompute", events, "--as", "vlm"]).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["curve", "http://127.0.0.1:9"], "cannot be asked"),
        (["curve", "http://127.0.0.1:9", "--objective", "mlperf:llama2"], "did you mean 'mlperf:llama2-70b'"),
        (["curve", "http://127.0.0.1:9", "--preset", "typicl"], "did you mean 'typical'"),
        (["sweep", "http://127.0.0.1:9", "--preset", "long", "--traffic", "x"], "leave one of the two out"),
        (["decode", "http://127.0.0.1:9", "--traffic", "/none/x"], "leave --preset and --traffic out"),
        (["decode", "http://127.0.0.1:9", "--prompts", "1,x"], "give numbers of tokens above 0"),
        (["sweep", "http://127.0.0.1:9", "--traffic", "/none/x"], "cannot be read"),
        (["curve", "http://127.0.0.1:9", "--chip", "MI210"], "cannot be asked"),
        (["load", "http://127.0.0.1:9,http://127.0.0.1:0"], "http://127.0.0.1:0: its port is no number"),
        (["curve", "http://127.0.0.1:99999"], "its port is no number from 1 to 65535; correct it"),
        (["compare", "http://127.0.0.1:9", "http://127.0.0.1:0"], "http://127.0.0.1:0: its port is no number"),
        (["load", "http://127.0.0.1:9"], "cannot be asked: Connection refused; give"),
        (["traffic", "trace", "--trace", "/", "-o", "/dev/null"], "/ cannot be read: it is a folder"),
        (["links", "--topology", "/"], "--topology / cannot be read: it is a folder"),
        (["compare", "nonsense", "http://127.0.0.1:9", "--no-certificate"], "is no target"),
        (["recompute", "/none/x"], "cannot be read"),
        (["curve", "http://127.0.0.1:9", "--chips", "2"], "--chips counts devices of --chip"),
        (["curve", "http://127.0.0.1:9", "--events", "/dev/null"], "a part of the path is a file"),
        (["load", "http://127.0.0.1:9", "--arrivals", "closed", "--rate", "2"], "--rate is of --arrivals constant or"),
        (["load", "http://127.0.0.1:9", "--concurrency", "2"], "--concurrency is of --arrivals closed or batch, not"),
        (["load", "http://127.0.0.1:9", "--burstiness", "2"], "--burstiness is of --arrivals gamma, not poisson"),
        (["load", "http://127.0.0.1:9", "--rate-from", "2"], "--rate-from is of --arrivals ramp, not poisson"),
        (["load", "http://127.0.0.1:9", "--unread-tokens", "9"], "--unread-tokens is of clients that --unread adds"),
        (["load", "http://127.0.0.1:9", "--unread-seconds", "9"], "--unread-seconds is of clients that --unread adds"),
        (["load", "engine:smollm2-135m", "--unread", "0.1"], "--unread is of servers: engine:smollm2-135m has no conn"),
        (["load", "http://127.0.0.1:9", "--trace-speed", "2"], "--trace-speed is of --arrivals trace, not poisson"),
        (["load", "http://127.0.0.1:9", "--traffic", "/none/x", "--natural"], "leave --natural out"),
        (["load", "http://127.0.0.1:9", "--objective", "ttft=fast"], "'ttft=fast' is no limit in ms; write ttft=2000"),
        (
            ["compare", "http://127.0.0.1:9", "http://127.0.0.1:9", "--rate", "2", "--by", "throughput"],
            "--by throughput at a --rate would compare the rate with itself",
        ),
        (
            ["compare", "http://127.0.0.1:9", "http://127.0.0.1:9", "--rate", "2", "--by", "goodput"],
            "give --objective, such as ttft=200,tpot=50",
        ),
        (
            ["compare", "http://127.0.0.1:9", "http://127.0.0.1:9", "--objective", "ttft=9", "--by", "goodput"],
            "give an offered --rate",
        ),
    ],
)
def test_mistakes_are_told(words, message):
    result = call_roofline(["bench", *words])
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_point_that_cannot_be_written_is_printed(fast_null, form):
    words = ["--requests", 2, "--rate", 100, "--out", "/dev/full", *form, *QUICK]
    result = call_roofline(["bench", "load", fast_null, *words])
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    point = msgspec.json.decode(line, type=Point)
    assert (point.counts.completed, point.id) == (2, with_id(point).id)
    told = "roofline: /dev/full: the disk is full; standard output has the point, as lines of a file of results"
    assert result.stderr.splitlines() == [told]


def test_a_point_whose_events_cannot_be_written_is_printed(fast_null, tmp_path, monkeypatch):
    folder = tmp_path / "e"
    monkeypatch.setattr(load_test, "write_events", lambda events, path: path.mkdir() or path.open("w"))
    words = ["--requests", 2, "--rate", 100, "--events", folder, "--json", *QUICK]
    result = call_roofline(["bench", "load", fast_null, *words])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["counts"]["completed"] == 2
    assert ": it is a folder; name another folder; standard output has the point" in result.stderr


@pytest.mark.slow
def test_both_points_of_a_comparison_that_cannot_be_written_are_printed(null):
    words = ["--block", 2, "--concurrency", 2, "--rounds", 2, "--out", "/dev/full", *QUICK]
    result = call_roofline(["bench", "compare", null, null, *words])
    assert result.exit_code == 1
    points = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [point["extra"]["side"] for point in points] == ["A", "B"]
    assert "/dev/full: the disk is full; standard output has the points" in result.stderr


def test_a_server_that_is_no_llm_server_is_told_in_a_sentence(tmp_path):
    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    server = subprocess.Popen([command[0], "-u", *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        port = server.stdout.readline().split()[5].decode()
        listed = call_roofline(["bench", "load", f"http://127.0.0.1:{port}", *QUICK])
        named = call_roofline(["bench", "load", f"http://127.0.0.1:{port}", "--model", "m", *QUICK])
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert "/v1/models answers 404 and lists no model: give the address of an OpenAI-compatible server" in listed.stderr
    assert "status 501: a page of HTML, as no LLM server answers" in named.stderr
    assert len(named.stderr.strip().splitlines()) == 1


def test_the_reason_of_failed_requests_is_told(null):
    words = ["--repeats", 2, "--prompts", "1,1", "--answer", 512, "--timeout", 0.2]
    result = call_roofline(["bench", "decode", null, *words, *QUICK])
    assert result.exit_code == 1
    assert "2 of 2 requests failed, the first with: " in result.stderr
    last = "roofline: no request was answered; the last one failed with: no complete answer within 0.2 s"
    assert result.stderr.splitlines()[-1] == last


@pytest.fixture
def weary():
    """weary(answers, refusal) -> url of a server that answers so many requests, and then refuses all of them."""
    servers = []

    def start(answers, refusal):
        left = iter(range(answers))

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words):
                pass

            def do_GET(self):
                self.answer(200, json.dumps({"data": [{"id": "m"}]}))

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                if next(left, None) is None:
                    self.answer(503, refusal)
                    return
                event = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
                self.answer(200, f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

            def answer(self, status, text):
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("words", "points"),
    [
        (["load", "--requests", 3, "--rate", 200], 1),
        (["curve", "--workers", 4, "--requests", 1, "--fewest", 2], 1),
        (["sweep", "--concurrency", 4, "--requests", 1, "--fewest", 2, "--json"], 1),
        (["decode", "--repeats", 2, "--answer", 4], 1),
    ],
)
def test_a_run_without_an_answer_fails_with_what_the_server_said(weary, tmp_path, words, points):
    url, out = weary(WARM_UP, "the model was unloaded"), tmp_path / "r.jsonl"
    result = call_roofline(["bench", words[0], url, *words[1:], "--out", out, *QUICK])
    assert result.exit_code == 1
    said = "roofline: no request was answered; the last one failed with: status 503: the model was unloaded"
    assert result.stderr.splitlines()[-1] == said
    assert len(read_points(out)) == points


@pytest.mark.slow
def test_a_run_with_many_answers_does_not_fail(weary):
    words = ["--prompts", "1,1", "--repeats", 10, "--answer", 4]
    result = call_roofline(["bench", "decode", weary(WARM_UP + 19, "it is late"), *words, *QUICK])
    assert result.exit_code == 0
    assert "1 of 10 requests failed, the first with: status 503: it is late" in result.stderr
    result = call_roofline(["bench", "decode", weary(WARM_UP + 1, "it is late"), *words, *QUICK])
    assert result.exit_code == 1
    assert "19 of 20 requests were not answered, more than 10%; the last one that failed: status 503" in result.stderr
