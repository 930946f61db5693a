"""Files of Qwen3.5 (text), with an MLP or with experts.

Hugging Face's norms lack the 1 that their weights are added to, but for the one behind gated DeltaNet; GGUF's converter
has added it. Files may have a layer that guesses further tokens, `mtp`, whose block attends.
"""

from collections.abc import Mapping
from dataclasses import replace

from roofline.common.fields import Fields, describe
from roofline.weights.families.qwen import MROPE
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    EACH_EXPERT,
    EXPERTS,
    HONOURED_GGUF,
    ROUTED_BESIDE_SHARED,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.tensor_names import ATTENTION, GUESSING, MLP, QK_NORMS, TensorNames

LAYER = (
    ATTENTION
    | QK_NORMS
    | MLP
    | EXPERTS
    | EACH_EXPERT
    | ROUTED_BESIDE_SHARED
    | GUESSING
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "mlp_norm": ("post_attention_norm", "post_attention_layernorm"),
        "linear.qkv": ("attn_qkv", "linear_attn.in_proj_qkv"),
        "linear.z": ("attn_gate", "linear_attn.in_proj_z"),
        "linear.b": ("ssm_beta", "linear_attn.in_proj_b"),
        "linear.a": ("ssm_alpha", "linear_attn.in_proj_a"),
        "linear.conv": ("ssm_conv1d", "linear_attn.conv1d"),
        "linear.norm": ("ssm_norm", "linear_attn.norm"),
        "linear.o": ("ssm_out", "linear_attn.out_proj"),
    }
)
BARE = {
    "linear.a_log.weight": ("ssm_a", "linear_attn.A_log"),
    "linear.dt_bias.weight": ("ssm_dt.bias", "linear_attn.dt_bias"),
}
NAMES = TensorNames(
    LAYER,
    bare=BARE,
    norms_less=1.0,
    norms_alike=("linear.norm",),
    parted=("linear.conv",),
    hf_guessing="mtp",
    hf_guessing_key="mtp_num_hidden_layers",
    hf_apart=stacked_experts_apart,
    gguf_negated=("linear.a_log",),
    gguf_tiles=True,
)
_LINEAR: dict[str, tuple[str, int]] = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
_KINDS = ("full_attention", "linear_attention")
_INTERVAL = 4  # of so many layers the last one attends
_FACTOR = 0.25  # of each head, which rope turns
_HONOURED = ("attention_bias", "num_experts", "partial_rotary_factor")
_DENSE, _EXPERTS = "qwen3_5_text", "qwen3_5_moe_text"
_DEFAULTS: dict[str, Mapping[str, object]] = {
    _DENSE: {
        **{"vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768},
    },
    _EXPERTS: {
        **{"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "max_position_embeddings": 32_768, "moe_intermediate_size": 512},
        **{"shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256},
    },
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. attn_output_gate and mamba_ssm_dtype are of other programs: transformers' model has
    the gate, and its states are float32. Whether there is a layer that guesses the tensors say, not its count here."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS[model_type])
    # Files of before, or of others; transformers reads neither, and its weights always add up to 1.
    refuse_unless_neutral(fields, {"attn_output_gate": (True,), "norm_topk_prob": (True,)})
    fields.get("mamba_ssm_dtype", str)
    fields.get("mtp_num_hidden_layers", int)
    ours = hybrid(fields, "qwen3_5", experts=model_type == _EXPERTS)
    return checked(fields, ours, hf_fields.SPELLED | ({"ffn": "moe_intermediate_size"} if ours.get("experts") else {}))


def hybrid(fields: Fields, family: str, experts: bool) -> Config:
    """The canonical configuration as far as Qwen3-Next and Qwen3.5 have the same fields; experts: the MLPs are those of
    experts."""
    hf_fields.refuse_features(fields, _HONOURED)
    if experts:  # which say nothing of an MLP
        fields = fields.changed({"intermediate_size": fields.need("moe_intermediate_size", int)})
    ours = hf_fields.sizes(fields, family)
    ours |= {"kv_heads": hf_fields.kv_heads(fields), "head_dim": hf_fields.head_dim(fields, 256)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": True, "sliding_window": None}
    hf_fields.biases(fields, ours)
    if experts:
        expert_size(fields, "moe_intermediate_size")
        ours |= hf_experts(fields, "num_experts") | {"renormalise": True}
        ours["shared_ffn"] = expert_size(fields, "shared_expert_intermediate_size")
    ours |= {name: _size(fields, key, default) for name, (key, default) in _LINEAR.items()}
    if ours["value_heads"] % ours["key_heads"]:
        fields.refuse("linear_num_value_heads", f"is no multiple of the {ours['key_heads']} heads of keys")
    ours["recurrent"] = _recurrent(fields, ours["layers"])
    ours |= hf_fields.turned_part(fields, ours["head_dim"], _FACTOR)
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields, partial=True, honoured=MROPE)
    return ours


def _size(fields: Fields, key: str, default: int) -> int:
    value = fields.get(key, int, default)
    if not 1 <= value <= 1 << 14:
        fields.refuse(key, f"{describe(value)} is not from 1 to {1 << 14}")
    return value


def _recurrent(fields: Fields, layers: int) -> list[bool]:
    """Of each layer whether it keeps state, as layer_types or full_attention_interval says."""
    types = hf_fields.layer_types(fields, _KINDS)
    interval = fields.get("full_attention_interval", int, _INTERVAL)
    if interval < 1:
        fields.refuse("full_attention_interval", f"{describe(interval)} is not at least 1")
    if types is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    return [kind == "linear_attention" for kind in types]


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    kind, name = (_EXPERTS, "Qwen3_5Moe") if config.get("experts") else (_DENSE, "Qwen3_5")
    return hybrid_to_hf(config, kind, name)


def hybrid_to_hf(config: Config, kind: str, name: str) -> Config:
    """The inverse of `hybrid`."""
    fields = hf_fields.to_hf(config, kind, name)
    fields |= {"attention_bias": config["attention_bias"]}
    fields |= {key: config.get(ours, default) for ours, (key, default) in _LINEAR.items()}
    fields["layer_types"] = [_KINDS[recurrent] for recurrent in config["recurrent"]]
    fields.setdefault("partial_rotary_factor", 1.0)
    fields["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    if config.get("experts"):
        del fields["intermediate_size"]
        fields |= {
            "moe_intermediate_size": config["ffn"],
            "shared_expert_intermediate_size": config["shared_ffn"],
            "num_experts": config["experts"],
            "num_experts_per_tok": config["experts_per_token"],
        }
    return fields


_GGUF_LINEAR = {
    "ssm.conv_kernel": "taps",
    "ssm.state_size": "key_dim",
    "ssm.group_count": "key_heads",
    "ssm.time_step_rank": "value_heads",
}
_SHARED, _EACH = "expert_shared_feed_forward_length", "expert_feed_forward_length"
_GGUF_HONOURED = {
    *(*HONOURED_GGUF, *_GGUF_LINEAR, _SHARED, _EACH, "ssm.inner_size", "attention.recurrent_layers"),
    # The last two: which frequencies are of which dimension of a position, which of text are alike, and layers that
    # guess further tokens.
    *("full_attention_interval", "rope.dimension_count", "rope.dimension_sections", "nextn_predict_layers"),
}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    return hybrid_from_gguf(model, "qwen3_5", architecture == "qwen35moe")


def hybrid_from_gguf(model: gguf_fields.GgufModel, family: str, experts: bool) -> Config:
    """The canonical configuration as far as the architectures agree. Files do not say that the weights of experts add
    up to 1: those of all released models do."""
    fields = model.fields
    further = fields.get("nextn_predict_layers", int, 0)
    layers = fields.need("block_count", int) - further
    changes: Config = {"block_count": layers}
    if experts and "feed_forward_length" not in fields.values:  # whose models have no other MLP
        changes["feed_forward_length"] = fields.need(_EACH, int)
    model = replace(model, fields=fields.changed(changes))
    config = gguf_fields.read(model, family, "half", _GGUF_HONOURED)
    biases = {"q", "k", "v", "o"} & {name.split(".")[3] for name in model.shapes if name.endswith(".bias")}
    config |= {"qk_norm": True, "attention_bias": bool(biases), **({"output_bias": True} if "o" in biases else {})}
    if experts:
        config |= gguf_experts(fields) | {"ffn": expert_size(fields, _EACH), "renormalise": True}
        config["shared_ffn"] = expert_size(fields, _SHARED)
    config |= {name: _size(fields, key, fields.need(key, int)) for key, name in _GGUF_LINEAR.items()}
    inner = _size(fields, "ssm.inner_size", fields.need("ssm.inner_size", int))
    if inner % config["value_heads"] or config["value_heads"] % config["key_heads"]:
        fields.refuse("ssm.time_step_rank", f"is no multiple of ssm.group_count, or does not divide {inner} values")
    config["value_dim"] = inner // config["value_heads"]
    config["tiled"] = NAMES.gguf_tiles and family == "qwen3_5" and config["value_heads"] != config["key_heads"]
    config["recurrent"] = _gguf_recurrent(fields, layers)
    return config


def _gguf_recurrent(fields: Fields, layers: int) -> list[bool]:
    kinds = fields.elements("attention.recurrent_layers", bool)
    if kinds is None:
        interval = fields.get("full_attention_interval", int, _INTERVAL)
        if interval < 1:
            fields.refuse("full_attention_interval", f"{describe(interval)} is not at least 1")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(kinds) < layers:
        fields.refuse("attention.recurrent_layers", f"has {len(kinds)} values for {layers} layers")
    return kinds[:layers]


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """What llama.cpp reads besides."""
    architecture = "qwen35moe" if config.get("experts") else "qwen35"
    return hybrid_to_gguf(config, architecture, {"rope.dimension_sections": [11, 11, 10, 0]})


def hybrid_to_gguf(config: Config, architecture: str, keys: Config) -> gguf_fields.GgufForm:
    """The inverse of `hybrid_from_gguf`. Raises UnsupportedError for what such files cannot say."""
    unsaid = {"values of another width than keys": config["key_dim"] != config["value_dim"]}
    unscaled = config.get("experts") and not config.get("renormalise", True)
    gguf_fields.refuse_unsaid(config, unsaid | {"weights of experts that do not add up to 1": unscaled})
    keys = keys | {key: config[name] for key, name in _GGUF_LINEAR.items()} | gguf_fields.turned_part(config)
    keys |= {"ssm.inner_size": config["value_heads"] * config["value_dim"]}
    recurrent = list(config["recurrent"])
    intervals = (
        n for n in range(1, len(recurrent) + 2) if recurrent == [(i + 1) % n != 0 for i in range(len(recurrent))]
    )
    interval = next(intervals, None)
    keys |= {"full_attention_interval": interval} if interval else {"attention.recurrent_layers": recurrent}
    if config.get("experts"):
        keys |= experts_to_gguf(config) | {_EACH: config["ffn"], _SHARED: config["shared_ffn"]}
    return gguf_fields.GgufForm(architecture, "half", keys)
