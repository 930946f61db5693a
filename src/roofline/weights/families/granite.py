"""Files of Granite (dense). Those of Granite 4 without recurrent layers call the MLP a shared one of no experts."""

import re
from pathlib import Path

from roofline.common.fields import Fields
from roofline.weights.families.llama import biased
from roofline.weights.families.shared import gguf_fields, hf_fields
from roofline.weights.families.shared.canonical import Config, checked, refuse_unless_neutral
from roofline.weights.families.shared.joined_experts import halves_apart, renamed
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, NORMS, TensorNames
from roofline.weights.quantised.method import TensorSource

_GATE_UP = re.compile(r"(.+)\.shared_mlp\.input_linear\.weight")


def _apart(path: Path, source: TensorSource) -> TensorSource:
    """With the names that Granite's MLP has, where those are Granite 4's."""
    halves = (rf"\1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    plain = halves_apart(source, _GATE_UP, (next(halves), next(halves)))
    return renamed(plain, lambda name: name.replace(".shared_mlp.output_linear.", ".mlp.down_proj."))


NAMES = TensorNames(NORMS | ATTENTION | MLP, hf_apart=_apart)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
GGUF_MULTIPLIERS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    return checked(fields, decoder(fields, "granite"), hf_fields.SPELLED)


def decoder(fields: Fields, family: str, honoured: tuple[str, ...] = ()) -> Config:
    """The canonical configuration as far as all of Granite's types agree on it. honoured: what the caller reads."""
    ours = hf_fields.decoder(fields, family, ("attention_bias", "mlp_bias", *MULTIPLIERS, *honoured))
    hf_fields.biases(fields, ours)
    return ours | {key: fields.positive(key) or 1.0 for key in MULTIPLIERS}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "granite", "Granite") | {key: config[key] for key in MULTIPLIERS}
    return fields | {"attention_bias": config["attention_bias"], "mlp_bias": config.get("mlp_bias", False)}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; converters permute the rows of q and k."""
    return decoder_from_gguf(model, "granite")


def decoder_from_gguf(model: gguf_fields.GgufModel, family: str, honoured: tuple[str, ...] = ()) -> Config:
    """The same as far as all of Granite's architectures agree on it. honoured: keys that the caller reads."""
    gguf_fields.refuse_window(model.fields)
    refuse_unless_neutral(
        model.fields, {"rope.scaling.finetuned": (True,)}
    )  # false, by its name, is a model without rope
    config = gguf_fields.read(model, family, "interleaved", (*GGUF_MULTIPLIERS, *honoured))
    for name, key in zip(MULTIPLIERS, GGUF_MULTIPLIERS, strict=True):
        default = config["head_dim"] ** -0.5 if key == "attention.scale" else 1.0
        config[name] = (model.fields.get(key, float, 0.0) and model.fields.positive(key)) or default  # 0 says nothing
    config["attention_bias"] = biased(model, "attn.q", "attn.k", "attn.v")
    return config | ({"output_bias": True} if biased(model, "attn.o") else {})


def multiplier_keys(config: Config) -> Config:
    """The keys of GGUF files for its multipliers."""
    return {key: config[name] for name, key in zip(MULTIPLIERS, GGUF_MULTIPLIERS, strict=True)}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Its multipliers have keys of their own."""
    return gguf_fields.GgufForm("granite", "interleaved", multiplier_keys(config))
