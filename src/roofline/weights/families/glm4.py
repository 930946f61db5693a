"""Files of GLM-4 (0414), which turns neighbouring dimensions in both kinds of files."""

from roofline.common.fields import Fields
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, TensorNames

NAMES = TensorNames(
    ATTENTION
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "attn_post_norm": ("post_attention_norm", "post_self_attn_layernorm"),
        "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
        "mlp_post_norm": ("post_ffw_norm", "post_mlp_layernorm"),
        "mlp.gate_up": ("ffn_up", "mlp.gate_up_proj"),
        "mlp.down": ("ffn_down", "mlp.down_proj"),
    },
    neighbours=True,
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; attention_bias is of q, k and v alone."""
    sized = fields.changed({"head_dim": fields.get("head_dim", int, 128)})
    ours = hf_fields.decoder(sized, "glm4", ("attention_bias",), heads_by_default=False, eps=1.5625e-7, turned=0.5)
    ours["rope_style"] = "interleaved"
    ours["attention_bias"] = fields.get("attention_bias", bool, True)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "glm4", "Glm4") | {"attention_bias": config["attention_bias"]}
    return {"partial_rotary_factor": 1.0} | fields | {"pad_token_id": None, "eos_token_id": 0}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    config = gguf_fields.read(model, "glm4", "interleaved", ("rope.dimension_count",))
    return config | {"attention_bias": biased(model, "attn.q", "attn.k", "attn.v")}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """A part of each head is turned."""
    return gguf_fields.GgufForm("glm4", "interleaved", gguf_fields.turned_part(config))
