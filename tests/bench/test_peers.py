"""`make bench-peers`: what follows from the times, what is kept, and what happens when a peer or the run is cut off."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peers, record, rows, starts, table
from benchmarks.processes import STARTS, Missing, Worker, last_line
from benchmarks.rows import BY_KEY, OURS, PEERS, ROWS
from roofline.bench import workloads

ROOT = Path(__file__).parents[2]
SHARES = {
    "share_of_roof": 0.7,
    "read_share": 0.82,
    "read_roof_gb_s": 100.0,
    "bytes_per_token": 97_000_000,
    "gb_s": 82.0,
}


def test_rows_have_the_peers_shapes_and_their_own_keys():
    assert len(BY_KEY) == len(ROWS) == 22
    assert BY_KEY["q4_1/serve_32x700+40"].shape == (32, 700, 40)
    assert BY_KEY["avx2/decode_ctx1024"].shape == (1024, 64)
    assert BY_KEY["1.1b/prefill_512"].kind == "prefill"
    assert {row.workload for row in ROWS if row.group == "q4_1"} == set(workloads.WORKLOADS)
    assert all(row.targets for row in ROWS if row.group != "q4_1")
    assert [row.key for row in rows.chosen("1.1b, ready")] == ["1.1b/decode_ctx8", "1.1b/prefill_512", "start/ready"]
    assert rows.chosen("nothing") == []


def test_the_default_run_takes_less_than_25_minutes():
    default = rows.estimate(list(ROWS), set())
    assert 300 < default < 25 * 60
    assert default < rows.estimate(list(ROWS), {"vllm", "transformers"}) < 30 * 60
    assert rows.peers_of("q4_1", {"vllm"}) == ["llama.cpp", "llama.cpp Q4_0", "OpenVINO", "vLLM"]


@pytest.mark.parametrize(("rounds", "seconds", "times"), [(5, 0.1, 5), (2, 91, 1), (3, 20, 2), (1, 1, 1)])
def test_repeats_end_with_the_patience(rounds, seconds, times):
    assert rows.repeats(rounds, seconds, patience=30) == times


def engines(row, ours, **theirs):
    shares = {} if row.group == "start" else SHARES
    own = [{"seconds": seconds, **shares} for seconds in ours]
    others = {name: record.engine(row, [{"seconds": s} for s in seconds]) for name, seconds in theirs.items()}
    return {OURS: record.engine(row, own), **others}


def test_every_repeat_is_kept_and_the_fastest_stands():
    row = BY_KEY["q4_1/prefill_512"]
    slow, fast = {"seconds": 2.0, "share_of_roof": 0.3}, {"seconds": 0.5, "share_of_roof": 0.8}
    kept = record.engine(row, [slow, fast, slow])
    assert kept["seconds"] == [2.0, 0.5, 2.0]
    assert (kept["best"], kept["median"]) == (1024.0, 256.0)
    assert (kept["share_of_roof"], kept["share_of_roof_median"]) == (0.8, 0.3)
    assert kept["turns"] == [slow, fast, slow]
    assert record.engine(row, [], "it ended") == {"missing": "it ended"}
    assert record.engine(row, [{"seconds": 1.0}], "it ended")["ended"] == "it ended"


def test_ratios_and_the_best_peer_with_the_same_model():
    row = BY_KEY["q4_1/prefill_512"]
    peers_ = {"llama.cpp": [4.0, 4.0], "llama.cpp Q4_0": [0.9, 0.9], "OpenVINO": [1.6, 1.4]}
    found = record.judged(row, engines(row, [1.0, 1.2], **peers_))
    assert found["ratios"]["OpenVINO"] == {"best": 1.4, "median": pytest.approx(1.364, abs=0.01)}
    assert found["ratios"]["llama.cpp Q4_0"]["best"] == pytest.approx(0.9, abs=0.01)
    assert found["best_peer"] == "OpenVINO"
    assert [(t["figure"], t["at_least"], t["met"]) for t in found["targets"]] == [
        ("ratio", 1.35, True), ("share_of_roof", 0.65, True),
    ]  # fmt: skip
    assert not record.judged(row, engines(row, [1.2], **peers_))["targets"][0]["met"]


def test_of_starts_the_medians_count_and_less_is_better():
    row = BY_KEY["start/first_token"]
    found = record.judged(row, engines(row, [0.2, 0.25, 0.9], **{"llama.cpp": [0.1, 0.5, 0.5]}))
    assert found["ratios"]["llama.cpp"] == {"median": 0.5, "best": 2.0}
    assert found["targets"] == [{"figure": "ratio", "at_most": 0.8, "measured": 0.5, "met": True}]
    ready = BY_KEY["start/ready"]
    assert not record.judged(ready, engines(ready, [0.9, 1.1, 1.2]))["targets"][0]["met"]


def test_without_a_peer_a_ratio_is_not_met():
    row = BY_KEY["1.1b/decode_ctx8"]
    found = record.judged(row, {**engines(row, [1.0]), "llama.cpp 1.1B": {"missing": "it ended"}})
    assert (found["ratios"], found["best_peer"]) == ({}, None)
    assert found["targets"] == [{"figure": "ratio", "at_least": 1.3, "measured": None, "met": False}]


# ---------------------------------------------------------------- the command, with engines that only say a time


class Said:
    """Answers with a time that depends on the engine; counts what it was asked."""

    asked: list[tuple[str, object]] = []  # noqa: RUF012

    def __init__(self, name):
        self.name = name

    def start(self):
        return {"build": "b"}

    def ask(self, request):
        self.asked.append((self.name, request.get("workload") or (request["kind"], request["shape"])))
        if self.name == "OpenVINO 1.1B":
            raise Missing("it ended: IndexError")
        if self.name == "llama.cpp" and request["shape"] == (64, 128, 64):
            return {"seconds": 40.0}
        return {"seconds": 0.5, **SHARES} if self.name == OURS else {"seconds": 2.0}

    def close(self):
        pass


@pytest.fixture
def command(monkeypatch, tmp_path):
    """command(*arguments) runs the command on a record in tmp_path and returns that record."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(peers.Session, "_worker", lambda self, name, group: Said(name))
    monkeypatch.setattr(peers, "versions", lambda folder, names: {"llama-cpp-python": "1"})
    Said.asked = []

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["peers", "--no-setup", "--out", str(out), *arguments])
        peers.main()
        return json.loads(out.read_text()) if out.exists() else None

    return run


