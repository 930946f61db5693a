"""Canonical names and configurations, from GGUF files and from models that transformers saves."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_builders import ARRAY, BOOL, CONFIG, F32, STRING, U32, tiny_llama

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.config import ModelConfig
from roofline.weights import names
from roofline.weights.checkpoint import open_checkpoint, read_config
from roofline.weights.config.gguf import from_gguf
from roofline.weights.config.hf import from_hf

Write = Callable[..., Path]


# --- GGUF --------------------------------------------------------------------------------------------------------


def test_gguf_model_opens_under_canonical_names(write: Write) -> None:
    checkpoint = open_checkpoint(write(tiny_llama()))
    family, config = checkpoint.config["family"], checkpoint.config
    assert (family, config) == ("llama", {**CONFIG, "norm_eps": float(np.float32(1e-5))})
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == names.parameter_shapes(CONFIG)
    info = checkpoint.tensors["layers.1.mlp.down.weight"]
    assert (info.name, info.format, info.shape) == ("layers.1.mlp.down.weight", "Q4_0", (64, 96))
    assert checkpoint.read(info.name).nbytes == info.nbytes == 64 * 96 // 32 * 18
    assert checkpoint.dequantize("layers.0.attn_norm.weight").tolist() == [1.0] * 64
    assert not checkpoint.read(info.name).flags.writeable
    with pytest.raises(ConfigError, match=r"no tensor 'head.weight'"):
        checkpoint.read("head.weight")


def test_real_file_opens(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    family, config = checkpoint.config["family"], checkpoint.config
    assert family == "llama"
    assert (config["layers"], config["heads"], config["kv_heads"], config["vocab"]) == (30, 9, 3, 49152)
    assert config["tied"]
    assert config["rope_style"] == "interleaved"
    assert checkpoint.tensors["embed.weight"].format == "Q8_0"
    assert len(checkpoint.tensors) == 272


def test_folder_with_one_gguf_is_that_file(write: Write) -> None:
    path = write(tiny_llama())
    assert open_checkpoint(path.parent).path == path
    write(tiny_llama(), "second.gguf")
    with pytest.raises(ConfigError, match=r"2 GGUF files.*second\.gguf"):
        open_checkpoint(path.parent)


def test_missing_surplus_and_misshapen_tensors_are_named(write: Write) -> None:
    builder = tiny_llama()
    del builder.tensors[4]
    with pytest.raises(ConfigError, match=r"layers\.0\.attn\.k\.weight.*missing; .* that are not there: 1 of 20$"):
        open_checkpoint(write(builder))
    builder = tiny_llama()
    builder.add("blk.0.attn_q.bias", np.zeros(64, np.float32))
    with pytest.raises(
        ConfigError, match=r"layers\.0\.attn\.q\.bias.*not part of this model; .* not part of it: 1 of 21$"
    ):
        open_checkpoint(write(builder))
    builder = tiny_llama()
    builder.add("blk.0.attn_sinks.weight", np.zeros(64, np.float32))
    with pytest.raises(ConfigError, match=r"attn_sinks.*no model of ours"):
        open_checkpoint(write(builder))
    builder = tiny_llama()
    builder.tensors = [t for t in builder.tensors if t[0] != "blk.1.ffn_up.weight"]
    builder.add("blk.1.ffn_up.weight", np.zeros((64, 96), np.float32))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up\.weight.*\(64, 96\), not \(96, 64\)"):
        open_checkpoint(write(builder))


def test_check_names_takes_names_alone(write: Write) -> None:
    checkpoint = open_checkpoint(write(tiny_llama()))
    checkpoint.check_names(list(checkpoint.tensors))
    with pytest.raises(ConfigError, match=r"'extra'.*missing"):
        checkpoint.check_names([*checkpoint.tensors, "extra"])


METADATA = {
    **{"general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 512},
    **{"llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.attention.head_count": 4},
    **{"llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5},
}
SHAPES = {"embed.weight": (50, 64)}


def _gguf(factors: np.ndarray | None = None, **changes: Any) -> dict[str, Any]:
    metadata = {**METADATA, **{key.replace("__", "."): content for key, content in changes.items()}}
    return from_gguf(Path("m.gguf"), {k: v for k, v in metadata.items() if v is not None}, SHAPES, factors)


def test_gguf_config_defaults_and_options() -> None:
    assert _gguf() == CONFIG
    assert _gguf(llama__attention__head_count_kv=None)["kv_heads"] == 4
    assert _gguf(llama__attention__head_count_kv=[2, 2])["kv_heads"] == 2
    assert _gguf(llama__attention__sliding_window=128)["sliding_window"] == 128
    assert _gguf(llama__rope__freq_base=5e5)["rope_theta"] == 5e5
    wide = _gguf(llama__attention__key_length=32, llama__attention__value_length=32, llama__rope__dimension_count=32)
    assert wide["head_dim"] == 32
    qwen = {k.replace("llama.", "qwen3."): v for k, v in METADATA.items()}
    config = from_gguf(Path("m"), {**qwen, "general.architecture": "qwen3"}, {**SHAPES, "head.weight": (50, 64)}, None)
    assert (config["family"], config["rope_style"], config["qk_norm"], config["tied"]) == ("qwen", "half", True, False)


def test_gguf_rope_scalings() -> None:
    linear = _gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert _gguf(llama__rope__scale_linear=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = _gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
    )
    assert yarn["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128.0}
    for config in (linear, yarn):
        assert ModelConfig.of(config).rope.kind == config["rope_scaling"]["rope_type"]


@pytest.mark.parametrize(("factor", "low", "high", "original"), [(8, 1, 4, 8192), (32, 1, 4, 8192), (4, 2, 9, 4096)])
def test_gguf_rope_divisors_give_llama3_back(factor: float, low: float, high: float, original: float) -> None:
    metadata = {**METADATA, "llama.rope.freq_base": 500000.0, "llama.attention.key_length": 64}
    metadata["llama.attention.value_length"] = metadata["llama.rope.dimension_count"] = 64
    inverse = 500000.0 ** (-np.arange(32) / 32)
    divisors = []  # as converters write them, wavelength by wavelength
    for wavelength in 2 * math.pi / inverse:
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(float(factor))
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    stored = np.array(divisors, np.float32)
    scaling = from_gguf(Path("m.gguf"), metadata, SHAPES, stored)["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == factor
    # Only the products of context and frequency matter, so the context may come back as 8192.
    ratio = original / scaling["original_max_position_embeddings"]
    assert scaling["low_freq_factor"] * ratio == pytest.approx(low, rel=1e-4)
    assert scaling["high_freq_factor"] * ratio == pytest.approx(high, rel=1e-4)


def test_gguf_rope_divisors_that_are_something_else_are_refused() -> None:
    assert _gguf(np.ones(8, np.float32))["rope_scaling"] is None
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        _gguf(np.linspace(3, 1, 8, dtype=np.float32))
    for bad in (np.ones(7), np.zeros(8), np.full(8, np.nan)):
        with pytest.raises(ConfigError, match="rope_freqs"):
            _gguf(bad.astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"general__architecture": None}, ConfigError, "general.architecture"),
        ({"general__architecture": "novel", "novel__gates": 3}, UnsupportedError, "novel.*gates.*llama, qwen2, qwen3"),
        ({"general__architecture": ["llama"]}, ConfigError, "general.architecture"),
        ({"llama__block_count": None}, ConfigError, "llama.block_count"),
        ({"llama__block_count": 0}, ConfigError, "llama.block_count: the number 0 is not from 1 to 16384"),
        ({"llama__block_count": 2**32 - 1}, ConfigError, "block_count"),
        ({"llama__attention__head_count": 0}, ConfigError, "head_count"),
        ({"llama__attention__head_count": [4, 2]}, UnsupportedError, "head_count"),
        ({"llama__attention__head_count": "4"}, ConfigError, "head_count"),
        ({"llama__attention__head_count_kv": 3}, ConfigError, "head_count_kv"),
        ({"llama__attention__key_length": 15}, ConfigError, "key_length: 15 is odd"),
        ({"llama__attention__value_length": 8}, UnsupportedError, "value_length"),
        ({"llama__rope__dimension_count": 8}, UnsupportedError, "dimension_count"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, ConfigError, "layer_norm_rms_epsilon"),
        ({"llama__attention__layer_norm_rms_epsilon": math.nan}, ConfigError, "is the number nan, not a finite"),
        ({"llama__rope__freq_base": -1.0}, ConfigError, "rope.freq_base"),
        ({"llama__vocab_size": 51}, ConfigError, "vocab_size"),
        ({"llama__expert_count": 8}, ConfigError, "expert_used_count"),
        ({"llama__attention__clamp_kqv": 8.0}, UnsupportedError, "clamp_kqv"),
        ({"llama__something__new": 1}, UnsupportedError, "something.new"),
        ({"llama__rope__scaling__type": "longrope"}, UnsupportedError, "longrope"),
        ({"llama__rope__scaling__type": "linear"}, ConfigError, "factor: is missing"),
        ({"llama__rope__scaling__type": 3}, ConfigError, "rope.scaling.type"),
        ({"llama__rope__scaling__attn_factor": 2.0}, UnsupportedError, "attn_factor"),
    ],
)
def test_gguf_config_is_refused_by_field(changes: dict[str, Any], kind: Any, field: str) -> None:
    with pytest.raises(kind, match=field):
        _gguf(**changes)


# --- Hugging Face ------------------------------------------------------------------------------------------------

HF = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50},
    **{"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": True, "hidden_act": "silu"},
}


def _hf(**changes: Any) -> dict[str, Any]:
    return from_hf(Path("config.json"), {k: v for k, v in {**HF, **changes}.items() if v is not ...})


def test_hf_config_defaults_and_options() -> None:
    assert _hf() == {**CONFIG, "rope_style": "half"}
    assert _hf(num_key_value_heads=...)["kv_heads"] == 4
    assert not _hf(tie_word_embeddings=...)["tied"]
    assert _hf(model_type="mistral", sliding_window=32)["sliding_window"] == 32
    assert _hf(model_type="mistral")["sliding_window"] == 4096
    assert _hf(model_type="mistral", sliding_window=None)["sliding_window"] is None
    assert _hf(model_type="qwen2", sliding_window=32, use_sliding_window=False)["sliding_window"] is None
    assert (
        _hf(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=0)["sliding_window"] == 32
    )
    assert _hf(model_type="qwen2", sliding_window=32, use_sliding_window=True)["sliding_window"] is None  # 28 > 2
    assert _hf(model_type="qwen2")["attention_bias"]
    biased = _hf(attention_bias=True, mlp_bias=True)
    assert biased == _hf() | {"attention_bias": True, "output_bias": True, "mlp_bias": True}
    mixed = _hf(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1)
    assert (mixed["sliding_window"], mixed["layer_windows"]) == (None, [0, 32])
    assert _hf(model_type="qwen3", head_dim=32)["head_dim"] == 32
    assert _hf(model_type="qwen3")["head_dim"] == 128


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_hf_rope_old_and_new(key: str) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    config = _hf(**{key: {**llama3, "original_max_position_embeddings": 256}}, rope_theta=5e5)
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {**llama3, "original_max_position_embeddings": 256}
    assert _hf(**{key: {"type": "linear", "factor": 2.0}})["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = _hf(**{key: {"rope_type": "yarn", "factor": 4.0, "truncate": False}})["rope_scaling"]
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512.0, "truncate": False}
    assert _hf(**{key: {"rope_type": "default", "rope_theta": 7.0}})["rope_scaling"] is None


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"model_type": ...}, ConfigError, "model_type"),
        (
            {"model_type": "novel", "gates": 3},
            UnsupportedError,
            "novel.*new in it: gates.*llama, mistral, qwen2, qwen3",
        ),
        ({"hidden_size": ...}, ConfigError, "hidden_size"),
        ({"hidden_size": "64"}, ConfigError, "hidden_size: is the string '64', not a whole number"),
        ({"hidden_size": 2**40, "head_dim": 16}, ConfigError, "hidden_size"),
        ({"num_attention_heads": 0}, ConfigError, "num_attention_heads"),
        ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads"),
        ({"head_dim": 15}, ConfigError, "head_dim"),
        ({"vocab_size": True}, ConfigError, "vocab_size: is true, not a whole number"),
        ({"rms_norm_eps": "1e-5"}, ConfigError, "rms_norm_eps: is the string '1e-5', not a number"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act = gelu"),
        ({"model_type": "mistral", "mlp_bias": True}, UnsupportedError, "mlp_bias"),
        ({"model_type": "qwen2", "attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, UnsupportedError, "auto_map"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedError, "softcapping"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedError, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, UnsupportedError, "per kind of layer"),
        ({"rope_parameters": {"new_beta": 1.0}}, UnsupportedError, "new_beta"),
        ({"rope_parameters": [1]}, ConfigError, "rope_parameters"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedError, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, UnsupportedError, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, ConfigError, "factor: is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ConfigError, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ConfigError, "low_freq_factor: is missing"),
        ({"rope_theta": 0}, ConfigError, "rope_theta"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, UnsupportedError, "layer_types"),
        ({"layer_types": 3}, ConfigError, "layer_types"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            ConfigError,
            "layer_types: has 1 values for 2 layers",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "new"]}, UnsupportedError, "layer_types 'new'"),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, ConfigError, "num_key_value_heads"),
        ({"model_type": "mistral", "sliding_window": -4}, ConfigError, "sliding_window"),
    ],
)
def test_hf_config_is_refused_by_field(changes: dict[str, Any], kind: Any, field: str) -> None:
    with pytest.raises(kind, match=field):
        _hf(**changes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), inner),
    max_leaves=6,
)
KEYS = [*HF, *("rope_parameters", "rope_scaling", "rope_theta", "head_dim", "sliding_window", "use_sliding_window")]
KEYS += ["layer_types", "max_window_layers", "attention_bias", "original_max_position_embeddings"]


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), changes=st.dictionaries(st.sampled_from(KEYS), JSON)
)
def test_any_json_in_hf_fields_never_crashes(kind: str, changes: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError, UnsupportedError):
        ModelConfig.of(_hf(**{"model_type": kind, **changes}))


GGUF_KEYS = [*METADATA, "llama.rope.freq_base", "llama.rope.scaling.type", "llama.rope.scaling.factor"]
GGUF_KEYS += ["llama.attention.key_length", "llama.attention.sliding_window", "llama.vocab_size"]


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(GGUF_KEYS), JSON.filter(lambda v: not isinstance(v, dict))))
def test_any_value_in_gguf_fields_never_crashes(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError, UnsupportedError):
        ModelConfig.of(from_gguf(Path("m.gguf"), {**METADATA, **changes}, SHAPES, np.linspace(1, 8, 8, dtype="f4")))


# --- models that transformers saves ------------------------------------------------------------------------------

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}, {"family": "llama", "tied": True, "attention_bias": False}),
    "llama3": (
        "LlamaConfig",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
        {"family": "llama", "rope_theta": 5e5, "tied": False},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 16}, {"family": "llama", "sliding_window": 16}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, {"family": "qwen", "attention_bias": True, "tied": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, {"family": "qwen", "qk_norm": True, "head_dim": 16}),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("case", MODELS)
def test_models_saved_by_transformers_open(case: str, sharded: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it writes the models")
    torch = pytest.importorskip("torch", reason="transformers' models are torch's")
    kind, options, expected = MODELS[case]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES, **options))
    model.to(torch.bfloat16 if case == "mistral" else torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    assert {key: config[key] for key in expected} == expected
    assert config["rope_style"] == "half"
    assert read_config(tmp_path) == config
    for theirs, values in model.state_dict().items():
        name = names.from_hf(config["family"], theirs)
        assert name is not None
        if name == "head.weight" and config["tied"]:
            continue
        assert checkpoint.tensors[name].shape == tuple(values.shape)
        assert np.array_equal(checkpoint.dequantize(name), values.float().numpy())
    if not sharded:
        assert open_checkpoint(tmp_path / "model.safetensors").config == config


# --- folders and names -------------------------------------------------------------------------------------------


def test_pickles_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.pth.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="pickle"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        open_checkpoint(tmp_path / "gone")


def test_old_extras_of_hf_files_are_skipped_and_int_tensors_refused(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="it writes the file")
    shapes = names.parameter_shapes({**CONFIG, "rope_style": "half"})
    hf_names = {names.from_hf("llama", n): n for n in _hf_names(2)}
    tensors = {hf_names[name]: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    (tmp_path / "config.json").write_text(json.dumps(HF))
    library.save_file(tensors, tmp_path / "model.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(shapes)
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    library.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight.*I8"):
        open_checkpoint(tmp_path)


def _hf_names(layers: int) -> list[str]:
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    inner = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in parts]
    return ["model.embed_tokens.weight", "model.norm.weight", *inner]


@pytest.mark.parametrize(
    "name",
    [
        *("blk.01.attn_q.weight", "blk.-1.attn_q.weight", "blk.9999999.attn_q.weight", "blk.0.attn_q.scale"),
        *("blk.0.attn_q", "token_embd", "output_norm.scale", "blk.0.attn_q.weight\n", "blk.٣.attn_q.weight", ""),
    ],
)
def test_names_that_are_nearly_right_are_unknown(name: str) -> None:
    assert names.from_gguf("llama", name) is None


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate_proj", "layers.0.mlp.gate_proj", "score.weight", ""])
def test_hf_names_that_are_nearly_right_are_unknown(name: str) -> None:
    assert names.from_hf("llama", name) is None


def test_gguf_with_other_keys_of_the_architecture_is_refused(write: Write) -> None:
    builder = tiny_llama()
    builder.pairs += [("llama.rope.freq_base", F32, 5e4), ("llama.expert_count", U32, 0)]
    builder.pairs += [("llama.use_parallel_residual", BOOL, 0), ("general.tags", ARRAY, (STRING, ["a"]))]
    assert open_checkpoint(write(builder)).config["rope_theta"] == 5e4
    builder.pairs += [("llama.use_parallel_residual.x", BOOL, 0)]
    with pytest.raises(UnsupportedError, match=r"use_parallel_residual\.x"):
        open_checkpoint(write(builder))


def test_a_file_of_another_kind_is_named_as_such(tmp_path):
    (tmp_path / "notes.md").write_text("# Notes\n")
    with pytest.raises(ConfigError, match=r"notes\.md is neither a GGUF file, a \.safetensors file nor a folder of"):
        open_checkpoint(tmp_path / "notes.md")


def test_a_gguf_file_is_known_by_its_beginning(write: Write) -> None:
    assert open_checkpoint(write(tiny_llama(), "model")).kind == "gguf"
    assert open_checkpoint(write(tiny_llama(), "blob.bin")).kind == "gguf"
    with pytest.raises(ConfigError, match="neither a GGUF file"):
        open_checkpoint(write(b"GGUX" + tiny_llama().build()[4:], "other"))


def test_many_gguf_files_are_named_in_part(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds 9 GGUF files; name one: .*0\.gguf.*7\.gguf'?$"):
        open_checkpoint(tmp_path)


def test_pickles_of_either_name_are_refused_as_such(tmp_path: Path) -> None:
    for name in ("model.bin", "model.pt", "model.pth"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(b"x")
        with pytest.raises(UnsupportedError, match="pickle"):
            open_checkpoint(folder)


def test_divisors_of_rope_in_a_file_are_read(write: Write) -> None:
    builder = tiny_llama()
    builder.add("rope_freqs.weight", np.full(8, 2, np.float32))
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        open_checkpoint(write(builder))
    builder = tiny_llama()
    builder.add("rope_freqs.weight", np.ones(8, np.float32))
    checkpoint = open_checkpoint(write(builder))
    assert checkpoint.config["rope_scaling"] is None
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_a_layer_s_number_has_up_to_six_digits() -> None:
    for index in ("0", "9", "10", "999999"):
        ours = f"layers.{index}.attn.q.bias"
        assert names.from_gguf("llama", f"blk.{index}.attn_q.bias") == ours
        assert names.from_hf("llama", names.to_hf("llama", ours)) == ours
    for index in ("", "00", "1000000", "x"):
        assert names.from_gguf("llama", f"blk.{index}.attn_q.weight") is None
