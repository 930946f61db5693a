"""bench train over numbers of processes: batches by the rule of scaling, efficiency, and what is refused before."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bench import train, train_scaling  # noqa: E402
from roofline.bench.report import gather, history, report, words  # noqa: E402
from roofline.bench.report.text import markdown  # noqa: E402
from roofline.bench.results.point import Host, Point  # noqa: E402
from roofline.bench.results.store import append_points, read_points  # noqa: E402
from roofline.bench.train_scaling import EACH, EFFICIENCY, FLOPS, Rule, Scaling, scale  # noqa: E402
from roofline.common.errors import ConfigError, RooflineError  # noqa: E402
from roofline.train.report import machine  # noqa: E402
from roofline.train.report.cards import CARD  # noqa: E402
from roofline.train.report.flops import CONVENTIONS  # noqa: E402
from roofline.train.run import launch  # noqa: E402
from roofline.train.run_folder import LOG  # noqa: E402
from tests.cli.test_train_card import card  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402

SMALL = "model.config_overrides={width: 32, heads: 2, layers: 2, ffn: 64, vocab: 64}"
CHANGES = (SMALL, "max_seq_len=16", "global_train_batch_size=8", "precision=fp32", "device=cpu")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "measured_roof", lambda *_: {"flops": 1e9, "measured": "matmul 2048^3 in float32"})
    monkeypatch.setattr(launch, "threads_of", lambda count: max(1, 4 // count))
    monkeypatch.setattr(train_scaling, "this_host", lambda: Host(chip="A CPU", cores=4, memory_bytes=1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(processes, rows of a step) of the runs that were started. Each leaves the card and the log of a run whose step
    takes 0.1 s, on a CPU of four cores whose processes reach 1 GFLOP/s each."""
    started: list[tuple[int, int]] = []

    def run_processes(count: int, path: Path) -> None:
        config = json.loads(path.read_text())
        rows, length = config["global_train_batch_size"], config["max_seq_len"]
        started.append((count, rows))
        leave(Path(config["run_folder"]), count, rows, length, 0.1, config["max_duration"])

    monkeypatch.setattr(train_scaling, "run_processes", run_processes)
    return started


