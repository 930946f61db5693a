"""Files of Gemma 2 and Gemma 3 (text).

Hugging Face's norms lack the 1 that their weights are added to; GGUF's converter has added it.
"""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, QK_NORMS, TensorNames

NAMES = TensorNames(
    ATTENTION
    | QK_NORMS
    | MLP
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "attn_post_norm": ("post_attention_norm", "post_attention_layernorm"),
        "mlp_norm": ("ffn_norm", "pre_feedforward_layernorm"),
        "mlp_post_norm": ("post_ffw_norm", "post_feedforward_layernorm"),
    },
    norms_less=1.0,
)
_HONOURED = {
    *("hidden_act", "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
}
_ACTIVATION = {"hidden_activation": ("gelu_pytorch_tanh",)}
# Of Gemma 3, whose published files leave them out where the text part lies in a model that reads pictures too.
_DEFAULTS = {
    "gemma3_text": {
        **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
    }
}
_PATTERN = {"gemma2": 2, "gemma3_text": 6}  # of so many layers the last one sees everything
# What the format of files does not say: of the largest model, known by its layers, a query has another scalar.
_GEMMA2_WINDOW = 4096  # of the first files, which do not say it
_LARGEST = {"gemma2": 46, "gemma3": 62}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS.get(model_type, {}))
    hf_fields.refuse_features(fields, _HONOURED)
    refuse_unless_neutral(fields, _ACTIVATION)  # hidden_act, beside it in old files, is read by nobody
    first = model_type == "gemma2"
    if not first:  # transformers has the key for this type too, and does not read it
        refuse_unless_neutral(fields, {"attn_logit_softcapping": ()})
    ours = hf_fields.sizes(fields, "gemma")
    ours |= {"kv_heads": hf_fields.kv_heads(fields), "head_dim": hf_fields.head_dim(fields, 256)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, True)
    ours |= {"attention_bias": False, "qk_norm": not first}
    ours["query_scalar"] = fields.positive("query_pre_attn_scalar") or 256.0
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    for key in caps:
        if fields.values.get(key) == 0:  # by which transformers divides
            fields.refuse(key, "is 0, which would make all scores alike; null is no cap")
    ours["attention_cap"] = _cap(fields, caps[0], 50.0 if first else 0.0)
    ours["logit_cap"] = _cap(fields, caps[1], 30.0 if first else 0.0)
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else 4096)
    hf_fields.windows(ours, _windows(fields, window or 0, ours["layers"], _PATTERN[model_type]))
    if first:
        ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields)
    else:
        ours |= _ropes(fields)
    return checked(fields, ours, hf_fields.SPELLED)


def _cap(fields: Fields, key: str, default: float) -> float:
    """A cap of at least 0; null is none, where the key is absent the type's own stands."""
    if key not in fields.values:
        return default
    value = fields.get(key, float, 0.0)
    if value < 0:
        fields.refuse(key, f"{describe(value)} is below 0")
    return value


def _windows(fields: Fields, window: int, layers: int, default: int) -> list[int]:
    """The window of each layer, as layer_types or sliding_window_pattern says."""
    types = hf_fields.layer_types(fields)
    pattern = fields.get("sliding_window_pattern", int, fields.get("_sliding_window_pattern", int, default))
    if pattern < 1:
        fields.refuse("sliding_window_pattern", f"{describe(pattern)} is not at least 1")
    slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    if any(slides) and window < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    return [window if slide else 0 for slide in slides]


