"""Files of Arcee's AFM."""

from roofline.common.fields import Fields
from roofline.weights.families import llama
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | {name: MLP[name] for name in ("mlp.up", "mlp.down")})
_SQUARED: Config = {"activation": "relu_squared"}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    ours = hf_fields.decoder(fields, "arcee", ("attention_bias", "mlp_bias", "hidden_act"), eps=1e-5)
    hf_fields.biases(fields, ours)
    ours |= hf_fields.activation(fields, "hidden_act", "relu2")
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return hf_fields.to_hf(config, "arcee", "Arcee") | {
        "hidden_act": hf_fields.activation_to_hf(config),
        "attention_bias": config["attention_bias"],
        "mlp_bias": config.get("mlp_bias", False),
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; which activation there is is no key of such files, but of the architecture."""
    gguf_fields.refuse_window(model.fields)
    return llama.read_gguf(model, "arcee") | _SQUARED


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """llama.cpp reads no bias of this architecture but those of q, k and v."""
    gguf_fields.refuse_unsaid(
        config, {"a bias of o or of the MLP": config.get("output_bias") or config.get("mlp_bias")}
    )
    return gguf_fields.GgufForm("arcee", "interleaved")
