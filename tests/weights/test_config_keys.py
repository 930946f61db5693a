"""Every key that the other readers of a file take into the forward pass is honoured here, or refused: none is lost."""

import contextlib
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights_builders import CONFIG

from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.common.fields import Fields
from roofline.models.config import ModelConfig
from roofline.ops.rope_tables import RopeTable, frequencies
from roofline.weights.config.gguf import from_gguf
from roofline.weights.config.hf import from_hf
from roofline.weights.families.shared.canonical import checked
from roofline.weights.families.shared.experts import expert_size, hf_experts
from roofline.weights.families.table import MODEL_TYPES

HF: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50},
    **{"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5},
}
MPT: dict[str, Any] = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 50}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ORIGINAL = "original_max_position_embeddings"


def _hf(changes: dict[str, Any], base: dict[str, Any] = HF) -> dict[str, Any]:
    return from_hf(Path("config.json"), {**base, **changes})


def _is_honoured_or_refused(changes: dict[str, Any], base: dict[str, Any]) -> bool:
    try:
        return _hf(changes, base) != _hf({}, base)
    except RooflineError:
        return True


# --- config.json ---------------------------------------------------------------------------------------------------

# What transformers' and LLM Foundry's classes have beside it says nothing about the logits of a text.
_HARMLESS = {
    *("num_mtp_layers", "embedding_initializer_range"),
    *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp"),
    *("attention_dropout", "resid_pdrop", "emb_pdrop", "init_device", "embedding_fraction", "attn_pdrop", "attn_impl"),
    *(
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "hidden_dropout",
        "classifier_dropout",
        "is_decoder",
        "dropout",
        "layerdrop",
        "init_std",
    ),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("residual_dropout", "eod_token_id", "sep_token_id"),
    "reorder_and_upcast_attn",  # the order of the same products
    "altup_coef_clip",  # of transformers' training
    # how Mamba's weights begin, and how long its chunks are
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor"),
    *("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan", "chunk_size"),
    *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype", "expand"),
    *("time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32", "moe_shared_expert_overlap"),
    *("num_nextn_predict_layers", "mtp_layers_block_type"),  # of layers that guess further tokens
    "z_loss_coefficient",  # of training
    "time_step_min",  # of Nemotron-H: see docs/decisions.md
}
_CHANGED: dict[str, Any] = {
    **{"vocab_size": 51, "hidden_size": 128, "intermediate_size": 97, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "hidden_act": "gelu", "max_position_embeddings": 513, "rms_norm_eps": 1e-4},
    **{"tie_word_embeddings": True, "rope_parameters": YARN, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    **{"sliding_window_pattern": 2, "attention_out_bias": True, "use_bias": True},
    **{"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"]},
    # of MPT
    **{"d_model": 128, "n_heads": 2, "n_layers": 3, "expansion_ratio": 2, "max_seq_len": 512, "no_bias": False},
    **{"layer_norm_epsilon": 1e-4, "learned_pos_emb": False, "logit_scale": 2.0, "norm_type": "rmsnorm"},
    **{"attn_type": "multiquery_attention", "clip_qkv": 8.0, "softmax_scale": 0.5, "prefix_lm": True, "qk_ln": True},
    **{"attn_uses_sequence_id": True, "alibi": False, "alibi_bias_max": 16},
    # of families with more to say
    **{"query_pre_attn_scalar": 100, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 20.0},
    **{"hidden_activation": "silu", "use_bidirectional_attention": True, "original_max_position_embeddings": 256},
    **{"no_rope_layers": [0, 0], "no_rope_layer_interval": 1, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    **{"residual_multiplier": 0.5, "attention_multiplier": 0.5},
    **{"num_local_experts": 5, "num_experts_per_tok": 1, "swiglu_alpha": 2.0, "swiglu_limit": 3.0},
    # of MiniCPM3
    **{"scale_emb": 3.0, "scale_depth": 2.0, "dim_model_base": 32},
    # of DeepSeek
    **{"kv_lora_rank": 48, "q_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 12, "v_head_dim": 12},
    **{"n_routed_experts": 5, "moe_intermediate_size": 49, "n_shared_experts": 1, "first_k_dense_replace": 2},
    **{"routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "norm_topk_prob": True, "rope_interleave": False},
    # of Qwen3-Next and Qwen3.5
    **{"linear_conv_kernel_dim": 3, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 5},
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 16, "shared_expert_intermediate_size": 49},
    **{"decoder_sparse_step": 2, "mlp_only_layers": [0]},
    # of families that choose experts by scores
    **{"n_group": 2, "topk_group": 2, "use_qk_norm": True, "mlp_layer_types": ["sparse"] * 2, "num_shared_experts": 2},
    **{"router_scaling_factor": 1.5, "moe_k": 3, "moe_num_experts": 5, "moe_num_shared_experts": 1, "clip_qkv": 8.0},
    **{
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 0,
        "moe_layer_interval": 3,
        "moe_norm_min": 0.1,
        "moe_topk": 2,
    },
    # of LFM2
    **{"norm_eps": 1e-4, "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 32, "full_attn_idxs": [1]},
    **{"block_ffn_dim_multiplier": 8.0, "block_auto_adjust_ff_dim": False, "num_dense_layers": 1},
    **{"use_expert_bias": False, "shared_intermediate_size": 48, "use_post_norm": False},
    # of Gemma 3n and 4
    **{"hidden_size_per_layer_input": 48, "vocab_size_per_layer_input": 49, "attention_k_eq_v": True},
    **{"num_kv_shared_layers": 1, "enable_moe_block": True, "use_double_wide_mlp": True, "top_k_experts": 1},
    **{"altup_active_idx": 1, "altup_correct_scale": False, "altup_num_inputs": 3, "laurel_rank": 24},
    **{"activation_sparsity_pattern": [0.5, 0.25]},
    # of Mamba
    **{"state_size": 8, "conv_kernel": 3, "expand": 4, "use_conv_bias": False, "time_step_rank": 7, "n_groups": 2},
    **{"mixer_rms_eps": 1e-3, "num_heads": 2, "time_step_limit": [0.1, 0.2]},
    # of Jamba and Bamba
    **{"attn_layer_period": 4, "attn_layer_offset": 0, "expert_layer_period": 4, "expert_layer_offset": 0},
    **{"mamba_dt_rank": 7, "attn_layer_indices": [0]},
    # of Granite 4, Nemotron-H and Falcon-H1
    **{"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 64, "mamba_d_head": 8, "mamba_d_conv": 3},
    **{"mamba_expand": 4, "mamba_conv_bias": False, "mamba_proj_bias": True, "time_step_limit": [0.1, 2.0]},
    **{"position_embedding_type": "rope", "layers_block_type": ["full_attention", "mlp"], "ssm_state_size": 64},
    **{"mamba_num_heads": 64, "mamba_head_dim": 32, "mamba_hidden_act": "gelu", "n_groups": 4, "conv_kernel": 3},
    **{"use_conv_bias": False, "moe_shared_expert_intermediate_size": 49, "moe_latent_size": 32, "use_bias": True},
    **{"layer_norm_epsilon": 1e-4, "mlp_hidden_act": "gelu", "mamba_d_ssm": 64, "mamba_norm_before_gate": False},
    **{"mamba_rms_norm": True, "projectors_bias": True, "lm_head_multiplier": 0.5, "key_multiplier": 0.5},
    **{"attention_out_multiplier": 0.5, "attention_in_multiplier": 0.5, "ssm_in_multiplier": 0.5},
    **{"ssm_out_multiplier": 0.5, "mlp_multipliers": [1.0, 2.0], "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 2.0]},
    # of GPT-NeoX, GPT-2 and OPT
    **{"layer_norm_eps": 1e-4, "use_parallel_residual": False, "n_embd": 128, "n_layer": 3, "n_head": 2, "n_inner": 97},
    **{"n_positions": 513, "activation_function": "gelu", "scale_attn_weights": False, "add_cross_attention": True},
    **{"scale_attn_by_inverse_layer_idx": True, "ffn_dim": 97, "do_layer_norm_before": False, "enable_bias": False},
    **{
        "type_vocab_size": 3,
        "_remove_final_layer_norm": True,
        "word_embed_proj_dim": 32,
        "layer_norm_elementwise_affine": False,
    },
}
# Keys that say something only beside another one.
_BESIDE: dict[str, dict[str, Any]] = {
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 8},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
    "use_sliding_window": {"max_window_layers": 0, "sliding_window": 8},
    "learned_pos_emb": {"attn_config": {"alibi": False}},
}
_ROUTED_GEMMA = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
# Of SmolLM3 a window is where there is no rope, unless layer_types says otherwise.
_WINDOWED = {"use_sliding_window": True, "sliding_window": 8}
_BESIDE_OF: dict[str, dict[str, dict[str, Any]]] = {
    **{
        kind: {}
        for kind in (
            "gemma2",
            "vaultgemma",
            "gemma3_text",
            "gemma3n_text",
            "phi3",
            "gpt_oss",
            "olmo3",
            "exaone4",
            "exaone_moe",
        )
    },
    "dots1": {"sliding_window": {"max_window_layers": 1}},
    "gemma4_text": {
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), _ROUTED_GEMMA),
        "use_double_wide_mlp": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window_pattern": 2},
    },
    "gemma4_unified_text": {},
    "falcon_h1": {"mamba_norm_before_gate": {"mamba_rms_norm": True}, "mamba_expand": {"mamba_d_ssm": None}},
    "smollm3": {
        "sliding_window": {"use_sliding_window": True, "no_rope_layers": [1, 0]},
        "use_sliding_window": {"sliding_window": 8, "no_rope_layers": [1, 0]},
        "layer_types": _WINDOWED,
    },
}
_CHANGED_OF: dict[str, dict[str, Any]] = {
    **{
        key: {"norm_topk_prob": False, "routed_scaling_factor": 3.0} for key in ("deepseek_v3", "kimi_k2", "sarvam_mla")
    },
    **{key: {"norm_topk_prob": False} for key in ("glm4_moe_lite", "mistral4")},
    **{key: {"tie_word_embeddings": False} for key in ("youtu", "minicpm3")},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "norm_topk_prob": True},
    **{
        kind: {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 2} for kind in ("gemma2", "vaultgemma")
    },
    "gemma3_text": {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 2},
    "smollm3": {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 2},
    **{
        kind: {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 9}
        for kind in ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
    },
    **{kind: {"attention_bias": False} for kind in ("glm4", "glm")},
    "seed_oss": {"attention_bias": False},
    "olmo3": {"layer_types": ["full_attention"] * 2},
    "exaone4": {"layer_types": ["full_attention"] * 2, "sliding_window_pattern": 2},
    "gemma": {"tie_word_embeddings": False, "hidden_act": "relu"},
    "ernie4_5": {"tie_word_embeddings": False},
    "gpt_oss": {"attention_bias": False, "layer_types": ["full_attention"] * 2},
    "gpt_neox": {"attention_bias": False},
    **{kind: {"tie_word_embeddings": False} for kind in ("gpt2", "gpt-sw3", "opt", "mamba", "falcon_mamba")},
    **{kind: {"layer_types": ["full_attention"] * 2} for kind in ("qwen3_5_text", "qwen3_5_moe_text")},
    "qwen3_next": {"layer_types": ["full_attention"] * 2, "norm_topk_prob": False},
    "dots1": {"norm_topk_prob": True, "n_shared_experts": 2},
    "glm4_moe": {"norm_topk_prob": False, "n_shared_experts": 2},
    "glm4v_moe_text": {"norm_topk_prob": False, "n_shared_experts": 2, "attention_bias": False},
    "solar_open": {"norm_topk_prob": False, "n_shared_experts": 2},
    "sarvam_moe": {"norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": False},
    "exaone_moe": {"layer_types": ["full_attention"] * 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "ernie4_5_moe": {"tie_word_embeddings": False},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 2},
    "nemotron_h": {"n_shared_experts": 2, "norm_topk_prob": False},
    "lfm2": {"tie_word_embeddings": False, "layer_types": ["conv", "full_attention"], "intermediate_size": 960},
    "lfm2_moe": {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 2, "norm_topk_prob": False},
    "mimo_v2_flash": {"attention_value_scale": 0.5, "layer_types": ["full_attention"] * 2, "norm_topk_prob": False},
    **{kind: {"norm_topk_prob": True, "num_experts_per_tok": 1} for kind in ("olmoe", "flex_olmo")},
}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16},
}
_LATENT_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
_ENCODERS = ("bert", "roberta", "xlm-roberta")
_BASE_OF: dict[str, dict[str, Any]] = {
    **{kind: {"hidden_act": "gelu_new"} for kind in _ENCODERS},
    **{kind: {"head_dim": 64} for kind in ("glm4", "glm")},
    "gpt_neox": {"hidden_act": "gelu_new"},
    "opt": {"ffn_dim": 96},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.5]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 3},
    **{
        kind: {"n_routed_experts": 4, "num_experts_per_tok": 2}
        for kind in ("glm4_moe", "glm4v_moe_text", "solar_open", "sarvam_moe")
    },
    "mimo_v2_flash": {"n_routed_experts": 4, "num_experts_per_tok": 2, "v_head_dim": 16},
    "deepseek_v2": _LATENT | _LATENT_EXPERTS | {"head_dim": 8},
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "sarvam_mla", "glm4_moe_lite"), _LATENT | _LATENT_EXPERTS),
    "mistral4": _LATENT | _LATENT_EXPERTS,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
}
# Of every class, beside what these say themselves: any model may say it, and transformers' shared code reads it.
_SHARED = {"is_causal": False, "per_layer_config": {"0": {"head_dim": 8}}, "attention_chunk_size": 4}


