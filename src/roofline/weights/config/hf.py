"""A Hugging Face config.json -> the canonical configuration, for the fields transformers itself would use."""

from collections.abc import Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.models.registry import file_kind, known_like
from roofline.weights.config.canonical import Config, checked, checked_rope_scaling, refuse_unless_neutral
from roofline.weights.config.mpt import from_mpt
from roofline.weights.files import float8
from roofline.weights.files.mapped import JsonObject, refuse, shorten

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen", "qwen3": "qwen", "mpt": "mpt"}
REQUIRED = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_position",
}
# Fields that change the mathematics -> the values at which they do not. Absent and null are always neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu",)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "rope_interleaved", "use_qk_norm"), (False,)),
    **dict.fromkeys(("attn_temperature_tuning", "is_encoder_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("auto_map", "text_config", "vision_config", "audio_config", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("clip_qkv", "no_rope_layer_interval", "attention_multiplier"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0, 0.0)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("partial_rotary_factor", "embedding_multiplier", "residual_multiplier"), (1, 1.0)),
    **dict.fromkeys(("logits_scaling", "logit_scale"), (1, 1.0)),
    "no_rope_layers": ([],),
    "pruned_heads": ({},),
}
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "finetuned"),
}


def from_hf(path: Path, config: JsonObject) -> Config:
    """The canonical configuration of a parsed config.json.

    Raises ConfigError for missing and bad fields, UnsupportedError for model types and features we do not have.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        refuse(path, "model_type", "is missing")
    registered = file_kind("hf", kind)
    if kind not in _FAMILIES and registered is None:
        raise UnsupportedError(f"{path}: model_type {shorten(kind)!r}", "we have no model for it", tuple(_FAMILIES))
    refuse_unless_neutral(path, config, _NEUTRAL)
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            float8.check_config(path, config[key])
    if kind == "mpt" and registered is None:
        return from_mpt(path, config)
    family, kind = registered or (_FAMILIES[kind], kind)
    known_like(kind, _FAMILIES)
    ours: Config = {"family": family, "rope_style": "half"}
    for key, name in REQUIRED.items():
        if key not in config:
            refuse(path, key, "is missing")
        ours[name] = config[key]
    ours["kv_heads"] = _kv_heads(path, config, kind)
    ours["head_dim"] = _head_dim(path, config, kind)
    ours["norm_eps"] = config.get("rms_norm_eps", 1e-6)
    ours["tied"] = config.get("tie_word_embeddings", False) is True
    ours["attention_bias"] = kind == "qwen2"
    ours["qk_norm"] = kind == "qwen3"
    ours["sliding_window"] = _sliding_window(path, config, kind)
    ours["rope_theta"], ours["rope_scaling"] = _rope(path, config)
    return checked(path, ours)


def _kv_heads(path: Path, config: JsonObject, kind: str) -> object:
    if config.get("num_key_value_heads") is not None:
        return config["num_key_value_heads"]
    if kind != "llama":  # transformers' default for the other types is a number, not the number of heads
        refuse(path, "num_key_value_heads", "is missing")
    return config["num_attention_heads"]


def _head_dim(path: Path, config: JsonObject, kind: str) -> object:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if kind == "qwen3":
        return 128  # transformers' default, independent of the width
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width % heads:
        refuse(path, "num_attention_heads", f"{heads!r} heads do not divide a width of {width!r}")
    return width // heads


def _sliding_window(path: Path, config: JsonObject, kind: str) -> object:
    """The window that all layers share, None for full attention."""
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(t, str) for t in types)):
        refuse(path, "layer_types", "is not a list of names")
    if kind == "mistral":
        return config.get("sliding_window", 4096)  # transformers' default; null means none
    if kind == "llama":
        if types and set(types) != {"full_attention"}:
            raise UnsupportedError(f"{path}: layer_types", "all layers of this type attend to everything")
        return None
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if types is None and window is not None:
        first, layers = config.get("max_window_layers", 28), config["num_hidden_layers"]  # layers from `first` on slide
        if not isinstance(first, int) or not isinstance(layers, int) or first < 0:
            refuse(path, "max_window_layers", f"{first!r} of {layers!r} layers")
        types = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < layers)
    if not types or set(types) == {"full_attention"}:
        return None
    if set(types) == {"sliding_attention"} and window is not None:
        return window
    raise UnsupportedError(f"{path}: layer_types that mix windows", "our layers are all alike", ("full_attention",))


def _rope(path: Path, config: JsonObject) -> tuple[object, Config | None]:
    """(theta, scaling) from rope_parameters (transformers 5), or from rope_theta and rope_scaling (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        refuse(path, "rope_parameters", "is not a mapping")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedError(f"{path}: rope_parameters per kind of layer", "our layers are all alike")
    unknown = sorted(set(rope) - _ROPE_KEYS)
    if unknown:
        what = f"{path}: rope_parameters {shorten(unknown[0])!r}"
        raise UnsupportedError(what, "we do not know what it does to the mathematics")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedError(f"{path}: partial_rotary_factor", "our heads turn whole")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str):
        refuse(path, "rope_type", f"{kind!r} is not a name")
    values, original = dict(rope), "original_max_position_embeddings"
    if values.get(original) is None:
        values[original] = config.get(original, config.get("max_position_embeddings"))
    return theta, checked_rope_scaling(path, shorten(kind), values)
