"""Files of OLMo 2."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, QK_NORMS, TensorNames

NAMES = TensorNames(
    ATTENTION
    | QK_NORMS
    | MLP
    | {
        "attn_post_norm": ("post_attention_norm", "post_attention_layernorm"),
        "mlp_post_norm": ("post_ffw_norm", "post_feedforward_layernorm"),
    }
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    return checked(fields, hf_fields.decoder(fields, "olmo2", eps=1e-5), hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return hf_fields.to_hf(config, "olmo2", "Olmo2") | {"attention_bias": False}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; files of OLMo 3, which has windows, have this architecture too."""
    gguf_fields.refuse_window(model.fields)
    return gguf_fields.read(model, "olmo2", "half")


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Nothing of it is its own."""
    return gguf_fields.GgufForm("olmo2", "half")
