"""A layer that guesses further tokens, of each family that has one, beside transformers' `MtpModel`."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the models are made by torch")
pytest.importorskip("transformers", reason="it is the judge")

from roofline.bundle import load
from roofline.ops.batch import Segment
from tests.models.guessing_models import guessing_model
from tests.models.parity_cases import CASES

IDS = [(7 * i + 5) % 90 for i in range(37)]
PAGES = [3, 0, 2, 1]


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_groups", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3"])
def test_a_layer_guesses_what_transformers_does(case: str, tmp_path: Path) -> None:
    """From the model's rows, then from its own, in float32 to 1e-5."""
    judge = guessing_model(CASES[case].config)
    folder = str(judge.save(tmp_path / "model"))
    model = load(folder, backend="reference", arithmetic="plain", text=False, guesses=True).executable
    model.batch.fill([Segment(IDS, 0, PAGES)], [len(IDS) - 1])
    model.forward()
    rows = model.hidden()
    assert np.abs(rows - judge.hidden(IDS)[0].numpy()).max() < 1e-5
    expected, logits = judge.guesses(IDS, 3)
    layer = model.guesser
    assert layer is not None
    zeros = np.zeros((1, rows.shape[1]), np.float32)
    ids, first, begun = IDS, 0, np.concatenate([zeros, rows[:-1]])
    for token, theirs in zip(expected, logits, strict=True):
        layer.batch.fill([Segment(ids, first, PAGES)], [len(ids) - 1])
        layer.take_hidden(begun)
        layer.forward()
        assert np.abs(layer.logits()[0] - theirs).max() < 1e-5
        assert int(layer.logits()[0].argmax()) == token
        ids, first, begun = [token], first + len(ids), layer.hidden().copy()
