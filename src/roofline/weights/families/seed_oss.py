"""Files of Seed-OSS."""

from roofline.common.fields import Fields
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, TensorNames

NAMES = TensorNames(
    ATTENTION
    | MLP
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "mlp_norm": ("post_attention_norm", "post_attention_layernorm"),
    }
)
_BIASES = {"attention_bias": "attention_bias", "attention_out_bias": "output_bias", "mlp_bias": "mlp_bias"}  # -> ours


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration; attention_bias is of q, k and v alone."""
    fields = hf_fields.with_defaults(fields, {"num_key_value_heads": 8, "head_dim": 128})
    ours = hf_fields.decoder(fields, "seed_oss", tuple(_BIASES))
    ours |= {ours_key: fields.get(key, bool, key == "attention_bias") for key, ours_key in _BIASES.items()}
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    biases = {key: config.get(ours, False) for key, ours in _BIASES.items()}
    return hf_fields.to_hf(config, "seed_oss", "SeedOss") | biases


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    gguf_fields.refuse_window(model.fields)
    config = gguf_fields.read(model, "seed_oss", "half")
    return config | {"attention_bias": biased(model, "attn.q", "attn.k", "attn.v")}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Biases of q, k and v are tensors alone; such files have no others."""
    gguf_fields.refuse_unsaid(
        config, {"a bias of o or of the MLP": config.get("output_bias") or config.get("mlp_bias")}
    )
    return gguf_fields.GgufForm("seed_oss", "half")
