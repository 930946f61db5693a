"""Result files of other tools as events.

`files/guidellm.json` is what GuideLLM 0.8.1 wrote of 239 requests to the null server, with its own figures; texts, and
what is not read here, were cut out. `files/vllm.json` is what `vllm bench serve` of vLLM 0.32.0 wrote of 12 requests to
the same server, without texts. `files/aiperf` is what AIPerf 0.13.0 wrote of 24 requests of a closed loop, and 3
of a warm-up, to a server that refuses every seventh, without figures that are not read here. Further runs of vLLM are
written down here, in the same form, and their figures by the formulas of its serve.py.
"""

import json
from pathlib import Path

import pytest

from roofline.bench.results.dialects import recompute
from roofline.bench.results.metrics import goodput
from roofline.bench.results.objectives import Objective
from roofline.bench.results.recorded import read_run
from roofline.bench.results.window import measured_span
from roofline.common.errors import ConfigError, UnsupportedError
from tests.command_line import call_roofline

FILES = Path(__file__).parent / "files"
AIPERF = FILES / "aiperf" / "profile_export_aiperf.json"
GUIDE, VLLM = FILES / "guidellm.json", FILES / "vllm.json"


def written(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def vllm(**fields):
    """Three requests, of which the last one waited half a second for a place: TTFT 0.1, 0.2 and 0.3 s."""
    values = {
        "backend": "openai",
        "model_id": "m",
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "completed": 3,
        "request_throughput": 1.0,
        "start_times": [1000.0, 1000.0, 1000.5],
        "ttfts": [0.1, 0.2, 0.3],
        "itls": [[0.1, 0.3], [0.05] * 4, []],
        "input_lens": [7, 8, 9],
        "output_lens": [3, 9, 1],
        "errors": ["", "", ""],
        "queue_times": [0.0, 0.0, 0.5],
    }
    return {**values, **fields}


def test_vllms_own_figures_of_a_real_run():
    own, figures = json.loads(VLLM.read_text()), recompute(read_run(VLLM).events, "vllm")
    for name in ("ttft", "tpot", "itl"):
        assert figures[name].mean == pytest.approx(own[f"mean_{name}_ms"], rel=1e-4)
        assert figures[name].p50 == pytest.approx(own[f"median_{name}_ms"], rel=1e-3)
    assert figures["request_throughput"].value == pytest.approx(own["request_throughput"], rel=2e-3)
    assert figures["output_throughput"].value == pytest.approx(own["output_throughput"], rel=2e-3)


def test_vllms_figures_by_its_formulas(tmp_path):
    figures = recompute(read_run(written(tmp_path, vllm())).events, "vllm")
    means = {"ttft": 200, "tpot": (400 / 2 + 200 / 8) / 2, "itl": 600 / 6, "e2el": (500 + 400 + 300) / 3}
    assert {name: figures[name].mean for name in means} == pytest.approx(means)
    assert figures["request_throughput"].value == pytest.approx(3 / 0.8)
    assert figures["output_throughput"].value == pytest.approx(13 / 0.8)


def test_vllms_planned_moments(tmp_path):
    """Only those of a limited rate are known: of how long each waited for one of the places."""
    closed = read_run(written(tmp_path, vllm()))
    assert all(each.scheduled is None for each in closed.events.requests)
    assert "no planned moments" in " ".join(closed.notes)
    assert (closed.events.head.arrivals, closed.events.head.concurrency) == ("closed", 2)
    limited = read_run(written(tmp_path, vllm(request_rate=4.0)))
    assert (limited.events.head.arrivals, limited.events.head.rate) == ("poisson", 4.0)
    waits = [each.dispatched - each.scheduled for each in limited.events.requests]
    assert waits == [0, 0, 500_000_000]
    assert "no planned moments" not in " ".join(limited.notes)
    free = read_run(written(tmp_path, vllm(request_rate=4.0, max_concurrency=None)))
    assert all(each.scheduled is None for each in free.events.requests)


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
    unfinished = min(each.dispatched for each in recorded.events.requests if each.end is None)
    assert measured_span(recorded.events).end <= unfinished, "GuideLLM ended the last lap before its time"


def test_what_guidellm_does_not_tell_is_absent():
    recorded = read_run(GUIDE)
    assert (recorded.events.head.arrivals, recorded.events.head.concurrency) == ("closed", 4)
    for name, absent in (("vllm", "itl"), ("aiperf", "inter_chunk_latency"), ("inference-perf", "inter_token_latency")):
        figures = recompute(recorded.events, name)
        assert [key for key, figure in figures.items() if not figure.n] == [absent]
        assert figures["output_throughput"].ci95 is None, "nothing tells when the tokens came"
    ours = recompute(recorded.events, "ours")
    assert [name for name, figure in ours.items() if not figure.n] == ["itl"]


def test_a_request_under_way_at_the_end_is_neither_completed_nor_failed():
    (own,) = json.loads(GUIDE.read_text())["benchmarks"]
    events = read_run(GUIDE).events
    unfinished = [each for each in events.requests if each.end is None]
    assert len(unfinished) == len(own["requests"]["incomplete"]) > 0
    assert [each.error for each in unfinished] == [None] * len(unfinished)


def test_requests_that_failed(tmp_path):
    lost = vllm(errors=["no connection", "", ""], ttfts=[0.1, 0.0, 0.3], itls=[[0.1], [], []])
    events = read_run(written(tmp_path, lost)).events
    assert sorted(each.error for each in events.requests if each.error) == ["no answer", "no connection"]
    guide = json.loads(GUIDE.read_text())
    lists = guide["benchmarks"][0]["requests"]
    lists["errored"] = [lists["successful"].pop()]
    lists["errored"][0]["info"]["error"] = "status 500"
    (failed,) = [each for each in read_run(written(tmp_path, guide)).events.requests if each.error]
    assert failed.error == "status 500"
    assert not failed.completed


def test_a_run_of_several(tmp_path):
    several = written(tmp_path, f"{json.dumps(vllm())}\n{json.dumps(vllm(request_rate=2.0))}")
    assert read_run(several, 2).events.head.arrivals == "poisson"
    with pytest.raises(ConfigError, match=r"file\.json: the file has 2 runs: name one with --run"):
        read_run(several)
    with pytest.raises(ConfigError, match="and no number 3"):
        read_run(several, 3)
    guide = json.loads(GUIDE.read_text())
    guide["benchmarks"] *= 2
    assert read_run(written(tmp_path, guide), 2).tool == "GuideLLM"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (vllm(), {"start_times": None}, "run `vllm bench serve` with --save-detailed"),
        (vllm(), {"ttfts": []}, "run `vllm bench serve` with --save-detailed"),
        (vllm(), {"itls": [[0.1]]}, "have different lengths"),
        (vllm(), {"start_times": ["x"]}, "no result of vLLM that can be read"),
        (json.loads(GUIDE.read_text()), {"benchmarks": [{}]}, "no benchmark of GuideLLM 0.8 that can be read"),
        (json.loads(GUIDE.read_text()), {"benchmarks": []}, "the file has no benchmark"),
    ],
)
def test_what_cannot_be_read(tmp_path, file, change, message):
    with pytest.raises(ConfigError, match=f"file.json: .*{message}"):
        read_run(written(tmp_path, {**file, **change}))


