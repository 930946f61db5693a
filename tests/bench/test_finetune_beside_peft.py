"""benchmarks.finetune: ours and peft with transformers' Trainer, from one adapter, over the same samples."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training is torch")
for package in ("peft", "accelerate"):  # not imported here: that would take each test process a second
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not here", allow_module_level=True)

from benchmarks import finetune  # noqa: E402
from tests.bundle.bundle_models import write_model  # noqa: E402


@pytest.mark.slow
def test_the_losses_are_those_of_peft(tmp_path: Path) -> None:
    """Of a tiny model in bf16, to the margin that `roofline parity` has; each says how many tokens it computed."""
    model = write_model(tmp_path / "model")
    task = finetune.Task(length=48, shortest=8, lr=1e-3, threads=1)
    found = finetune.measure(task, str(model), list(finetune.CONTESTANTS), rounds=2, steps=32)
    said = found["to_peft"]["parity"]
    assert said["verdict"] == "equivalent", said
    ours, packed, theirs = (found["results"][name] for name in finetune.CONTESTANTS)
    assert len(ours["losses"]) == len(theirs["losses"]) == 67
    assert ours["losses"][-1] < ours["losses"][0] - 0.01, "nothing was learnt, so equal losses say little"
    assert 0.1 < ours["padding_share"] < 0.6
    assert 0 <= packed["padding_share"] < ours["padding_share"]
    assert ours["padding_share"] <= theirs["padding_share"] + 0.1
    assert found["packed_to_padded"]["tokens_per_s"] > 0
    text = finetune.table(found)
    assert re.search(r"^\| peft \| [\d,]+ \([\d,]+ to [\d,]+\) \|", text, re.MULTILINE)
    assert "losses equivalent" in text


def test_ratios_are_medians_over_rounds_of_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuner(name: str, seconds: list[float], peak: int) -> finetune.Tuner:
        made = object.__new__(finetune.Tuner)
        made.name, made.peak, made.losses = name, peak, [1.0]
        made.seconds, made.real, made.computed = [[each] for each in seconds], [[100], [100], [100]], [[120]] * 3
        return made

    ours, theirs = tuner("roofline", [1, 2, 4], 60), tuner("peft", [2, 4, 5], 100)
    found = finetune.compared({"roofline": ours, "peft": theirs})
    assert found["to_peft"]["tokens_per_s"] == 2
    assert found["to_peft"]["peak_memory"] == 0.6
    assert found["to_peft"]["parity"]["verdict"] == "identical"
    assert found["reached"] == {"tokens_per_s": True, "peak_memory": True}
    theirs.real[1] = [99]
    with pytest.raises(SystemExit, match="did not train on the same samples"):
        finetune.compared({"roofline": ours, "peft": theirs})
