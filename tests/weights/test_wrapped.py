"""Models that read pictures beside text: their text part is read as transformers runs it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="it runs the models")
transformers = pytest.importorskip("transformers", reason="it has the models")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="it writes the files")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

import quantised_models  # noqa: E402

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint, read_config  # noqa: E402
from roofline.weights.config.gguf import from_gguf  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from roofline.weights.config.unread_keys import unread_keys  # noqa: E402
from roofline.weights.config.wrapped import WRAPPERS, media_ids, text_fields  # noqa: E402
from tests.models.parity_cases import CASES, Eager, theirs  # noqa: E402
from tests.models.wrapped_models import CONFIGS, logits_of, older_name, wrapped  # noqa: E402

IDS = torch.randint(0, 88, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PATH = Path("config.json")


def _same(source: Any, model: Any) -> None:
    expected = logits_of(model, IDS)
    assert expected.std() > 0.1
    assert np.abs(Eager(source).step(IDS) - expected).max() < 1e-5


def _written(folder: Path, model: Any, state: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    if model.config.tie_word_embeddings:
        state = {name: values for name, values in state.items() if "lm_head" not in name}
    safetensors_torch.save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_as_transformers_saves_it_and_in_memory(kind: str, tmp_path: Path) -> None:
    model = wrapped(kind)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for source in (open_checkpoint(tmp_path), checkpoint_of(model)):
        _same(source, model)
        assert source.other_parts is not None
        assert source.other_parts.tensors > 10
        assert source.other_parts.nbytes == sum(
            values.nbytes for name, values in model.state_dict().items() if "language_model" not in name
            and "lm_head" not in name
        )  # fmt: skip
        assert 90 in source.other_parts.media
    assert not open_checkpoint(tmp_path).unused


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("spelling", ["in memory", "before transformers 5", "without a head of its own"])
def test_names_of_all_times(kind: str, spelling: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True} if spelling.startswith("without") else {}
    model = wrapped(kind, changes)
    state = model.state_dict()
    if spelling == "before transformers 5":
        state = {older_name(name): values for name, values in state.items()}
    elif spelling != "in memory":
        state = {name.removeprefix("model."): values for name, values in state.items()}
    _same(open_checkpoint(_written(tmp_path, model, state)), model)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    model = wrapped("gemma3")
    state = model.state_dict()
    twin = {older_name(name): values.clone() for name, values in state.items() if name.endswith("embed_tokens.weight")}
    with pytest.raises(ConfigError, match=r"embed_tokens.weight': is the tensor of the text part that 'language"):
        open_checkpoint(_written(tmp_path, model, state | twin))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_text_part_is_read_as_transformers_reads_it(kind: str) -> None:
    """What transformers makes of the keys, with its defaults, gives the same as the keys alone."""
    said = {"model_type": kind, **CONFIGS[kind]}
    size = "head_dim" if kind != "kimi_k25" else "kv_lora_rank"  # whose heads have no such size
    for keys in ({}, {size: 32}, {"rms_norm_eps": 1e-3}):
        text = {**said["text_config"], **keys}
        text = {key: value for key, value in text.items() if value is not None}
        fields = {key: value for key, value in said.items() if key != "model_type"}
        built = transformers.AutoConfig.for_model(kind, **{**fields, "text_config": dict(text)})
        assert from_hf(PATH, {**said, "text_config": text}) == from_hf(PATH, built.to_dict())


def test_gemma_3_as_published_says_little_of_its_text() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    said = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    built = transformers.Gemma3Config(text_config=dict(text)).to_dict()
    ours = from_hf(PATH, said)
    assert ours == from_hf(PATH, built)
    assert (ours["heads"], ours["kv_heads"], ours["head_dim"], ours["vocab"]) == (8, 4, 256, 262_208)
    assert (ours["max_position"], ours["norm_eps"], ours["tied"]) == (131_072, 1e-6, True)
    for key in ("num_attention_heads", "vocab_size", "max_position_embeddings"):
        with pytest.raises(ConfigError, match=f"config.json: text_config.{key}: is null"):
            from_hf(PATH, {**said, "text_config": {**text, key: None}})
    assert from_hf(PATH, {"model_type": "gemma3", "text_config": {"hidden_size": 2304}}) == from_hf(
        PATH, transformers.Gemma3Config().to_dict()
    )


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_qwen3_vl_with_few_keys(kind: str) -> None:
    experts = {"num_experts": 4} if kind.endswith("moe") else {}
    said = {"model_type": kind, "text_config": {"hidden_size": 2048, **experts}}
    built = transformers.AutoConfig.for_model(kind, text_config=dict(said["text_config"])).to_dict()
    assert from_hf(PATH, said) == from_hf(PATH, built)
    assert from_hf(PATH, said)["rope_theta"] == 5e5


def test_layers_of_qwen3_vl_moe_that_are_not_alike_are_refused() -> None:
    said = {"model_type": "qwen3_vl_moe", **CONFIGS["qwen3_vl_moe"]}
    for key, value in (("decoder_sparse_step", 2), ("mlp_only_layers", [0]), ("attention_bias", True)):
        with pytest.raises(UnsupportedError, match=f"text_config.{key}"):
            from_hf(PATH, {**said, "text_config": {**said["text_config"], key: value}})
    for key, value in (("num_experts", 5), ("num_experts_per_tok", 1), ("moe_intermediate_size", 48)):
        text = {**said["text_config"], key: value}
        assert from_hf(PATH, {**said, "text_config": text}) != from_hf(PATH, said)


@pytest.mark.parametrize("kind", CONFIGS)
def test_whether_the_head_is_the_embedding_is_said_outside(kind: str) -> None:
    for outside in (True, False, None):
        for inside in (True, False, None):
            said = {"model_type": kind, **CONFIGS[kind], "tie_word_embeddings": outside}
            said["text_config"] = {**said["text_config"], "tie_word_embeddings": inside}
            if outside is None:
                del said["tie_word_embeddings"]
            if inside is None:
                del said["text_config"]["tie_word_embeddings"]
            fields = {key: value for key, value in said.items() if key != "model_type"}
            built = transformers.AutoConfig.for_model(kind, **{**fields, "text_config": dict(said["text_config"])})
            assert from_hf(PATH, said)["tied"] == built.tie_word_embeddings, (outside, inside)


def test_positions_of_text_turn_alike_whatever_the_sections(tmp_path: Path) -> None:
    """With sections that leave no frequency to the first dimension, and with YaRN inside."""
    rope = {"mrope_section": [0, 8, 8], "mrope_interleaved": True, "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for parameters in (rope | {"rope_type": "default"}, rope | yarn):
        _same(checkpoint_of(wrapped("qwen3_vl", text={"rope_parameters": parameters})), wrapped("qwen3_vl", text={
            "rope_parameters": parameters}))  # fmt: skip


@pytest.mark.parametrize("kind", ["awq 32", "pack-quantized", "gptq sym 64"])
def test_weights_quantised_by_a_method_that_is_named_outside(kind: str, tmp_path: Path) -> None:
    plain = open_checkpoint(quantised_models.written(tmp_path / "plain", kind))
    folder = quantised_models.written(tmp_path / "whole", kind)
    stored = {f"language_model.{name}": values for name, values in quantised_models.tensors_of(kind)[0].items()}
    stored["vision_tower.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2)
    safetensors_torch.save_file(stored, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    said = {"model_type": "mistral3", "quantization_config": text.pop("quantization_config"), "text_config": text}
    (folder / "config.json").write_text(json.dumps(said))
    whole = open_checkpoint(folder)
    assert whole.tensors == plain.tensors
    assert any(info.format not in ("F32", "BF16") for info in whole.tensors.values())
    for name in plain.tensors:
        np.testing.assert_array_equal(whole.read(name), plain.read(name), err_msg=name)
    said["quantization_config"] = {"quant_method": "nothing"}
    with pytest.raises(UnsupportedError, match="quant_method nothing"):
        from_hf(PATH, said)


def test_modules_that_stay_as_they_are_are_named_as_in_the_whole_model() -> None:
    names = ["language_model.model.layers.0.mlp.down_proj", "model.language_model.lm_head", "lm_head", "vision_tower"]
    said = {"model_type": "mistral3", **CONFIGS["mistral3"], "quantization_config": {"modules_to_not_convert": names}}
    method: Any = text_fields(PATH, said).values["quantization_config"]
    assert method["modules_to_not_convert"] == [
        "model.layers.0.mlp.down_proj",
        "model.lm_head",
        "lm_head",
        "vision_tower",
    ]


def test_a_text_part_that_is_missing_or_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: text_config: is missing"):
        from_hf(PATH, {"model_type": "gemma3"})
    with pytest.raises(UnsupportedError, match="model_type 'rwkv'"):
        from_hf(PATH, {"model_type": "mistral3", "text_config": {"model_type": "rwkv"}})


def test_attention_to_what_follows_is_refused_but_among_pictures() -> None:
    said = {"model_type": "gemma3", **CONFIGS["gemma3"]}
    said["text_config"] = {**said["text_config"], "use_bidirectional_attention": "vision"}
    assert from_hf(PATH, said)["family"] == "gemma"
    for value in ("all", True):
        said["text_config"]["use_bidirectional_attention"] = value
        with pytest.raises(UnsupportedError, match=rf"text_config.use_bidirectional_attention = {value}"):
            from_hf(PATH, said)


def test_the_text_part_of_gemma_3n_in_a_model_whose_tower_is_not_built_here(tmp_path: Path) -> None:
    """Its tower of vision is another package's, so the model around the text part is its files alone."""
    text = theirs(CASES["gemma3n"].config)
    fields = text.config.to_dict()
    said = {"model_type": "gemma3n", "text_config": fields, "vision_config": {}, "audio_config": {}}
    said |= {"image_token_id": 90, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(said, default=str))
    state = {name.replace("model.", "model.language_model.", 1): v for name, v in text.state_dict().items()}
    state |= {f"model.{tower}.layer.weight": torch.ones(2, 2) for tower in WRAPPERS["gemma3n"].other_modules}
    state |= {"model.language_model.layers.3.self_attn.k_proj.weight": torch.ones(16, 64)}  # of a layer that shares
    del state["lm_head.weight"]
    safetensors_torch.save_file(
        {key: value.contiguous() for key, value in state.items()}, tmp_path / "model.safetensors"
    )
    source = open_checkpoint(tmp_path)
    assert source.other_parts is not None
    assert source.other_parts.tensors == 4
    assert source.unused == ["model.layers.3.self_attn.k_proj.weight"]
    ids = list(range(40))
    assert np.abs(Eager(source).step(ids) - logits_of(text, ids)).max() < 1e-5