@pytest.mark.parametrize("content", ["", "[]", '{"benchmarks": [{"config": {"strat', '{"benchmarks": NaN}'])
def test_a_file_of_no_kind_is_not_read_as_lines_of_events(tmp_path, content):
    with pytest.raises(ConfigError, match=r"file.json: this is neither a file of events nor a result of"):
        read_run(written(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last_token_iteration": 1.0}, "request 3 has its start, parts and end in no order of time"),
        ({"request_end": 1.0}, "request 3 has its start, parts and end in no order of time"),
        ({"output_tokens": -4}, "request 3 has a negative number of tokens"),
    ],
)
def test_guidellms_impossible_values_are_refused(tmp_path, change, message):
    guide = json.loads(GUIDE.read_text())
    request = guide["benchmarks"][0]["requests"]["successful"][2]
    for name, value in change.items():
        (request if name in request else request["info"]["timings"])[name] = value
    with pytest.raises(ConfigError, match=message):
        read_run(written(tmp_path, guide))


def test_guidellms_files_that_say_too_little(tmp_path):
    guide = json.loads(GUIDE.read_text())
    guide["benchmarks"][0]["requests"]["successful"].pop()
    with pytest.raises(ConfigError, match=r"keeps .* requests: run GuideLLM without a sample_size"):
        read_run(written(tmp_path, guide))
    guide["benchmarks"][0]["config"]["strategy"]["type_"] = "incremental"
    with pytest.raises(UnsupportedError, match="strategy 'incremental'"):
        read_run(written(tmp_path, guide))


