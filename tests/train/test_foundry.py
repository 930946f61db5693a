"""A file of LLM Foundry's runs as it stands, with nothing set but the place of its data and its length."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from roofline.common.errors import ConfigError
from roofline.train.config.data_sets import EvalLoaderSection
from roofline.train.config.read import parse_config, read_config

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = Path(__file__).parent / "mpt_small_cpu.yaml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows under the names of the file's splits, in the columns of LLM Foundry's own conversion: bytes of int64."""
    from roofline.train.data.mds import ShardWriter

    random = np.random.default_rng(0)
    for split, rows in (("train_small", 300), ("val_small", 90)):
        with ShardWriter(tmp_path / "c4" / split, {"tokens": "bytes"}, size_limit=1 << 16) as writer:
            for _ in range(rows):
                writer.write({"tokens": random.integers(0, 50_000, 128).astype("<i8").tobytes()})
    return tmp_path / "c4"


def trained(data: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> list[dict[str, float]]:
    """The log of a run of the file, in a folder of its own."""
    pytest.importorskip("torch", reason="training is torch")
    from roofline.train.run.loop import train

    monkeypatch.chdir(data.parent)
    finished = train(read_config(FILE, [f"variables.data_local={data}", *changes]))
    assert finished.folder == Path("runs/mpt_small_cpu")
    return [json.loads(line) for line in (finished.folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.soak
def test_the_file_runs_with_its_data_and_length_alone(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = trained(data, monkeypatch, "max_duration=2ba")
    steps = [line for line in lines if "loss" in line]
    assert [line["tokens"] for line in steps] == [256 * 128, 2 * 256 * 128]
    assert [line["lr"] for line in steps] == [0, pytest.approx(6e-6)]  # 100 batches of warmup
    assert [line["microbatch"] for line in steps] == [16, 16]
    assert [line["eval_tokens"] for line in lines if "eval_loss" in line] == [5 * 16 * 127]


@pytest.mark.slow
def test_the_file_runs_in_small_batches(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("max_duration=2ba", "global_train_batch_size=3", "device_eval_batch_size=1", "probes=false")
    lines = trained(data, monkeypatch, *changes)
    assert [line["lr"] for line in lines if "loss" in line] == [0, pytest.approx(6e-6)]
    assert [line["eval_tokens"] for line in lines if "eval_loss" in line] == [5 * 127]


def test_keys_beside_it_are_honoured_harmless_or_refused_with_the_reason(data: Path) -> None:
    found = yaml.safe_load(FILE.read_text())
    found["variables"]["data_local"] = str(data)

    def refusal(**more: object) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_config({**found, **more})
        return str(caught.value).removeprefix("configuration: ")

    harmless = parse_config(
        {**found, "expandable_segments": True, "log_config": True, "load_strict_model_weights": True}
        | {"save_weights_only": False}
    )
    assert harmless.expandable_segments
    assert refusal(save_weights_only=True).startswith("save_weights_only = True: ")
    assert "icl_tasks is no key here: no in-context task is evaluated" in refusal(icl_tasks=[{"label": "lambada"}])
    assert "write model.attn_config.alibi" in refusal(algorithms={"alibi": {"max_sequence_length": 128}})
    assert "max_split_size_mb is no key here: expandable_segments" in refusal(max_split_size_mb=512)
    kwargs = {"name": "gpt2", "kwargs": {"model_max_length": 64}}
    assert "rows of 128 tokens" in refusal(tokenizer=kwargs)
    assert "unknown key tokenizer.kwargs.padding_side" in refusal(
        tokenizer={"name": "gpt2", "kwargs": {"padding_side": "left"}}
    )


SHARED = """
max_seq_len: 32
tokenizer: {name: EleutherAI/gpt-neo-20b}
model: {name: mpt_causal_lm, d_model: 32, n_heads: 4, n_layers: 2, vocab_size: 96}
shared: &samples
  hf_name: json
  hf_kwargs: {data_dir: /nowhere}
others:
  betas: &betas [0.8, 0.9]
train_loader: &loader
  name: finetuning
  dataset: {<<: *samples, split: train, max_seq_len: "${max_seq_len}", shuffle: true}
  num_workers: 3
eval_loader:
  <<: *loader
  dataset: {<<: *samples, split: validation}
optimizer: {name: adamw, lr: 1.0e-3, betas: *betas}
max_duration: 2ba
global_train_batch_size: 8
"""


def test_anchors_and_merged_keys_are_read(tmp_path: Path) -> None:
    """As in LLM Foundry's 1b_local_data_sft.yaml: what other places name by its anchor is a variable."""
    file = tmp_path / "run.yaml"
    file.write_text(SHARED)
    config = read_config(file)
    assert isinstance(config.eval_loader, EvalLoaderSection)
    for loader, split in ((config.train_loader, "train"), (config.eval_loader, "validation")):
        assert (loader.name, loader.num_workers) == ("finetuning", 3)
        assert (loader.dataset.hf_name, loader.dataset.hf_kwargs.data_dir) == ("json", "/nowhere")
        assert (loader.dataset.split, loader.dataset.shuffle) == (split, split == "train")
    assert config.optimizer.betas == (0.8, 0.9)
    for text, key in (
        (SHARED.replace("*betas", "[0.8, 0.9]"), "others"),  # an anchor that nothing names
        (SHARED + "typed: *betas\n", "typed"),  # it names one, and has none
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"unknown key {key}"):
            read_config(file)
    file.write_text(SHARED.replace("others:", "eval_gauntlet:"))
    with pytest.raises(ConfigError, match="eval_gauntlet is no key here: no in-context task"):
        read_config(file)


def test_keys_of_its_other_files_are_taken_or_refused_with_the_reason(data: Path) -> None:
    found = yaml.safe_load(FILE.read_text())
    found["variables"]["data_local"] = str(data)

    def refusal(section: str, **keys: object) -> str:
        node = found if not section else {**found, section: {**found[section], **keys}}
        with pytest.raises(ConfigError) as caught:
            parse_config({**node, **({} if section else keys)})
        return str(caught.value)

    gated = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "x", "use_auth_token": True}
    assert parse_config({**found, "model": gated}).model.use_auth_token
    assert parse_config({**found, "spin_dataloaders": True}).spin_dataloaders
    assert refusal("", spin_dataloaders=False).endswith("should be True: a run that goes on computes where its data "
                                                        "stands, and reads nothing twice")  # fmt: skip
    assert "icl_seq_len is no key here: no in-context task is evaluated" in refusal("", icl_seq_len=1024)
    assert "model.trust_remote_code is no key here: code that comes" in refusal("model", trust_remote_code=True)
    code = refusal("tokenizer", kwargs={"trust_remote_code": True})
    assert "tokenizer.kwargs.trust_remote_code = True: input should be False: code that comes with a model" in code
    assert "such as T5, are not trained" in refusal("train_loader", dataset={"decoder_only_format": False})
    assert "moe_num_experts is no key here: models with experts" in refusal("model", ffn_config={"moe_num_experts": 4})


def test_segments_grow_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="training is torch")
    from roofline.train.memory.meter import grow_segments

    settings: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    grow_segments(torch.device("cpu"))
    assert not settings
    grow_segments(torch.device("cuda"))
    assert settings == ["expandable_segments:True"]
