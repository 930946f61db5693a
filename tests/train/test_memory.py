"""What a process takes: rehearsed as torch does it, added up by part, and measured."""

import json
import mmap
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.models import presets  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.config.schema import TrainConfig  # noqa: E402
from roofline.train.memory import estimate  # noqa: E402
from roofline.train.memory import meter as meter_module  # noqa: E402
from roofline.train.memory.dry_run import ACTIVATIONS, GRADIENTS, LOGITS, Ledger, dry_run  # noqa: E402
from roofline.train.memory.estimate import Memory  # noqa: E402
from roofline.train.memory.meter import Meter  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402

LENGTH = 32
SHAPES = {
    "mpt": presets.preset("mpt-125m") | {"width": 64, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16},
    "llama": presets.preset("smollm2-135m") | {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16},
    "alibi": presets.preset("mpt-125m-alibi") | {"width": 64, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16},
}
SHAPES = {name: shape | {"ffn": 128, "vocab": 96, "max_position": 64} for name, shape in SHAPES.items()}


def made(**changes: Any) -> TrainConfig:
    given = {
        "max_seq_len": LENGTH,
        "model": {"name": "mpt-125m"},
        "train_loader": {"name": "synthetic"},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "max_duration": "3ba",
        "global_train_batch_size": 8,
        "precision": "fp32",
        "device": "cpu",
    }
    return parse_config(given | changes)


def test_a_ledger_counts_until_a_tensor_is_dropped() -> None:
    with Ledger() as ledger:
        a = torch.zeros(1000)
        view = a[:10]
        b = a + 1
        del a
        assert ledger.usage.parts == {ACTIVATIONS: 8000}
        ledger.part = LOGITS
        c = view + 1  # `a` lives on in its view
        assert ledger.usage.parts == {ACTIVATIONS: 8000, LOGITS: 40}
        del view, c
        ledger.begin()
        assert ledger.usage.parts == {ACTIVATIONS: 4000, LOGITS: 0}
    assert b.numel() == 1000


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True, "selective"])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "amp_bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_rehearsal_is_as_the_play(name: str, precision: str, again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data torch makes and keeps what it does with data."""
    config = made(precision=precision, fsdp_config={"activation_checkpointing": again})
    args = (config, SHAPES[name], World(), torch.float32, 4, True)
    found = dry_run(*args)
    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", nullcontext)
    real = dry_run(*args)
    assert found == real
    assert found.parts[GRADIENTS] == 4 * presets.parameter_count(SHAPES[name])


def test_what_makes_it_smaller() -> None:
    def rehearsed(rows: int = 8, **changes: Any) -> dict[str, int]:
        return dry_run(made(**changes), SHAPES["llama"], World(), torch.float32, rows, False).most

    plain = rehearsed()
    assert rehearsed(16)[ACTIVATIONS] == pytest.approx(2 * plain[ACTIVATIONS], rel=0.05)
    full, kept = (
        rehearsed(fsdp_config={"activation_checkpointing": again})[ACTIVATIONS] for again in (True, "selective")
    )
    assert full < kept < plain[ACTIVATIONS]
    assert rehearsed(precision="amp_bf16")[ACTIVATIONS] < 0.8 * plain[ACTIVATIONS]


def test_documents_apart_need_a_mask() -> None:
    apart = made(model={"name": "mpt-125m", "attn_config": {"attn_uses_sequence_id": True}})
    with_mask = dry_run(apart, SHAPES["llama"], World(), torch.float32, 8, False).most[ACTIVATIONS]
    without = dry_run(made(), SHAPES["llama"], World(), torch.float32, 8, False).most[ACTIVATIONS]
    assert with_mask >= without + 4 * 8 * LENGTH * LENGTH


