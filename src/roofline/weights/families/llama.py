"""Files of Llama and Mistral, whose layers all have the same window."""

from collections.abc import Collection

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields, layer_kinds
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | MLP)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; biases where attention_bias and mlp_bias say so, as Llama alone has them."""
    biases = ("attention_bias", "mlp_bias") if model_type == "llama" else ()
    hf_fields.refuse_features(fields, biases)
    ours = hf_fields.sizes(fields, "llama")
    ours["kv_heads"] = hf_fields.kv_heads(fields, heads_by_default=model_type == "llama")
    ours["head_dim"] = hf_fields.head_dim(fields)
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-6)
    ours["tied"] = fields.get("tie_word_embeddings", bool, False)
    ours |= {"attention_bias": False, "qk_norm": False}
    if biases:
        hf_fields.biases(fields, ours)
    ours["sliding_window"] = window(fields, 4096) if model_type == "mistral" else no_window(fields)
    ours["rope_theta"], ours["rope_scaling"] = hf_fields.rope(fields)
    return checked(fields, ours, hf_fields.SPELLED)


def no_window(fields: Fields) -> int | None:
    """None: full attention. Raises UnsupportedError where layers have another."""
    if set(fields.elements("layer_types", str) or ()) - {"full_attention"}:
        raise UnsupportedError(f"{fields.path}: layer_types", "all layers of this type attend to everything")
    return None


def window(fields: Fields, absent: int | None) -> int | None:
    """The window that all layers share, None for full attention. absent: that of a file that says nothing."""
    size = fields.get("sliding_window", int, None if "sliding_window" in fields.values else absent)  # null means none
    if set(fields.elements("layer_types", str) or ()) - {"full_attention" if size is None else "sliding_attention"}:
        reason = "all layers of this type attend as sliding_window says"
        raise UnsupportedError(f"{fields.path}: layer_types", reason)
    return size


def to_hf(config: Config) -> Config:
    """The fields of a config.json: Mistral's where all layers have a window, Ministral's where some have."""
    if config.get("layer_windows"):
        kinds = layer_kinds.kinds_of_layers(config["layer_windows"])
        fields = hf_fields.to_hf(config, "ministral", "Ministral") | {"layer_types": kinds}
        return fields | {"sliding_window": max(config["layer_windows"])}
    if config["sliding_window"] is not None:
        return hf_fields.to_hf(config, "mistral", "Mistral") | {"sliding_window": config["sliding_window"]}
    biases = {"attention_bias": config["attention_bias"], "mlp_bias": config.get("mlp_bias", False)}
    return hf_fields.to_hf(config, "llama", "Llama") | biases


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    return read_gguf(model, "llama")


def read_gguf(model: gguf_fields.GgufModel, family: str, honoured: Collection[str] = ()) -> Config:
    """The same of a family like Llama; converters permute the rows of q and k, and write biases as tensors alone.

    honoured: as `gguf_fields.read` has it.
    """
    config = gguf_fields.read(model, family, "interleaved", honoured)
    config["attention_bias"] = biased(model, "attn.q", "attn.k", "attn.v")
    if biased(model, "attn.o"):
        config["output_bias"] = True
    if biased(model, "mlp.up", "mlp.down"):
        config["mlp_bias"] = True
    return config


def biased(model: gguf_fields.GgufModel, *names: str) -> bool:
    """Whether all of these linear layers have a bias in the first layer."""
    return all(f"layers.0.{name}.bias" in model.shapes for name in names)


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Biases are tensors alone, and no key."""
    return gguf_fields.GgufForm("llama", "interleaved")