def _ropes(fields: Fields) -> Config:
    """Gemma 3's two tables: nested by kind of layer, or rope_theta, rope_scaling and rope_local_base_freq."""
    nested = fields.inside("rope_parameters")
    kinds = {key for key, value in nested.values.items() if value is not None}
    local = fields.get("rope_local_base_freq", float, 1e4)
    if not kinds & {"full_attention", "sliding_attention"}:
        theta, scaling = hf_fields.rope(fields, 1e6)
        return {"rope_theta": theta, "rope_scaling": scaling, "local_theta": local}
    new = sorted(kinds - {"full_attention", "sliding_attention"})
    if new:
        what = f"{fields.path}: rope_parameters.{new[0]} beside those of kinds of layers"
        raise UnsupportedError(what, "we do not know what it does to the mathematics")
    inside = {kind: nested.inside(kind).values for kind in ("full_attention", "sliding_attention")}
    size = {"max_position_embeddings": fields.need("max_position_embeddings", int)}
    theta, scaling = hf_fields.rope(
        Fields(
            fields.path,
            {**size, "rope_theta": fields.get("rope_theta", float, 1e6), "rope_parameters": inside["full_attention"]},
        )
    )
    local_theta, local_scaling = hf_fields.rope(
        Fields(fields.path, {**size, "rope_theta": local, "rope_parameters": inside["sliding_attention"]})
    )
    if local_scaling is not None:
        what = f"{fields.path}: rope_parameters.sliding_attention with a scaling"
        raise UnsupportedError(what, "layers with a window are not scaled")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_theta": local_theta}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    kind, name = ("gemma3_text", "Gemma3") if config["qk_norm"] else ("gemma2", "Gemma2")
    fields, scalar = hf_fields.to_hf(config, kind, name), config["query_scalar"]
    del fields["hidden_act"]
    windows = config.get("layer_windows") or [config["sliding_window"] or 0] * config["layers"]
    if kind == "gemma3_text":
        rope_parameters = fields.pop("rope_parameters")
        for key in ("rope_theta", "rope_scaling"):
            fields.pop(key, None)
        local = {"rope_type": "default", "rope_theta": config["local_theta"]}
        fields["rope_parameters"] = {"full_attention": rope_parameters, "sliding_attention": local}
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # transformers asks for an int
        "attn_logit_softcapping": config["attention_cap"] or None,
        "final_logit_softcapping": config["logit_cap"] or None,
        "sliding_window": max(windows) or None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; which layers have the window is no key of most files, but of the architecture."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    window_keys = ("attention.sliding_window_pattern", "rope.freq_base_swa")
    config = gguf_fields.read(model, "gemma", "half", (*caps, *window_keys))
    fields, first = model.fields, architecture == "gemma2"
    if not first:  # llama.cpp reads it of Gemma 2 alone
        refuse_unless_neutral(fields, {caps[0]: (0.0,)})
    absent = first and "attention.sliding_window" not in fields.values
    window = _GEMMA2_WINDOW if absent else config["sliding_window"] or 0
    pattern = fields.get("attention.sliding_window_pattern", int, 2 if first else 6)
    if pattern < 1:
        fields.refuse("attention.sliding_window_pattern", f"{describe(pattern)} is not at least 1")
    hf_fields.windows(config, [window if (layer + 1) % pattern else 0 for layer in range(config["layers"])])
    config |= {"qk_norm": not first, "attention_cap": _cap(fields, caps[0], 50.0 if first else 0.0)}
    config["logit_cap"] = _cap(fields, caps[1], 30.0 if first else 0.0)
    largest = config["layers"] == _LARGEST[architecture]
    config["query_scalar"] = config["width"] / config["heads"] if largest else float(config["head_dim"])
    if not first:
        config["local_theta"] = fields.positive("rope.freq_base_swa") or 1e4
        fields.need(
            "rope.freq_base", float
        )  # llama.cpp takes 10,000 where it is missing, which no model was trained with
    elif "rope.freq_base_swa" in fields.values:
        fields.refuse("rope.freq_base_swa", "the layers of this architecture turn alike")
    return config


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Which layers have the window, and what queries are scaled by, is no key, but part of the architecture."""
    keys: Config = {"attention.sliding_window": max(config.get("layer_windows") or [config["sliding_window"] or 0])}
    if config["qk_norm"]:
        keys |= {"rope.freq_base_swa": config["local_theta"]}
        return gguf_fields.GgufForm("gemma3", "half", keys)
    caps = {"attn_logit_softcapping": config["attention_cap"], "final_logit_softcapping": config["logit_cap"]}
    return gguf_fields.GgufForm("gemma2", "half", keys | caps)
