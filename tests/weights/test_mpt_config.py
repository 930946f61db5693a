"""LLM Foundry's switches of MPT in config.json: read, written as they are read, or refused by name."""

from pathlib import Path
from typing import Any

import pytest

from roofline.common.errors import ConfigError, RooflineError
from roofline.models import presets
from roofline.models.registry import configure
from roofline.weights.config.hf import from_hf
from roofline.weights.to_hf import hf_config

MPT: dict[str, Any] = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 50}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
DEFAULTS = {
    **{"attn_type": "multihead_attention", "attn_pdrop": 0.0, "attn_impl": "flash", "qk_ln": False, "qk_gn": False},
    **{"fused_qkv": True, "clip_qkv": None, "softmax_scale": None, "attn_uses_sequence_id": False, "alibi": False},
    **{"sliding_window_size": -1, "alibi_bias_max": 8, "rope": False, "rope_theta": 10000, "rope_impl": "dail"},
    "rope_dail_config": {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
    "rope_hf_config": {"type": "no_scaling", "factor": 1.0},
}


def read(**changes: Any) -> dict[str, Any]:
    return from_hf(Path("config.json"), MPT | changes)


def test_a_file_with_all_of_llm_foundrys_defaults_says_nothing_new() -> None:
    ffn = {"ffn_type": "mptmlp", "fc_type": {"name": "torch"}}
    assert read(attn_config=DEFAULTS, ffn_config=ffn, norm_type="low_precision_layernorm") == read(
        attn_config={"alibi": False}
    )


def test_the_code_that_llm_foundry_names_in_its_exports_is_known() -> None:
    code = {"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}
    assert read(auto_map=code) == read()
    for other in ({**code, "AutoModelForCausalLM": "modeling_own.OwnModel"}, {"AutoModelForCausalLM": 3}):
        with pytest.raises(RooflineError, match=r"config\.json: auto_map\.AutoModelForCausalLM"):
            read(auto_map=other)
    with pytest.raises(RooflineError, match="auto_map"):
        read(auto_map="modeling_mpt.MPTForCausalLM")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"attn_config": {"rope": True}}, {"positions": "rope", "rope_theta": 1e4, "rope_scaling": None}),
        ({"attn_config": DEFAULTS | {"rope": True, "rope_theta": 500000}}, {"positions": "rope", "rope_theta": 5e5}),
        (
            {"attn_config": {"rope": True, "rope_impl": "hf", "rope_hf_config": {"type": "linear", "factor": 2}}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"attn_config": {"rope": True, "rope_impl": "hf", "rope_hf_config": LLAMA3}},
            {"rope_scaling": {"rope_type": "llama3"} | {k: v for k, v in LLAMA3.items() if k != "type"}},
        ),
        ({"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}}, {"kv_heads": 2}),
        ({"attn_config": {"attn_type": "multiquery_attention", "kv_n_heads": 1}}, {"kv_heads": 1}),
        ({"ffn_config": {"ffn_type": "mptglu"}}, {"gated": True, "ffn": 256}),
        (
            {"ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 96, "ffn_act_fn": {"name": "silu"}}},
            {"gated": True, "ffn": 96, "activation": "silu"},
        ),
        (
            {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}, "expansion_ratio": 3},
            {"ffn": 192, "activation": "gelu_tanh"},
        ),
        ({"norm_type": "rmsnorm"}, {"rms": True}),
        ({"norm_type": "low_precision_rmsnorm", "no_bias": False}, {"rms": True, "bias": True}),
    ],
)
def test_a_switch_means_this_and_is_written_as_it_is_read(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = read(**changes)
    assert {key: config[key] for key in wanted} == wanted
    assert from_hf(Path("config.json"), hf_config(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_config": {"attn_type": "grouped_query_attention"}}, "attn_config.kv_n_heads: is missing"),
        ({"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 3}}, "kv_n_heads: 3 does not divide"),
        ({"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 0}}, "attn_config.kv_n_heads"),
        ({"attn_config": {"kv_n_heads": 2}}, "kv_n_heads: 2 is not the 4 that attn_type multihead_attention has"),
        ({"attn_config": {"attn_type": "sparse_attention"}}, "attn_config.attn_type = sparse_attention"),
        ({"attn_config": {"qk_ln": True}}, "attn_config.qk_ln = True"),
        ({"attn_config": {"qk_gn": True}}, "attn_config.qk_gn = True"),
        ({"attn_config": {"fused_qkv": False}}, "attn_config.fused_qkv = False"),
        ({"attn_config": {"rope": True, "alibi": True}}, "attn_config.alibi beside attn_config.rope"),
        ({"attn_config": {"rope": True, "rope_theta": 0}}, "attn_config.rope_theta"),
        ({"attn_config": {"rope": True, "rope_impl": "own"}}, "attn_config.rope_impl 'own'"),
        ({"attn_config": {"rope": True, "rope_dail_config": {"type": "xpos"}}}, "rope_dail_config.type = xpos"),
        (
            {"attn_config": {"rope": True, "rope_dail_config": {"pos_idx_in_fp32": False}}},
            "rope_dail_config.pos_idx_in_fp32 = False",
        ),
        (
            {"attn_config": {"rope": True, "rope_impl": "hf", "rope_hf_config": {"type": "dynamic", "factor": 2}}},
            "rope scaling 'dynamic'",
        ),
        (
            {"attn_config": {"rope": True, "rope_impl": "hf", "rope_hf_config": {"type": "linear"}}},
            "rope_hf_config.factor: is missing",
        ),
        (
            {"attn_config": {"rope": True, "rope_hf_config": {"type": "linear", "factor": 2}}},
            "rope_hf_config.type: linear is read with rope_impl: hf alone",
        ),
        ({"ffn_config": {"ffn_type": "mb_moe"}}, "ffn_config.ffn_type = mb_moe"),
        ({"ffn_config": {"ffn_type": "mptglu", "moe_top_k": 2}}, "ffn_config.moe_top_k = 2"),
        ({"ffn_config": {"fc_type": "te"}}, "ffn_config.fc_type"),
        ({"ffn_config": {"ffn_act_fn": {"name": "relu6"}}}, "ffn_config.ffn_act_fn = {'name': 'relu6'}"),
        ({"ffn_config": {"ffn_act_fn": {"name": "silu", "inplace": True}}}, "ffn_config.ffn_act_fn"),
        ({"ffn_config": {"ffn_hidden_size": 0}}, "ffn_hidden_size"),
        ({"norm_type": "triton_rmsnorm"}, "norm_type = triton_rmsnorm"),
    ],
)
def test_what_is_not_the_same_mathematics_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RooflineError) as caught:
        read(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_other_families_have_none_of_it() -> None:
    for name in ({"rms": True}, {"gated": True}, {"activation": "silu"}):
        with pytest.raises(RooflineError, match="family mpt"):
            configure(presets.preset("llama-3-8b") | name)
    with pytest.raises(ConfigError, match="activation='relu6'"):
        configure(presets.preset("mpt-125m") | {"activation": "relu6"})


def test_a_scaling_that_llm_foundry_has_no_name_for_is_not_written() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ConfigError, match="'yarn'"):
        hf_config(read(attn_config={"rope": True}) | {"rope_scaling": yarn})


def test_heads_of_an_odd_size_are_refused_with_rope_alone() -> None:
    odd = {"d_model": 36, "n_heads": 4}
    assert read(**odd, attn_config={"alibi": False})["head_dim"] == 9
    with pytest.raises(ConfigError, match="head_dim: 9 is odd; rope turns pairs"):
        read(**odd, attn_config={"alibi": False, "rope": True})


def test_what_a_file_leaves_out_is_what_llm_foundry_takes() -> None:
    assert read() == {
        **{"family": "mpt", "rope_style": "half", "width": 64, "layers": 2, "heads": 4, "vocab": 50, "kv_heads": 4},
        **{"head_dim": 16, "ffn": 256, "max_position": 2048, "norm_eps": 1e-5, "tied": True, "bias": False},
        **{"attention_bias": False, "qk_norm": False, "sliding_window": None, "positions": "alibi"},
        **{"rope_theta": 1e4, "rope_scaling": None},
    }
    assert read(attn_config={"alibi": False})["positions"] == "learned"
    with pytest.raises(RooflineError, match="an MPT without positions"):
        read(attn_config={"alibi": False}, learned_pos_emb=False)


@pytest.mark.parametrize("key", ["d_model", "n_layers", "n_heads", "vocab_size"])
def test_sizes_are_at_least_1(key: str) -> None:
    assert read(**{"d_model": 4, "n_heads": 1} | {key: 1})
    with pytest.raises(ConfigError, match=rf"{key}: the number 0 is not at least 1"):
        read(**{key: 0})
    with pytest.raises(ConfigError, match="n_heads: 3 heads do not divide"):
        read(n_heads=3)


def test_the_expansion_ratio_makes_a_whole_width() -> None:
    assert read(expansion_ratio=1.5)["ffn"] == 96
    assert read(expansion_ratio=65535, d_model=4)["ffn"] == 4 * 65535
    for bad in (0, -1, 0.01, 1 << 16):
        with pytest.raises(ConfigError, match=r"expansion_ratio: .* times 64 is not a whole number"):
            read(expansion_ratio=bad)
        assert read(expansion_ratio=bad, ffn_config={"ffn_hidden_size": 80})["ffn"] == 80
