"""Runs of DPO: the reference, resuming, processes, held-out pairs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.data.mds import ShardWriter  # noqa: E402
from roofline.train.preference.pairs import REFERENCE  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.train import small  # noqa: E402
from tests.train.small import VOCAB, config, digest, log_of, stored  # noqa: E402
from tests.train.test_parallel import launch  # noqa: E402


def write_pairs(folder: Path, rows: int, seed: int = 0) -> Path:
    """Rows with one or two pairs of answers to a prompt of one token: the better answers count up, the others down."""
    random = np.random.default_rng(seed)
    columns = {"tokens": "ndarray:uint16", "documents": "ndarray:uint32", "trained": "ndarray:uint8"}
    with ShardWriter(folder, columns, size_limit=1 << 12) as writer:
        for _ in range(rows):
            tokens, lengths, trained = [], [], []
            for _ in range(int(random.integers(1, 3))):
                first = int(random.integers(VOCAB))
                for step in (1, -1):
                    length = int(random.integers(2, 5))
                    tokens += [(first + step * i) % VOCAB for i in range(length)]
                    trained += [0] + [1] * (length - 1)
                    lengths.append(length)
            sample = {"tokens": np.array(tokens, np.uint16), "trained": np.array(trained, np.uint8)}
            writer.write(sample | {"documents": np.array(lengths, np.uint32)})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "train", 40)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "val", 9, seed=1)


def made(data: Path, folder: Path, **changes: Any) -> Any:
    common = {
        "train_loader": {"name": "finetuning", "dataset": {"local": str(data), "shuffle": True}},
        "dpo": {"beta": 0.5},
        "optimizer__lr": 1e-2,
        "global_train_batch_size": 6,
    }
    return config(data, folder, **(common | changes))


def test_a_run_prefers_the_chosen_answers(data: Path, held_out: Path, tmp_path: Path) -> None:
    loader = {"name": "finetuning", "dataset": {"local": str(held_out)}}
    train(made(data, tmp_path, max_duration="20ba", eval_loader=loader, eval_interval="10ba", eval_first=True))
    lines = log_of(tmp_path)
    steps = [line for line in lines if "loss" in line]
    held = [line for line in lines if "eval_loss" in line]
    # Before the first update the model is the reference, whatever microbatches it is computed in.
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(steps[0]["reward_chosen"]) < 1e-5
    assert held[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert "perplexity" not in held[0]
    assert steps[-1]["loss"] < 0.4
    assert steps[-1]["accuracy"] > 0.9
    assert held[-1]["eval_loss"] < 0.65
    assert held[-1]["accuracy"] > 0.6
    assert steps[-1]["reward_chosen"] > steps[-1]["reward_rejected"] + 0.5
    assert held[-1]["eval_tokens"] > 9  # pairs
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["evaluations"]["eval"]["accuracy"] == held[-1]["accuracy"]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(data: Path, tmp_path: Path) -> None:
    common = {"max_duration": "8ba", "save_interval": "4ba", "autoresume": True}
    train(made(data, tmp_path / "whole", **common))
    train(made(data, tmp_path / "parts", **common, stop_after="4ba"))
    assert log_of(tmp_path / "parts")[-1]["step"] == 4
    train(made(data, tmp_path / "parts", **common))
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    places = [stored(tmp_path / name / "checkpoints") for name in ("whole", "parts")]
    assert digest(places[0]) == digest(places[1])


def test_a_reference_that_is_gone_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    common = {"save_interval": "2ba", "autoresume": True}
    train(made(data, tmp_path, max_duration="2ba", **common))
    kept = (tmp_path / REFERENCE).read_text()
    with pytest.raises(ConfigError, match=r"reference.json lacks sample \d+ of train_loader: .*Begin a new run"):
        train(made(data, tmp_path, max_duration="6ba", **common))
    (tmp_path / REFERENCE).write_text("{]")
    with pytest.raises(ConfigError, match=r"reference.json is damaged"):
        train(made(data, tmp_path, max_duration="4ba", **common))
    (tmp_path / REFERENCE).unlink()
    with pytest.raises(ConfigError, match=r"reference.json is missing.*put it back"):
        train(made(data, tmp_path, max_duration="4ba", **common))
    assert len(json.loads(kept)[""]) == 12


def test_what_does_not_go_with_dpo(data: Path, tmp_path: Path) -> None:
    for changes, message in [
        ({"train_loader": {"dataset": {"local": str(data)}}}, "train_loader.name"),
        ({"model__loss_fn": "torch_crossentropy"}, "loss_fn"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"grpo": {"reward": "exact_match"}}, "exclude each other"),
        ({"dpo": {"loss": "hinge", "label_smoothing": 0.1}}, "of the losses sigmoid and robust"),
        ({"dpo": {"loss": "robust"}}, "needs label_smoothing"),
    ]:
        with pytest.raises(ConfigError, match=message):
            made(data, tmp_path, **changes)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(data: Path, held_out: Path, tmp_path: Path) -> None:
    loader = {"name": "finetuning", "dataset": {"local": str(held_out)}}
    common: dict[str, Any] = {
        "train_loader": {"name": "finetuning", "dataset": {"local": str(data), "shuffle": True}},
        "dpo": {"beta": 0.5, "loss": "ipo"},
        "global_train_batch_size": 8,
        "max_duration": "4ba",
        "eval_loader": loader,
        "eval_interval": "2ba",
    }
    for name, changes in {"plain": {}, "elastic": {"elastic": {"virtual_shards": 4}}}.items():
        alone = small.mapping(data, tmp_path / name, **common, **changes)
        train(small.parse_config(alone))
        launch(2, small.mapping(data, tmp_path / f"{name}-2", **common, **changes))
        one, two = log_of(tmp_path / name), log_of(tmp_path / f"{name}-2")
        for a, b in zip(one, two, strict=True):
            figures = ("loss", "eval_loss", "accuracy", "reward_chosen", "eval_tokens", "grad_norm")
            # Before the first step nothing is gained, and rounding decides which answer gained more.
            for key in (key for key in figures if key in a and (key != "accuracy" or a["step"] > 1)):
                assert b[key] == (a[key] if name == "elastic" else pytest.approx(a[key], rel=1e-4, abs=1e-6)), key