def test_the_command(tmp_path):
    shown = call_roofline(["bench", "recompute", GUIDE, "--as", "aiperf"]).stdout
    assert "absent: inter_chunk_latency" in shown
    assert "first and the last part of each answer" in shown
    assert "as read in AIPerf" in shown
    told = json.loads(
        call_roofline(["bench", "recompute", written(tmp_path, vllm()), "--as", "mlperf", "--json"]).stdout
    )
    assert told["written_by"] == "vLLM"
    assert {"first_token_latency", "sample_latency", "valid llama2-70b"} <= set(told["absent"])
    assert "time_per_output_token" in told["metrics"]
    told = call_roofline(["bench", "recompute", written(tmp_path, {"schema": "events"}), "--run", 1])
    assert told.exit_code == 1
    assert "--run names a run in a file of another tool" in told.stderr


def aiperf(tmp_path, change=lambda records: records, summary=True, name="profile_export.jsonl"):
    """A copy of the real files, changed: the path of the records."""
    records = [json.loads(line) for line in AIPERF.with_name("profile_export.jsonl").read_text().splitlines()]
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))
    if summary:
        to = "profile_export_aiperf.json" if name == "profile_export.jsonl" else f"{path.stem}.json"
        path.with_name(to).write_text(AIPERF.read_text())
    return path


@pytest.mark.parametrize("path", [AIPERF, AIPERF.with_name("profile_export.jsonl")])
def test_aiperfs_own_figures_of_a_real_run(path):
    """Either of the two files names the run."""
    own, recorded = json.loads(AIPERF.read_text()), read_run(path)
    assert (recorded.tool, recorded.events.head.arrivals, recorded.events.head.concurrency) == ("AIPerf", "closed", 3)
    figures = recompute(recorded.events, "aiperf")
    for name in ("time_to_first_token", "inter_token_latency", "request_latency", "inter_chunk_latency"):
        assert figures[name].n == own[name]["count"]
        assert figures[name].mean == pytest.approx(own[name]["avg"], rel=1e-5)
        assert figures[name].p50 == pytest.approx(own[name]["p50"], rel=1e-5)
    span = own["benchmark_duration"]["avg"]
    assert figures["request_throughput"].value == pytest.approx(own["request_throughput"]["avg"], rel=0.02)
    assert figures["output_throughput"].value * span == pytest.approx(12 * 21, rel=0.02)
    requests = recorded.events.requests
    assert len(requests) == 24, "those of the warm-up are left out"
    refused = 'status 503, Service Unavailable, {"error": {"message": "no room"}}'
    completed = [each for each in requests if each.completed]
    assert [each.error for each in requests if not each.completed] == [refused] * 3
    assert all(each.prompt_tokens == 21 and each.cached_tokens == 4 for each in completed)
    assert all(each.first_reasoning < each.first_text for each in requests if each.completed)
    assert all(
        each.scheduled <= each.dispatched < each.headers <= each.chunks[0] for each in requests if each.completed
    )
    assert len({len(each.chunks) for each in completed}) == 1
    good = goodput(recorded.events, Objective(ttft=1e6), measured_span(recorded.events))["good_share"]
    assert good.n > 0, "planned moments are known"


def test_aiperfs_phases_are_arrivals(tmp_path):
    for kind, fields, arrivals in (
        ("poisson", {"rate": 12.0}, ("poisson", None, 12.0)),
        ("gamma", {"rate": 3.0, "concurrency": 4}, ("gamma", None, 3.0)),
        ("fixed_schedule", {}, ("trace", None, None)),
    ):
        path = aiperf(tmp_path)
        summary = json.loads(AIPERF.read_text())
        summary["input_config"]["phases"][1] = {"name": "p", "kind": "profiling", "type": kind, **fields}
        path.with_name("profile_export_aiperf.json").write_text(json.dumps(summary))
        head = read_run(path).events.head
        assert (head.arrivals, head.concurrency, head.rate) == arrivals
    summary["input_config"]["phases"][1]["type"] = "surprise"
    path.with_name("profile_export_aiperf.json").write_text(json.dumps(summary))
    with pytest.raises(UnsupportedError, match="surprise"):
        read_run(path)


