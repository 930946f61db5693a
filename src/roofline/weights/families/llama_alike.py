"""Files of types whose models are Llama's with other defaults: InternLM3 and IQuest-Coder, and CWM and Ministral, some
of whose layers have a window."""

from roofline.common.fields import Fields
from roofline.weights.families import llama
from roofline.weights.families.shared import hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral

NAMES, to_hf, from_gguf, to_gguf = llama.NAMES, llama.to_hf, llama.from_gguf, llama.to_gguf
_SLIDING = "sliding_attention"
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_EPS = {"rms_norm_eps": 1e-5}
_DEFAULTS: dict[str, dict[str, object]] = {
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128, **_EPS},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128, **_EPS},
    "cwm": {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192, **_EPS},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
_BIASES: dict[str, tuple[str, ...]] = {
    "internlm3": ("attention_bias", "mlp_bias"),
    "iquestcoder": ("attention_bias", "mlp_bias"),
}
_BIASES |= {"cwm": ("mlp_bias",), "ministral": ()}
_OTHER_NAMES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}  # of InternLM3


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration, as one of Llama."""
    if model_type == "internlm3":
        fields = _respelled(fields)
    if model_type == "cwm" and fields.values.get("rope_parameters") is None and not fields.get("rope_scaling", dict):
        fields = fields.changed({"rope_parameters": _LLAMA3})
    fields = hf_fields.with_defaults(fields, _DEFAULTS[model_type])
    ours = hf_fields.decoder(fields, "llama", _BIASES[model_type], theta=1e6 if model_type == "cwm" else 1e4)
    hf_fields.biases(fields, ours)
    if model_type in ("cwm", "ministral"):
        hf_fields.windows(ours, _windows(fields, ours["layers"], model_type))
    else:
        refuse_unless_neutral(fields, {"use_sliding_window": (False,)})
        ours["sliding_window"] = llama.no_window(fields)
    return checked(fields, ours, hf_fields.SPELLED)


def _respelled(fields: Fields) -> Fields:
    """The same under Llama's names. Raises ConfigError where one of two biases is there alone."""
    changes = {ours: fields.values[key] for key, ours in _OTHER_NAMES.items() if key in fields.values}
    fields = fields.changed(changes | dict.fromkeys(_OTHER_NAMES))
    if fields.get("attention_bias", bool, False) != fields.get("mlp_bias", bool, False):
        fields.refuse("attention_bias", "is not mlp_bias: this type has biases in all linear layers or in none")
    return fields


def _windows(fields: Fields, layers: int, model_type: str) -> list[int]:
    """The window of each layer, 0: none. Where layer_types is missing, each fourth layer of CWM has none, from the
    first on, and none of Ministral."""
    window = fields.get("sliding_window", int)
    kinds = hf_fields.layer_types(fields)
    if kinds is None:
        full = range(0, layers, 4) if model_type == "cwm" else range(layers if window is None else 0)
        kinds = ["full_attention" if layer in full else _SLIDING for layer in range(layers)]
    if _SLIDING in kinds and not window:
        fields.refuse("sliding_window", "is missing, and layer_types has layers with one")
    return [window or 0 if kind == _SLIDING else 0 for kind in kinds]
