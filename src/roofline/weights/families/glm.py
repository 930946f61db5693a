"""Files of GLM-4 (9B of 2024) in transformers' form, which turns neighbouring dimensions in both kinds of files."""

from roofline.common.fields import Fields
from roofline.weights.families import glm4
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.tensor_names import ATTENTION, NORMS, TensorNames

NAMES = TensorNames(
    NORMS | ATTENTION | {"mlp.gate_up": ("ffn_up", "mlp.gate_up_proj"), "mlp.down": ("ffn_down", "mlp.down_proj")},
    neighbours=True,
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration, of the same fields as that of GLM-4-0414."""
    fields = hf_fields.with_defaults(fields, {"num_key_value_heads": 2})
    return glm4.from_hf(fields, model_type) | {"family": "glm"}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return glm4.to_hf(config) | {"architectures": ["GlmForCausalLM"], "model_type": "glm"}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration. Files of ChatGLM have q, k and v in one tensor, which is refused by its name."""
    gguf_fields.refuse_window(model.fields)
    config = gguf_fields.read(model, "glm", "interleaved", ("rope.dimension_count",))
    return config | {"attention_bias": biased(model, "attn.q", "attn.k", "attn.v")}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """A part of each head is turned."""
    return gguf_fields.GgufForm("chatglm", "interleaved", gguf_fields.turned_part(config))