def test_engines_take_turns_and_the_slow_are_spared(command):
    kept = command("--only", "q4_1/serve_64", "--rounds", "3")["rows"]["q4_1/serve_64x128+64"]
    assert [name for name, _ in Said.asked] == [
        OURS, "llama.cpp", "llama.cpp Q4_0", "OpenVINO", OURS, "llama.cpp Q4_0", "OpenVINO", OURS, "llama.cpp Q4_0",
        "OpenVINO",
    ]  # fmt: skip
    assert Said.asked[:2] == [(OURS, "serve_64x128+64_out_tok_s"), ("llama.cpp", ("serve", (64, 128, 64)))]
    assert kept["engines"]["llama.cpp"]["seconds"] == [40.0]
    assert kept["ratios"]["OpenVINO"]["best"] == 4.0
    assert kept["targets"][0]["met"]


def test_a_peer_that_crashes_is_said_so_and_the_row_stands(command, capsys):
    kept = command("--only", "1.1b", "--rounds", "2")["rows"]["1.1b/prefill_512"]
    assert kept["engines"]["OpenVINO 1.1B"] == {"missing": "it ended: IndexError"}
    assert kept["best_peer"] == "llama.cpp 1.1B"
    assert len(kept["engines"][OURS]["seconds"]) == 2
    assert "2 of 2 rows to measure, about" in capsys.readouterr().out


