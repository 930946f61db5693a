"""What readers of config.json share: the fields that most model types have, and those that are refused by name."""

from collections.abc import Collection, Mapping
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, shorten
from roofline.weights.families.shared.canonical import (
    Config,
    check_integer,
    checked_rope_scaling,
    refuse_unless_neutral,
)
from roofline.weights.quantised.methods import method_of

REQUIRED = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_position",
}
SPELLED = {ours: theirs for theirs, ours in REQUIRED.items()} | {
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
}
# Fields that change the mathematics -> the values at which they do not. Absent and null are always neutral.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish")),  # two names of one
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "rope_interleaved", "use_qk_norm"), (False,)),
    **dict.fromkeys(("attn_temperature_tuning", "is_encoder_decoder", "add_cross_attention"), (False,)),
    "use_bidirectional_attention": (False, "vision"),  # the second: where there are pictures
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
# What transformers calls activations -> ours, to rounding.
ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
}
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "finetuned"),
}


# What else a config.json of a family of ours has, or any config.json, without a change of the mathematics.
SHARED = {
    *("model_type", "architectures", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "initializer_range", "pretraining_tp"),
    *("attention_dropout", "_name_or_path", "_attn_implementation", "quantization_config", "unsloth_fixed"),
}


def refuse_features(fields: Fields, honoured: Collection[str] = ()) -> None:
    """Raise UnsupportedError for a field that changes the mathematics, unless a reader honours it."""
    refuse_unless_neutral(fields, {key: values for key, values in NEUTRAL.items() if key not in honoured})
    method_of(Path(fields.path), fields.values)


def with_defaults(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    """The fields with those that a type has where a file leaves them out; null is a value of its own."""
    return fields.changed({key: value for key, value in defaults.items() if key not in fields.values})


def new_fields(fields: Fields) -> str:
    """The fields that none of our readers knows, for an error; empty where there are none."""
    known = {*REQUIRED, *SPELLED.values(), *NEUTRAL, *SHARED}
    new = sorted(key for key, value in fields.values.items() if value is not None and key not in known)
    return f"; new in it: {', '.join(map(shorten, new[:8]))}{', ...' if len(new) > 8 else ''}" if new else ""


def sizes(fields: Fields, family: str, required: Mapping[str, str] = REQUIRED) -> Config:
    """The fields of `required`, and what follows from there being a config.json: the style of rope."""
    ours: Config = {"family": family, "rope_style": "half"}
    ours |= {name: fields.need(key, int) for key, name in required.items()}
    spelled = next(key for key, name in required.items() if name == "layers")
    check_integer(fields, spelled, "layers", ours["layers"])  # of which readers make lists
    return ours


def activation(fields: Fields, key: str, default: str) -> Config:
    """What the value of a field, transformers' name of an activation, says in the canonical configuration. Raises
    UnsupportedError."""
    name = fields.get(key, str, default)
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"{fields.path}: {key} = {shorten(name)}", "we do not have it", tuple(ACTIVATIONS))
    return {} if ACTIVATIONS[name] == "gelu" else {"activation": ACTIVATIONS[name]}


