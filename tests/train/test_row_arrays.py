"""Rows for fine-tuning: which tokens are targets, what is padding, and that padding and packing change no sum."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.train.config.data_sets import DatasetSection  # noqa: E402
from roofline.train.config.schema import InitSection  # noqa: E402
from roofline.train.data.loader import Rows, Source  # noqa: E402
from roofline.train.data.mds import ShardWriter  # noqa: E402
from roofline.train.data.row_arrays import PADDING  # noqa: E402
from roofline.train.model.init import initialize  # noqa: E402
from roofline.train.model.modules import IGNORED, Model  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run.gradients import Gradients, targets  # noqa: E402

VOCAB, LENGTH = 96, 32
SAMPLES = [(7, 3), (9, 5), (12, 2), (3, 1), (20, 11)]  # tokens, and how many of them, at the end, are targets


def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(5)
    return [(random.integers(0, VOCAB, n), np.arange(n) >= n - trained) for n, trained in SAMPLES]


def write(folder: Path, rows: list[list[int]]) -> Source:
    """Each row is some of SAMPLES, one behind the other."""
    columns = {"tokens": "ndarray:uint16", "documents": "ndarray:uint32", "trained": "ndarray:uint8"}
    every = samples()
    with ShardWriter(folder, columns) as writer:
        for row in rows:
            tokens, trained = (np.concatenate([every[number][kind] for number in row]) for kind in (0, 1))
            lengths = np.array([len(every[number][0]) for number in row], np.uint32)
            sample = {"tokens": tokens.astype(np.uint16), "trained": trained.astype(np.uint8), "documents": lengths}
            writer.write(sample)
    return Source(DatasetSection(local=str(folder)), LENGTH, False, trained=True)


def test_rows_are_filled_up_with_padding(tmp_path: Path) -> None:
    rows = write(tmp_path, [[0, 3], [4]]).rows([1, 0])
    assert rows.documents is not None
    assert rows.trained is not None
    assert rows.documents.tolist() == [[0] * 20 + [PADDING] * 12, [0] * 7 + [1] * 3 + [PADDING] * 22]
    assert rows.trained.sum(1).tolist() == [11, 4]
    assert rows.real() == 30
    narrow = rows.without_padding()
    assert narrow.tokens.shape == (2, 24), "a multiple of 8"
    assert narrow.documents is not None
    alone = rows.rows(slice(0, 1)).without_padding()
    assert alone.documents is None, "a row of one document is causal"
    goals = targets(*rows)
    assert (goals != IGNORED).sum(1).tolist() == [11, 4]
    assert goals[1, [3, 4, 5, 6, 8]].tolist() == [*rows.tokens[1, 4:7].tolist(), IGNORED, rows.tokens[1, 9]]


def test_rows_without_targets_are_refused_by_name(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {"tokens": "ndarray:uint16", "documents": "ndarray:uint32"}) as writer:
        writer.write({"tokens": np.zeros(LENGTH, np.uint16), "documents": np.array([LENGTH], np.uint32)})
    with pytest.raises(ConfigError, match="do not say which tokens are trained on"):
        Source(DatasetSection(local=str(tmp_path)), LENGTH, False, trained=True).rows([0])


@pytest.mark.parametrize("family", ["mpt", "llama"])  # learned positions and rope
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_gradient_is_that_of_the_samples_alone_packed_or_padded(tmp_path: Path, family: str, size: int) -> None:
    model = made(family)
    losses, count = 0.0, 0
    for tokens, trained in samples():
        logits = model(torch.from_numpy(tokens)[None])[0]
        losses += torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(tokens[1:]), reduction="none")[
            torch.from_numpy(trained[1:])
        ].sum()
        count += int(trained[1:].sum())
    (losses / count).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for name, rows in (("padded", [[0], [1], [2], [3], [4]]), ("packed", [[4, 1, 3], [0, 2]])):
        model.zero_grad()
        computed = Gradients(model, World(), "fp32", size)
        source = write(tmp_path / name, rows)
        numbers = np.arange(len(rows))
        loss, tokens = computed.backward(Rows(0, numbers, (source.rows(numbers),)))
        assert tokens == count
        assert loss == pytest.approx(float(losses.detach()), rel=1e-5)
        assert (computed.counted.real, computed.counted.trained) == (sum(n for n, _ in SAMPLES), count)
        assert computed.counted.real <= computed.counted.computed <= len(rows) * LENGTH
        for parameter, each in model.named_parameters():
            assert torch.allclose(each.grad, expected[parameter], rtol=2e-4, atol=2e-6), (name, parameter)
        source.close()


def made(family: str) -> Any:
    shape = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": VOCAB}
    name = {"mpt": "mpt-125m", "llama": "llama-3.2-1b"}[family]
    model = Model(presets.preset(name) | shape | {"max_position": LENGTH}, "cpu")
    model.restarts = True
    initialize(model, 3, InitSection(name="baseline_", init_std=0.3))
    return model
