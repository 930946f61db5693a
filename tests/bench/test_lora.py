"""bench lora: a run for each batch size, padding told apart, memory that runs out as a row, points that compare."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bench import train_points  # noqa: E402
from roofline.bench.lora import point, rows, sweep  # noqa: E402
from roofline.bench.lora.options import LoraBenchOptions  # noqa: E402
from roofline.bench.report import gather, history, report  # noqa: E402
from roofline.bench.report.text import markdown  # noqa: E402
from roofline.bench.results.store import append_points, read_points  # noqa: E402
from roofline.common.errors import ConfigError, RooflineError  # noqa: E402
from roofline.train.data.mds import Shards  # noqa: E402
from tests.bundle.bundle_models import write_model  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lora") / "tiny")


def settings(
    model: Path, batches: tuple[int, ...] = (3,), changes: tuple[str, ...] = (), **more: Any
) -> sweep.LoraSweepSettings:
    options = LoraBenchOptions(**{"warmup": 2} | ({} if "epochs" in more else {"steps": 4}) | more)
    return sweep.LoraSweepSettings(str(model), options, batches, ("precision=fp32", *changes))


@pytest.fixture(scope="module")
def measured(model: Path) -> Any:
    """The point of a run in a process of its own."""
    (only,) = sweep.sweep(settings(model, base="f32"), show=False)
    return only


def test_random_samples_have_lengths_about_the_mean_and_answers_as_targets(tmp_path: Path) -> None:
    lengths = rows.random_lengths(4096, 1)
    assert len(lengths) == 1000
    assert lengths == rows.random_lengths(4096, 1)
    assert abs(np.mean(lengths) - rows.MEAN) < 15
    assert max(rows.random_lengths(128, 1)) == 128
    rows.write_random([12, 70, 50], 80, 30, 1, False, tmp_path / "apart")
    rows.write_random([12, 70, 50], 80, 30, 1, True, tmp_path / "packed")
    apart, packed = (rows.samples_in(tmp_path / name, "x") for name in ("apart", "packed"))
    assert (apart.lengths, apart.answers, apart.rows) == ((12, 70, 50), (2, 10, 8), 3)
    assert (packed.lengths, packed.answers, packed.rows) == ((70, 50, 12), (10, 8, 2), 2)
    assert apart.sha256 != packed.sha256
    shards = Shards(tmp_path / "apart")
    assert shards[0]["trained"].tolist() == [0] * 10 + [1] * 2
    assert max(shards[number]["tokens"].max() for number in range(3)) < 30
    shards.close()


def test_a_point_says_what_was_computed_and_what_of_it_was_padding(measured: Any) -> None:
    real, computed = (measured.metrics[name].value for name in (point.REAL, point.COMPUTED))
    padding = measured.extra["padding_share"]
    assert 0 < padding < 0.2
    assert real == pytest.approx(computed * (1 - padding))
    step = measured.metrics[train_points.STEP]
    assert (step.n, measured.extra["steps"], measured.extra["batch"]) == (4, 6, 3)
    assert step.p50 > 0
    assert step.p95 is None, "four steps have no 95th percentile"
    assert 0 < measured.extra["trained_share"] < 0.3
    share = measured.metrics[train_points.MFU].value
    assert share == pytest.approx(measured.limit.share_of_measured)
    assert share == pytest.approx(computed / measured.limit.tokens_per_s)
    low, high = measured.metrics[point.REAL].ci95
    assert low <= real <= high
    assert measured.metrics[train_points.MEMORY].value > 1e6
    assert measured.extra["command"].startswith("roofline bench lora ")


def test_points_are_compared_by_reports(measured: Any, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    empty = point.point_of(
        settings(model, batches=(64,)),
        64,
        rows.Samples((8,), (2,), 1, "0" * 64, "x"),
        point.Outcome(out_of_memory="training needs 8 bytes"),
        run="r",
        started=measured.started,
        host=measured.host,
    )
    append_points([measured, empty], path)
    assert [each.preset for each in read_points(path)] == [
        "lora of rank 16 beside f32, batch 3 of 512 tokens, precision=fp32",
        "lora of rank 16 beside bf16, batch 64 of 512 tokens, precision=fp32",
    ]
    gathered = gather.gather([path])
    assert gathered.refused == []
    table = markdown(report.report(gathered))
    assert "| train_rate |" in table
    assert "batch 64 of 512 tokens, precision=fp32 | out of memory | - |" in table
    for metric in ("train_rate", "step_time"):
        (finding,) = history.check([measured], [measured], metric, history.Allowed(0.05))
        assert (finding.ratio.value, finding.verdict) == (1, "passes")


def test_a_killed_process_is_out_of_memory_and_another_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        status = 0

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> "Ended":
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self) -> int:
            return self.status

    monkeypatch.setattr(sweep.subprocess, "Popen", Ended)
    Ended.status = -9
    assert sweep.measure(tmp_path / "a.json", show=False) == point.Outcome(out_of_memory=sweep.KILLED)
    Ended.status = 130
    with pytest.raises(KeyboardInterrupt):
        sweep.measure(tmp_path / "a.json", show=False)
    Ended.status = 1
    with pytest.raises(RooflineError, match="a failed; what it said stands above"):
        sweep.measure(tmp_path / "a.json", show=False)


def test_what_each_run_has_of_its_own_cannot_be_set(model: Path) -> None:
    for change in ("run_folder=x", "global_train_batch_size=5", "max_duration=1ep"):
        with pytest.raises(ConfigError, match=f"--set {change.split('=')[0]}: each run has its own here"):
            next(sweep.sweep(settings(model, changes=(change,)), show=False))
    with pytest.raises(ConfigError, match=r"optimizer\.nothing"):
        next(sweep.sweep(settings(model, changes=("optimizer.nothing=1",)), show=False))


def test_the_command_refuses_what_would_do_nothing(model: Path) -> None:
    for words, said in (
        (["--batches", "1,x"], "--batches 1,x: give different numbers of rows above 0, with commas, such as 1,16"),
        (["--batches", "4,4"], "--batches 4,4: give different numbers of rows"),
        (
            ["--method", "full", "--rank", "8"],
            "--rank 8 is of lora and dora: --method full trains all matrices as they are",
        ),
        (["--steps", "8", "--epochs", "2"], "steps and epochs both say how long a run is: leave one of the two out"),
    ):
        refused = call_roofline(["bench", "lora", str(model), *words])
        assert refused.exit_code == 1
        assert said in refused.stderr


@pytest.mark.slow
def test_of_data_the_held_out_loss_is_a_figure_and_its_rows_may_be_packed(tmp_path: Path) -> None:
    chats = sft.write_lines(tmp_path / "d.jsonl", [sft.question(number) for number in range(60)])
    chosen = settings(sft.write_model(tmp_path / "tiny"), data=chats, pack=True, max_seq_len=128, epochs=1, warmup=0)
    (only,) = sweep.sweep(chosen, show=False)
    assert (only.workload.name, only.workload.requests) == ("d.jsonl", 57)
    assert only.metrics["loss_eval"].value > 0
    assert "--data" in chosen.command
    assert "--pack" in chosen.command
    assert chosen.preset(3).endswith(", packed, precision=fp32")


def test_the_command_that_measures_again_names_its_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "sweep", lambda settings, show: iter(()))
    done = call_roofline(["bench", "lora", model, "--steps", 3, "-o", tmp_path / "my points.jsonl"])
    again = f"again: roofline bench lora {model} --batches 1,16,64,128 --steps 3"
    assert done.stdout.replace("\n", " ").rstrip().endswith(f"{again} --out '{tmp_path}/my points.jsonl'")
    assert call_roofline(["bench", "lora", model, "--steps", 3]).stdout.replace("\n", " ").rstrip().endswith(again)


@pytest.mark.slow
def test_memory_that_runs_out_is_a_row(model: Path, tmp_path: Path) -> None:
    """Beside a row that fits: its limit is that of its own process. It reads all samples once."""
    wide = "model.loss_fn=torch_crossentropy"  # the logits of all rows at once
    words = ["--batches", "500,50", "--epochs", "1", "--warmup", "0", "--max-seq-len", "256", "--set", wide]
    words += ["--set", "memory_limit=800mb", "--set", "device_train_microbatch_size=500", "-o", tmp_path / "p.jsonl"]
    done = call_roofline(["bench", "lora", str(model), "--method", "full", *words, "--json"])
    assert done.exit_code == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["validity"]["flags"] == [point.OUT_OF_MEMORY]
    assert "bytes" in first["extra"]["out_of_memory"]
    assert not first["metrics"]
    assert second["extra"]["steps"] == 20
    assert second["workload"]["requests"] == 1000
    assert len(read_points(tmp_path / "p.jsonl")) == 2
