"""What a run leaves: a model whose rounding keeps what was trained, its tokenizer, and the state of a stopped run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")
pytest.importorskip("safetensors.torch", reason="it writes the base")

from safetensors.torch import load_file, save_file  # noqa: E402

from roofline.train.checkpoint.outcome import TrainedFolder, rounding_fidelity  # noqa: E402
from roofline.train.config.read import read_config  # noqa: E402
from roofline.train.memory.dry_run import Ledger  # noqa: E402
from roofline.train.run import preflight  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.run_folder import read_lines  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.command_line import call_roofline  # noqa: E402
from tests.train import sft, small  # noqa: E402

SMALL = ("--max-seq-len", "64", "--batch", "4", "--precision", "fp32", "--eval-share", "0.2", "--ask", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are values of bf16, so that a small change is rounded away; of others it would be kept on average."""
    folder = sft.write_model(tmp_path_factory.mktemp("models") / "tiny")
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_lines(tmp_path_factory.mktemp("data") / "d.jsonl", [sft.question(n) for n in range(40)])


def fully_tuned(model: Path, data: Path, out: Path, *words: object) -> Any:
    done = call_roofline(["finetune", model, data, "--out", out, "--method", "full", *SMALL, *words])
    assert done.exit_code == 0, done.stderr
    return done


def held_out_losses(folder: Path) -> list[float]:
    return [line["eval_loss"] for line in read_lines(folder / "log.jsonl") if "eval_loss" in line]


def loss_of(model: Path, run: Path, out: Path) -> float:
    """The held-out loss of a model's files on the data of a run, in a run of their own that changes nothing."""
    changes = [
        f"model.pretrained_model_name_or_path={model}",
        f"run_folder={out}",
        "eval_first=true",
        "max_duration=1ba",
    ]
    train(read_config(run / "finetune.yaml", changes, preflight.faults))
    return held_out_losses(out)[0]


