"""What readers of GGUF metadata share: the keys that most architectures have, and how they are read.

Keys of an architecture that no reader honours may change the mathematics, and are refused by name.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe, has_type, refuse, shorten
from roofline.weights.families.shared.canonical import Config, checked, checked_rope_scaling, refuse_unless_neutral
from roofline.weights.files.mapped import JsonObject

_REQUIRED = {
    "block_count": "layers",
    "embedding_length": "width",
    "feed_forward_length": "ffn",
    "attention.head_count": "heads",
    "context_length": "max_position",
}
_BY_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
_READ = {
    *_REQUIRED,
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("vocab_size", "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type"),
    *("rope.scaling.yarn_ext_factor", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor"),
    "pooling_type",  # weights/vectors.py
}
# Of Qwen3-VL's text part: which frequencies of rope are of which dimension of a position, which of text has the same in
# all, and how many layers take in what a picture adds.
VISION = ("rope.dimension_sections", "n_deepstack_layers")
WINDOW_KEYS = ("attention.sliding_window_pattern", "rope.freq_base_swa")  # of layers that have one, beside its size
GGUF_ROPE_FACTORS = "rope_freqs.weight"  # not a parameter: divisors of the rope frequencies
# Nor are these, of Phi-3: what each frequency is divided by in texts of either length -> Hugging Face's key of it.
GGUF_LONGROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
RMS_EPSILON, EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SPELLED = {ours: theirs for theirs, ours in _REQUIRED.items()} | {
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "vocab": "vocab_size",
}
_SPELLED_ROPE = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys that change nothing at these values (the first is what a converter writes by default).
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.attn_factor": (1.0,),
    **dict.fromkeys(("expert_count", "expert_used_count"), (0,)),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0.0,)),
    "logit_scale": (0.0, 1.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0,)),
    "tensor_data_layout": ("Meta AI original pth",),
}


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file says of its model.

    fields: the metadata of the architecture, without its name before each key; shapes: canonical parameter name ->
    shape, which say the vocabulary's size and whether the head is tied; rope_factors: float32 [head_dim / 2] of the
    tensor rope_freqs.weight (Llama 3.1), if there is one; longrope: those of Phi-3, by Hugging Face's keys.
    """

    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: np.ndarray | None
    longrope: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class GgufForm:
    """How a GGUF file says a configuration: the inverse of a family's `from_gguf`.

    architecture: `general.architecture`; rope_style: which rows of q and k rope turns together in such files; keys:
    metadata of the architecture beside what all have, None for a key of those that it has not; epsilon: the key of that
    of its norms; longrope: what each frequency is divided by, by Hugging Face's keys; rope_factors: the same in one
    tensor, of families that say so.
    """

    architecture: str
    rope_style: str
    keys: Mapping[str, object] = field(default_factory=dict)
    epsilon: str = RMS_EPSILON
    longrope: Mapping[str, np.ndarray] = field(default_factory=dict)
    rope_factors: np.ndarray | None = None


def refuse_unsaid(config: Config, features: Mapping[str, object]) -> None:
    """Raise UnsupportedError for the first feature that a model has and llama.cpp's architecture of its kind has not.

    features: what it is called -> whether the model has it.
    """
    for name, there in features.items():
        if there:
            what = f"a GGUF file of a {config['family']} model with {name}"
            raise UnsupportedError(
                what, "llama.cpp does not compute that in its architecture of this kind", ("safetensors",)
            )


