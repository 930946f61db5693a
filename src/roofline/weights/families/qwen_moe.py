"""Files of Qwen2-MoE (biases on q, k, v; a shared expert) and of Qwen3-MoE (norms of q and k), and of the text part of
Qwen3-VL-MoE, which is the latter (see `qwen`)."""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields
from roofline.weights.families.qwen import MROPE
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    EACH_EXPERT,
    EXPERTS,
    HONOURED_GGUF,
    ROUTED_BESIDE_SHARED,
    TAKEN_FOR_EXPERTS,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.joined_experts import stacked_experts_apart
from roofline.weights.families.shared.tensor_names import ATTENTION, NORMS, QK_NORMS, TensorNames

NAMES = TensorNames(
    NORMS | ATTENTION | QK_NORMS | EXPERTS | EACH_EXPERT | ROUTED_BESIDE_SHARED,
    hf_apart=stacked_experts_apart,
    as_parameters=TAKEN_FOR_EXPERTS,
)
_VISION_DEFAULTS = {
    **{"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128_000},
    **{"moe_intermediate_size": 1408, "num_experts_per_tok": 4},
}
_ALIKE: dict[str, tuple[object, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    second, vision = model_type == "qwen2_moe", model_type == "qwen3_vl_moe_text"
    if vision:
        fields = hf_fields.with_defaults(fields, _VISION_DEFAULTS)
    honoured = ("num_experts", "num_local_experts", *(("qkv_bias",) if second else ()))
    hf_fields.refuse_features(fields, honoured)
    refuse_unless_neutral(fields, {**_ALIKE, "use_sliding_window": (False,)})
    if set(hf_fields.layer_types(fields) or ()) - {"full_attention"}:
        raise UnsupportedError(f"{fields.path}: layer_types", "no released model of this type has windows")
    ours = hf_fields.sizes(fields, "qwen_moe")
    ours["ffn"] = expert_size(fields, "moe_intermediate_size")
    ours["kv_heads"] = hf_fields.kv_heads(fields, heads_by_default=vision)
    ours["head_dim"] = hf_fields.head_dim(fields)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": second and fields.get("qkv_bias", bool, True), "qk_norm": not second}
    ours |= hf_experts(fields, "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts")
    ours["renormalise"] = vision or fields.get("norm_topk_prob", bool, False)  # a file of the former has no such key
    if second:
        ours["shared_ffn"] = expert_size(fields, "shared_expert_intermediate_size")
    ours["sliding_window"] = None
    theta, neutral = (5e5, MROPE) if vision else (1e4, ())
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields, theta, honoured=neutral)
    return checked(fields, ours, hf_fields.SPELLED | {"ffn": "moe_intermediate_size"})


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    third = config["qk_norm"]
    kind, name = ("qwen3_moe", "Qwen3Moe") if third else ("qwen2_moe", "Qwen2Moe")
    experts = {
        "moe_intermediate_size": config["ffn"],
        "num_experts": config["experts"],
        "num_experts_per_tok": config["experts_per_token"],
        "norm_topk_prob": config["renormalise"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    shared = {"shared_expert_intermediate_size": config.get("shared_ffn", 0), "qkv_bias": config["attention_bias"]}
    return hf_fields.to_hf(config, kind, name) | experts | ({} if third else shared)


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. Files do not say whether weights are made to add up to 1: those of Qwen3-MoE are,
    those of Qwen2-MoE are not, in all released models."""
    second, fields = architecture == "qwen2moe", model.fields
    shared = "expert_shared_feed_forward_length"
    own = (shared,) if second else gguf_fields.VISION if architecture == "qwen3vlmoe" else ()
    honoured = (*HONOURED_GGUF, "expert_feed_forward_length", *own)
    config = gguf_fields.read(model, "qwen_moe", "half", honoured) | gguf_experts(fields)
    config["ffn"] = expert_size(fields, "expert_feed_forward_length")
    config |= {"attention_bias": second, "qk_norm": not second, "renormalise": not second}
    return config | ({"shared_ffn": expert_size(fields, shared)} if second else {})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Whether weights are made to add up to 1 is part of the architecture."""
    keys = experts_to_gguf(config) | {"expert_feed_forward_length": config["ffn"]}
    if config["qk_norm"]:
        return gguf_fields.GgufForm("qwen3moe", "half", keys)
    keys["expert_shared_feed_forward_length"] = config["shared_ffn"]
    return gguf_fields.GgufForm("qwen2moe", "half", keys)
