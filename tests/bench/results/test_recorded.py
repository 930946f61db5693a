"""Result files of other tools as events. Those in `files` are what the tools wrote when they sent a few requests to the
null server: `vllm bench serve` 0.32.0 with --save-result --save-detailed, GuideLLM 0.8.1 with its JSON output; what
GuideLLM repeats of its configuration, and the texts, were cut out. Each file has the tool's own figures, too."""

import json
from pathlib import Path

import pytest

from roofline.bench.results.dialects import recompute
from roofline.bench.results.metrics import measured_span
from roofline.bench.results.recorded import read_run
from roofline.common.errors import ConfigError, UnsupportedError
from tests.command_line import call_roofline

FILES = Path(__file__).parent / "files"
CLOSED, OPEN, CHAT = FILES / "vllm-closed.json", FILES / "vllm-open.json", FILES / "vllm-chat.json"
GUIDE = FILES / "guidellm.json"


def written(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("path", [CLOSED, OPEN, CHAT])
def test_vllms_own_figures(path):
    own, figures = json.loads(path.read_text()), recompute(read_run(path).events, "vllm")
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert figures[name].mean == pytest.approx(own[f"mean_{name}_ms"], rel=1e-4)
        assert figures[name].p50 == pytest.approx(own[f"median_{name}_ms"], rel=1e-4)
    # The whole run of vLLM is a little longer than from the first request to the last answer's end.
    assert figures["request_throughput"].value == pytest.approx(own["request_throughput"], rel=0.02)
    assert figures["output_throughput"].value == pytest.approx(own["output_throughput"], rel=0.02)
    assert figures["request_throughput"].n == own["completed"]


def test_vllms_planned_moments():
    """Only those of a limited rate are known: of how long each waited for one of the places."""
    closed, limited = read_run(CLOSED), read_run(OPEN)
    assert all(each.scheduled is None for each in closed.events.requests)
    assert "no planned moments" in " ".join(closed.notes)
    own = json.loads(OPEN.read_text())
    waits = [(each.dispatched - each.scheduled) * 1e-9 for each in limited.events.requests]
    assert sorted(waits) == pytest.approx(sorted(own["queue_times"]), abs=1e-6)
    assert max(waits) > 0.01, "the fixture is of more requests than places"
    figures = recompute(limited.events, "ours")
    assert figures["ttft_corrected"].mean - figures["ttft"].mean == pytest.approx(sum(waits) / len(waits) * 1e3)


def test_the_loads_of_vllm():
    heads = {path.stem: read_run(path).events.head for path in (CLOSED, OPEN)}
    assert (heads["vllm-closed"].arrivals, heads["vllm-closed"].concurrency) == ("closed", 4)
    assert (heads["vllm-open"].arrivals, heads["vllm-open"].rate) == ("poisson", json.loads(OPEN.read_text())["request_rate"])


def test_guidellms_own_figures():
    (own,) = json.loads(GUIDE.read_text())["benchmarks"]
    recorded = read_run(GUIDE)
    figures, metrics = recompute(recorded.events, "guidellm"), own["metrics"]
    for name, theirs, scale in (
        ("time_to_first_token", "time_to_first_token_ms", 1),
        ("time_per_output_token", "time_per_output_token_ms", 1),
        ("inter_token_latency", "inter_token_latency_ms", 1),
        ("request_latency", "request_latency", 1e3),
    ):
        summary = metrics[theirs]["successful"]
        assert figures[name].n == summary["count"]
        assert figures[name].mean == pytest.approx(summary["mean"] * scale, rel=1e-5)
        assert figures[name].p50 == pytest.approx(summary["median"] * scale, rel=0.02)
    # GuideLLM divides by the time that was set, not by that from the first request to the last answer's end.
    span = figures["request_throughput"].n / figures["request_throughput"].value
    assert span == pytest.approx(own["duration"], rel=0.1)
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    assert figures["output_throughput"].value * span == pytest.approx(tokens)
    assert measured_span(recorded.events).end == recorded.events.head.end


def test_what_guidellm_does_not_tell_is_absent():
    recorded = read_run(GUIDE)
    assert (recorded.events.head.arrivals, recorded.events.head.concurrency) == ("closed", 3)
    for name, absent in (("vllm", "itl"), ("aiperf", "inter_chunk_latency"), ("inference-perf", "inter_token_latency")):
        figures = recompute(recorded.events, name)
        assert [key for key, figure in figures.items() if not figure.n] == [absent]
        assert figures["output_throughput"].ci95 is None, "nothing tells when the tokens came"
    ours = recompute(recorded.events, "ours")
    assert [name for name, figure in ours.items() if not figure.n] == ["itl", "answer_rate"]


def test_a_request_under_way_at_the_end_is_neither_completed_nor_failed():
    (own,) = json.loads(GUIDE.read_text())["benchmarks"]
    events = read_run(GUIDE).events
    unfinished = [each for each in events.requests if each.end is None]
    assert len(unfinished) == len(own["requests"]["incomplete"]) > 0
    assert [each.error for each in unfinished] == [None] * len(unfinished)


def test_requests_that_failed(tmp_path):
    own = json.loads(CLOSED.read_text())
    own["errors"][0], own["ttfts"][1], own["itls"][1] = "no connection", 0.0, []
    events = read_run(written(tmp_path, own)).events
    assert sorted(each.error for each in events.requests if each.error) == ["no answer", "no connection"]
    guide = json.loads(GUIDE.read_text())
    lists = guide["benchmarks"][0]["requests"]
    lists["errored"] = [lists["successful"].pop()]
    lists["errored"][0]["info"]["error"] = "status 500"
    (failed,) = [each for each in read_run(written(tmp_path, guide)).events.requests if each.error]
    assert failed.error == "status 500"
    assert not failed.completed


def test_a_run_of_several(tmp_path):
    several = written(tmp_path, f"{CLOSED.read_text()}\n{OPEN.read_text()}")
    assert read_run(several, 2).events.head.arrivals == "poisson"
    with pytest.raises(ConfigError, match="file.json: the file has 2 runs: name one with --run"):
        read_run(several)
    with pytest.raises(ConfigError, match="and no number 3"):
        read_run(several, 3)
    guide = json.loads(GUIDE.read_text())
    guide["benchmarks"] *= 2
    assert read_run(written(tmp_path, guide), 2).tool == "GuideLLM"


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (CLOSED, {"start_times": None}, "run `vllm bench serve` with --save-detailed"),
        (CLOSED, {"ttfts": []}, "run `vllm bench serve` with --save-detailed"),
        (CLOSED, {"itls": [[0.1]]}, "have different lengths"),
        (CLOSED, {"start_times": ["x"]}, "no result of vLLM that can be read"),
        (GUIDE, {"benchmarks": [{}]}, "no benchmark of GuideLLM 0.8 that can be read"),
        (GUIDE, {"benchmarks": []}, "has 0 runs"),
    ],
)
def test_what_cannot_be_read(tmp_path, path, change, message):
    with pytest.raises(ConfigError, match=f"file.json: .*{message}"):
        read_run(written(tmp_path, {**json.loads(path.read_text()), **change}))