def test_aiperfs_requests_without_their_summary_are_a_trace(tmp_path):
    recorded = read_run(aiperf(tmp_path, summary=False))
    assert recorded.events.head.arrivals == "trace"
    assert "not known without the JSON file" in " ".join(recorded.notes)
    prefixed = read_run(aiperf(tmp_path, name="mine.jsonl"))
    assert prefixed.events.head.arrivals == "closed"
    assert read_run(tmp_path / "mine.json").events.head == prefixed.events.head


def test_aiperfs_summary_alone_has_no_requests(tmp_path):
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(AIPERF.read_text())
    with pytest.raises(ConfigError, match=r"profile_export\.jsonl, which has them, is not beside it"):
        read_run(path)


def test_aiperfs_phases_are_runs(tmp_path):
    def twice(records):
        second = json.loads(json.dumps(records[-5:]))
        for record in second:
            record["metadata"]["profiling_index"] = 1
        return [*records, *second]

    path = aiperf(tmp_path, twice)
    with pytest.raises(ConfigError, match="has 2 runs: name one with --run"):
        read_run(path)
    assert len(read_run(path, 2).events.requests) == 5
    with pytest.raises(ConfigError, match="no number 3"):
        read_run(path, 3)


def measured_records(change):
    """A change of all records that are no warm-up and have metrics."""

    def changed(records):
        for record in records:
            if record["metadata"]["benchmark_phase"] == "profiling" and "error" not in record:
                change(record["metrics"])
        return records

    return changed


def absent(events, name):
    return {key for key, figure in recompute(events, name).items() if not figure.n}


STREAMED = ("time_to_first_token", "time_to_first_output_token", "inter_chunk_latency", "inter_token_latency")


def test_an_answer_that_was_not_streamed_has_no_first_token(tmp_path):
    change = measured_records(lambda metrics: [metrics.pop(name, None) for name in STREAMED])
    recorded, own = read_run(aiperf(tmp_path, change)), json.loads(AIPERF.read_text())
    events = recorded.events
    assert absent(events, "aiperf") == {"time_to_first_token", "inter_token_latency", "inter_chunk_latency"}
    assert absent(events, "vllm") == {"ttft", "tpot", "itl"}
    assert absent(events, "ours") == {"ttft", "ttft_corrected", "tpot", "decode_rate", "itl"}
    latency = recompute(events, "aiperf")["request_latency"]
    assert latency.mean == pytest.approx(own["request_latency"]["avg"])
    assert "21 of 21 answers have no time to a first token" in " ".join(recorded.notes)
    span = measured_span(events)
    assert goodput(events, Objective(ttft=1e6), span)["goodput"].n == 0, "nobody knows whether they keep it"
    assert goodput(events, Objective(e2e=1e6), span)["good_share"].value > 0


def test_an_answer_of_guidellm_that_was_not_streamed(tmp_path):
    guide = json.loads(GUIDE.read_text())
    for each in guide["benchmarks"][0]["requests"]["successful"]:
        timings = each["info"]["timings"]
        timings.update(dict.fromkeys(("first_token_iteration", "last_token_iteration", "first_request_iteration")))
        timings.update(first_output_token_iteration=None, token_iterations=0)
    events = read_run(written(tmp_path, guide)).events
    answered = [each for each in events.requests if each.completed]
    assert len(answered) == len(guide["benchmarks"][0]["requests"]["successful"])
    assert {"time_to_first_token", "inter_token_latency"} <= absent(events, "guidellm")
    assert recompute(events, "guidellm")["request_latency"].n == len(answered)


def test_an_answer_without_its_gaps_has_its_latency(tmp_path):
    """The first token and the latency are in the file, so the time between tokens is known, and its gaps are not."""
    recorded = read_run(aiperf(tmp_path, measured_records(lambda metrics: metrics.pop("inter_chunk_latency"))))
    figures, own = recompute(recorded.events, "aiperf"), json.loads(AIPERF.read_text())
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert figures[name].mean == pytest.approx(own[name]["avg"], rel=1e-5)
    assert absent(recorded.events, "aiperf") == {"inter_chunk_latency"}
    assert "21 of 21 answers have no gaps between parts" in " ".join(recorded.notes)


def test_gaps_that_do_not_come_to_the_latency_are_left_out(tmp_path):
    change = measured_records(lambda metrics: metrics["inter_chunk_latency"].update(value=[1.0, 2.0]))
    recorded = read_run(aiperf(tmp_path, change))
    own = json.loads(AIPERF.read_text())
    assert recompute(recorded.events, "aiperf")["request_latency"].mean == pytest.approx(own["request_latency"]["avg"])
    assert absent(recorded.events, "aiperf") == {"inter_chunk_latency"}
    assert "The gaps between parts of 21 of 21 answers do not come to their latency" in " ".join(recorded.notes)


