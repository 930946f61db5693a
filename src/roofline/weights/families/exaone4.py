"""Files of EXAONE 4, of which the large models have layers with a window and the small one has none."""

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, POST_NORMS, QK_NORMS, TensorNames

NAMES = TensorNames(ATTENTION | QK_NORMS | MLP | POST_NORMS)
_WINDOW, _PATTERN = 4096, 4  # of so many layers the last one sees everything
_LAYERS_WITH_WINDOWS = 64  # llama.cpp tells the model that has windows by its layers


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, {"num_key_value_heads": 32})
    ours = hf_fields.decoder(fields, "exaone4", eps=1e-5) | {"qk_norm": True}
    windows_and_turning(fields, ours)
    return checked(fields, ours, hf_fields.SPELLED)


def windows_and_turning(fields: Fields, ours: Config) -> None:
    """Write the window of each layer, and whether it turns q and k: where there is a window, layers with one alone."""
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else _WINDOW)
    types, spelled = hf_fields.layer_types(fields), fields.values.get("sliding_window_pattern", _PATTERN)
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
    elif window is None:
        slides = [False] * ours["layers"]
    else:  # beside layer_types it may be letters, which are not read
        pattern = fields.checked("sliding_window_pattern", spelled, int)
        if pattern < 1:
            fields.refuse("sliding_window_pattern", f"{describe(pattern)} is not at least 1")
        slides = [(layer + 1) % pattern != 0 for layer in range(ours["layers"])]
    if any(slides) and (window or 0) < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1, and there are layers with a window")
    hf_fields.windows(ours, [window if slide and window else 0 for slide in slides])
    ours["turning"] = [window is None or slide for slide in slides]


def to_hf(config: Config) -> Config:
    """The fields of a config.json; that layers turn nothing is said by a window, whether a layer has it or not."""
    return hf_fields.to_hf(config, "exaone4", "Exaone4") | windows_to_hf(config)


def windows_to_hf(config: Config) -> Config:
    """The inverse of `windows_and_turning`."""
    windows = layer_kinds.window_of_each(config)
    window = max(windows) or (None if all(config["turning"]) else _WINDOW)
    return {"sliding_window": window, "layer_types": layer_kinds.kinds_of_layers(windows)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    config = gguf_fields.read(model, "exaone4", "half", gguf_fields.WINDOW_KEYS)
    gguf_fields.refuse_other_theta(model.fields, config)
    default = _WINDOW if config["layers"] == _LAYERS_WITH_WINDOWS else 0
    window = model.fields.get("attention.sliding_window", int, default)
    windows = gguf_fields.windows(model.fields, window, config["layers"], _PATTERN)
    hf_fields.windows(config, windows)
    return config | {"qk_norm": True, "turning": [not window or bool(each) for each in windows]}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    windows = layer_kinds.window_of_each(config)
    gguf_fields.refuse_unsaid(
        config,
        {f"{_LAYERS_WITH_WINDOWS} layers and no window": not any(windows) and config["layers"] == _LAYERS_WITH_WINDOWS},
    )
    return gguf_fields.GgufForm("exaone4", "half", gguf_fields.window_keys(windows))