def read(
    model: GgufModel, family: str, rope_style: str, honoured: Collection[str] = (), epsilon: str = RMS_EPSILON
) -> Config:
    """The canonical configuration as far as architectures agree on it; attention without biases and norms of q and k.

    honoured: further keys that the caller reads; "rope.dimension_count" says that a part of a head may be turned.
    epsilon: the key of that of its norms.
    """
    fields = model.fields
    refuse_unknown(fields, (*honoured, epsilon))
    config: Config = {"family": family, "rope_style": rope_style, "attention_bias": False, "qk_norm": False}
    for key, name in _REQUIRED.items():
        if key in _BY_LAYER:
            config[name] = _uniform(fields, key, config["layers"])
        else:
            config[name] = fields.need(key, int)
    config["norm_eps"] = fields.need(epsilon, float)
    config["kv_heads"] = config["heads"]
    if "attention.head_count_kv" in fields.values:
        config["kv_heads"] = _uniform(fields, "attention.head_count_kv", config["layers"])
    config["head_dim"] = _head_dim(fields, config, honoured)
    if "rope.dimension_count" in honoured:
        turned = fields.get("rope.dimension_count", int, config["head_dim"])
        if turned % 2 or not 0 < turned <= config["head_dim"]:
            fields.refuse("rope.dimension_count", f"{turned} is not an even number up to {config['head_dim']}")
        config |= {"rotary_dim": turned} if turned != config["head_dim"] else {}
    if any((fields.elements("rope.dimension_sections", int) or [])[3:]):
        fields.refuse("rope.dimension_sections", "turns a part of each head by a fourth position, which text has not")
    config["vocab"] = vocabulary(fields, model.shapes)
    config["tied"] = "head.weight" not in model.shapes
    config["sliding_window"] = fields.get("attention.sliding_window", int) or None
    config["rope_theta"] = fields.get("rope.freq_base", float, 10000.0)
    config["rope_scaling"] = _rope_scaling(fields)
    config = checked(fields, config, SPELLED | {"norm_eps": epsilon})
    if model.rope_factors is not None:
        if config["rope_scaling"] is not None:
            scaling = f"{fields.within}rope.scaling.factor"
            refuse(fields.path, "rope_freqs.weight", f"stands beside {scaling}; one of them is too many")
        config["rope_scaling"] = _llama3_of(fields.path, model.rope_factors, config)
    return config


def with_fields(model: GgufModel, fields: Fields) -> GgufModel:
    """The same of a file with other fields, whose divisors of rope the caller reads."""
    return replace(model, fields=fields, rope_factors=None)


def turned_part(config: Config) -> Config:
    """The key of how much of each head is turned."""
    return {"rope.dimension_count": config.get("rotary_dim") or config["head_dim"]}


def refuse_unknown(fields: Fields, honoured: Collection[str] = ()) -> None:
    """Raise UnsupportedError for a key that nobody reads and that may change the mathematics."""
    for key in fields.values:
        if key not in _READ and key not in _NEUTRAL and key not in honoured:
            what = f"{fields.path}: {fields.within}{shorten(key)}"
            raise UnsupportedError(what, "we do not know what it does to the mathematics")
    refuse_unless_neutral(fields, {key: values for key, values in _NEUTRAL.items() if key not in honoured})


def refuse_window(fields: Fields) -> None:
    """Raise UnsupportedError for a window, in files of an architecture whose layers have none, or not all of them."""
    window = fields.get("attention.sliding_window", int, 0)
    if window:
        what = f"{fields.path}: {fields.within}attention.sliding_window = {window}"
        raise UnsupportedError(what, "models of this architecture that we have attend to everything")


def windows(fields: Fields, window: int, layers: int, pattern: int) -> list[int]:
    """The window of each layer, 0 for none: of those that `attention.sliding_window_pattern` has true for, or of all
    but each of its number. pattern: that number where the file says none."""
    key = "attention.sliding_window_pattern"
    if has_type(fields.values.get(key), list):
        slides = fields.elements(key, bool) or []
        if len(slides) != layers:
            fields.refuse(key, f"has {len(slides)} values for {layers} layers")
    else:
        pattern = fields.get(key, int, pattern)
        if pattern < 1:
            fields.refuse(key, f"{describe(pattern)} is not at least 1")
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return [window if slide else 0 for slide in slides]


def heads_by_layer(fields: Fields) -> list[int]:
    """Heads of keys of each layer, of architectures that say 0 of layers that do not attend; of a file with one number,
    that for all."""
    key = "attention.head_count_kv"
    if has_type(fields.values.get(key), list):
        return fields.elements(key, int) or []
    layers = fields.need("block_count", int)
    return [fields.need(key, int)] * max(0, min(layers, 1 << 14))