@pytest.mark.parametrize("kind", WRAPPERS)
def test_ids_of_pictures_where_nobody_says_are_those_of_transformers(kind: str) -> None:
    built = transformers.AutoConfig.for_model(kind)
    expected = {key: getattr(built, key) for key in WRAPPERS[kind].media}
    assert media_ids(PATH, {"model_type": kind}) == {number: key for key, number in expected.items()}
    assert media_ids(PATH, built.to_dict()) == {number: key for key, number in expected.items()}
    with pytest.raises(ConfigError, match="is not the id of a token"):
        media_ids(PATH, {"model_type": kind, "video_token_id": -1})


def test_keys_that_nothing_reads_are_those_of_the_text_part(tmp_path: Path) -> None:
    said = {"model_type": "qwen3_vl", **CONFIGS["qwen3_vl"]}
    said["text_config"] = {**said["text_config"], "strange_key": 3}
    assert unread_keys(PATH, said) == ["strange_key"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert read_config(tmp_path)["layers"] == 2


@pytest.mark.parametrize("kind", ["qwen3", "qwen3moe"])
def test_gguf_files_of_qwen3_vl_are_those_of_qwen3_for_text(kind: str) -> None:
    keys = {"context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96}
    keys |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e6}
    keys |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24} if "moe" in kind else {}
    vision = {"n_deepstack_layers": 3, "rope.dimension_sections": [24, 20, 20, 0]}
    name = kind.replace("qwen3", "qwen3vl")

    def read(architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
        metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
        return from_gguf(PATH, {"general.architecture": architecture, **metadata}, {"embed.weight": (96, 64)}, None)

    assert read(name, keys | vision) == read(kind, keys)
    with pytest.raises(UnsupportedError, match="n_deepstack_layers"):
        read(kind, keys | vision)
    with pytest.raises(ConfigError, match="dimension_sections: turns a part of each head by a fourth position"):
        read(name, keys | vision | {"rope.dimension_sections": [0, 24, 20, 20]})