def activation_to_hf(config: Config) -> str:
    """The inverse of `activation`."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.get("activation", "gelu"))


def kv_heads(fields: Fields, heads_by_default: bool = False) -> int:
    """num_key_value_heads; heads_by_default: where it is absent, transformers takes the number of heads."""
    if not heads_by_default:
        return fields.need("num_key_value_heads", int)
    return fields.get("num_key_value_heads", int, fields.need("num_attention_heads", int))


def head_dim(fields: Fields, default: int | None = None) -> int:
    """head_dim; where it is absent `default`, or what the heads have of the width."""
    dim = fields.get("head_dim", int, default)
    if dim is not None:
        return dim
    width, heads = fields.need("hidden_size", int), fields.need("num_attention_heads", int)
    if heads < 1 or width % heads:
        fields.refuse("num_attention_heads", f"{describe(heads)} does not divide a width of {width!r}")
    return width // heads


def divided(fields: Fields, ours: Config, heads: str) -> int:
    """What the heads have of the width each. heads: what the file calls their number."""
    if ours["heads"] < 1 or ours["width"] % ours["heads"]:
        fields.refuse(heads, f"{describe(ours['heads'])} does not divide a width of {ours['width']!r}")
    return int(ours["width"] // ours["heads"])


def learned_positions() -> Config:
    """Positions that are a row of a table, and plain attention."""
    plain: Config = {"attention_bias": False, "qk_norm": False, "sliding_window": None}
    return {"positions": "learned", "rope_theta": 1e4, "rope_scaling": None} | plain


def layer_types(fields: Fields, known: Collection[str] = ("full_attention", "sliding_attention")) -> list[str] | None:
    """The kind of each layer, None where the file does not say. Raises ConfigError, UnsupportedError."""
    types = fields.elements("layer_types", str)
    if not types:
        return None
    layers = fields.need("num_hidden_layers", int)
    if len(types) != layers:
        fields.refuse("layer_types", f"has {len(types)} values for {layers} layers")
    new = next((kind for kind in types if kind not in known), None)
    if new is not None:
        what = f"{fields.path}: layer_types {shorten(new)!r}"
        raise UnsupportedError(what, "we do not have such layers", tuple(known))
    return types


def windows(ours: Config, each: list[int]) -> None:
    """Write the window of each layer, 0 for none, as the canonical configuration has it."""
    ours["sliding_window"] = (each[0] or None) if len(set(each)) == 1 else None
    if len(set(each)) > 1:
        ours["layer_windows"] = each


def decoder(
    fields: Fields,
    family: str,
    honoured: Collection[str] = (),
    *,
    heads_by_default: bool = True,
    eps: float = 1e-6,
    tied: bool = False,
    theta: float = 1e4,
    turned: float | None = None,
) -> Config:
    """The canonical configuration as far as most model types agree on it: full attention without biases and norms of q
    and k. The caller adds what is its own, then asks `checked`.

    honoured: what the caller reads besides. heads_by_default, eps, tied, theta: transformers' defaults for the type;
    turned: its default of partial_rotary_factor, None: it has none.
    """
    refuse_features(fields, (*honoured, *(("partial_rotary_factor",) if turned is not None else ())))
    ours = sizes(fields, family)
    ours |= {"kv_heads": kv_heads(fields, heads_by_default), "head_dim": head_dim(fields)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, eps)
    ours["tied"] = fields.get("tie_word_embeddings", bool, tied)
    ours |= {"attention_bias": False, "qk_norm": False, "sliding_window": None}
    if turned is not None:
        ours |= turned_part(fields, ours["head_dim"], turned)
    ours["rope_theta"], ours["rope_scaling"] = rope(fields, theta, partial=turned is not None)
    return ours


def turned_part(fields: Fields, dim: int, default: float) -> Config:
    """rotary_dim, where partial_rotary_factor leaves a part of each head alone."""
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    outer = fields.get("partial_rotary_factor", float, default)
    factor = fields.inside(name).get("partial_rotary_factor", float, outer)
    turned = int(dim * factor) if 0 < factor <= 1 else 0
    if turned < 2 or turned % 2:
        fields.refuse("partial_rotary_factor", f"{describe(factor)} of {dim} dimensions is no even number of them")
    return {"rotary_dim": turned} if turned != dim else {}


def biases(fields: Fields, ours: Config, attention: bool = False) -> None:
    """Write what attention_bias (of q, k, v and o) and mlp_bias say; attention: the default of the first."""
    if fields.get("attention_bias", bool, attention):
        ours |= {"attention_bias": True, "output_bias": True}
    if fields.get("mlp_bias", bool, False):
        ours["mlp_bias"] = True


def rope(
    fields: Fields, default: float = 1e4, partial: bool = False, neutral: Collection[str] = ()
) -> tuple[object, Config | None]:
    """(theta, scaling) as transformers takes them from rope_parameters (its own version 5) and from what came before:
    rope_scaling, where it says anything, stands for all of rope_parameters; rope_theta beside them is a default of the
    one inside; original_max_position_embeddings beside them is read before the one inside.

    neutral: further keys inside, which change nothing.
    """
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    table = fields.inside(name)
    unknown = sorted({*table.values} - _ROPE_KEYS - {*neutral})
    if any(isinstance(table.values[key], Mapping) for key in unknown):
        raise UnsupportedError(f"{fields.path}: {name} per kind of layer", "our layers are all alike")
    if unknown:
        what = f"{fields.path}: {name} {shorten(unknown[0])!r}"
        raise UnsupportedError(what, "we do not know what it does to the mathematics")
    refuse_unless_neutral(table, {} if partial else {"partial_rotary_factor": (1,)})
    theta = table.get("rope_theta", float, fields.get("rope_theta", float, default))
    unread = fields.inside("rope_parameters").get("rope_theta", float, theta)
    if unread != theta and "rope_theta" not in {*table.values, *fields.values}:
        fields.refuse("rope_parameters.rope_theta", f"{unread} is not read beside rope_scaling: write it there too")
    kind = table.get("rope_type", str) or table.get("type", str, "default")
    original = "original_max_position_embeddings"
    values: Config = {original: fields.need("max_position_embeddings", int)}
    values |= {key: value for key, value in table.values.items() if value is not None or key == "truncate"}
    if fields.get(original, float) is not None:
        values[original] = fields.values[original]
    return theta, checked_rope_scaling(Fields(fields.path, values, table.within), kind)


def to_hf(config: Config, kind: str, name: str) -> Config:
    """The fields that most model types share, of a canonical configuration. name: of transformers' classes."""
    scaling = config["rope_scaling"] and dict(config["rope_scaling"])  # transformers writes into it
    fields: Config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        **{theirs: config[ours] for theirs, ours in REQUIRED.items()},
        "num_key_value_heads": config["kv_heads"],
        "head_dim": config["head_dim"],
        "rms_norm_eps": config["norm_eps"],
        "hidden_act": "silu",
        "rope_theta": config["rope_theta"],
        "rope_parameters": {"rope_theta": config["rope_theta"], **(scaling or {"rope_type": "default"})},
    }
    if config.get("rotary_dim"):
        factor = config["rotary_dim"] / config["head_dim"]
        fields["partial_rotary_factor"] = fields["rope_parameters"]["partial_rotary_factor"] = factor
        scaling = scaling and {**scaling, "partial_rotary_factor": factor}
    return fields | ({"rope_scaling": dict(scaling)} if scaling else {})
