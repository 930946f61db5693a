"""Files of SmolLM3."""

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | MLP)
_INTERVAL = 4  # of so many layers the last one turns nothing
_HONOURED = ("no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    ours = hf_fields.decoder(fields, "smollm3", _HONOURED, tied=True, theta=2e6)
    hf_fields.biases(fields, ours)
    layers = ours["layers"]
    interval = fields.get("no_rope_layer_interval", int, _INTERVAL)
    if interval < 1:
        fields.refuse("no_rope_layer_interval", f"{describe(interval)} is not at least 1")
    turning = fields.elements("no_rope_layers", int)  # 1 where a layer turns, in spite of the name
    if turning is None:
        turning = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(turning) != layers or set(turning) - {0, 1}:
        fields.refuse("no_rope_layers", f"is not a 0 or 1 for each of {layers} layers")
    ours["turning"] = [bool(turns) for turns in turning]
    window = fields.get("sliding_window", int) if fields.get("use_sliding_window", bool, False) else None
    types = hf_fields.layer_types(fields)
    slides = [not turns for turns in turning] if types is None else [kind == "sliding_attention" for kind in types]
    if window is None and types is not None and any(slides):
        fields.refuse("layer_types", "has sliding_attention without use_sliding_window and sliding_window")
    if window is not None and window < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1")
    hf_fields.windows(ours, [window if slide and window else 0 for slide in slides])
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    windows = config.get("layer_windows") or [config["sliding_window"] or 0] * config["layers"]
    return hf_fields.to_hf(config, "smollm3", "SmolLM3") | {
        "pad_token_id": None,  # the type's default is of a larger vocabulary
        "attention_bias": config["attention_bias"],
        "mlp_bias": config.get("mlp_bias", False),
        "no_rope_layers": [int(turns) for turns in config["turning"]],
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; which layers turn nothing is part of the architecture."""
    gguf_fields.refuse_window(model.fields)
    config = gguf_fields.read(model, "smollm3", "interleaved")
    return config | {"turning": [(layer + 1) % _INTERVAL != 0 for layer in range(config["layers"])]}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Which layers turn nothing is part of the architecture."""
    return gguf_fields.GgufForm("smollm3", "interleaved")