def test_a_prediction_adds_up() -> None:
    shape = SHAPES["mpt"]
    weights = 4 * presets.parameter_count(shape)
    found = Memory(made(), shape, World()).predicted
    assert found is not None
    assert found.rows == 8
    assert found.total == sum(found.parts.values())
    assert (found.parts["parameters"], found.parts["optimizer"]) == (weights, 2 * weights)
    assert "checkpoint" not in found.parts
    saved = Memory(made(save_interval="1ba"), shape, World()).predicted
    assert saved is not None
    assert saved.parts["checkpoint"] == 3 * weights
    muon = Memory(made(optimizer={"name": "muon", "lr": 1e-3}), shape, World()).predicted
    assert muon is not None
    hidden = 4 * 3 * (4 * 64 * 64 + 2 * 64 * 128)
    assert muon.parts["optimizer"] == 2 * weights - hidden
    less = Memory(made(device_train_microbatch_size=2), shape, World()).predicted
    assert less is not None
    assert less.rows == 2
    assert less.parts["gradients"] == weights  # the second microbatch finds those of the first
    assert less.parts[ACTIVATIONS] < found.parts[ACTIVATIONS] / 3


def test_what_cannot_be_rehearsed_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise NotImplementedError("an op of someone's")

    monkeypatch.setattr(estimate, "dry_run", fails)
    assert Memory(made(), SHAPES["mpt"], World()).predicted is None


def test_the_meter_sees_what_comes_and_goes() -> None:
    meter = Meter(torch.device("cpu"))
    if meter.peak() is None:
        pytest.skip("this system does not say how much memory a process has")
    with mmap.mmap(-1, 192 << 20) as held:  # not of the C library, which may keep what it has
        for _ in range(192):
            held.write(bytes(1 << 20))
    peak = meter.peak()
    assert peak is not None
    assert peak == pytest.approx(192 << 20, rel=0.1)
    meter.restart()
    later = meter.peak()
    assert later is None or later < 64 << 20


def test_a_peak_that_is_not_forgotten_is_not_taken_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox that takes the request, and does nothing."""
    found = {"RssAnon": 100 << 20, "RssFile": 50 << 20, "VmRSS": 150 << 20, "VmHWM": 150 << 20}
    monkeypatch.setattr(meter_module, "_status", lambda: found)
    meter = Meter(torch.device("cpu"))
    found["VmHWM"] = 400 << 20
    assert meter.peak() == 250 << 20
    meter.restart()
    assert meter.peak() is None
    found["VmHWM"] = 410 << 20
    assert meter.peak() == 260 << 20


CASES = {
    "mpt fp32": ["mpt-125m", "model.config_overrides={width: 128, heads: 4, layers: 6, vocab: 4096, ffn: 512}"],
    "llama bf16": [
        "smollm2-135m",
        "model.config_overrides={width: 160, heads: 5, kv_heads: 1, head_dim: 32, layers: 5, vocab: 8192, ffn: 512}",
        "precision=amp_bf16",
    ],
    "large weights": [
        "mpt-125m",
        "model.config_overrides={width: 512, heads: 8, layers: 6, vocab: 32768, ffn: 2048}",
        "global_train_batch_size=2",
        "max_seq_len=128",
    ],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_predictions_hold_on_this_cpu(name: str, tmp_path: Path) -> None:
    """A process of its own for each: what one has freed would hide what the next takes."""
    what, *changes = CASES[name]
    settings = ["precision=fp32", "max_seq_len=256", "global_train_batch_size=24", "device_train_microbatch_size=12"]
    words = [f"--set={change}" for change in (*settings, *changes)]
    code = "import sys; from roofline.cli.main import main; sys.argv[0] = 'roofline'; sys.exit(main())"
    record = tmp_path / "record.json"
    command = [sys.executable, "-c", code, "bench", "train", what, "--steps=3", "--warmup=1", f"--out={record}", *words]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads(record.read_text())["card"]["memory"]
    if found["measured"] is None:
        pytest.skip("this system does not forget a process's peak memory: nothing is measured of the steps alone")
    assert found["measured"] > 300e6
    assert found["predicted"]["total"] == pytest.approx(found["measured"], rel=0.2)
