"""Lion with LLM Foundry's decay: its steps by hand, and a run that goes on as if never stopped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.model.lion import DecoupledLionW  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.train.small import config, digest, log_of, stored, write_rows  # noqa: E402


def test_its_steps_are_those_of_the_paper_with_a_decay_that_follows_the_schedule() -> None:
    random = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.tensor(random.normal(size=7), dtype=torch.float64))
    expected, moment = parameter.detach().numpy().copy(), np.zeros(7)
    lion = DecoupledLionW([parameter], 0.1, (0.9, 0.99), 0.01)
    for rate in (0.1, 0.05, 0.0, 0.1):
        gradient = random.normal(size=7)
        parameter.grad = torch.tensor(gradient)
        lion.param_groups[0]["lr"] = rate
        lion.step()
        expected *= 1 - 0.01 * rate / 0.1
        expected -= rate * np.sign(0.9 * moment + 0.1 * gradient)
        moment = 0.99 * moment + 0.01 * gradient
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12)


def test_it_learns_and_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", 60)
    common: dict[str, Any] = {
        "optimizer": {"name": "decoupled_lionw", "lr": 1e-3, "weight_decay": 1e-3},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "4ba"},
        "max_duration": "30ba",
        "save_interval": "15ba",
    }
    train(config(data, tmp_path / "whole", **common))
    lines = log_of(tmp_path / "whole")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    train(config(data, tmp_path / "parts", stop_after="15ba", **common))
    train(config(data, tmp_path / "parts", autoresume=True, **common))
    ends = [stored(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert digest(ends[0]) == digest(ends[1])
    assert {name.rpartition(".")[2] for name in ends[0] if name.startswith("optimizer.")} == {"exp_avg"}
