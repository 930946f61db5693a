"""Files and tensors beside those that a model is read from: transformers decides which are read, and a line says which
are not.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="transformers' models are torch's")
transformers = pytest.importorskip("transformers", reason="it is what is compared with")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="it writes the files")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.models.folder_rows import our_rows, their_rows  # noqa: E402
from tests.models.parity_cases import CASES, theirs  # noqa: E402

INDEX = "model.safetensors.index.json"
State = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An untied Llama without biases in one file."""
    theirs({**CASES["llama"].config, "tied": False}).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def state_of(folder: Path) -> State:
    state: State = safetensors_torch.load_file(folder / "model.safetensors")
    return state


def save(folder: Path, state: State, name: str = "model.safetensors") -> None:
    state = {key: value.contiguous().clone() for key, value in state.items()}
    if name.endswith(".bin"):
        torch.save(state, folder / name)
    else:
        safetensors_torch.save_file(state, folder / name, {"format": "pt"})


def index(folder: Path, files: dict[str, State], places: dict[str, str] | None = None) -> None:
    """Shards, and an index of all their tensors, or of `places`."""
    for name, state in files.items():
        save(folder, state, name)
    placed = places or {key: name for name, state in files.items() for key in state}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def scaled(state: State, factor: float) -> State:
    return {key: value * factor for key, value in state.items()}


def configure(folder: Path, **changes: Any) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | changes))


def agree(folder: Path) -> None:
    mine, expected = our_rows(folder), their_rows(folder)
    assert mine is not None
    assert expected is not None
    assert np.abs(mine - expected).max() < 1e-4


def test_one_file_stands_before_an_index(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    index(folder, {"model-00001-of-00001.safetensors": scaled(state_of(folder), 1.5)})
    agree(folder)
    assert f"{folder}: the model is read from model.safetensors; not used: model-00001-of-00001" in caplog.text
    assert INDEX in caplog.text


def test_a_variant_does_not_stand_before_pytorch_model_bin(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(folder)
    (folder / "model.safetensors").unlink()
    save(folder, scaled(state, 1.5), "pytorch_model.bin")
    save(folder, state, "model.fp16.safetensors")
    agree(folder)
    assert "is read from pytorch_model.bin; not used: model.fp16.safetensors" in caplog.text


def test_of_two_pickled_models_the_single_file_is_read(folder: Path) -> None:
    state = state_of(folder)
    (folder / "model.safetensors").unlink()
    save(folder, state, "pytorch_model.bin")
    save(folder, scaled(state, 1.5), "pytorch_model-00001-of-00001.bin")
    placed = dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    agree(folder)


def test_weights_of_other_kinds_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "model.Q4_K_M.gguf")
    for name in (*others, "consolidated.00.pth"):
        (folder / name).write_bytes(b"not even a file of its kind")
    for name in ("training_args.bin", "README.md", "tokenizer.json"):
        (folder / name).write_text("{}")
    assert our_rows(folder) is not None
    (line,) = (record.message for record in caplog.records if "not used" in record.message)
    assert all(name in line for name in (*others, "consolidated.00.pth"))
    assert "training_args" not in line
    assert "--adapter" not in line


def test_an_adapter_beside_a_model_is_named_with_how_to_apply_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "adapter_config.json").write_text("{}")
    save(folder, {"x": torch.ones(1)}, "adapter_model.safetensors")
    assert our_rows(folder) is not None
    assert "not used: adapter_config.json, adapter_model.safetensors; an adapter is applied" in caplog.text


def test_nothing_is_said_where_everything_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(folder)
    agree(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    index(folder, {file: {key: state[key] for key in keys} for file, keys in shards.items()})
    agree(folder)
    assert caplog.records == []


def test_config_json_may_name_the_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(folder, scaled(state_of(folder), 1.5), "other.safetensors")
    before = our_rows(folder)
    configure(folder, transformers_weights="other.safetensors")
    agree(folder)
    assert not np.array_equal(before, our_rows(folder))
    assert "is read from other.safetensors; not used: model.safetensors" in caplog.text
    for name in ("../other.safetensors", "config.json"):
        configure(folder, transformers_weights=name)
        with pytest.raises(ConfigError, match=r"transformers_weights.*is no safetensors file of this folder"):
            open_checkpoint(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save(folder, {"x": torch.ones(1)}, "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"config\.json: transformers_weights: names files of safetensors"):
        open_checkpoint(folder)


# --- tensors -----------------------------------------------------------------------------------------------------


def test_tensors_outside_of_the_model_are_named_and_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}
    extra |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "position_ids": torch.ones(4)}
    save(folder, state_of(folder) | extra)
    agree(folder)
    assert "no part of the model are not used (3): " in caplog.text
    assert "v_head.summary.weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.q_norm.weight", "no model of ours has it"),
        ("model.layers.0.self_attn.q_proj.weight_scale", "no model of ours has it"),
        ("layers.1.mlp.extra.weight", "no model of ours has it"),
        ("model.embed_tokens.scale", "no model of ours has it"),
        ("lm_head.lora_A.weight", "no model of ours has it"),
        ("lm_head.bias", "is not part of this model; "),
        ("model.layers.2.mlp.up_proj.weight", r"is not part of this model as .* \(num_hidden_layers\)"),
        ("model.layers.0.mlp.up_proj.bias", r"is not part of this model as .* \(mlp_bias\)"),
        ("model.layers.0.self_attn.q_proj.bias", r"is not part of this model as .* \(attention_bias\)"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "is an adapter's"),
        ("layers.0.mlp.up_proj.weight", r"is the parameter that '[\w.]+mlp\.up_proj\.weight' is too"),
    ],
)
def test_tensors_that_may_change_what_the_model_computes_are_refused(name: str, reason: str, folder: Path) -> None:
    state = state_of(folder)
    save(folder, {**state, name: torch.ones(4)})
    with pytest.raises(ConfigError, match=reason):
        open_checkpoint(folder)