def test_guidellms_files_that_say_too_little(tmp_path):
    guide = json.loads(GUIDE.read_text())
    guide["benchmarks"][0]["requests"]["successful"].pop()
    with pytest.raises(ConfigError, match="keeps .* requests: run GuideLLM without a sample_size"):
        read_run(written(tmp_path, guide))
    guide["benchmarks"][0]["config"]["strategy"]["type_"] = "incremental"
    with pytest.raises(UnsupportedError, match="strategy 'incremental'"):
        read_run(written(tmp_path, guide))


def test_the_command():
    shown = call_roofline(["bench", "recompute", GUIDE, "--as", "aiperf"]).stdout
    assert "absent: inter_chunk_latency" in shown
    assert "first and the last part of each answer" in shown
    assert "as read in AIPerf" in shown
    told = json.loads(call_roofline(["bench", "recompute", CLOSED, "--as", "mlperf", "--json"]).stdout)
    assert told["written_by"] == "vLLM"
    assert {"first_token_latency", "sample_latency", "valid llama2-70b"} <= set(told["absent"])
    assert "time_per_output_token" in told["metrics"]
    told = call_roofline(["bench", "recompute", FILES.parent / "test_recorded.py", "--run", 1])
    assert told.exit_code == 1
    assert "--run names a run in a file of another tool" in told.stderr
