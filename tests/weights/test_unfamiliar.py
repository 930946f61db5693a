"""What is told of files of other architectures."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from weights_builders import GGUFBuilder

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import presets
from roofline.weights.checkpoint import open_checkpoint, read_config
from roofline.weights.config import unfamiliar as unfamiliar_keys
from roofline.weights.config.gguf import from_gguf
from roofline.weights.config.hf import from_hf
from roofline.weights.config.unfamiliar import unfamiliar
from roofline.weights.families import table
from roofline.weights.to_hf import hf_config


def test_files_that_we_have_a_family_for_are_not_strange(tmp_path: Path) -> None:
    for name in ("llama-3-8b", "mpt-125m"):
        (tmp_path / "config.json").write_text(json.dumps(hf_config(presets.preset(name))))
        assert unfamiliar(tmp_path) is None
    assert unfamiliar(tmp_path / "nothing") is None
    (tmp_path / "model.bin").write_bytes(b"none of these")
    assert unfamiliar(tmp_path / "model.bin") is None


def test_nothing_near_is_said_so(tmp_path: Path) -> None:
    config = {"model_type": "strange", "rwkv_version": 6, "mamba_d_state": 4, "hidden_act": "silu", "widen": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": False}))
    strange = unfamiliar(tmp_path)
    assert strange is not None
    assert (strange.name, strange.nearest) == ("strange", "")
    assert strange.lacking == {"linear attention": ("rwkv_version",)}
    scans = dict.fromkeys(("causal_conv", "selective_scan"), ("mamba_d_state",))
    assert strange.ops == {"silu_mul": ("hidden_act",), "silu": ("hidden_act",), **scans}
    assert strange.new_keys["widen"] == "2"


def test_gguf_files_are_told_too(write: Callable[..., Path]) -> None:
    file = GGUFBuilder()
    file.pairs = [("general.architecture", 8, "wide"), ("wide.block_count", 4, 2), ("wide.expert_count", 4, 8)]
    file.pairs += [("wide.attention.head_count_kv", 4, 2), ("wide.rope.freq_base", 6, 1e4), ("other.key", 4, 1)]
    strange = unfamiliar(write(file))
    assert strange is not None
    assert (strange.key, strange.name, strange.nearest) == ("general.architecture", "wide", "qwen2")
    assert set(strange.ops) == {"route", "expert_linear", "combine", "attend", "rope"}
    assert dict(strange.new_keys) == {"expert_count": "8"}


def test_factors_by_position_and_relu_squared_are_computed(tmp_path: Path) -> None:
    config = {"model_type": "llama9", "attn_temperature_tuning": True, "floor_scale": 8192, "hidden_act": "relu2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    strange = unfamiliar(tmp_path)
    assert strange is not None
    assert strange.ops == {"scale_by_position": ("attn_temperature_tuning", "floor_scale"), "relu": ("hidden_act",)}
    assert strange.lacking == {}


def test_families_that_are_named_as_near_are_ours() -> None:
    assert set(unfamiliar_keys._HF_KEYS) <= set(table.MODEL_TYPES)
    assert set(unfamiliar_keys._GGUF_KEYS) <= set(table.ARCHITECTURES)


def test_experts_are_nearest_to_families_with_experts(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v9", "num_experts": 64, "num_experts_per_tok": 6, "kv_lora_rank": 512}
    config |= {"moe_intermediate_size": 1408, "norm_topk_prob": False, "n_shared_experts": 2, "rms_norm_eps": 1e-6}
    config |= {"rope_theta": 1e4, "hidden_act": "silu", "num_key_value_heads": 16, "router_aux_loss_coef": 0.001}
    (tmp_path / "config.json").write_text(json.dumps(config))
    strange = unfamiliar(tmp_path)
    assert strange is not None
    assert strange.nearest in ("mixtral", "qwen2_moe", "qwen3_moe")
    assert strange.lacking == {}
    assert strange.ops["join_heads"] == ("kv_lora_rank",)
    assert {"route", "expert_linear", "combine"} <= set(strange.ops)


def test_a_strange_value_cannot_fill_the_screen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x" * 1000, "y" * 1000: "\x1b[2J" + "z" * 1000}))
    strange = unfamiliar(tmp_path)
    assert strange is not None
    assert all(len(text) < 90 and text.isprintable() for item in strange.new_keys.items() for text in item)
    assert len(strange.name) < 90


def test_a_model_that_wraps_an_unknown_text_model_is_near_by_the_keys_of_its_text(tmp_path: Path) -> None:
    text = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_key_value_heads": 2, "hidden_act": "silu", "head_dim": 64}
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = {"model_type": "new_vl", "text_config": text | {"model_type": "new_text"}, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    strange = unfamiliar(tmp_path)
    assert strange is not None
    assert (strange.name, strange.nearest) == ("new_vl", "qwen3_moe")
    assert "images, or sound, beside text" in strange.lacking
    with pytest.raises(UnsupportedError, match=r"'new_vl'.*like those of qwen3_moe; docs/how-to/add-a-family"):
        read_config(tmp_path)


def test_a_wrapper_that_we_have_is_not_strange_and_its_text_may_be(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral", "hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unfamiliar(tmp_path) is None
    config["text_config"] = {"model_type": "newer", "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    strange = unfamiliar(tmp_path)
    assert strange is not None
    assert strange.name == "newer"


def test_what_reads_pictures_alone_is_told_from_a_model(write: Callable[..., Path], tmp_path: Path) -> None:
    file = GGUFBuilder()
    file.pairs = [("general.architecture", 8, "clip"), ("clip.has_vision_encoder", 7, 1)]
    path = write(file, "mmproj-model-f16.gguf")
    assert unfamiliar(path) is None
    with pytest.raises(ConfigError, match=r"is clip: this file .* name that one, and it answers to text"):
        open_checkpoint(path)
    with pytest.raises(ConfigError, match="is clip"):
        open_checkpoint(tmp_path)  # it alone is there
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(ConfigError, match=r"model\.gguf"):  # which is read, and damaged
        open_checkpoint(tmp_path)


def test_refusals_name_the_nearest_family_and_the_page_on_adding_one() -> None:
    fields = {"model_type": "newer", "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_bias": True, "head_dim": 64}
    fields |= {"num_key_value_heads": 2, "rope_theta": 1e4, "rope_scaling": None}
    for config, nearest in ((fields, "its keys are most like those of ernie4_5; "), ({"model_type": "newer"}, "it; ")):
        message = f"{nearest}docs/how-to/add-a-family.md adds one"
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            from_hf(Path("config.json"), config)
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64, "rope.freq_base": 1e4}
    metadata = {"general.architecture": "newer"} | {f"newer.{key}": value for key, value in keys.items()}
    with pytest.raises(UnsupportedError, match=r"most like those of qwen2moe; docs/how-to/add-a-family\.md adds one"):
        from_gguf(Path("m.gguf"), metadata, {}, None)
