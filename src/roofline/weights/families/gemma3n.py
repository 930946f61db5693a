"""Files of Gemma 3n (text).

Norms are whole in both kinds of files. GGUF's have the matrices between streams in one tensor, and the deviations at
which gates are cut off in place of the parts that are.
"""

import math
from statistics import NormalDist

from roofline.common.fields import Fields, describe, has_type
from roofline.weights.families.gemma4 import LAYER, LAYER_INPUTS_TOP, cap_of, layer_inputs, shares_keys, sharing_of
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds
from roofline.weights.families.shared.canonical import Config, check_integer, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import TOP, JoinedRows, TensorNames
from roofline.weights.files.mapped import JsonObject

_STREAMS = 32  # at most
_MATRICES = {
    "stream_in": ("altup_proj", "altup_projections"),
    "stream_out": ("altup_unembd_proj", "altup_unembed_projections"),
}


def joined(config: Config) -> dict[str, JoinedRows]:
    """The matrices between streams, one below the other, as GGUF's files have them."""
    numbers, width = range(config.get("streams", 4) - 1), config["width"]
    return {ours: [(f"{ours}.{n}", range(width)) for n in numbers] for ours in _MATRICES}


def is_spare(config: JsonObject, name: str) -> bool:
    """Whether a parameter is one of keys and values that a layer does not have, or of a stream that is not scaled."""
    return shares_keys(config, name) or ("altup.scale." in name and not config.get("scales_active", True))


