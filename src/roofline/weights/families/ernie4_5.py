"""Files of ERNIE 4.5 (dense), which turns neighbouring dimensions in both kinds of files."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | MLP, neighbours=True)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; use_bias is of all linear layers but the head. The first files name classes of their
    own in auto_map, whose mathematics this is."""
    fields = hf_fields.with_defaults(fields, {"num_key_value_heads": 2, "head_dim": 128})
    ours = hf_fields.decoder(fields, "ernie4_5", ("auto_map",), eps=1e-5, tied=True, theta=5e5)
    ours["rope_style"] = "interleaved"
    if fields.get("use_bias", bool, False):
        ours |= {"attention_bias": True, "output_bias": True, "mlp_bias": True}
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return hf_fields.to_hf(config, "ernie4_5", "Ernie4_5") | {"use_bias": config["attention_bias"]}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    return gguf_fields.read(model, "ernie4_5", "interleaved")


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration. Raises UnsupportedError for what llama.cpp has not."""
    gguf_fields.refuse_unsaid(config, {"biases": config["attention_bias"]})
    return gguf_fields.GgufForm("ernie4_5", "interleaved")
