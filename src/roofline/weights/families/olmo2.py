"""Files of OLMo 2 and OLMo 3, whose layers have a window where those of OLMo 2 have none."""

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, POST_NORMS, QK_NORMS, TensorNames

NAMES = TensorNames(ATTENTION | QK_NORMS | MLP | POST_NORMS)
_THETA, _WINDOW, _PATTERN = 5e5, 4096, 4  # of OLMo 3; of so many layers the last one sees everything


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    if model_type == "olmo2":
        return checked(fields, hf_fields.decoder(fields, "olmo2", eps=1e-5), hf_fields.SPELLED)
    plain = fields.changed({"rope_theta": None, "rope_scaling": None, "rope_parameters": None})
    ours = hf_fields.decoder(plain, "olmo2", eps=1e-5)
    types = hf_fields.layer_types(fields)
    slides = [(layer + 1) % _PATTERN != 0 for layer in range(ours["layers"])]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else _WINDOW)
    if any(slides) and (window or 0) < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    hf_fields.windows(ours, [window or 0 if slide else 0 for slide in slides])
    ours |= layer_kinds.ropes_by_kind(fields, fields.get("rope_theta", float, _THETA), _THETA)
    if not any(slides):
        del ours["local_theta"]
    elif "rope_theta" in fields.values and not fields.inside("rope_parameters").inside("sliding_attention").values:
        stated = fields.need("rope_theta", float)
        if stated != _THETA:  # which transformers reads for the others, taking its own default for these
            reason = f"{stated:g} is not read for layers with a window: write rope_parameters by kind of layer"
            fields.refuse("rope_theta", reason)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json: of OLMo 3 where a layer has a window."""
    windows = layer_kinds.window_of_each(config)
    if not any(windows):
        return hf_fields.to_hf(config, "olmo2", "Olmo2") | {"attention_bias": False}
    fields = layer_kinds.nested_ropes(hf_fields.to_hf(config, "olmo3", "Olmo3"), config)
    return fields | {"sliding_window": max(windows), "layer_types": layer_kinds.kinds_of_layers(windows)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; layers with a window turn by the same theta, without its scaling."""
    config = gguf_fields.read(model, "olmo2", "half", gguf_fields.WINDOW_KEYS)
    window = config["sliding_window"] or 0
    hf_fields.windows(config, gguf_fields.windows(model.fields, window, config["layers"], _PATTERN))
    if window:
        gguf_fields.refuse_other_theta(model.fields, config)
    return config | ({"local_theta": config["rope_theta"]} if any(layer_kinds.window_of_each(config)) else {})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Which layers have a window is a list of the file, which says then how they turn, too."""
    keys = gguf_fields.window_keys(layer_kinds.window_of_each(config))
    return gguf_fields.GgufForm("olmo2", "half", keys | ({"rope.freq_base_swa": config["rope_theta"]} if keys else {}))
