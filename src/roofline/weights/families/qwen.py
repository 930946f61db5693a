"""Files of Qwen2 and Qwen2.5 (biases on q, k, v), of Qwen3 (norms of q and k), and of the text part of Qwen3-VL.

The latter is Qwen3: positions of text are the same in all three dimensions that its rope turns by, and what a picture
adds to the first layers is not there. Its parameters are written as a Qwen3 model.
"""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, QK_NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | QK_NORMS | MLP)


MROPE = ("mrope_section", "mrope_interleaved")  # which frequencies are of which dimension of a position
_VISION_TEXT = "qwen3_vl_text"
_VISION_DEFAULTS = {
    **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 128_000},
}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    if model_type == _VISION_TEXT:
        return _vision_text(fields)
    hf_fields.refuse_features(fields)
    ours = hf_fields.sizes(fields, "qwen")
    ours["kv_heads"] = hf_fields.kv_heads(fields)
    ours["head_dim"] = hf_fields.head_dim(fields, 128 if model_type == "qwen3" else None)  # transformers' default
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": model_type == "qwen2", "qk_norm": model_type == "qwen3"}
    hf_fields.windows(ours, _windows(fields, ours["layers"]))
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields)
    return checked(fields, ours, hf_fields.SPELLED)


def _vision_text(fields: Fields) -> Config:
    """The canonical configuration of the text part of Qwen3-VL, whose layers attend to everything."""
    fields = hf_fields.with_defaults(fields, _VISION_DEFAULTS)
    hf_fields.refuse_features(fields)
    ours = hf_fields.sizes(fields, "qwen")
    ours |= {"kv_heads": hf_fields.kv_heads(fields, heads_by_default=True), "head_dim": hf_fields.head_dim(fields, 128)}
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": True, "sliding_window": None}
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields, 5e5, honoured=MROPE)
    return checked(fields, ours, hf_fields.SPELLED)


def _windows(fields: Fields, layers: int) -> list[int]:
    """The window of each layer: of those from max_window_layers on, or as layer_types says."""
    window = fields.get("sliding_window", int, None if "sliding_window" in fields.values else 4096)  # null means none
    window = window if fields.get("use_sliding_window", bool, False) else None
    first = fields.get("max_window_layers", int, 28)
    if first < 0:
        fields.refuse("max_window_layers", f"{describe(first)} is below 0")
    types = hf_fields.layer_types(fields)
    if window is not None and window < 1:
        fields.refuse("sliding_window", f"{describe(window)} is not at least 1")
    slides = [layer >= first for layer in range(layers)]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
        if any(slides) and window is None:
            what = f"{fields.path}: layer_types with sliding_attention"
            raise UnsupportedError(what, "there is no window without use_sliding_window and sliding_window")
    return [window if slide and window is not None else 0 for slide in slides]


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    kind = "qwen3" if config["qk_norm"] else "qwen2"
    each = config.get("layer_windows") or [config["sliding_window"] or 0] * config["layers"]
    fields = hf_fields.to_hf(config, kind, kind.capitalize())
    if any(each):
        types = ["sliding_attention" if window else "full_attention" for window in each]
        first = next(layer for layer, window in enumerate(each) if window)
        windows = {"use_sliding_window": True, "sliding_window": max(each), "max_window_layers": first}
        fields |= windows | {"layer_types": types}
    return fields


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. What files of Qwen3-VL say of pictures changes nothing for text."""
    honoured = gguf_fields.VISION if architecture == "qwen3vl" else ()
    config = gguf_fields.read(model, "qwen", "half", honoured)
    return config | {"attention_bias": architecture == "qwen2", "qk_norm": architecture != "qwen2"}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Qwen2 has biases of q, k and v, Qwen3 norms of q and k; files have no name for another pair of these."""
    biased, normed = bool(config["attention_bias"]), bool(config["qk_norm"])
    both = "biases and norms of q and k" if biased else "neither biases nor norms of q and k"
    gguf_fields.refuse_unsaid(config, {both: biased == normed})
    return gguf_fields.GgufForm("qwen3" if config["qk_norm"] else "qwen2", "half")
