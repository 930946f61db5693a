"""Runs of GRPO with our engine as the sampler: rewards rise, and engine and training agree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bundle import load_text_of  # noqa: E402
from roofline.cli.training.engine_sampler import sampler_of  # noqa: E402
from roofline.train.data.mds import ShardWriter  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.train.small import config, log_of  # noqa: E402
from tests.train.tiny_model import write_model  # noqa: E402

REWARD = """
def early(answer, record):
    return sum(each < "n" for each in answer) / max(1, len(answer))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("prompts") / "train", load_text_of(str(model))[0]
    columns = {"tokens": "ndarray:uint16", "documents": "ndarray:uint32", "trained": "ndarray:uint8", "record": "json"}
    with ShardWriter(folder, columns) as writer:
        for text in ("how many", "a better answer", "yes no", "letters", "in this", "short"):
            ids = np.array(tokenizer.encode(text, add_special=False, parse_special=False), np.uint16)
            documents, trained = np.array([len(ids)], np.uint32), np.zeros(len(ids), np.uint8)
            record = {"prompt": text, "answer": "a"}
            writer.write({"tokens": ids, "documents": documents, "trained": trained, "record": record})
    return folder


def made(model: Path, prompts: Path, folder: Path, **changes: Any) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    grpo = {"group": 8, "max_new_tokens": 6, "reward": f"{folder / 'reward.py'}:early"} | changes.pop("grpo", {})
    common = {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(model)},
        "adapter": {"rank": 4, "base": "f32"},
        "max_seq_len": 32,
        "train_loader": {"name": "finetuning", "dataset": {"local": str(prompts), "shuffle": True}},
        "grpo": grpo,
        "optimizer__lr": 2e-2,
        "global_train_batch_size": 3,
        "max_duration": "8ba",
    }
    return config(prompts, folder, **(common | changes))


def run(made: Any) -> list[dict[str, Any]]:
    train(made, make_sampler=lambda: sampler_of(made))
    return log_of(Path(made.run_folder))


def test_rewards_rise_and_engine_and_training_agree(model: Path, prompts: Path, tmp_path: Path) -> None:
    lines = run(made(model, prompts, tmp_path))
    steps = [line for line in lines if "loss" in line]
    print([(round(s["reward"], 3), s["apart"], s["ratio"]) for s in steps])
    assert max(line["apart"] for line in steps) < 1e-3
    assert np.mean([line["reward"] for line in steps[-3:]]) > steps[0]["reward"] + 0.1
