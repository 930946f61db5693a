"""Files of HyperCLOVA X, whose logits_scaling multiplies logits, where Granite's divides them. There are no GGUF files
of it."""

from roofline.common.fields import Fields
from roofline.weights.families import granite
from roofline.weights.families.shared import hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(
    NORMS | ATTENTION | MLP | {"attn_post_norm": ("", "post_norm1"), "mlp_post_norm": ("", "post_norm2")}
)
_DEFAULTS = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32}
_DEFAULTS |= {"num_attention_heads": 32, "max_position_embeddings": 2048}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. Published files have an auto_map to classes of this mathematics."""
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    ours = granite.decoder(fields, "hyperclovax", ("auto_map",))
    if fields.values.get("attention_multiplier") is None:
        ours["attention_multiplier"] = float(ours["head_dim"] ** -0.5)
    ours |= {"logits_multiplier": ours.pop("logits_scaling"), "post_norms": fields.get("use_post_norm", bool, True)}
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = granite.to_hf({**config, "logits_scaling": config.get("logits_multiplier", 1.0)})
    fields |= {"architectures": ["HyperCLOVAXForCausalLM"], "model_type": "hyperclovax"}
    return fields | {"use_post_norm": config.get("post_norms", True)}
