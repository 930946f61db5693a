"""Files of Gemma (the first). Hugging Face's norms lack the 1 that their weights are added to; GGUF's have it."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | MLP, norms_less=1.0)
# The second of hidden_act, which the first files have, is read as the first; nobody reads hidden_activation.
_ACTIVATION = {"hidden_act": ("gelu_pytorch_tanh", "gelu"), "hidden_activation": ("gelu_pytorch_tanh",)}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    fields = hf_fields.with_defaults(fields, {"num_key_value_heads": 16, "head_dim": 256})
    refuse_unless_neutral(fields, _ACTIVATION)
    ours = hf_fields.decoder(fields, "gemma1", _ACTIVATION, tied=True)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return hf_fields.to_hf(config, "gemma", "Gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    return gguf_fields.read(model, "gemma1", "half")


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Nothing of it is its own."""
    return gguf_fields.GgufForm("gemma", "half")