def test_names_of_a_model_without_its_head(folder: Path) -> None:
    """As AutoModel.save_pretrained writes them."""
    state = state_of(folder)
    head = state.pop("lm_head.weight")
    bare = {key.removeprefix("model."): value for key, value in state.items()}
    save(folder, bare)
    with pytest.raises(ConfigError, match=r"head\.weight'?: is missing"):
        open_checkpoint(folder)
    save(folder, {**bare, "lm_head.weight": head})
    agree(folder)
    configure(folder, tie_word_embeddings=True)
    save(folder, bare)
    agree(folder)


def test_names_of_a_module_around_the_model(folder: Path) -> None:
    save(folder, {f"model.{key}": value for key, value in state_of(folder).items()})
    agree(folder)
    save(folder, state_of(folder) | {"model.model.layers.0.mlp.extra.weight": torch.ones(4)})
    with pytest.raises(ConfigError, match="no model of ours has it"):
        open_checkpoint(folder)


def test_biases_of_experts_that_lie_otherwise_are_refused(tmp_path: Path) -> None:
    """As many numbers as there should be, in another shape."""
    theirs(CASES["gpt_oss"].config).save_pretrained(tmp_path)
    agree(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    state = state_of(tmp_path)
    save(tmp_path, state | {name: state[name].T})
    assert their_rows(tmp_path) is None
    with pytest.raises(ConfigError, match=r"gate_up_proj_bias': of shape \(\d+, 4\) is not for 4 experts"):
        open_checkpoint(tmp_path)


def test_names_behind_an_unknown_prefix_are_named_where_tensors_are_missing(folder: Path) -> None:
    save(folder, {f"module.{key}": value for key, value in state_of(folder).items()})
    with pytest.raises(ConfigError, match=r"is missing; .*not there: 21 of 21; the files have, .* has: module\."):
        open_checkpoint(folder)
    assert their_rows(folder) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["equal", "other", "no head", "no embedding"])
def test_head_and_embedding_are_those_of_transformers(
    stored: str, tied: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(folder)
    if stored == "equal":
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    elif stored != "other":
        del state["lm_head.weight" if stored == "no head" else "model.embed_tokens.weight"]
    save(folder, state)
    configure(folder, tie_word_embeddings=tied)
    mine, expected = our_rows(folder), their_rows(folder)
    assert (mine is None) == (expected is None) == (not tied and stored.startswith("no "))
    if mine is not None and expected is not None:
        assert np.abs(mine - expected).max() < 1e-4
        assert ("both are used as they are" in caplog.text) == (tied and stored == "other")
        head = "head.weight" in open_checkpoint(folder).tensors
        assert head == (stored == "other" or not tied)


# --- indexes -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_the_index_does_not_list_is_read(folder: Path) -> None:
    state = state_of(folder)
    (folder / "model.safetensors").unlink()
    listed = [key for key in state if "mlp.up_proj" not in key]
    index(folder, {"a.safetensors": state}, dict.fromkeys(listed, "a.safetensors"))
    agree(folder)


def test_of_a_tensor_in_two_shards_the_last_one_counts_if_the_index_says_so(folder: Path) -> None:
    state, key = state_of(folder), "model.layers.0.mlp.up_proj.weight"
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": state, "b.safetensors": {key: state[key] * 2}}
    index(folder, shards, {**dict.fromkeys(state, "a.safetensors"), key: "b.safetensors"})
    agree(folder)
    other = next(each for each in state if each != key)
    index(folder, {**shards, "b.safetensors": {key: state[key] * 2, other: state[other]}},
          {**dict.fromkeys(state, "a.safetensors"), other: "b.safetensors"})  # fmt: skip
    with pytest.raises(ConfigError, match=rf"b\.safetensors: tensor '{key}': is also in a\.safetensors"):
        open_checkpoint(folder)


def test_naming_a_json_file_says_what_to_name(folder: Path) -> None:
    for name in ("config.json", INDEX):
        (folder / INDEX).write_text("{}")
        with pytest.raises(ConfigError, match=rf"{name} .* holds none: name the model's folder, {folder}"):
            open_checkpoint(folder / name)