def test_the_head_of_an_answer_is_no_first_event(tmp_path):
    """What vLLM calls TTFT ends at an event with a choice, and AIPerf's file has none of those without text."""
    assert absent(read_run(AIPERF).events, "vllm") == {"ttft"}


@pytest.mark.parametrize(("unit", "in_ms"), [("s", 1e3), ("us", 1e-3), ("ns", 1e-6), ("ms", 1.0)])
def test_units_of_times_are_read(tmp_path, unit, in_ms):
    def change(metrics):
        for name in STREAMED:
            value = metrics[name]["value"]
            scaled = [each / in_ms for each in value] if isinstance(value, list) else value / in_ms
            metrics[name] = {"value": scaled, "unit": unit}

    figures = recompute(read_run(aiperf(tmp_path, measured_records(change))).events, "aiperf")
    own = json.loads(AIPERF.read_text())
    for name in ("time_to_first_token", "inter_token_latency", "inter_chunk_latency"):
        assert figures[name].mean == pytest.approx(own[name]["avg"], rel=1e-5)


def test_a_request_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lines 4 and 28 have the same request"):
        read_run(aiperf(tmp_path, lambda records: [*records, records[3]]))


def test_requests_that_did_not_complete_are_named(tmp_path):
    assert read_run(AIPERF).notes[0].startswith("Of 24 requests 21 completed: 3 failed (3 with: status 503, Service")

    def cancelled(records):
        records[-1]["metadata"]["was_cancelled"] = True
        return records

    assert "3 failed" in (note := read_run(aiperf(tmp_path, cancelled)).notes[0])
    assert note.endswith(", 1 cancelled.")
    guide = read_run(GUIDE)
    unfinished = sum(each.end is None for each in guide.events.requests)
    assert f"{unfinished} under way when the run ended" in guide.notes[0]
    assert not any("completed" in note for note in read_run(written(tmp_path, vllm())).notes), "all did"
    told = json.loads(call_roofline(["bench", "recompute", AIPERF, "--json"]).stdout)
    assert (told["requests"]["completed"], told["requests"]["failed"]) == (21, 3)


def test_the_objective_of_a_file_is_named(tmp_path):
    notes = " ".join(read_run(AIPERF).notes)
    assert "objective is time_to_first_token 40, inter_token_latency 20; AIPerf's own figures of it: 6 good" in notes
    for name in ("request_goodput", "request_goodput:"):
        notes = " ".join(read_run(written(tmp_path, vllm(**{name: 1.25}))).notes)
        assert "1.25 good requests/s" in notes


def test_a_summary_of_another_form_is_not_missing(tmp_path):
    path = aiperf(tmp_path)
    summary = {"aiperf_version": "0.13.0", "input_config": {"loadgen": {"request_rate": 2.0}}}
    path.with_name("profile_export_aiperf.json").write_text(json.dumps(summary))
    notes = " ".join(read_run(path).notes)
    assert "says in no form that is known here how requests were sent" in notes
    assert "without the JSON file" not in notes


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda record: record["metadata"].update(request_end_ns=5), "line 27 has a request that ends before"),
        (lambda record: record["metrics"]["output_sequence_length"].update(value=-1), "line 27 .*negative number"),
        (lambda record: record["metrics"]["inter_chunk_latency"].update(value=[-1.0]), "line 27 has a negative time"),
        (
            lambda record: record["metrics"]["request_latency"].update(unit="laps"),
            "line 27 has request_latency in 'laps'",
        ),
        (lambda record: record["metrics"]["time_to_first_token"].update(value=1e6), "line 27 has a first token that"),
        (lambda record: record.update(metadata={"request_start_ns": "x"}), "line 27 is no record of AIPerf"),
    ],
)
def test_damaged_records_of_aiperf_are_refused(tmp_path, damage, words):
    def damaged(records):
        damage(records[-1])
        return records

    with pytest.raises(ConfigError, match=words):
        read_run(aiperf(tmp_path, damaged))
    with pytest.raises(ConfigError, match="all are of a warm-up"):
        read_run(aiperf(tmp_path, lambda records: records[:3]))