def test_a_run_that_was_cut_goes_on(command, monkeypatch):
    whole = peers.Session._turns

    def cut(self, row):
        if row.key == "avx2/decode_ctx8":
            raise KeyboardInterrupt
        return whole(self, row)

    monkeypatch.setattr(peers.Session, "_turns", cut)
    with pytest.raises(KeyboardInterrupt):
        command("--only", "avx2/prefill_512,avx2/decode", "--rounds", "1")
    monkeypatch.setattr(peers.Session, "_turns", whole)
    Said.asked.clear()
    kept = command("--only", "avx2/prefill_512,avx2/decode", "--rounds", "1")
    assert list(kept["rows"]) == ["avx2/prefill_512", "avx2/decode_ctx8", "avx2/decode_ctx1024"]
    asked = [what for name, what in Said.asked if name == OURS]
    assert asked == ["decode_ctx8_tok_s", "decode_ctx1024_tok_s"]
    Said.asked.clear()
    command("--only", "avx2/prefill_512", "--rounds", "1")
    assert Said.asked == []
    command("--only", "avx2/prefill_512", "--rounds", "1", "--again")
    assert len(Said.asked) == 2


def test_a_row_without_a_peer_that_is_now_wanted_is_measured_again(command):
    command("--only", "q4_1/decode_ctx8", "--rounds", "1")
    Said.asked.clear()
    kept = command("--only", "q4_1/decode_ctx8", "--rounds", "1", "--with", "vllm")
    assert [name for name, _ in Said.asked] == [OURS, "llama.cpp", "llama.cpp Q4_0", "OpenVINO", "vLLM"]
    assert "vLLM" in kept["rows"]["q4_1/decode_ctx8"]["engines"]


def test_rows_of_two_builds_are_not_mixed(command, tmp_path):
    kept = command("--only", "avx2/decode_ctx8", "--rounds", "1")
    (tmp_path / "out.json").write_text(json.dumps({**kept, "build": "another"}))
    with pytest.raises(SystemExit, match="another build"):
        command("--only", "avx2/prefill_512")


def test_our_failure_ends_the_run(command, monkeypatch):
    monkeypatch.setattr(Said, "ask", lambda self, request: (_ for _ in ()).throw(Missing("no memory")))
    with pytest.raises(SystemExit, match="ours failed: no memory"):
        command("--only", "avx2/decode_ctx8")


# ---------------------------------------------------------------- child processes

