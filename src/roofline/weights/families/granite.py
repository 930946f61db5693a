"""Files of Granite (dense)."""

from roofline.common.fields import Fields
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames(NORMS | ATTENTION | MLP)
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GGUF = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    ours = hf_fields.decoder(fields, "granite", ("attention_bias", "mlp_bias", *_MULTIPLIERS))
    hf_fields.biases(fields, ours)
    ours |= {key: fields.positive(key) or 1.0 for key in _MULTIPLIERS}
    return checked(fields, ours, hf_fields.SPELLED)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "granite", "Granite") | {key: config[key] for key in _MULTIPLIERS}
    return fields | {"attention_bias": config["attention_bias"], "mlp_bias": config.get("mlp_bias", False)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters permute the rows of q and k."""
    gguf_fields.refuse_window(model.fields)
    refuse_unless_neutral(
        model.fields, {"rope.scaling.finetuned": (True,)}
    )  # false, by its name, is a model without rope
    config = gguf_fields.read(model, "granite", "interleaved", _GGUF)
    for name, key in zip(_MULTIPLIERS, _GGUF, strict=True):
        default = config["head_dim"] ** -0.5 if key == "attention.scale" else 1.0
        config[name] = (model.fields.get(key, float, 0.0) and model.fields.positive(key)) or default  # 0 says nothing
    config["attention_bias"] = biased(model, "attn.q", "attn.k", "attn.v")
    return config | ({"output_bias": True} if biased(model, "attn.o") else {})


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Its multipliers have keys of their own."""
    keys = {key: config[name] for name, key in zip(_MULTIPLIERS, _GGUF, strict=True)}
    return gguf_fields.GgufForm("granite", "interleaved", keys)
