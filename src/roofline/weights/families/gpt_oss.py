"""Files of gpt-oss.

Hugging Face's hold the gates and ups of all experts in one tensor, in turn (`shared/joined_experts.py`); where these
are in MXFP4, `weights/quantised/mxfp4.py` reads them.
"""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields
from roofline.ops.activations import SWIGLU_SLOPE
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.experts import (
    EACH_EXPERT,
    EXPERTS,
    HONOURED_GGUF,
    expert_size,
    experts_to_gguf,
    gguf_experts,
    hf_experts,
)
from roofline.weights.families.shared.joined_experts import experts_apart, experts_placed
from roofline.weights.families.shared.tensor_names import ATTENTION, TensorNames

NAMES = TensorNames(
    ATTENTION
    | EXPERTS
    | EACH_EXPERT
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "attn.sinks": ("attn_sinks", "self_attn.sinks"),
        "mlp_norm": ("post_attention_norm", "post_attention_layernorm"),
        "mlp.router": ("ffn_gate_inp", "mlp.router"),
    },
    hf_apart=experts_apart,
    hf_placed=experts_placed,
)
_HONOURED = ("num_local_experts", "num_experts", "attention_bias")
# What transformers takes where the file says nothing of it.
_THETA = 150000.0
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    hf_fields.refuse_features(fields, _HONOURED)
    ours = hf_fields.sizes(fields, "gpt_oss")
    ours |= {"kv_heads": hf_fields.kv_heads(fields), "head_dim": hf_fields.head_dim(fields, 64)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-5)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": False}
    hf_fields.biases(fields, ours, attention=True)
    experts = "num_local_experts" if fields.values.get("num_local_experts") is not None else "num_experts"
    ours |= hf_experts(fields, experts)
    ours["swiglu_limit"] = fields.positive("swiglu_limit") or 7.0
    neutral = {"swiglu_alpha": (SWIGLU_SLOPE,), "experts_per_token": (ours["experts_per_token"],)}
    refuse_unless_neutral(fields, neutral)
    hf_fields.windows(ours, _windows(fields, ours["layers"]))
    scaled = any(fields.values.get(key) is not None for key in ("rope_scaling", "rope_parameters"))
    read = fields if scaled else fields.changed({"rope_parameters": _YARN})
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(read, _THETA)
    return checked(fields, ours, hf_fields.SPELLED)


def _windows(fields: Fields, layers: int) -> list[int]:
    """The window of each layer, 0 for none: where layer_types does not say otherwise, of every second one."""
    types = hf_fields.layer_types(fields)
    slides = [layer % 2 == 0 for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else 128)
    if any(slides) and (window is None or window < 1):
        fields.refuse("sliding_window", f"{window} is not at least 1, and there are layers with a window")
    return [(window or 0) if slide else 0 for slide in slides]


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    windows = config.get("layer_windows") or [config["sliding_window"] or 0] * config["layers"]
    return hf_fields.to_hf(config, "gpt_oss", "GptOss") | {
        "num_local_experts": config["experts"],
        "num_experts_per_tok": config["experts_per_token"],
        "attention_bias": config["attention_bias"],
        "swiglu_limit": config.get("swiglu_limit", 7.0),
        "sliding_window": max(windows) or None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. Files do not say which layers have the window, the limit of SwiGLU and that the ramp
    of YaRN is not cut to whole dimensions: all released models have them alike."""
    fields = model.fields
    config = gguf_fields.read(model, "gpt_oss", "half", (*HONOURED_GGUF, "expert_feed_forward_length"))
    config |= gguf_experts(fields)
    config["ffn"] = expert_size(fields, "expert_feed_forward_length")
    biases = {"layers.0.attn.q.bias", "layers.0.attn.o.bias"} & set(model.shapes)
    if len(biases) == 1:
        raise UnsupportedError(f"{fields.path}: biases on q, k, v or on o alone", "all of them have one, or none")
    config |= {"attention_bias": bool(biases), "output_bias": bool(biases), "swiglu_limit": 7.0}
    window = config["sliding_window"]
    if window is None:
        fields.refuse("attention.sliding_window", "is missing, and every second layer has a window")
    hf_fields.windows(config, [window if layer % 2 == 0 else 0 for layer in range(config["layers"])])
    fields.need("rope.freq_base", float)  # llama.cpp takes 10,000 where it is missing, which no model was trained with
    if (config["rope_scaling"] or {}).get("rope_type") == "yarn":
        config["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
    return config


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Which layers have the window is part of the architecture."""
    windows = config.get("layer_windows") or [config["sliding_window"] or 0]
    keys = {"expert_feed_forward_length": config["ffn"], "attention.sliding_window": max(windows)}
    return gguf_fields.GgufForm("gpt-oss", "half", experts_to_gguf(config) | keys)
