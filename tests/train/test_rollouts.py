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
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.data.mds import ShardWriter  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.train import sft  # noqa: E402
from tests.train.small import config, log_of  # noqa: E402

REWARD = """
def early(answer, record):
    return sum(each < "n" for each in answer) / max(1, len(answer))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft.write_model(tmp_path_factory.mktemp("models") / "tiny", std=0.4)


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
    grpo = {"group": 16, "max_new_tokens": 2, "reward": f"{folder / 'reward.py'}:early"} | changes.pop("grpo", {})
    common = {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(model)},
        "adapter": {"rank": 4, "base": "f32"},
        "max_seq_len": 32,
        "train_loader": {"name": "finetuning", "dataset": {"local": str(prompts), "shuffle": True}},
        "grpo": grpo,
        "optimizer__lr": 2e-2,
        "global_train_batch_size": 6,
        "max_duration": "8ba",
    }
    return config(prompts, folder, **(common | changes))


def run(made: Any) -> list[dict[str, Any]]:
    train(made, make_sampler=sampler_of(made))
    return log_of(Path(made.run_folder))


def test_rewards_rise_and_engine_and_training_agree(model: Path, prompts: Path, tmp_path: Path) -> None:
    loader = {"name": "finetuning", "dataset": {"local": str(prompts)}}
    lines = run(made(model, prompts, tmp_path, eval_loader=loader, eval_interval="4ba", eval_first=True))
    steps = [line for line in lines if "loss" in line]
    held = [line for line in lines if "eval_loss" in line]
    # The engine keeps keys and values in bf16; ratios are of the probabilities that answers were sampled with.
    assert 0 < max(line["apart_most"] for line in steps) < 0.5
    assert all(line["apart"] < line["apart_most"] for line in steps)
    assert steps[0]["ratio"] == pytest.approx(1, abs=0.01)
    assert steps[0]["reward"] < 0.6
    assert steps[-1]["reward"] > 0.8
    assert held[0]["reward"] < held[-1]["reward"]
    assert held[-1]["eval_loss"] == -held[-1]["reward"]
    answers = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in answers] == [step for step in range(1, 9) for _ in range(6)]
    of_last = [each["reward"] for line in answers[-6:] for each in line["answers"]]
    assert np.mean(of_last) == pytest.approx(steps[-1]["reward"])
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_in_plain_float32_they_agree_to_rounding(model: Path, prompts: Path, tmp_path: Path) -> None:
    lines = run(made(model, prompts, tmp_path, max_duration="2ba", grpo={"backend": "reference", "group": 4}))
    assert 0 < max(line["apart_most"] for line in lines) < 2e-5


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_divergence_is_from_the_model_as_it_was(model: Path, prompts: Path, tmp_path: Path, method: str) -> None:
    """None before the first step, whatever the group, and some later; of each update, the last one's is in the log."""
    adapter = {"method": "full"} if method == "full" else {"rank": 4, "base": "f32"}
    lines = run(made(model, prompts, tmp_path, max_duration="3ba", grpo={"kl": 0.05, "group": 4}, adapter=adapter))
    kl = [line["kl"] for line in lines]
    assert 0 <= kl[0] < 1e-3 < kl[1] < kl[2]


def test_other_temperatures_are_trained_as_they_are_drawn(model: Path, prompts: Path, tmp_path: Path) -> None:
    lines = run(made(model, prompts, tmp_path, max_duration="2ba", grpo={"temperature": 0.5, "group": 4}))
    # Their probabilities at the sampling are training's own, so that nothing is apart.
    assert max(line["apart_most"] for line in lines) < 1e-5
    assert all(line["ratio"] == pytest.approx(1, abs=1e-5) for line in lines)
    with pytest.raises(ConfigError, match=r"kl=0\.1 needs temperature=1, not 0\.5"):
        made(model, prompts, tmp_path, grpo={"temperature": 0.5, "kl": 0.1})


def test_several_processes_and_what_does_not_go_with_grpo_are_refused(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="grpo samples with an engine in its own process"):
        train(made(model, prompts, tmp_path))
    for changes, message in [
        ({"adapter": None}, "grpo needs adapter"),
        ({"adapter": {"base": "nf4"}}, "adapter.base=nf4: grpo samples from the model's own files"),
        ({"elastic": {"virtual_shards": 2}}, "grpo runs in one process"),
    ]:
        with pytest.raises(ConfigError, match=message):
            made(model, prompts, tmp_path, **changes)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_resumed_run_samples_what_an_uninterrupted_one_does(
    model: Path, prompts: Path, tmp_path: Path, method: str
) -> None:
    grpo = {"iterations": 2, "kl": 0.05, "loss": "grpo", "group": 4}
    common = {"max_duration": "4ba", "save_interval": "2ba", "autoresume": True, "grpo": grpo}
    common["adapter"] = {"method": "full"} if method == "full" else {"rank": 4, "base": "f32"}
    whole = run(made(model, prompts, tmp_path / "whole", **common))
    run(made(model, prompts, tmp_path / "parts", **common, stop_after="2ba"))
    parts = run(made(model, prompts, tmp_path / "parts", **common))
    times = ("sampling_seconds",)
    assert [{k: v for k, v in line.items() if k not in times} for line in parts] == [
        {k: v for k, v in line.items() if k not in times} for line in whole
    ]
    assert whole[0]["kl"] > 0  # of the second update
    assert (tmp_path / "parts" / "rollouts.jsonl").read_text() == (tmp_path / "whole" / "rollouts.jsonl").read_text()