def check_heads(fields: Fields, heads: Sequence[int], layers: int) -> None:
    """Raise ConfigError unless `heads_by_layer` gave a number for each layer, 0 or the same."""
    if len(heads) != layers or len({*heads, 0}) > 2:
        fields.refuse("attention.head_count_kv", f"is not 0 or one number for each of {layers} layers")


def window_keys(each: Sequence[int]) -> Config:
    """The inverse: the keys of the windows of all layers, none where there are no windows."""
    slides = [bool(window) for window in each]
    return {"attention.sliding_window": max(each), WINDOW_KEYS[0]: slides} if any(slides) else {}


def refuse_other_theta(fields: Fields, config: Config) -> None:
    """Raise ConfigError where layers with a window would turn by another theta, which llama.cpp does not read of these
    architectures."""
    theta = fields.get("rope.freq_base_swa", float, config["rope_theta"])
    if theta != config["rope_theta"]:
        fields.refuse("rope.freq_base_swa", f"{theta:g} is not rope.freq_base, by which all layers turn")


def refuse_rope(fields: Fields) -> None:
    """Raise UnsupportedError for a key of rope, in files of an architecture that has none."""
    turned = next((key for key in fields.values if key.startswith("rope.")), None)
    if turned is not None:
        raise UnsupportedError(f"{fields.path}: {fields.within}{turned}", "this architecture has learned positions")


def new_keys(fields: Fields) -> str:
    """The keys that no architecture we have shares, for an error; empty where there are none."""
    new = [shorten(key) for key in fields.values if key not in _READ and key not in _NEUTRAL]
    return f"; new in it: {', '.join(new[:8])}{', ...' if len(new) > 8 else ''}" if new else ""


def _uniform(fields: Fields, key: str, layers: int) -> int:
    """The one value of a field that may be an array with a value per layer."""
    if not has_type(fields.values.get(key), list):
        return fields.need(key, int)
    values = fields.elements(key, int) or []
    if len(values) != layers:
        fields.refuse(key, f"has {len(values)} values for {layers} layers")
    if any(value != values[0] for value in values):
        what = f"{fields.path}: {fields.within}{key} that differs between layers"
        raise UnsupportedError(what, "our layers are all alike")
    return values[0]


