"""Files of architectures that there is no family for: what their keys say of them, as far as keys can say it.

A best effort for whoever wants to add the family: nothing that runs a model reads it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from roofline.common.fields import shorten
from roofline.common.json_files import read_config_json
from roofline.models.registry import file_kind
from roofline.ops import registry
from roofline.weights.config.wrapped import TEXT_CONFIG, text_fields
from roofline.weights.families.table import ARCHITECTURES, MODEL_TYPES
from roofline.weights.files.gguf import GGUFFile
from roofline.weights.files.mapped import JsonObject, map_file

# Keys of what every decoder has, and of files' housekeeping: they tell no architecture from another.
COMMON = re.compile(
    r"architectures|model_type|(torch_)?dtype|transformers_version|use_cache|auto_map|_name_or_path|.*_token_id|"
    r"initializer_range|attention_dropout|.*_dropout|.*_pdrop|pretraining_tp|output_\w+|return_dict|"
    r"vocab_size|hidden_size|num_hidden_layers|num_attention_heads|intermediate_size|max_position_embeddings|"
    r"block_count|embedding_length|feed_forward_length|context_length|attention\.head_count|tie_word_embeddings"
)
# Keys that each of our families' files have beside those, under Hugging Face's and GGUF's names.
_GATED = ("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "num_key_value_heads")
_GATED_GGUF: tuple[str, ...] = (
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
)
_GATED_GGUF += ("attention.key_length", "attention.value_length", "vocab_size", "rope.scaling.type")
_QWEN = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_MPT = ("d_model", "n_heads", "n_layers", "expansion_ratio", "max_seq_len", "attn_config", "no_bias", "norm_type")
_NEOX = ("rotary_pct", "rotary_emb_base", "use_parallel_residual", "hidden_dropout", "rope_parameters")
_LEARNED = ("layer_norm_epsilon", "activation_function", "n_ctx", "embd_pdrop", "attn_pdrop")
_BERT = ("type_vocab_size", "hidden_act", "layer_norm_eps", "position_embedding_type", "classifier_dropout")
_GEMMA = ("hidden_activation", "query_pre_attn_scalar", "sliding_window", "head_dim", *_GATED[1:])
_LAYER_INPUTS: tuple[str, ...] = (
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "num_kv_shared_layers",
    "layer_types",
)
_LAYER_INPUTS += ("hidden_activation", "head_dim", "sliding_window", "final_logit_softcapping", *_GATED[1:])
_LAYER_INPUTS_GGUF = ("embedding_length_per_layer_input", "attention.shared_kv_layers", "attention.sliding_window")
_EXPERTS: tuple[str, ...] = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
)
_EXPERTS += ("mlp_only_layers", "router_aux_loss_coef")
_EXPERTS_GGUF = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_HYBRID: tuple[str, ...] = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "head_dim")
_HYBRID += ("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval", "layer_types", *_GATED)
_HYBRID += ("partial_rotary_factor", "attention_bias", "attn_output_gate")
_HYBRID_GGUF = (*_GATED_GGUF[:6], "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank")
_HYBRID_GGUF += ("ssm.inner_size", "full_attention_interval")
_SCORED: tuple[str, ...] = (*_GATED, "head_dim", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
_SCORED += ("routed_scaling_factor", "n_routed_experts", "n_shared_experts", "n_group", "topk_group")
_SCORED_GGUF: tuple[str, ...] = (*_EXPERTS_GGUF, "expert_shared_count", "expert_gating_func", "expert_weights_norm")
_SCORED_GGUF += ("leading_dense_block_count", "expert_weights_scale", "expert_group_count", "expert_group_used_count")
_MULTIPLIED = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_BESIDE_ATTENTION = (
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_conv_bias",
)
_PERIODS = ("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset")
_SHORT = ("conv_L_cache", "conv_bias", "norm_eps", "layer_types", "rope_theta", "num_key_value_heads")
_SHORT_GGUF = (*_GATED_GGUF[:6], "shortconv.l_cache")
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias")
_DEEPSEEK: tuple[str, ...] = (*_GATED, *_EXPERTS[1:4], *_LATENT, "n_routed_experts", "n_shared_experts")
_DEEPSEEK += ("first_k_dense_replace", "topk_method", "routed_scaling_factor", "n_group", "topk_group")
_DEEPSEEK += ("scoring_func", "moe_layer_freq", "ep_size")
_LATENT_GGUF = (*_GATED_GGUF, "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla")
_LATENT_GGUF += ("attention.value_length_mla", "leading_dense_block_count", "expert_shared_count")
_SCANS: tuple[str, ...] = ("state_size", "conv_kernel", "expand", "use_bias", "use_conv_bias", "layer_norm_epsilon")
_SCANS += ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "hidden_act", "residual_in_fp32")
_SCANS_GGUF: tuple[str, ...] = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_SCANS_GGUF += ("attention.layer_norm_rms_epsilon",)
_HF_KEYS: dict[str, tuple[str, ...]] = {
    "llama": (*_GATED, "attention_bias", "mlp_bias", "head_dim"),
    "mistral": (*_GATED, "head_dim", "sliding_window"),
    **dict.fromkeys(("ministral", "cwm"), (*_GATED, "head_dim", "sliding_window", "layer_types")),
    **dict.fromkeys(("internlm3", "iquestcoder", "exaone"), (*_GATED, "head_dim", "attention_bias", "mlp_bias")),
    "qwen2": (*_GATED, *_QWEN),
    "qwen3": (*_GATED, *_QWEN, "attention_bias", "head_dim"),
    "gemma": (*_GATED, "hidden_activation", "head_dim", "attention_bias"),
    **dict.fromkeys(("gemma2", "vaultgemma"), (*_GEMMA, "attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3_text": (*_GEMMA, "rope_local_base_freq", "layer_types", "_sliding_window_pattern"),
    "gemma3n_text": (
        *(*_LAYER_INPUTS, "altup_active_idx", "altup_coef_clip", "altup_correct_scale", "altup_num_inputs"),
        *("laurel_rank", "activation_sparsity_pattern"),
    ),
    "gemma4_text": (
        *(*_LAYER_INPUTS, "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "enable_moe_block"),
        *("use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size"),
    ),
    "phi3": (*_GATED, "sliding_window", "original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop"),
    "olmo2": (*_GATED, "attention_bias"),
    "helium": (*_GATED, "attention_bias", "mlp_bias", "head_dim"),
    "seed_oss": (*_GATED, "attention_bias", "attention_out_bias", "mlp_bias", "head_dim"),
    "ernie4_5": (*_GATED, "use_bias", "head_dim"),
    "olmo3": (*_GATED, "attention_bias", "sliding_window", "layer_types"),
    "exaone4": (*_GATED, "sliding_window", "sliding_window_pattern", "layer_types", "head_dim"),
    "hunyuan_v1_dense": (*_GATED, "attention_bias", "head_dim", "use_qk_norm", "use_cla", "eod_token_id"),
    "smollm3": (*_GATED, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "layer_types"),
    "ministral3": (*_GATED, "head_dim", "sliding_window"),
    "arcee": (*_GATED, "attention_bias", "mlp_bias", "head_dim"),
    **dict.fromkeys(("glm4", "glm"), (*_GATED, "attention_bias", "head_dim", "partial_rotary_factor")),
    "mixtral": (*_GATED, "sliding_window", "num_local_experts", *_EXPERTS[1:2], *_EXPERTS[-1:], "router_jitter_noise"),
    "qwen2_moe": (*_GATED, *_QWEN, *_EXPERTS, "shared_expert_intermediate_size", "qkv_bias"),
    "qwen3_moe": (*_GATED, *_QWEN, *_EXPERTS, "attention_bias", "head_dim"),
    "gpt_oss": (
        *(*_GATED, "sliding_window", "layer_types", "attention_bias", "head_dim", "num_local_experts"),
        *("num_experts_per_tok", "swiglu_limit", "initial_context_length"),
    ),
    "deepseek_v2": (*_DEEPSEEK, "seq_aux", "aux_loss_alpha"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "sarvam_mla"), (*_DEEPSEEK, "num_nextn_predict_layers")),
    "glm4_moe_lite": (*_DEEPSEEK, "num_nextn_predict_layers", "mlp_layer_types", "partial_rotary_factor"),
    "mistral4": (*_DEEPSEEK, "rope_interleave", "head_dim"),
    "youtu": (*_GATED, *_LATENT, "rope_interleave"),
    "minicpm3": (*_GATED, *_LATENT, "scale_emb", "scale_depth", "dim_model_base"),
    "qwen3_next": (*_HYBRID, *_EXPERTS, "shared_expert_intermediate_size"),
    "qwen3_5_text": (*_HYBRID, "mamba_ssm_dtype", "mtp_num_hidden_layers"),
    "qwen3_5_moe_text": (
        *(*_HYBRID, *_EXPERTS[:3], "shared_expert_intermediate_size", "router_aux_loss_coef", "mamba_ssm_dtype"),
        "mtp_num_hidden_layers",
    ),
    "glm4_moe": (*_SCORED, "attention_bias", "use_qk_norm", "first_k_dense_replace", "partial_rotary_factor"),
    "glm4v_moe_text": (*_SCORED, "attention_bias", "first_k_dense_replace", "partial_rotary_factor"),
    "solar_open": (*_SCORED, "attention_bias"),
    "dots1": (*_SCORED, *_QWEN[2:], "sliding_window", "attention_bias", "first_k_dense_replace", "scoring_func"),
    "olmoe": (*_GATED, "attention_bias", "clip_qkv", *_EXPERTS[:2], "norm_topk_prob", "router_aux_loss_coef"),
    "minimax_m2": (
        *(*_GATED, "head_dim", "num_local_experts", "num_experts_per_tok", "rotary_dim", "use_qk_norm", "scoring_func"),
        *("use_routing_bias", "attn_type_list", "qk_norm_type", "shared_intermediate_size"),
    ),
    "ernie4_5_moe": (
        *(*_GATED, "use_bias", "moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_intermediate_size"),
        *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_norm_min"),
    ),
    "exaone_moe": (
        *(*_SCORED[:-4], "num_experts", "num_shared_experts", "sliding_window", "sliding_window_pattern"),
        *("layer_types", "mlp_layer_types", "first_k_dense_replace", "n_group", "topk_group"),
    ),
    "mimo_v2_flash": (
        *(
            *_SCORED[:-4],
            "n_routed_experts",
            "sliding_window",
            "layer_types",
            "mlp_layer_types",
            "attention_value_scale",
        ),
        *("v_head_dim", "hybrid_layer_pattern", "swa_num_key_value_heads", "moe_layer_freq", "attention_bias"),
    ),
    "hunyuan_v1_moe": (
        *(*_GATED, "attention_bias", "head_dim", "use_qk_norm", "use_cla", "eod_token_id", "num_experts", "moe_topk"),
        *("moe_intermediate_size", "num_shared_expert", "use_mixed_mlp_moe", "moe_layer_num_skipped"),
    ),
    "sarvam_moe": (
        *_SCORED,
        "use_qk_norm",
        "first_k_dense_replace",
        "num_shared_experts",
        "use_qkv_bias",
        "score_function",
    ),
    "flex_olmo": (*_GATED, "attention_bias", *_EXPERTS[:2], "norm_topk_prob", "router_aux_loss_coef"),
    "hy_v3": (
        *(*_GATED, "head_dim", "num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size"),
        *("router_scaling_factor", "mlp_layer_types", "enable_moe_fp32_combine", "attention_bias", "mlp_bias"),
    ),
    "granitemoe": (*_GATED, *_MULTIPLIED, "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"),
    "granitemoeshared": (
        *(*_GATED, *_MULTIPLIED, "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"),
        "shared_intermediate_size",
    ),
    "granitemoehybrid": (
        *(
            *_GATED,
            *_MULTIPLIED,
            *_BESIDE_ATTENTION,
            "num_local_experts",
            "num_experts_per_tok",
            "shared_intermediate_size",
        ),
        *("position_embedding_type", "layer_types", "mamba_expand"),
    ),
    "nemotron_h": (
        *("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        *("use_conv_bias", "mlp_hidden_act", "layer_norm_epsilon", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "routed_scaling_factor", "head_dim"),
    ),
    "falcon_h1": (
        *(*_GATED, *_BESIDE_ATTENTION, "mamba_d_ssm", "ssm_multipliers", "mlp_multipliers", "key_multiplier"),
        *("ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "lm_head_multiplier"),
    ),
    "jamba": (
        *(*_GATED[:2], "num_key_value_heads", *_PERIODS, "num_experts", "num_experts_per_tok", "router_aux_loss_coef"),
        *("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias"),
    ),
    "bamba": (
        *(*_GATED, *_BESIDE_ATTENTION, "mamba_expand", "mamba_proj_bias", "attn_layer_indices", "attn_rotary_emb"),
        *("partial_rotary_factor", "time_step_limit", "attention_bias", "mlp_bias"),
    ),
    "lfm2": (*_SHORT, "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "full_attn_idxs"),
    "lfm2_moe": (*_SHORT, *_EXPERTS[:4], "num_dense_layers", "use_expert_bias", "routed_scaling_factor"),
    "mamba": _SCANS,
    "falcon_mamba": (*_SCANS, "mixer_rms_eps"),
    "mamba2": (*_SCANS, "num_heads", "head_dim", "n_groups", "chunk_size", "time_step_limit"),
    "gpt_neox": (*_NEOX, "layer_norm_eps", "attention_bias", "hidden_act"),
    "gpt2": ("n_embd", "n_head", "n_layer", "n_positions", "n_inner", *_LEARNED, "scale_attn_weights"),
    "opt": ("ffn_dim", "do_layer_norm_before", "word_embed_proj_dim", "enable_bias", "activation_function"),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT),
    "mpt": (*_MPT, "learned_pos_emb", "emb_pdrop", "resid_pdrop", "ffn_config", "init_config", "logit_scale"),
}
_GGUF_KEYS: dict[str, tuple[str, ...]] = {
    "llama": _GATED_GGUF,
    "qwen2": _GATED_GGUF[:4],
    "qwen3": _GATED_GGUF[:6],
    "gptneox": ("attention.layer_norm_epsilon", "rope.dimension_count", "use_parallel_residual"),
    "gpt2": ("attention.layer_norm_epsilon",),
    "bert": ("attention.layer_norm_epsilon", "attention.causal", "pooling_type"),
    "qwen2moe": (*_GATED_GGUF[:4], *_EXPERTS_GGUF, "expert_shared_feed_forward_length"),
    "qwen3moe": (*_GATED_GGUF[:6], *_EXPERTS_GGUF),
    "gpt-oss": (*_GATED_GGUF[:6], *_EXPERTS_GGUF, "attention.sliding_window"),
    "deepseek2": (*_LATENT_GGUF, *_EXPERTS_GGUF, "expert_weights_scale", "expert_gating_func"),
    "mistral4": (*_LATENT_GGUF, *_EXPERTS_GGUF, "attention.temperature_scale"),
    "minicpm3": _LATENT_GGUF[: len(_GATED_GGUF) + 2],
    "olmo2": (*_GATED_GGUF[:4], "attention.sliding_window", "attention.sliding_window_pattern"),
    "gemma3n": (
        *(*_GATED_GGUF[:6], *_LAYER_INPUTS_GGUF, "altup.active_idx", "altup.num_inputs", "activation_sparsity_scale"),
        *("attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping"),
    ),
    "gemma4": (
        *(*_GATED_GGUF[:6], *_LAYER_INPUTS_GGUF, "attention.key_length_swa", "attention.value_length_swa"),
        *("attention.sliding_window_pattern", "rope.freq_base_swa", "rope.dimension_count_swa"),
        "final_logit_softcapping",
    ),
    "exaone": _GATED_GGUF[:7],
    "exaone4": (*_GATED_GGUF[:7], "attention.sliding_window", "attention.sliding_window_pattern"),
    "glm4moe": (*_GATED_GGUF[:6], *_SCORED_GGUF, "nextn_predict_layers"),
    "dots1": (*_GATED_GGUF[:4], *_SCORED_GGUF),
    "olmoe": (*_GATED_GGUF[:6], *_EXPERTS_GGUF[:2]),
    "mimo2": (
        *(*_GATED_GGUF[:6], *_EXPERTS_GGUF, "attention.sliding_window", "attention.sliding_window_pattern"),
        *("attention.value_scale", "attention.value_length", "rope.freq_base_swa", "rope.dimension_count"),
    ),
    "minimax-m2": (*_GATED_GGUF[:6], *_EXPERTS_GGUF, "expert_gating_func"),
    "ernie4_5-moe": (
        *(*_GATED_GGUF[:4], *_EXPERTS_GGUF, "expert_shared_count", "expert_shared_feed_forward_length"),
        *("interleave_moe_layer_step", "leading_dense_block_count"),
    ),
    "hy_v3": (*_GATED_GGUF[:7], *_SCORED_GGUF, "expert_shared_feed_forward_length"),
    "bailingmoe2": (*_GATED_GGUF[:7], *_SCORED_GGUF, "expert_shared_feed_forward_length", "nextn_predict_layers"),
    "hunyuan-moe": (*_GATED_GGUF[:7], *_EXPERTS_GGUF, "expert_shared_count", "expert_shared_feed_forward_length"),
    "exaone-moe": (
        *(*_GATED_GGUF[:7], *_SCORED_GGUF, "expert_shared_feed_forward_length", "nextn_predict_layers"),
        *("attention.sliding_window", "attention.sliding_window_pattern"),
    ),
    "mamba": (*_SCANS_GGUF, "ssm.dt_b_c_rms"),
    "mamba2": (*_SCANS_GGUF, "ssm.group_count"),
    "qwen3next": (*_HYBRID_GGUF, *_EXPERTS_GGUF, "expert_shared_feed_forward_length"),
    "qwen35": (*_HYBRID_GGUF, "rope.dimension_sections"),
    "granitemoe": (
        *(*_GATED_GGUF[:4], *_EXPERTS_GGUF[:2], "embedding_scale", "residual_scale", "attention.scale", "logit_scale"),
        "expert_shared_feed_forward_length",
    ),
    "granitehybrid": (
        *(*_GATED_GGUF[:4], *_HYBRID_GGUF[6:11], *_EXPERTS_GGUF[:2], "embedding_scale", "residual_scale"),
        *("attention.scale", "logit_scale", "expert_shared_feed_forward_length", "rope.scaling.finetuned"),
    ),
    "nemotron_h": (*_GATED_GGUF[:2], *_HYBRID_GGUF[6:11], *_GATED_GGUF[4:6], "attention.layer_norm_epsilon"),
    "nemotron_h_moe": (
        *(*_GATED_GGUF[:2], *_HYBRID_GGUF[6:11], *_GATED_GGUF[4:6], "attention.layer_norm_epsilon", *_EXPERTS_GGUF),
        *("expert_weights_scale", "expert_weights_norm", "moe_latent_size"),
    ),
    "falcon-h1": (*_GATED_GGUF[:6], *_HYBRID_GGUF[6:11]),
    "jamba": (*_GATED_GGUF[:2], *_SCANS_GGUF, *_EXPERTS_GGUF[:2]),
    "lfm2": _SHORT_GGUF,
    "lfm2moe": (*_SHORT_GGUF, *_EXPERTS_GGUF, "leading_dense_block_count", "expert_gating_func"),
    "qwen35moe": (*_HYBRID_GGUF, *_EXPERTS_GGUF, "expert_shared_feed_forward_length", "rope.dimension_sections"),
}
# What a key, or a key and its value, says the model computes -> the ops of ours that compute it.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"(num|n)_(local_|routed_)?experts(_per_tok)?|moe_\w+|\w*router\w*|expert_\w+",
        ("route", "expert_linear", "combine"),
    ),
    (r"rms_norm_eps|attention\.layer_norm_rms_epsilon", ("rms_norm",)),
    (r"layer_norm_eps(ilon)?|norm_epsilon|attention\.layer_norm_epsilon", ("layer_norm",)),
    (r"rope_\w+|rope\.\w+|rotary_\w+|partial_rotary_factor|local_rope_theta", ("rope",)),
    (r"(hidden_act(ivation)?|activation_function)=\w*gelu\w*", ("gelu_mul", "gelu")),
    (r"(hidden_act(ivation)?|activation_function)=(silu|swish)", ("silu_mul", "silu")),
    (r"(hidden_act(ivation)?|activation_function)=relu2?", ("relu",)),
    (r"num_key_value_heads|attention\.head_count_kv|multi_query|n_head_kv", ("attend",)),
    (r"sliding_window\w*|layer_types|attention\.sliding_window\w*|global_attn_every_n_layers", ("attend",)),
    (r"type_vocab_size|attention\.causal|attn_logit_softcapping|alibi\w*|attention\.max_alibi_bias", ("attend",)),
    (r"(q|kv)_lora_rank|qk_(rope|nope)_head_dim|attention\.(q|kv)_lora_rank", ("cut_heads", "join_heads")),
    (r"attention\.temperature_\w+|attn_temperature_tuning|floor_scale|attn_scale", ("scale_by_position",)),
    (r"n_group|topk_group|routed_scaling_factor|scoring_func|topk_method", ("route",)),
    (r"linear_(num_)?(key|value)_head\w*|linear_conv_kernel_dim", ("causal_conv", "delta_rule")),
    (r"conv_L_cache|shortconv\.l_cache", ("causal_conv", "mul")),
    (r"ssm\.\w+|ssm_\w+|mamba_\w+|state_size|d_conv|conv_kernel\w*|time_step_\w+", ("causal_conv", "selective_scan")),
    (r"attn_output_gate", ("sigmoid_mul",)),
    (r"final_logit_softcapping", ("soft_cap",)),
    (r"use_qk_norm|qk_layernorm|qk_norm", ("rms_norm",)),
    (r"\w*(embedding|residual|attention)_multiplier|logits?_scal\w+|embedding_scale|residual_scale", ("scale",)),
    (r"n_positions|position_embedding_type|learned_pos_emb", ("embed",)),
)
# What no op of ours computes, whatever its name may be one day.
_LACKING: tuple[tuple[str, str], ...] = (
    (r"wkv\.\w+|rwkv\w*", "linear attention"),
    (r"is_encoder_decoder|encoder_layers|decoder_layers|num_decoder_layers|relative_attention_\w+", "an encoder"),
    (r"vision_\w+|image_\w+|audio_\w+|mm_\w+|text_config", "images, or sound, beside text"),
)

CLIP = "clip"  # the architecture of a file that has what turns pictures into rows for a text model: no model of its own
LEAST_LIKENESS = 0.2  # share of all keys of two that both have, below which they are not near


@dataclass(frozen=True)
class Unfamiliar:
    """What can be said of a file whose architecture we do not have.

    key: "model_type" or "general.architecture"; name: its value; nearest: of ours, by the keys they share, "" where
    they share next to none; new_keys: those that no file of the nearest has, with their values; ops: of ours that its
    keys ask for -> these keys; lacking: what they ask for and no op of ours does -> these keys.
    """

    path: str
    key: str
    name: str
    nearest: str
    new_keys: Mapping[str, str]
    ops: Mapping[str, tuple[str, ...]]
    lacking: Mapping[str, tuple[str, ...]]


def unfamiliar(path: Path) -> Unfamiliar | None:
    """What can be said of a config.json, a folder that holds one, or a GGUF file; None for an architecture that we
    have, and for what is no such file. Raises ConfigError for a damaged one."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return None
    if file.suffix == ".json":
        config = text_fields(file, read_config_json(file)).values
        name = config.get("model_type")
        if not isinstance(name, str) or name in MODEL_TYPES or file_kind("hf", name):
            return None
        return _describe(file, "model_type", name, _with_text_keys(config), _HF_KEYS)
    if file.suffix != ".gguf" and map_file(file)[:4] != b"GGUF":
        return None
    metadata = GGUFFile(file).metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name in (*ARCHITECTURES, CLIP) or file_kind("gguf", name):
        return None
    family_values = {
        key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
    }
    return _describe(file, "general.architecture", name, family_values, _GGUF_KEYS)