@pytest.mark.parametrize(("rate", "form"), [(1e-7, "F32"), (1e-2, "BF16")])
def test_a_model_is_rounded_only_where_that_keeps_what_was_trained(
    rate: float, form: str, model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = fully_tuned(model, data, out, "--steps", 4, "--lr", rate)
    written = open_checkpoint(out / "model")
    assert {info.format for info in written.tensors.values()} == {form}
    base = open_checkpoint(model)
    exported = tmp_path / "exported"
    assert call_roofline(["train", "export", out, "-o", exported, "--dtype", "f32"]).exit_code == 0
    trained = open_checkpoint(exported)
    values = {name: torch.from_numpy(trained.dequantize(name)) for name in trained.tensors}
    kept = rounding_fidelity(values, lambda name: torch.from_numpy(base.dequantize(name)))
    assert (kept >= 0.9) == (form == "BF16")
    assert f"{kept:.1%} of what training changed" in done.stdout
    assert f"{out}/model {'in bf16 keeps' if form == 'BF16' else 'is in float32'}" in done.stdout
    for name, tensor in values.items():
        expected = tensor if form == "F32" else tensor.bfloat16().float()
        assert np.array_equal(written.dequantize(name), expected.numpy()), name
    # The loss that is printed last is that of the file.
    assert held_out_losses(out)[-1] == pytest.approx(loss_of(out / "model", out, tmp_path / "again"), abs=1e-6)
    assert f"held-out loss {held_out_losses(out)[-1]:.4f}" in done.stdout


def test_the_share_that_rounding_keeps() -> None:
    base = {"a": torch.ones(4), "b": torch.ones(2)}
    unit = 2.0**-7  # a step of bf16 above 1
    trained = {"a": torch.tensor([1 + unit, 1.0, 1.0, 1.0]), "b": torch.tensor([1 + 0.4 * unit, 1.0])}
    expected = 1 - (0.4 * unit) ** 2 / (unit**2 + (0.4 * unit) ** 2)
    assert rounding_fidelity(trained, base.__getitem__) == pytest.approx(expected, rel=1e-5)
    assert rounding_fidelity(base, base.__getitem__) == 1.0
    # Where the base is rounded by more than was trained, nothing of that is kept, however the roundings fall.
    between = {"a": torch.full((4,), 1 + 0.49 * unit), "b": torch.full((2,), 1 - 0.1 * unit)}
    moved = {name: tensor + 0.02 * unit for name, tensor in between.items()}
    assert rounding_fidelity(moved, between.__getitem__) == 0.0


def test_what_rounding_keeps_is_computed_in_little_memory() -> None:
    """Of a large matrix no copy is made in float64; the result is that of all at once."""
    base = torch.linspace(-1, 1, 5_000_000)
    trained = base + 1e-2 * torch.sin(torch.arange(5_000_000.0))
    change, lost = ((each - trained).double().square().sum() for each in (base, trained.bfloat16().float()))
    ledger = Ledger()
    for tensor in (base, trained):
        ledger.leave_out(tensor)
    with ledger:
        share = rounding_fidelity({"a": trained}, lambda _: base)
    assert share == pytest.approx(1 - float(lost / change), rel=1e-6)
    assert sum(ledger.usage.most.values()) < trained.nbytes


def test_a_model_is_written_when_its_checkpoint_is_stored(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not beside the copy of parameters and optimizer state that a checkpoint is stored from."""
    running = []
    write = TrainedFolder._write

    def watched(self: TrainedFolder, weights: Any) -> None:
        running.append([each.done() for each in self.run.saver._running])
        write(self, weights)

    monkeypatch.setattr(TrainedFolder, "_write", watched)
    fully_tuned(model, data, tmp_path / "run", "--steps", 2)
    assert running == [[]]


def test_a_model_from_a_gguf_file_has_its_tokenizer(model: Path, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    assert call_roofline(["convert", model, "-o", file]).exit_code == 0
    out = tmp_path / "run"
    done = fully_tuned(file, data, out, "--steps", 2)
    assert "without a tokenizer" not in done.stderr
    assert (out / "model/tokenizer.json").is_file()
    asked = call_roofline(["generate", "What", "--model", out / "model", "--max-tokens", "3"])
    assert asked.exit_code == 0, asked.stderr
    assert call_roofline(["train", "export", out, "-o", tmp_path / "exported"]).exit_code == 0
    assert (tmp_path / "exported/tokenizer_config.json").is_file()


# Stops itself after its second step, as `kill` would.
STOPPED = """
import os, signal, sys
from roofline.train.report import log
before = log.RunLog.step
def step(self, **line):
    written = before(self, **line)
    if line["step"] == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return written
log.RunLog.step = step
sys.argv[0] = "roofline"
from roofline.cli.main import main
sys.exit(main())
"""


def stopped(model: Path, data: Path, out: Path, *words: object) -> str:
    call = ["finetune", model, data, "--out", out, *SMALL, "--steps", 6, *words]
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, *map(str, call)], capture_output=True, text=True, timeout=200, env=os.environ
    )
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_stopped_run_says_so_and_has_the_adapter_of_its_checkpoint(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = stopped(model, data, out)
    assert "stopped after step 2, saved in" in words
    card = json.loads((out / "card.json").read_text())
    assert (card["done"], card["stopped"]) == (False, True)
    page = (out / "run.html").read_text()
    assert "stopped after step 2 of 6" in page
    assert "finished" not in page.split("<section", 1)[0]
    assert '"live": false' in page or '"live":false' in page
    assert (out / "adapter/adapter_model.safetensors").is_file()
    done = call_roofline(["finetune", model, data, "--out", out, *SMALL, "--steps", 6])
    assert done.exit_code == 0, done.stderr
    card = json.loads((out / "card.json").read_text())
    assert (card["done"], card["stopped"]) == (True, False)
    assert "stopped after" not in (out / "run.html").read_text()


@pytest.mark.slow
def test_a_stopped_run_offers_no_model_that_is_not_there(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped(model, data, out, "--method", "full")
    assert not (out / "model").exists()
    assert "--extra-model" not in (out / "run.html").read_text()


@pytest.mark.parametrize(
    ("changes", "saves"), [({}, False), ({"save_interval": "2ba"}, True), ({"save_folder": "c"}, True)]
)
def test_a_run_tells_whether_it_keeps_weights(changes: dict[str, str], saves: bool, tmp_path: Path) -> None:
    changes = {key: str(tmp_path / value) if key == "save_folder" else value for key, value in changes.items()}
    config = small.config(small.write_rows(tmp_path / "rows", 20), tmp_path / "run", max_duration="1ba", **changes)
    lines: list[dict[str, Any]] = []
    train(config, lines.append)
    assert lines[0]["about"]["saves"] == saves
