"""A Hugging Face config.json -> the canonical configuration, for the fields transformers itself would use."""

from collections.abc import Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.models.registry import file_kind, known_like
from roofline.weights.config.canonical import Config, checked, checked_rope_scaling, refuse_unless_neutral
from roofline.weights.config.mpt import from_mpt
from roofline.weights.files import float8
from roofline.weights.files.mapped import JsonObject

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen", "qwen3": "qwen", "mpt": "mpt"}
REQUIRED = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_position",
}
_SPELLED = {ours: theirs for theirs, ours in REQUIRED.items()} | {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
}
# Fields that change the mathematics -> the values at which they do not. Absent and null are always neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu",)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "rope_interleaved", "use_qk_norm"), (False,)),
    **dict.fromkeys(("attn_temperature_tuning", "is_encoder_decoder", "add_cross_attention"), (False,)),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    **dict.fromkeys(("auto_map", "text_config", "vision_config", "audio_config", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("clip_qkv", "no_rope_layer_interval", "attention_multiplier"), ()),
    **dict.fromkeys(("per_layer_config", "attention_chunk_size"), ()),
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
    fields = Fields(path, config)
    kind = fields.need("model_type", str)
    registered = file_kind("hf", kind)
    if kind not in _FAMILIES and registered is None:
        raise UnsupportedError(f"{path}: model_type {shorten(kind)!r}", "we have no model for it", tuple(_FAMILIES))
    own_code = kind == "mpt" and registered is None  # `from_mpt` knows the code that its files name
    refuse_unless_neutral(
        fields, {key: values for key, values in _NEUTRAL.items() if key != "auto_map" or not own_code}
    )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            float8.check_config(path, config[key])
    if own_code:
        return from_mpt(fields)
    family, kind = registered or (_FAMILIES[kind], kind)
    known_like(kind, _FAMILIES)
    ours: Config = {"family": family, "rope_style": "half"}
    for key, name in REQUIRED.items():
        ours[name] = fields.need(key, int)
    ours["kv_heads"] = _kv_heads(fields, kind)
    ours["head_dim"] = _head_dim(fields, kind)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours["attention_bias"] = kind == "qwen2"
    ours["qk_norm"] = kind == "qwen3"
    ours["sliding_window"] = _sliding_window(fields, kind)
    ours["rope_theta"], ours["rope_scaling"] = _rope(fields)
    return checked(fields, ours, _SPELLED)


def _kv_heads(fields: Fields, kind: str) -> int:
    if kind != "llama":  # transformers' default for the other types is a number, not the number of heads
        return fields.need("num_key_value_heads", int)
    return fields.get("num_key_value_heads", int, fields.need("num_attention_heads", int))


def _head_dim(fields: Fields, kind: str) -> int:
    dim = fields.get("head_dim", int)
    if dim is not None:
        return dim
    if kind == "qwen3":
        return 128  # transformers' default, independent of the width
    width, heads = fields.need("hidden_size", int), fields.need("num_attention_heads", int)
    if heads < 1 or width % heads:
        fields.refuse("num_attention_heads", f"{describe(heads)} does not divide a width of {width!r}")
    return width // heads


def _sliding_window(fields: Fields, kind: str) -> int | None:
    """The window that all layers share, None for full attention."""
    types = set(fields.elements("layer_types", str) or ())
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else 4096)  # null means none
    if kind == "mistral":
        if types - {"full_attention" if window is None else "sliding_attention"}:
            raise UnsupportedError(
                f"{fields.path}: layer_types", "all layers of this type attend as sliding_window says"
            )
        return window
    if kind == "llama":
        if types - {"full_attention"}:
            raise UnsupportedError(f"{fields.path}: layer_types", "all layers of this type attend to everything")
        return None
    window = window if fields.get("use_sliding_window", bool, False) else None
    first, layers = fields.get("max_window_layers", int, 28), fields.need("num_hidden_layers", int)
    if first < 0:
        fields.refuse("max_window_layers", f"{describe(first)} is below 0")
    if not types and window is not None:  # layers from `first` on slide
        types = {"full_attention"} if first >= layers else {"sliding_attention"}
        types |= {"full_attention"} if first > 0 else set()
    if types <= {"full_attention"}:
        return None
    if types == {"sliding_attention"} and window is not None:
        return window
    reason = "our layers are all alike"
    raise UnsupportedError(f"{fields.path}: layer_types that mix windows", reason, ("full_attention",))


def _rope(fields: Fields) -> tuple[object, Config | None]:
    """(theta, scaling) as transformers takes them from rope_parameters (its own version 5) and from what came before:
    rope_scaling, where it says anything, stands for all of rope_parameters; rope_theta beside them is a default of the
    one inside; original_max_position_embeddings beside them is read before the one inside.
    """
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    rope = fields.inside(name)
    unknown = sorted(set(rope.values) - _ROPE_KEYS)
    if any(isinstance(rope.values[key], Mapping) for key in unknown):
        raise UnsupportedError(f"{fields.path}: {name} per kind of layer", "our layers are all alike")
    if unknown:
        what = f"{fields.path}: {name} {shorten(unknown[0])!r}"
        raise UnsupportedError(what, "we do not know what it does to the mathematics")
    refuse_unless_neutral(rope, {"partial_rotary_factor": (1,)})
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, 10000.0))
    unread = fields.inside("rope_parameters").get("rope_theta", float, theta)
    if unread != theta and "rope_theta" not in {*rope.values, *fields.values}:
        fields.refuse("rope_parameters.rope_theta", f"{unread} is not read beside rope_scaling: write it there too")
    kind = rope.get("rope_type", str) or rope.get("type", str, "default")
    original = "original_max_position_embeddings"
    values: Config = {original: fields.need("max_position_embeddings", int)}
    values |= {key: value for key, value in rope.values.items() if value is not None or key == "truncate"}
    if fields.get(original, float) is not None:
        values[original] = fields.values[original]
    return theta, checked_rope_scaling(Fields(fields.path, values, rope.within), kind)