def how_to_add(config: JsonObject, is_gguf: bool = False) -> str:
    """What an error says behind that there is no model: the nearest of ours, and the page on adding one. config: of a
    config.json, or the keys of an architecture without its name before them."""
    nearest = _nearest(_telling(_with_text_keys(config)), _GGUF_KEYS if is_gguf else _HF_KEYS)
    near = f"its keys are most like those of {nearest}; " if nearest else ""
    return f"; {near}docs/how-to/add-a-family.md adds one"


def _with_text_keys(config: JsonObject) -> JsonObject:
    """A config.json with the keys of its text part, which it may have inside, beside its own."""
    text = config.get(TEXT_CONFIG)
    return {**text, **config} if isinstance(text, Mapping) else config


def _telling(config: JsonObject) -> list[str]:
    """The keys that have a value and tell one architecture from another."""
    return [key for key, value in config.items() if value is not None and not COMMON.fullmatch(key)]


def _nearest(keys: list[str], families: Mapping[str, tuple[str, ...]]) -> str:
    nearest = max(families, key=lambda family: _likeness(keys, families[family]))
    return nearest if _likeness(keys, families[nearest]) >= LEAST_LIKENESS else ""


def _describe(
    file: Path, key: str, name: str, config: JsonObject, families: Mapping[str, tuple[str, ...]]
) -> Unfamiliar:
    keys = _telling(config)
    nearest = _nearest(keys, families)
    new = {shorten(k): shorten(str(config[k])) for k in keys if k not in families.get(nearest, ())}
    ops: dict[str, tuple[str, ...]] = {}
    lacking: dict[str, tuple[str, ...]] = {}
    for k in (k for k in keys if config[k] not in (False, 0, [], {})):
        computed = [
            (op, op in registry.names()) for pattern, names in _SIGNS if _says(pattern, k, config[k]) for op in names
        ]
        computed += [(what, False) for pattern, what in _LACKING if _says(pattern, k, config[k])]
        for what, exists in computed:
            into = ops if exists else lacking
            into[what] = (*into.get(what, ()), shorten(k))
    return Unfamiliar(
        path=str(file), key=key, name=shorten(name), nearest=nearest, new_keys=new, ops=ops, lacking=lacking
    )


def _says(pattern: str, key: str, value: object) -> bool:
    """Whether a pattern of `_SIGNS` or `_LACKING` is that of a key, or of "key=value"."""
    return re.match(f"(?:{pattern})(?:=|$)", f"{key}={value}") is not None


def _likeness(keys: Iterable[str], family: tuple[str, ...]) -> float:
    """The share of all keys of the two that both have."""
    ours, theirs = set(family), set(keys)
    return len(ours & theirs) / max(1, len(ours | theirs))