WORKLOADS = "def token_ids(n): return list(range(n))\ndef run(*a, **k): raise SystemExit('not replaced')\n"
ADAPTER = """
import sys
from workloads import run, token_ids
print("loading", sys.argv[1])
def serve(n, i, o):
    print("cannot open /some/where/weights.bin", file=sys.stderr)
    sys.exit(3)
run("toy", 0.25, prefill=lambda n: len(token_ids(n)) / 1000, decode=lambda n, k: 0.01, serve=serve, repeats=2)
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "workloads.py").write_text(WORKLOADS)
    (tmp_path / "peer_toy.py").write_text(ADAPTER)
    (tmp_path / "model").write_text("")
    command = [sys.executable, str(peers.HOST), str(tmp_path / "peer_toy.py"), str(tmp_path / "model")]
    made = Worker("toy", command, tmp_path / "log", start_timeout=30, timeout=30)
    yield made
    made.close()


def test_an_adapter_answers_single_runs(worker):
    assert worker.ask({"kind": "prefill", "shape": [512]}) == {"seconds": 0.512}
    assert worker.head == {"engine": "toy", "load_s": 0.25}
    assert worker.ask({"kind": "decode", "shape": [8, 64]}) == {"seconds": pytest.approx(0.64)}
    assert worker.starts == 1


def states(path):
    """The states of the processes that have `path` in their command line: R, S, T (stopped)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (folder / "cmdline").read_text():
                found.append((folder / "stat").read_text().rsplit(")", 1)[1].split()[0])
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="process states are read from /proc")
def test_an_engine_is_still_between_its_turns_and_ends_with_close(worker, tmp_path):
    worker.ask({"kind": "prefill", "shape": [1]})
    deadline = time.monotonic() + 5
    while states(tmp_path) != ["T"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states(tmp_path) == ["T"]
    worker.close()
    assert states(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="process states are read from /proc")
def test_a_stopped_engine_does_not_outlive_a_killed_run(worker, tmp_path):
    """The worst case: no clean-up of ours runs, and the engine, stopped, cannot read the end of its input."""
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom benchmarks.processes import Worker\n"
        "Worker('toy', sys.argv[2:], Path(sys.argv[1])).ask({'kind': 'prefill', 'shape': [1]})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    log = str(tmp_path.with_suffix(".log"))
    done = subprocess.run([sys.executable, "-c", code, log, *worker.command], cwd=ROOT, start_new_session=True)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while states(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert states(tmp_path) == []


def test_an_adapter_that_crashes_is_started_again_but_not_for_ever(worker):
    for _ in range(STARTS):
        with pytest.raises(Missing, match=r"it ended: cannot open weights\.bin"):
            worker.ask({"kind": "serve", "shape": [1, 2, 3]})
    assert worker.starts == STARTS
    with pytest.raises(Missing, match="cannot open"):
        worker.ask({"kind": "prefill", "shape": [1]})
    assert worker.starts == STARTS


def test_what_is_not_set_up_is_said(tmp_path):
    with pytest.raises(Missing, match="environment is not set up"):
        Worker("x", [str(tmp_path / "bin/python"), "model"], tmp_path / "log").start()
    with pytest.raises(Missing, match=r"there is no model\.gguf"):
        Worker("x", [sys.executable, str(tmp_path / "model.gguf")], tmp_path / "log").start()


def test_an_answer_that_takes_too_long_ends_the_engine(tmp_path):
    (tmp_path / "sleeps").write_text("import time; time.sleep(60)")
    slow = Worker("slow", [sys.executable, str(tmp_path / "sleeps")], tmp_path / "log", start_timeout=0.2)
    started = time.monotonic()
    with pytest.raises(Missing, match="no answer within 0 s"):
        slow.start()
    assert time.monotonic() - started < 10


def test_reasons_name_no_folders(tmp_path):
    (tmp_path / "log").write_text("x\nError in /home/someone/env/lib/a.py: see https://host.example/a/b\n\n")
    assert last_line(tmp_path / "log") == "Error in a.py: see https://host.example/a/b"
    assert last_line(tmp_path / "none") == ""


SERVER = """
import http.server, sys, time
begun = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" and time.monotonic() - begun > 0.3 else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_ready_is_the_first_200(tmp_path):
    assert 0.3 < starts.ready_seconds([sys.executable, "-c", SERVER], tmp_path / "log") < 20
    command = [sys.executable, "-c", "import sys; print('bad model'); sys.exit(4)"]
    with pytest.raises(Missing, match="ended with 4: bad model"):
        starts.ready_seconds(command, tmp_path / "log")


def test_a_start_is_timed_to_the_end_of_the_process(tmp_path):
    assert starts.run_seconds([sys.executable, "-c", "import time; time.sleep(0.2)"], tmp_path / "log") > 0.2
    with pytest.raises(Missing, match="failed with 1: ValueError: no"):
        starts.run_seconds([sys.executable, "-c", "raise ValueError('no')"], tmp_path / "log")


# ---------------------------------------------------------------- tables and the README


@pytest.fixture
def measured():
    """A record of all rows, made up."""
    kept = {}
    for row in ROWS:
        names = [] if row.workload == "ready" else rows.peers_of(row.group, set())
        got = engines(row, [0.5, 0.6], **{name: [2.0, 1.5] for name in names})
        if "OpenVINO 1.1B" in got:
            got["OpenVINO 1.1B"] = {"missing": "it ended: IndexError"}
        kept[row.key] = {"engines": got, **record.judged(row, got)}
    machine = {"cpu": "Toy", "cores": 2, "memory_gib": 8.0}
    return {
        "schema": record.SCHEMA, "started": "2030-01-02T03:04:05", "machine": machine,
        "versions": {"llama-cpp-python": "1.2"}, "rows": kept,
    }  # fmt: skip


def test_tables_show_every_row_with_its_verdict(measured):
    assert record.complete(measured)
    lines = table.against(measured).splitlines()
    assert len(lines) == 2 + len(ROWS)
    decode = next(line for line in lines if line.startswith("| decode, context 8 "))
    assert "97.0 MB a token at 82.0 GB/s: 82% of reads (100 GB/s)" in decode
    assert decode.endswith("| >= 80% of the read roof | met |")
    prefill = next(line for line in lines if line.startswith("| prefill 512 "))
    assert prefill.startswith("| prefill 512 | **1024** | llama.cpp 341 | 3.00 (3.14) | 70% of the roofs |")
    assert prefill.endswith("| >= 1.35 x; >= 65% of the roofs | met; met |")
    assert any(line.startswith("| AVX2: serve 64 x (128 + 64) ") for line in lines)
    assert lines[-2].startswith(
        "| process start to first token | **0.55 s** | llama.cpp 1.75 s | 0.33 (0.31) | - | <= 0.8 x | met |"
    )
    every = table.all_engines(measured).splitlines()
    assert every[0] == "| tokens/s | **Roofline** | llama.cpp | llama.cpp Q4_0 \\* | OpenVINO |"
    assert len(every) == 2 + len(workloads.WORKLOADS)
    assert "Missing: OpenVINO 1.1B (it ended: IndexError)." in table.notes(measured, "r.json")


def test_only_the_marked_part_of_a_readme_changes(measured, tmp_path):
    readme, kept = tmp_path / "README.md", tmp_path / "records/r.json"
    readme.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    record.save(measured, kept)
    table.fill(readme, kept)
    text = readme.read_text()
    assert text.startswith("before\n<!-- results: records/r.json -->\n\n| row")
    assert text.endswith("<!-- end of results -->\nafter\n")
    assert "old" not in text
    table.fill(readme, kept)
    assert readme.read_text() == text
    with pytest.raises(ValueError, match="needs one"):
        table.filled("nothing marked", measured, "r.json")


@pytest.mark.parametrize(("name", "part"), [("README.md", "summary"), ("docs/explanation/measured.md", "results")])
def test_a_document_says_what_its_record_says(name, part):
    document = ROOT / name
    text = document.read_text()
    marked = table.MARKED.search(text)
    assert marked, f"{name} has lost its markers"
    assert marked["part"] == part
    link = marked["record"]
    if link:
        kept = record.load(document.parent / link)
        assert kept is not None, f"{name} names {link}, which is not there"
        assert table.filled(text, kept, link) == text, f"run: python -m benchmarks.table RECORD --documents {name}"


def test_the_summary_has_a_few_rows_and_names_the_machine(measured):
    lines = table.summary(measured).splitlines()
    assert len(lines) == 2 + len(table.SUMMARY_ROWS) + 2
    assert "| decode, context 8, tokens/s | **" in "\n".join(lines)
    assert lines[-1] == "SmolLM2-135M-Instruct Q4_1 on 2 cores of Toy (8 GiB), 2030-01-02."


def test_older_records_are_refused(tmp_path):
    (tmp_path / "old.json").write_text('{"schema": "bench.peers/1"}')
    with pytest.raises(ValueError, match="not a record"):
        record.load(tmp_path / "old.json")
    assert record.load(tmp_path / "none.json") is None


def test_every_peer_has_seconds_for_the_estimate():
    assert {name for name in PEERS if name != "OpenVINO 1.1B"} | {OURS} == set(rows.SECONDS)
