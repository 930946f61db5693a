"""Files of Helium, which turns neighbouring dimensions."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | MLP, neighbours=True)
_BIASES = ("attention_bias", "mlp_bias")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; attention_bias is of q, k and v alone."""
    fields = hf_fields.with_defaults(fields, {"num_key_value_heads": 20, "head_dim": 128})
    ours = hf_fields.decoder(fields, "helium", _BIASES, eps=1e-8, theta=1e5) | {"rope_style": "interleaved"}
    ours |= {key: fields.get(key, bool, False) for key in _BIASES}
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return hf_fields.to_hf(config, "helium", "Helium") | {key: config.get(key, False) for key in _BIASES}