def _head_dim(fields: Fields, config: JsonObject, honoured: Collection[str]) -> int:
    heads, width = config["heads"], config["width"]
    if heads < 1:
        fields.refuse("attention.head_count", f"{describe(heads)} is not at least 1")
    dim = fields.get("attention.key_length", int, width // heads)
    for key in {"attention.value_length", "rope.dimension_count"}.difference(honoured):
        other = fields.get(key, int, dim)
        if other != dim:
            what = f"{fields.path}: {fields.within}{key} = {other!r}"
            raise UnsupportedError(what, f"it differs from the head's dimension {dim!r}")
    return dim


def vocabulary(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many ids a file has embeddings of."""
    if "embed.weight" not in shapes:
        refuse(fields.path, "token_embd.weight", "the tensor is missing")
    rows = shapes["embed.weight"][0]
    stated = fields.get("vocab_size", int, rows)
    if stated != rows:
        fields.refuse("vocab_size", f"{stated!r} is not the {rows} rows of token_embd.weight")
    return rows


def _rope_scaling(fields: Fields) -> Config | None:
    """The scaling as llama.cpp reads it: a type that is not said is linear; a factor that is neither there, nor under
    its older name scale_linear, or is 0, changes nothing; the original context is the context where it is not said.
    """
    kind = fields.get("rope.scaling.type", str, "linear")
    name = "rope.scaling.factor" if "rope.scaling.factor" in fields.values else "rope.scale_linear"
    factor = fields.get(name, float, 0.0)
    mixed = fields.get("rope.scaling.yarn_ext_factor", float, -1.0)  # below 0: as the type says
    if mixed >= 0 and mixed != (kind == "yarn"):
        what = f"{fields.path}: {fields.within}rope.scaling.yarn_ext_factor = {mixed}"
        raise UnsupportedError(what, f"it changes the mathematics of scaling {shorten(kind)!r} and we do not have it")
    _check_yarn_factor(fields, factor if kind == "yarn" else 1.0)
    unscaled = factor == 0 and (name in fields.values or "rope.scaling.type" not in fields.values)
    if kind == "linear" and (unscaled or factor == 1):
        return None
    original, context = "rope.scaling.original_context_length", "context_length"
    values = {original: fields.need(context, int), **fields.values}
    values["rope.scaling.factor"] = fields.values.get(name)
    return checked_rope_scaling(Fields(fields.path, values, fields.within), kind, _SPELLED_ROPE)


def _check_yarn_factor(fields: Fields, factor: float) -> None:
    """Raise UnsupportedError unless a file says of YaRN what follows from the factor of its scaling anyhow, as
    converters write it: llama.cpp computes that, and reads no other."""
    key = "rope.scaling.yarn_attn_factor"
    default = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
    value = fields.get(key, float, default)
    if value != 1 and not math.isclose(value, default, rel_tol=1e-4):
        what = f"{fields.path}: {fields.within}{key} = {value}"
        raise UnsupportedError(what, f"the scaling multiplies by {default:g}, and llama.cpp reads no other number")


def _llama3_of(path: Path | str, factors: np.ndarray, config: JsonObject) -> Config | None:
    """The Llama 3.1 scaling whose frequency divisors a file carries.

    Converters evaluate the ramp and drop its parameters. Scaling both of its ends and the original context together
    changes nothing, so 8192 (Llama 3.1's own) is taken for the context. The result is used only if it gives back every
    divisor.
    """
    half = config["head_dim"] // 2
    if factors.shape != (half,) or not np.isfinite(factors).all() or (factors <= 0).any():
        refuse(path, "rope_freqs.weight", f"is not {half} positive numbers")
    divisors = factors.astype(np.float64)
    if np.all(divisors == 1):
        return None
    original = 8192.0
    turns = original / (2 * math.pi) * config["rope_theta"] ** (-np.arange(half) / half)
    largest = float(divisors.max())
    candidates = [(1.0, 4.0), _ramp(turns, divisors, largest)]
    for low, high in candidates:
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), divisors, rtol=1e-5, atol=0):
            ramp = {"factor": largest, "low_freq_factor": float(low), "high_freq_factor": float(high)}
            values = {**ramp, "original_max_position_embeddings": original}
            return checked_rope_scaling(Fields(path, values, "rope_freqs.weight: "), "llama3")
    reason = "its divisors are not those of Llama 3.1's scaling"
    raise UnsupportedError(f"{path}: rope_freqs.weight", reason, ("a file with rope.scaling.* metadata",))


def _ramp(turns: np.ndarray, divisors: np.ndarray, largest: float) -> tuple[float, float]:
    """The ends of the ramp, in turns within the original context: inside it 1 / divisor is linear in the frequency.

    Where one frequency of few is inside, or none, many ramps give the same divisors, and this is the longest of them.
    Without a frequency on either side of it they are Llama 3.1's own.
    """
    scaled, unscaled = divisors > largest * 0.9999, divisors < 1.0001
    inside = ~scaled & ~unscaled
    if not scaled.any() or not unscaled.any() or largest <= 1:
        return 1.0, 4.0
    smooth = (1 / divisors - 1 / largest) / (1 - 1 / largest)
    low, high = float(turns[scaled].max()), float(turns[unscaled].min())
    if inside.sum() >= 2:
        slope, offset = np.polyfit(turns[inside], smooth[inside], 1)
    elif inside.any():
        at, part = float(turns[inside][0]), float(smooth[inside][0])
        slope = max((1 - part) / (high - at), part / (at - low))
        offset = part - slope * at
    else:
        return low, high
    if slope > 0 > offset:
        return float(-offset / slope), float((1 - offset) / slope)
    return 1.0, 4.0