def leave(folder: Path, count: int, rows: int, length: int, seconds: float, duration: str) -> None:
    """The files of a run. Two steps are warm-up; of the others one is slower and one faster than `seconds`."""
    steps, left_out, tokens = int(duration.removesuffix("ba")), 2, rows * length
    each = [seconds * (1 + (-1) ** number * 0.01) for number in range(steps)]
    rate = tokens * (steps - left_out) / sum(each[left_out:])
    flops = {"model_flops_per_token": 1e3, "hardware_flops_per_token": 1e3, "tflops_per_device": 1e-9 * rate / count}
    speed: dict[str, Any] = {"tokens_per_s": rate, "tokens_per_s_per_device": rate / count}
    speed |= {"computed_per_s_per_device": rate / count, "rows_per_s": rate / length}
    speed |= {"steps": [left_out + 1, steps], "left_out": {"steps": left_out, "why": "they compile"}}
    text = card(
        devices=count,
        device={"name": "A CPU", "kind": "cpu", "threads": 4 // count},
        global_batch=rows,
        seq_len=length,
        speed=speed,
        flops=dict.fromkeys(CONVENTIONS, flops),
        peak=None,
        roof={"flops": 1e9, "measured": "matmul 2048^3 in float32", "share": 0.1},
        memory={"measured": 1 << 30, "measured_as": "peak resident, no files"},
        versions={"torch": "2", "commit": "abc"},
    )
    folder.mkdir()
    (folder / CARD).write_text(json.dumps(text))
    lines: list[dict[str, Any]] = [{"about": {}}]
    lines += [{"step": n + 1, "loss": 4.0, "tokens": (n + 1) * tokens, "seconds": s} for n, s in enumerate(each)]
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(rule: Rule, processes: Sequence[int] = (1, 2), changes: Sequence[str] = CHANGES) -> list[Point]:
    settings = Scaling("mpt-125m", tuple(processes), rule, tuple(changes), steps=6, warmup=2)
    return list(scale(settings, show=False))


def test_strong_scaling_keeps_the_rows_of_a_step(runs: list[tuple[int, int]]) -> None:
    """Steps take as long with two processes as with the one: the four cores do the same work."""
    first, second = measured("strong")
    assert runs == [(1, 8), (2, 8)]
    assert EFFICIENCY not in first.metrics
    efficiency = second.metrics[EFFICIENCY]
    assert efficiency.value == pytest.approx(1)
    assert efficiency.ci95 is not None
    assert efficiency.ci95[0] < 1 < efficiency.ci95[1]
    assert "core (processes x threads)" in efficiency.definition
    rate = words.metric(first, words.TRAIN)
    assert rate == pytest.approx(8 * 16 / 0.1)
    assert second.metrics[EACH].value == pytest.approx(rate / 2)
    assert second.metrics[FLOPS].definition.startswith("of a process; foundry: ")
    assert second.metrics[words.STEP].n == 6
    assert (second.extra["threads"], second.extra["batch"], second.extra["processes"]) == (2, 8, 2)
    assert second.preset.startswith("mpt-125m, strong scaling, 2 processes, batch 8 of 16 tokens, model.config_")
    (device,) = second.devices
    assert (device.count, device.measured_flops) == (1, 2e9), "a chip, with the roof of both of its processes"
    assert second.limit is not None
    assert second.limit.tokens_per_s == pytest.approx(2e6)
    assert words.share(second) == pytest.approx(1280 / 2e6)


def test_weak_scaling_keeps_the_rows_in_each_process(runs: list[tuple[int, int]]) -> None:
    first, second, third = measured("weak", (1, 2, 4))
    assert runs == [(1, 8), (2, 16), (4, 32)]
    assert second.metrics[EFFICIENCY].value == pytest.approx(2), "twice the rows in the time, on the same cores"
    assert third.metrics[EFFICIENCY].value == pytest.approx(4)
    assert first.extra["scaling"] == "weak"
    runs.clear()
    measured("weak", (2, 4))
    assert runs == [(2, 8), (4, 16)], "rows of the first number of processes are the configured ones"


def test_of_gpus_efficiency_is_of_a_device(runs: list[tuple[int, int]]) -> None:
    first, second = measured("strong")
    for point in (first, second):
        point.extra["threads"] = None
    efficiency = train_scaling._efficiency(second, first)
    assert efficiency.value == pytest.approx(0.5)
    assert efficiency.ci95 is not None
    assert efficiency.ci95[1] < 0.6
    assert "train_rate of a device / that with 1 process, with the same rows of a step" in efficiency.definition


def test_tensor_parallel_ranks_share_their_rows(runs: list[tuple[int, int]]) -> None:
    measured("weak", (2, 4), (*CHANGES, "tensor_parallel=2"))
    assert runs == [(2, 8), (4, 16)]
    runs.clear()
    measured("strong", (2, 4), (*CHANGES, "tensor_parallel=2", "global_train_batch_size=2"))
    assert runs == [(2, 2), (4, 2)]


@pytest.mark.parametrize(
    ("rule", "processes", "changes", "sentence"),
    [
        ("strong", (1, 3), (), "=8: 8 rows do not divide among 3 processes, so some would wait for others; set a mult"),
        ("weak", (3, 4), (), "=8: 8 rows do not divide among 3 processes"),
        ("strong", (1, 8), (), "processes=1,8: 8 processes need a core each, and there are 4"),
        ("strong", (1, 2), ("tensor_parallel=2",), "tensor_parallel=2 does not divide 1 process: leave that number"),
        (
            "strong",
            (2, 4),
            ("tensor_parallel=2", "global_train_batch_size=3"),
            "3 rows do not divide among the 2 groups of 4 processes",
        ),
        ("strong", (1, 4), ("elastic.virtual_shards=2",), "elastic.virtual_shards=2 on 4 processes"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    runs: list[tuple[int, int]], rule: Rule, processes: tuple[int, ...], changes: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        measured(rule, processes, (*CHANGES, *changes))
    assert sentence in str(refused.value)
    assert runs == []


def test_threads_that_the_user_set_are_refused(runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS=3 gives any number of processes as many threads each"):
        measured("strong")
    with pytest.raises(ConfigError, match="convention=lora does not count this run: choose one of foundry"):
        next(scale(Scaling("mpt-125m", (1, 2), changes=CHANGES, convention="lora")))
    assert runs == []


def test_points_are_read_by_reports(runs: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    append_points(measured("strong"), path)
    points = read_points(path)
    gathered = gather.gather([path])
    assert gathered.refused == []
    lines = markdown(report.report(gathered)).splitlines()
    assert any("| efficiency |" in line for line in lines)
    shares = {line.split("|")[3].strip(): line.split("|")[6].strip() for line in lines if "| train, mpt-125m" in line}
    assert shares["train_rate"].endswith("%")
    assert (shares["peak_memory"], shares["step_time"]) == ("-", "-"), "the limit is one of tokens a second"
    assert [point.validity.grade for point in points] == ["A", "A"]
    (finding,) = history.check(points, points, "efficiency", history.Allowed(0.05))
    assert (finding.ratio.value, finding.verdict) == (1, "passes")
    assert len(history.check(points, points, "train_rate", history.Allowed(0.05))) == 2


def test_points_beside_other_programs_are_marked(runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(chip="A CPU", cores=4, memory_bytes=1, load=1.5)
    monkeypatch.setattr(train_scaling, "this_host", lambda: host)
    validity = measured("strong")[0].validity
    assert (validity.grade, validity.flags) == ("C", ["other programs used 1.5 cores"])


def test_the_command_prints_a_table_and_adds_points_to_a_file(runs: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    call = ["bench", "train", "mpt-125m", "--processes", "1,2", "--scaling", "weak", "--steps", "6", "--warmup", "2"]
    call += [word for change in CHANGES for word in ("--set", change)]
    done = call_roofline([*call, "-o", path])
    assert done.exit_code == 0, done.output
    table = [line.split() for line in done.stdout.splitlines()]
    assert table[1][:3] == ["1", "4", "8"]
    assert "the first" in done.stdout
    assert table[2][:3] == ["2", "2", "16"]
    assert "200% [" in done.stdout
    assert "Efficiency is the tok/s of a core (processes share the cores of a CPU, cores / processes" in done.stdout
    assert "roof: matmul: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("again: roofline bench train mpt-125m --processes 1,2 --scaling w")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["1 process", "2 processes"]
    assert len(read_points(path)) == 2
    done = call_roofline([*call, "-o", path, "--json", "--convention", "matmul"])
    first, _ = (json.loads(line) for line in done.stdout.splitlines())
    assert first["metrics"]["flops_rate"]["definition"].startswith("of a process; matmul: ")
    assert done.stderr == ""
    assert len(read_points(path)) == 4


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (["--processes", "2"], "--processes 2: give two or more different numbers above 0, with commas, such as 1,2"),
        (["--processes", "1,01"], "--processes 1,01: give two or more different"),
        (["--processes", "0,1"], "--processes 0,1: give two or more different"),
        (["--scaling", "weak"], "--scaling weak is over several numbers of processes: give them, --processes 1,2"),
        (["--processes", "1,2", "--nproc", "2"], "nproc and processes both say how many there are: leave one"),
        (["--processes", "1,8"], "--processes 1,8: 8 processes need a core each, and there are 4"),
    ],
)
def test_the_command_refuses_what_would_do_nothing(call: list[str], sentence: str) -> None:
    done = call_roofline(["bench", "train", "mpt-125m", "--set", "device=cpu", *call])
    assert (done.exit_code, done.stdout) == (1, "")
    assert sentence in done.stderr


def test_processes_that_fail_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 1)
    with pytest.raises(RooflineError, match="one of the processes failed"):
        train.run_processes(2, tmp_path)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 130)
    with pytest.raises(KeyboardInterrupt):
        train.run_processes(2, tmp_path)


@pytest.mark.e2e
@pytest.mark.slow
def test_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = launch.threads_of(1)
    if cores < 2:
        pytest.skip("two processes need two cores")
    first, second = measured("weak")
    assert [(each.extra["threads"], each.extra["batch"]) for each in (first, second)] == [
        (cores, 8),
        (cores // 2, 16),
    ]
    assert second.metrics[EFFICIENCY].value is not None
    assert second.metrics[EFFICIENCY].value > 0
    assert second.system.options["sharding"] == "FULL_SHARD"
    assert first.system.options["sharding"] == "none"
    assert first.host.settings is not None