NAMES = TensorNames(
    LAYER
    | {
        "altup.prediction": ("altup_predict_coef", "altup.prediction_coefs"),
        "altup.correction": ("altup_correct_coef", "altup.correction_coefs"),
        "altup.router": ("altup_router", "altup.modality_router"),
        "altup.router_norm": ("altup_router_norm", "altup.router_norm"),
        "laurel.left": ("laurel_l", "laurel.linear_left"),
        "laurel.right": ("laurel_r", "laurel.linear_right"),
        "laurel_norm": ("laurel_post_norm", "laurel.post_laurel_norm"),
    },
    top=TOP
    | LAYER_INPUTS_TOP
    | {ours: (theirs[0], "") for ours, theirs in _MATRICES.items()}
    | {f"{ours}.{n}": ("", f"model.{theirs[1]}.{n}") for ours, theirs in _MATRICES.items() for n in range(_STREAMS)},
    bare={"altup.scale.weight": ("altup_correct_scale.weight", "altup.correct_output_scale")},
    joined=joined,
    gguf_joined=tuple(_MATRICES),
    gguf_stacked=tuple(_MATRICES),
    spare=is_spare,
)
_HONOURED = ("hidden_act", "hidden_activation", "final_logit_softcapping")
_DEFAULTS: dict[str, object] = {
    **{"vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "sliding_window": 512},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "num_kv_shared_layers": 15},
    **{"final_logit_softcapping": 30.0},
}
_PATTERN, _SPARSE, _CUT = 5, 10, 0.95  # of so many layers the last sees everything; of the first ones gates are cut off


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. altup_coef_clip is of transformers' training alone."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    hf_fields.refuse_features(fields, _HONOURED)
    refuse_unless_neutral(fields, {"hidden_activation": ("gelu_pytorch_tanh",)})
    fields.get("altup_coef_clip", float)
    layers = fields.need("num_hidden_layers", int)
    check_integer(fields, "num_hidden_layers", "layers", layers)
    ffns = _ffns(fields, "intermediate_size", layers)
    ours = hf_fields.sizes(fields.changed({"intermediate_size": ffns[0]}), "gemma3n")
    ours |= {"kv_heads": hf_fields.kv_heads(fields), "head_dim": hf_fields.head_dim(fields, 256)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, True)
    ours |= {"attention_bias": False, "qk_norm": True}
    windows = _windows(fields, layers)
    hf_fields.windows(ours, windows)
    ours |= {"layer_ffns": ffns} if len(set(ffns)) > 1 else {}
    ours["sharing_layers"] = sharing_of(
        fields, "num_kv_shared_layers", fields.need("num_kv_shared_layers", int), windows
    )
    ours["logit_cap"] = cap_of(fields, "final_logit_softcapping")
    ours |= layer_inputs(fields, "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    ours |= {"streams": fields.get("altup_num_inputs", int, 4), "active": fields.get("altup_active_idx", int, 0)}
    _check_streams(fields, ours, ("altup_num_inputs", "altup_active_idx"))
    ours["scales_active"] = fields.get("altup_correct_scale", bool, True)
    ours["laurel_rank"] = fields.get("laurel_rank", int, 64)
    check_integer(fields, "laurel_rank", "width", ours["laurel_rank"])
    ours["sparsity"] = _sparsity(fields, layers)
    thetas = fields.get("rope_theta", float, 1e6), fields.get("rope_local_base_freq", float, 1e4)
    return checked(fields, ours | layer_kinds.ropes_by_kind(fields, *thetas), hf_fields.SPELLED)


def _check_streams(fields: Fields, ours: Config, keys: tuple[str, str]) -> None:
    if not 2 <= ours["streams"] <= _STREAMS:
        fields.refuse(keys[0], f"{describe(ours['streams'])} is not from 2 to {_STREAMS}")
    if not 0 <= ours["active"] < ours["streams"]:
        fields.refuse(keys[1], f"{describe(ours['active'])} is none of {ours['streams']} streams")


def _ffns(fields: Fields, key: str, layers: int) -> list[int]:
    """A width for each layer, of a list or of one number for all."""
    values = [fields.need(key, int)] * layers if not has_type(fields.values.get(key), list) else None
    values = values or fields.elements(key, int) or []
    if len(values) != layers:
        fields.refuse(key, f"has {len(values)} values for {layers} layers")
    for value in dict.fromkeys(values):
        check_integer(fields, key, "ffn", value)
    return values


def _windows(fields: Fields, layers: int) -> list[int]:
    types, window = hf_fields.layer_types(fields), fields.need("sliding_window", int)
    slides = [(layer + 1) % _PATTERN != 0 for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and window < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    return [window if slide else 0 for slide in slides]


def _sparsity(fields: Fields, layers: int) -> list[float]:
    """The part of each layer's gates that is cut off; where a file does not say it, that of the first ten layers of a
    model with more."""
    parts = fields.elements("activation_sparsity_pattern", float)
    if parts is None:
        sparse = _SPARSE if layers > _SPARSE else 0
        return [_CUT] * sparse + [0.0] * (layers - sparse)
    if len(parts) != layers:
        fields.refuse("activation_sparsity_pattern", f"has {len(parts)} values for {layers} layers")
    if any(not 0 <= part < 1 for part in parts):
        fields.refuse("activation_sparsity_pattern", "has a value that is not from 0 to below 1")
    return [float(part) for part in parts]


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "gemma3n_text", "Gemma3n")
    del fields["hidden_act"]
    windows = layer_kinds.window_of_each(config)
    fields = layer_kinds.nested_ropes(fields, config)
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": list(config.get("layer_ffns") or [config["ffn"]] * config["layers"]),
        "num_kv_shared_layers": config.get("sharing_layers", 0),
        "hidden_size_per_layer_input": config["layer_width"],
        "vocab_size_per_layer_input": config["layer_vocab"],
        "altup_num_inputs": config.get("streams", 4),
        "altup_active_idx": config.get("active", 0),
        "altup_correct_scale": config.get("scales_active", True),
        "laurel_rank": config.get("laurel_rank", 64),
        "activation_sparsity_pattern": list(config.get("sparsity") or [0.0] * config["layers"]),
        "final_logit_softcapping": config["logit_cap"],
        "sliding_window": max(windows) or 1,
        "layer_types": layer_kinds.kinds_of_layers(windows),
    }


_KEYS = ("altup.num_inputs", "altup.active_idx")
_SHARING, _WIDTH, _CUTS = "attention.shared_kv_layers", "embedding_length_per_layer_input", "activation_sparsity_scale"
_CAP = "final_logit_softcapping"
_NOWHERE = -math.inf  # the deviations of a layer whose gates stay


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. The rank of the second way and the rows of the layers' table are those of their
    tensors."""
    fields, layers = model.fields, model.fields.need("block_count", int)
    check_integer(fields, "block_count", "layers", layers)
    windows = gguf_fields.windows(fields, fields.need("attention.sliding_window", int), layers, _PATTERN)
    ffns = _ffns(fields, "feed_forward_length", layers)
    plain = fields.changed({"feed_forward_length": ffns[0], "attention.sliding_window": None})
    honoured = (*_KEYS, _SHARING, _WIDTH, _CUTS, _CAP, *gguf_fields.WINDOW_KEYS)
    config = gguf_fields.read(gguf_fields.with_fields(model, plain), "gemma3n", "half", honoured)
    hf_fields.windows(config, windows)
    config |= {"qk_norm": True, "layer_width": fields.need(_WIDTH, int)}
    config |= {"layer_ffns": ffns} if len(set(ffns)) > 1 else {}
    config["sharing_layers"] = sharing_of(fields, _SHARING, fields.get(_SHARING, int, 0), windows)
    config |= {"streams": fields.need(_KEYS[0], int), "active": fields.need(_KEYS[1], int)}
    _check_streams(fields, config, _KEYS)
    config["logit_cap"] = cap_of(fields, _CAP)
    config["layer_vocab"] = model.shapes.get("layer_embed.weight", (config["vocab"],))[0]
    config["laurel_rank"] = model.shapes.get("layers.0.laurel.left.weight", (64,))[0]
    cuts = fields.get(_CUTS, list) or []
    if len(cuts) != layers:
        fields.refuse(_CUTS, f"has {len(cuts)} values for {layers} layers")
    config["sparsity"] = [0.0 if cut == _NOWHERE else _part(fields.checked(_CUTS, cut, float)) for cut in cuts]
    config["local_theta"] = fields.positive("rope.freq_base_swa") or 1e4
    return config


def _part(deviations: float) -> float:
    """The part of normally distributed gates below so many deviations; files have these as float32."""
    return round(NormalDist().cdf(deviations), 6)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """A layer that scales its active stream is the only kind there is."""
    gguf_fields.refuse_unsaid(config, {"a stream that is not scaled": not config.get("scales_active", True)})
    windows = layer_kinds.window_of_each(config)
    cuts = [
        NormalDist().inv_cdf(part) if part else _NOWHERE for part in config.get("sparsity") or [0.0] * config["layers"]
    ]
    keys: Config = {_KEYS[0]: config.get("streams", 4), _KEYS[1]: config.get("active", 0), _CUTS: cuts}
    keys |= {_SHARING: config.get("sharing_layers", 0), _WIDTH: config["layer_width"], _CAP: config["logit_cap"]}
    keys |= {"feed_forward_length": list(config.get("layer_ffns") or [config["ffn"]] * config["layers"])}
    keys |= {"rope.freq_base_swa": config["local_theta"], **gguf_fields.window_keys(windows)}
    return gguf_fields.GgufForm("gemma3n", "half", keys)
