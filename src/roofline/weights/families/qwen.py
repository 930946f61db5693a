"""Files of Qwen2 and Qwen2.5 (biases on q, k, v) and of Qwen3 (norms of q and k)."""

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, describe
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, QK_NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | QK_NORMS | MLP)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
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
    """The canonical configuration."""
    config = gguf_fields.read(model, "qwen", "half")
    return config | {"attention_bias": architecture == "qwen2", "qk_norm": architecture == "qwen3"}


def to_gguf(config: Config) -> gguf_fields.GgufForm | None:
    """Qwen2 has biases of q, k and v, Qwen3 norms of q and k; files have no name for another pair of these."""
    if bool(config["attention_bias"]) == bool(config["qk_norm"]):
        return None
    return gguf_fields.GgufForm("qwen3" if config["qk_norm"] else "qwen2", "half")