_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text")  # tests/bundle/test_moe.py, test_wrapped.py
_DENSE = [kind for kind in MODEL_TYPES if kind not in _MIXTURES]


@pytest.mark.parametrize("kind", _DENSE)
def test_every_key_of_transformers_is_honoured_or_refused(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its classes list the keys")
    known = set(transformers.CONFIG_MAPPING[{"kimi_k2": "deepseek_v3"}.get(kind, kind)].__annotations__)
    base = {**(MPT if kind == "mpt" else HF), "model_type": kind, **_BASE_OF.get(kind, {})}
    known -= {"model_type", "keys_to_ignore_at_inference", "base_model_tp_plan", "base_model_pp_plan", *_HARMLESS}
    known -= {"sub_configs", "attribute_map", "attn_config", "default_theta"}
    known -= {"base_model_ep_plan", "router_aux_loss_coef", "output_router_logits"}  # of training, and of several ranks
    if kind == "deepseek_v2":
        known -= {"n_group", "topk_group"}  # read beside a topk_method that is refused
    # How many layers guess further tokens; in which dtype two sums are added; noise of training.
    known -= {"num_mtp_layers", "enable_moe_fp32_combine", "router_jitter_noise"}
    known -= {"original_max_position_embeddings", "embd_pdrop"}  # of Phi-3: read beside a scaling; a dropout
    if kind == "qwen3_next":
        known -= {"intermediate_size"}  # of layers without experts, which are refused beside those that have some
    if kind == "mamba2":
        known -= {"time_step_rank"}  # its steps have a column for each head
    if kind == "nemotron_h":
        known -= {"expand"}  # nobody reads it: heads and their size say how many channels there are
    if kind in _ENCODERS:
        known -= {"tie_word_embeddings"}  # of a head of masked-language models: the vectors of texts have none
        assert (_hf({"pad_token_id": 3}, base) != _hf({}, base)) == (kind != "bert"), "positions begin behind it"
    changed = _CHANGED | _CHANGED_OF.get(kind, {})
    assert known <= set(changed), "a new key: does it change the logits?"
    _hf({}, base)  # is read
    for key in known:
        if kind == "llama" and key in ("sliding_window", "layer_types"):
            continue
        value = False if (kind, key) == ("mpt", "tie_word_embeddings") else changed[key]
        beside = _BESIDE_OF.get(kind, _BESIDE).get(key, {})
        assert _is_honoured_or_refused({key: value}, {**base, **beside}), key
    for key, value in _SHARED.items():
        assert _is_honoured_or_refused({key: value}, base), key
    if kind == "mpt":
        inner = transformers.CONFIG_MAPPING["mpt"].sub_configs["attn_config"].__annotations__
        for key in set(inner) - _HARMLESS - {"base_config_key", "model_type"}:
            assert _is_honoured_or_refused({"attn_config": {key: _CHANGED[key]}}, base), key


def test_mpt_says_nothing_twice_and_differently() -> None:
    assert _hf({"norm_eps": 1e-3}, MPT)["norm_eps"] == 1e-3  # LLM Foundry's name
    assert _hf({"norm_eps": 1e-3, "layer_norm_epsilon": 1e-3, "hidden_size": 64}, MPT)["norm_eps"] == 1e-3
    for other in ({"norm_eps": 1e-3, "layer_norm_epsilon": 1e-4}, {"hidden_size": 32}, {"num_attention_heads": 2}):
        with pytest.raises(ConfigError, match=next(iter(other))):
            _hf(other, MPT)


def _ropes() -> list[dict[str, Any]]:
    """Old, new and mixed spellings: of theta, of the original context, of the kind, of the table and of two tables."""
    linear = {"type": "linear", "factor": 2.0}
    both = {"rope_type": "default", "type": "linear", "factor": 2.0}
    tables: list[dict[str, Any] | None] = [None, {}, linear, both, {**linear, "rope_theta": 3e4}]
    tables += [{**YARN, "rope_theta": 2e4}, {**YARN, "type": "linear"}, {**YARN, ORIGINAL: 64}, LLAMA3]
    tables += [{"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}]
    tables += [{**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, {**YARN, "attention_factor": 1.5}]
    tables += [{"rope_type": "default", "rope_theta": 7e4}]
    outside: list[dict[str, Any]] = [{}, {"rope_theta": 5e4}, {ORIGINAL: 96}]
    pairs = itertools.product(tables, tables, outside)
    return [{"rope_parameters": new, "rope_scaling": old, **beside} for new, old, beside in pairs]


def test_rope_is_read_as_transformers_reads_it() -> None:
    """Each spelling alone and beside each other one: the frequencies of transformers' own code, or a refusal."""
    transformers = pytest.importorskip("transformers", reason="its code computes what is expected")
    import copy

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    honoured = 0
    for rope in _ropes():
        try:
            ours = ModelConfig.of(_hf(rope))
        except (ConfigError, UnsupportedError):
            assert rope["rope_scaling"], rope  # what stands alone is never refused here
            continue
        theirs = transformers.LlamaConfig(**copy.deepcopy({**HF, **rope}))
        scaling = theirs.rope_parameters
        if scaling["rope_type"] == "default":
            expected, factor = scaling["rope_theta"] ** (-np.arange(0, 16, 2) / 16), 1.0
        else:
            inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")
            expected = inverse.double().numpy()
        mine, my_factor = frequencies(ours.rope)
        assert np.allclose(mine, expected, rtol=1e-5, atol=0), rope
        assert my_factor == pytest.approx(factor), rope
        honoured += 1
    assert honoured > 300


def test_theta_that_transformers_would_lose_is_refused() -> None:
    tables = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}
    with pytest.raises(ConfigError, match=r"config\.json: rope_parameters\.rope_theta: 1000000\.0 is not read beside"):
        _hf(tables)
    assert _hf({**tables, "rope_theta": 1e6})["rope_theta"] == 1e6


# --- GGUF ----------------------------------------------------------------------------------------------------------

METADATA: dict[str, Any] = {
    **{"general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 512},
    **{"llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.attention.head_count": 4},
    **{"llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5},
}


def _gguf(changes: dict[str, Any]) -> dict[str, Any]:
    return from_gguf(Path("m.gguf"), METADATA | changes, {"embed.weight": (50, 64)}, None)


def test_every_key_of_gguf_is_honoured_or_refused() -> None:
    """All keys of an architecture that the format's own package lists, at a value that is nobody's default."""
    constants = pytest.importorskip("gguf.constants", reason="it lists the keys")
    spelled = [value for group in vars(constants.Keys).values() for value in _strings(group) if "{arch}" in value]
    harmless = {"rope.scaling.finetuned", "rope.scaling.original_context_length"}  # the latter is YaRN's alone
    # The last says what vectors are made of: `weights/vectors.py` reads it, or refuses it, for every architecture.
    harmless |= {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "pooling_type"}
    assert len(spelled) > 80
    for key in spelled:
        field = key.removeprefix("{arch}.")
        if field in harmless:
            continue
        for value in (3, 0.375, "x", [3, 3]) if field != "attention.causal" else (False,):
            with contextlib.suppress(RooflineError):
                assert _gguf({f"llama.{field}": value}) != _gguf({}), (field, value)


def _strings(group: object) -> list[str]:
    inner = [v for k, v in vars(group).items() if not k.startswith("__")] if isinstance(group, type) else []
    return [v for v in inner if isinstance(v, str)] + [s for v in inner if isinstance(v, type) for s in _strings(v)]


@pytest.mark.parametrize("kind", [None, "none", "linear", "yarn"])
@pytest.mark.parametrize("factor", [None, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("legacy", [None, 1.0, 2.0])
@pytest.mark.parametrize("mixed", [None, -1.0, 0.0, 1.0])
def test_gguf_rope_is_read_as_llama_cpp_reads_it(
    kind: str | None, factor: float | None, legacy: float | None, mixed: float | None
) -> None:
    keys = {"scaling.type": kind, "scaling.factor": factor, "scale_linear": legacy, "scaling.yarn_ext_factor": mixed}
    changes = {f"llama.rope.{key}": value for key, value in keys.items() if value is not None}
    # llama.cpp: linear where no type is said; the older name only where the newer is absent; 0 divides by 1.
    divisor = (legacy if factor is None else factor) or 1.0
    type_ = kind or "linear"
    mixes = (type_ == "yarn") if mixed is None or mixed < 0 else bool(mixed)
    try:
        mine, mine_factor = frequencies(ModelConfig.of(_gguf(changes)).rope)
    except RooflineError:
        without_factor = kind in ("linear", "yarn") and not factor and not legacy
        assert without_factor or mixes != (type_ == "yarn") or (kind == "yarn" and factor == 0)
        return
    inverse = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    if type_ == "none":
        divisor = 1.0
    if not mixes:
        assert np.allclose(mine, inverse / divisor)
        assert mine_factor == 1
        return
    low, high = (16 * math.log(512 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 15)
    ramp = 1 - np.clip((np.arange(8) - low) / max(0.001, high - low), 0, 1)
    assert np.allclose(mine, inverse / divisor * (1 - ramp) + inverse * ramp)
    assert mine_factor == pytest.approx(1 + 0.1 * math.log(divisor))


def test_a_factor_without_a_type_is_linear() -> None:
    scaled = _gguf({"llama.rope.scaling.factor": 4.0})
    assert scaled == {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    yarn = _gguf({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "yarn"})
    assert yarn["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 512.0}


# --- every value of the wrong type ---------------------------------------------------------------------------------

WRONG: list[Any] = [None, True, False, "x", "", 7, -1, 1 << 70, 1e9, 0.5, math.nan, [], ["x"], [1], {}, {"x": 1}]
FULL: dict[str, dict[str, Any]] = {
    "llama": {
        **HF,
        **{"rope_theta": 1e4, "rope_scaling": YARN | {"truncate": True, "beta_fast": 32.0}, "head_dim": 16},
        **{"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "is_causal": True},
        **{"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
        **{"logits_scaling": 1.0, "partial_rotary_factor": 1, "num_local_experts": 0, "no_rope_layers": []},
    },
    "qwen3": {**HF, "model_type": "qwen3", "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "mpt": {**MPT, "attn_config": {"alibi": True, "alibi_bias_max": 8}, "no_bias": True, "expansion_ratio": 4},
    "mpt of llm foundry": {
        **{**MPT, "norm_type": "rmsnorm", "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 96}},
        "attn_config": {
            **{"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True, "rope_theta": 5e5},
            **{"alibi": False, "rope_impl": "hf", "rope_hf_config": {"type": "linear", "factor": 2.0}},
        },
    },
}
GGUF = METADATA | {
    **{"llama.attention.key_length": 16, "llama.rope.freq_base": 1e4, "llama.rope.scaling.type": "yarn"},
    **{"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 1.0, "split.count": 1},
    **{"llama.attention.causal": True, "llama.vocab_size": 50, "llama.expert_count": 0},
}


def _mutants(values: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Each key at each value of another type, and at numbers beyond all reason; also of the objects inside."""
    made = []
    for key, value in values.items():
        if isinstance(value, dict):
            made += [(inner, wrong, {**values, key: changed}) for inner, wrong, changed in _mutants(value)]
        kinds = [w for w in WRONG if type(w) is not type(value) or (isinstance(w, int | float) and abs(w) > 1e6)]
        made += [(key, wrong, {**values, key: wrong}) for wrong in kinds]
    return made


def _check(key: str, wrong: Any, load: Any, good: dict[str, Any], file: str) -> bool:
    """Whether a mutant was refused by file and key; those that load differ in what their type allows."""
    message = ""
    try:
        config = load()
        ModelConfig.of(config)
    except RooflineError as error:
        message = str(error)
    if message:
        assert file in message, (key, wrong, message)
        assert key in message, (key, wrong, message)
        return True
    is_number = isinstance(wrong, int | float) and not isinstance(wrong, bool)
    assert wrong is None or wrong in ({}, []) or is_number or config == good, (key, wrong)
    return False


@pytest.mark.parametrize("kind", FULL)
def test_wrong_types_in_config_json_are_named(kind: str) -> None:
    good, refused = _hf({}, FULL[kind]), 0
    for key, wrong, changed in _mutants(FULL[kind]):
        refused += _check(key, wrong, lambda changed=changed: _hf({}, changed), good, "config.json")
    assert refused > 60


def test_wrong_types_in_gguf_configurations_are_named() -> None:
    good, refused = _gguf(GGUF), 0
    for key, wrong, changed in _mutants(GGUF):
        if wrong is None or isinstance(wrong, dict):  # a GGUF file has neither
            continue
        whole = METADATA | changed
        refused += _check(key, wrong, lambda whole=whole: _gguf(whole), good, "m.gguf")
    assert refused > 100


# --- limits and defaults -------------------------------------------------------------------------------------------

LARGEST = {
    **{"width": 1 << 20, "ffn": 1 << 22, "vocab": 1 << 24, "max_position": 1 << 30},
    **{"layers": 1 << 14, "heads": 1 << 14, "kv_heads": 1 << 14, "head_dim": 1 << 14},
}


def _checked(**changes: Any) -> dict[str, Any]:
    return checked(Fields("config.json", {}), CONFIG | changes, {})


@pytest.mark.parametrize("key", LARGEST)
def test_sizes_are_from_1_to_the_largest(key: str) -> None:
    beside = {"heads": LARGEST["heads"]} if key == "kv_heads" else {"kv_heads": 1}
    learned = {"positions": "learned"}  # heads of one element
    for good in (1, LARGEST[key]):
        assert _checked(**learned | beside | {key: good})[key] == good
    for bad in (0, LARGEST[key] + 1):
        with pytest.raises(ConfigError, match=rf"{key}: .* is not from 1 to {LARGEST[key]}"):
            _checked(**beside | {key: bad})


def test_counts_and_widths_of_experts_are_within_their_limits() -> None:
    for size in (1, 1 << 22):
        assert expert_size(Fields("config.json", {"n": size}), "n") == size
    for size in (0, (1 << 22) + 1):
        with pytest.raises(ConfigError, match=rf"n: .* is not from 1 to {1 << 22}"):
            expert_size(Fields("config.json", {"n": size}), "n")
    for count, chosen in ((1, 1), (4, 4), (4096, 1), (4096, 256)):
        fields = Fields("config.json", {"num_experts": count, "num_experts_per_tok": chosen})
        assert hf_experts(fields, "num_experts") == {"experts": count, "experts_per_token": chosen}
    for count, chosen, said in (
        *((0, 1, "num_experts: .* from 1 to 4096"), (4097, 1, "num_experts: .* from 1 to 4096")),
        *((4, 0, "tok: .* from 1 to 4"), (4, 5, "tok: .* from 1 to 4"), (4096, 257, "tok: .* from 1 to 256")),
    ):
        with pytest.raises(ConfigError, match=said):
            hf_experts(Fields("config.json", {"num_experts": count, "num_experts_per_tok": chosen}), "num_experts")


def test_what_is_above_0_may_be_small() -> None:
    for key in ("norm_eps", "rope_theta"):
        assert _checked(**{key: 1e-30})[key] == 1e-30
        with pytest.raises(ConfigError, match=rf"{key}: 0\.0 is not above 0"):
            _checked(**{key: 0})
    assert _checked(sliding_window=1)["sliding_window"] == 1
    assert _checked(sliding_window=1 << 30)["sliding_window"] == 1 << 30
    for window in (0, (1 << 30) + 1):
        with pytest.raises(ConfigError, match=f"sliding_window: the number {window} is not from 1 to"):
            _checked(sliding_window=window)
    for head_dim in (13, 15):
        with pytest.raises(ConfigError, match=f"head_dim: {head_dim} is odd"):
            _checked(head_dim=head_dim)
    assert _checked(head_dim=14)["head_dim"] == 14


def test_yarn_needs_pairs_that_turn_apart() -> None:
    with pytest.raises(ConfigError, match="a theta of 1 turns all pairs alike"):
        ModelConfig.of(_hf({"rope_theta": 1.0, "rope_scaling": YARN}))
    assert ModelConfig.of(_hf({"rope_theta": 1.5, "rope_scaling": YARN})).rope_theta == 1.5


def test_llama3_needs_a_ramp() -> None:
    assert _hf({"rope_scaling": LLAMA3 | {"low_freq_factor": 3.9}})["rope_scaling"]["low_freq_factor"] == 3.9
    for low in (4.0, 5.0):
        with pytest.raises(ConfigError, match="high_freq_factor: is not above low_freq_factor"):
            _hf({"rope_scaling": LLAMA3 | {"low_freq_factor": low}})


# Values that say nothing, of the keys that say something at every other value.
NEUTRAL_HF: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "gelu")),
    **dict.fromkeys(("qkv_bias", "rope_interleaved", "use_qk_norm"), (False, True)),
    **dict.fromkeys(("attn_temperature_tuning", "is_encoder_decoder", "add_cross_attention"), (False, True)),
    "use_bidirectional_attention": (False, True),
    "is_causal": (True, False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0, 1.0)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (0, 1)),
    **dict.fromkeys(("partial_rotary_factor", "embedding_multiplier", "residual_multiplier"), (1.0, 2.0)),
    **dict.fromkeys(("logits_scaling", "logit_scale"), (1, 0)),
    "no_rope_layers": ([], [1]),
    "pruned_heads": ({}, {"0": [1]}),
}
NEUTRAL_GGUF: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1.0, 2.0)),
    "expert_used_count": (0, 1),
    "use_parallel_residual": (False, True),
    "attention.causal": (True, False),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0.0, 1.0)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0, 1.0)),
    "logit_scale": (1.0, 2.0),
    "tensor_data_layout": ("Meta AI original pth", "another"),
}


def test_neutral_values_say_nothing_and_others_are_refused() -> None:
    for key, (neutral, other) in NEUTRAL_HF.items():
        assert _hf({key: neutral}) == _hf({}), key
        with pytest.raises(UnsupportedError, match=key):
            _hf({key: other})
    for key, (neutral, other) in NEUTRAL_GGUF.items():
        assert _gguf({f"llama.{key}": neutral}) == CONFIG, key
        with pytest.raises(UnsupportedError, match=key):
            _gguf({f"llama.{key}": other})
    assert _gguf({"llama.logit_scale": 0.0}) == CONFIG
    for is_finetuned in (True, False):
        assert _gguf({"llama.rope.scaling.finetuned": is_finetuned}) == CONFIG
    for count in (0, 1, 3):  # the files of a split model are the reader's business
        assert _gguf({"split.count": count}) == CONFIG


def test_architectures_of_gguf_say_how_their_models_compute() -> None:
    expected = {
        "llama": ("llama", "interleaved", False, False),
        "qwen2": ("qwen", "half", True, False),
        "qwen3": ("qwen", "half", False, True),
    }
    for arch, said in expected.items():
        metadata = {key.replace("llama.", f"{arch}."): value for key, value in METADATA.items()}
        config = from_gguf(Path("m"), metadata | {"general.architecture": arch}, {"embed.weight": (50, 64)}, None)
        assert tuple(config[key] for key in ("family", "rope_style", "attention_bias", "qk_norm")) == said


def test_values_per_layer_are_one_for_each_and_alike() -> None:
    key = "llama.attention.head_count_kv"
    assert _gguf({key: [4], "llama.block_count": 1})["kv_heads"] == 4
    with pytest.raises(UnsupportedError, match="head_count_kv that differs between layers"):
        _gguf({key: [2, 4]})
    for values in ([2], [2, 2, 2]):
        with pytest.raises(ConfigError, match=f"head_count_kv: has {len(values)} values for 2 layers"):
            _gguf({key: values})


def test_a_model_may_have_one_head() -> None:
    one = {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1}
    assert _gguf(one)["head_dim"] == 64
    assert _hf({"num_attention_heads": 1, "num_key_value_heads": 1})["head_dim"] == 64
    with pytest.raises(ConfigError, match=r"num_attention_heads: the number 3 does not divide a width of 64"):
        _hf({"num_attention_heads": 3, "num_key_value_heads": 1})
    with pytest.raises(ConfigError, match=r"num_attention_heads: the number 0 does not divide"):
        _hf({"num_attention_heads": 0})
    with pytest.raises(ConfigError, match=r"attention\.head_count: the number 0 is not at least 1"):
        _gguf({"llama.attention.head_count": 0})


def test_defaults_of_config_json_are_those_of_transformers() -> None:
    small = {key: value for key, value in HF.items() if key != "rms_norm_eps"}
    config = from_hf(Path("config.json"), small)
    assert (config["norm_eps"], config["rope_theta"], config["tied"]) == (1e-6, 10000.0, False)
    assert (config["sliding_window"], config["attention_bias"], config["qk_norm"]) == (None, False, False)
    window = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert _hf(window | {"num_hidden_layers": 28})["sliding_window"] is None  # layers from the 28th on slide
    assert _hf(window | {"num_hidden_layers": 29})["layer_windows"] == [0] * 28 + [8]
    assert _hf(window | {"max_window_layers": 1})["layer_windows"] == [0, 8]
    assert _hf(window | {"max_window_layers": 0})["sliding_window"] == 8
    assert _hf(window | {"max_window_layers": 2})["sliding_window"] is None
    with pytest.raises(ConfigError, match="max_window_layers: the number -1 is below 0"):
        _hf(window | {"max_window_layers": -1})
    with pytest.raises(UnsupportedError, match="layer_types with sliding_attention"):  # layers that slide over nothing
        _hf({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2})


def test_layer_types_say_what_the_model_type_says() -> None:
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    assert _hf({"layer_types": full}) == _hf({})
    assert _hf({"model_type": "mistral", "sliding_window": 8, "layer_types": sliding})["sliding_window"] == 8
    assert _hf({"model_type": "mistral", "sliding_window": None, "layer_types": full})["sliding_window"] is None
    for changes in (
        {"layer_types": sliding},
        {"model_type": "mistral", "sliding_window": 8, "layer_types": full},
        {"model_type": "mistral", "sliding_window": None, "layer_types": sliding},
    ):
        with pytest.raises(UnsupportedError, match="layer_types"):
            _hf(changes)


def test_divisors_of_rope_are_compared_to_a_hundred_thousandth() -> None:
    """Llama 3.1's divisors are read back; those that differ by more than 1e-5 are refused as something else."""
    big = {"llama.attention.key_length": 64, "llama.rope.freq_base": 5e5}
    turns = 8192 / (2 * math.pi) * 5e5 ** (-np.arange(32) / 32)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    divisors = 1 / ((1 - smooth) / 8 + smooth)

    def scaling(values: np.ndarray) -> Any:
        config = from_gguf(Path("m"), METADATA | big, {"embed.weight": (50, 64)}, values.astype(np.float32))
        return config["rope_scaling"]

    expected = LLAMA3 | {ORIGINAL: 8192.0}
    assert scaling(divisors) == expected
    for place in (0, 31):  # the highest and the lowest frequency
        near, far = divisors.copy(), divisors.copy()
        near[place] *= 1 - 0.7e-5
        far[place] *= 1 - 1.5e-5
        assert scaling(near) == expected
        with pytest.raises(UnsupportedError, match="not those of Llama 3"):
            scaling(far)
    with pytest.raises(UnsupportedError, match="not those of Llama 3"):  # frequencies that grow
        scaling(np.linspace(0.5, 1, 32))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight: stands beside llama\.rope\.scaling\.factor"):
        from_gguf(Path("m"), METADATA | {"llama.rope.scaling.factor": 2.0}, {"embed.weight": (50, 64)}, np.ones(8))


@pytest.mark.parametrize(
    ("low", "high", "inside"), [(1.0, 4.0, 1), (3.0, 100.0, 3), (3.0, 30.0, 2), (3.0, 9.0, 1), (5.0, 12.0, 0)]
)
@pytest.mark.filterwarnings("error")
def test_a_ramp_is_found_from_its_divisors(low: float, high: float, inside: int) -> None:
    """Of 8 frequencies few lie on the ramp; where there are fewer than two, another may have the same divisors."""
    turns = 8192 / (2 * math.pi) * 1e4 ** (-np.arange(8) / 8)  # 4.12 and 1.30 of them are around low_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    assert np.sum((smooth > 0) & (smooth < 1)) == inside
    divisors = 1 / ((1 - smooth) / 8 + smooth)
    config = from_gguf(Path("m"), METADATA, {"embed.weight": (50, 64)}, divisors.astype(np.float32))
    scaling = config["rope_scaling"]
    rope = RopeTable.of(config["head_dim"], 1e4, "half", scaling)
    assert frequencies(rope)[0] == pytest.approx(1e4 ** (-np.arange(8) / 8) / divisors, rel=1e-5)
    if inside >= 2 or low == 1:
        assert scaling["low_freq_factor"] == pytest.approx(low, rel=1e-4)
        assert scaling["high_freq_factor"] == pytest.approx(high, rel=1e-4)
    assert scaling["factor"] == 8
