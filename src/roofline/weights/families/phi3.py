"""Files of Phi-3 and Phi-4, whose rope_scaling "longrope" depends on the length of each text, and is refused."""

from roofline.common.fields import Fields
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import NORMS, TensorNames

NAMES = TensorNames(
    NORMS
    | {
        "attn.qkv": ("attn_qkv", "self_attn.qkv_proj"),
        "attn.o": ("attn_output", "self_attn.o_proj"),
        "mlp.gate_up": ("ffn_up", "mlp.gate_up_proj"),
        "mlp.down": ("ffn_down", "mlp.down_proj"),
    }
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. Old files name classes of their own in auto_map, whose mathematics this is."""
    ours = hf_fields.decoder(fields, "phi3", ("auto_map",), eps=1e-5, turned=1.0)
    ours["sliding_window"] = fields.get("sliding_window", int)
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "phi3", "Phi3") | {"pad_token_id": None}
    return fields | {"sliding_window": config["sliding_window"]}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration."""
    return gguf_fields.read(model, "phi3", "half", ("rope.dimension_count",))
