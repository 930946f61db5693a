"""Files of MiniCPM3."""

import math
from dataclasses import replace

import numpy as np

from roofline.common.fields import Fields
from roofline.ops.rope_tables import LONGROPE
from roofline.weights.families import phi3
from roofline.weights.families.shared import gguf_fields, hf_fields, latent_fields
from roofline.weights.families.shared.canonical import Config, checked
from roofline.weights.families.shared.tensor_names import MLP, NORMS, TensorNames

# llama.cpp has the matrix of keys and values of all heads in one, as Hugging Face's files have it.
NAMES = TensorNames(NORMS | MLP | latent_fields.ATTENTION | {"attn.k_up": ("", ""), "attn.v_up": ("", "")})
_DEFAULTS: Config = {"num_key_value_heads": 40, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64}
_DEFAULTS |= {"qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "head_divisor")
_FIXED = (12.0, 1.4, 256)  # what llama.cpp takes, whatever a file says
_ORIGINAL = "original_max_position_embeddings"


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. Files of the first days name classes of their own in auto_map, whose mathematics
    this is."""
    hf_fields.refuse_features(fields, ("auto_map",))
    fields = hf_fields.with_defaults(fields, _DEFAULTS)
    ours = hf_fields.sizes(fields, "minicpm3")
    if fields.get("v_head_dim", int) is None:
        fields = fields.changed({"v_head_dim": hf_fields.divided(fields, ours, "num_attention_heads")})
    ours |= latent_fields.hf_attention(fields, ours["heads"])
    ours["norm_eps"] = fields.get("rms_norm_eps", float, 1e-5)
    ours["tied"] = fields.get("tie_word_embeddings", bool, True)
    depth = fields.positive("scale_depth") or math.sqrt(ours["layers"])
    base = fields.positive("dim_model_base") or float(ours["width"])
    values = (fields.positive("scale_emb"), depth / math.sqrt(ours["layers"]), ours["width"] / base)
    ours |= dict(zip(_MULTIPLIERS, values, strict=True))
    if ours["embedding_multiplier"] is None:
        fields.refuse("scale_emb", "is null, and embeddings are multiplied by it")
    ours["rope_theta"], ours["rope_scaling"] = _rope(fields, ours)
    return checked(fields, ours, hf_fields.SPELLED | {"head_dim": "qk_nope_head_dim"})


def _rope(fields: Fields, ours: Config) -> tuple[object, Config | None]:
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    table = fields.inside(name)
    if (table.get("rope_type", str) or table.get("type", str, "")) != LONGROPE:
        return hf_fields.rope(fields)
    plain = {key: value for key, value in table.values.items() if key == "rope_theta"}
    theta, _ = hf_fields.rope(fields.changed({"rope_scaling": None, "rope_parameters": plain}))
    original = fields.positive(_ORIGINAL) or table.positive(_ORIGINAL) or float(ours["max_position"])
    return theta, phi3.longrope(fields, table, ours, original)


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    written = {key: value for key, value in config.items() if key != "rotary_dim"}
    fields = hf_fields.to_hf(written, "minicpm3", "MiniCPM3") | latent_fields.attention_to_hf(config)
    return fields | {
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * math.sqrt(config["layers"]),
        "dim_model_base": round(config["width"] / config["head_divisor"]),
    }


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration, with the multipliers that llama.cpp has of these models; the width of values is that
    of a matrix."""
    fields = model.fields
    config = gguf_fields.read(model, "minicpm3", "half", latent_fields.GGUF_KEYS)
    o = model.shapes.get("layers.0.attn.o.weight", (0, config["heads"]))
    config |= latent_fields.gguf_attention(_with_values(model, o[1] // config["heads"]), config)
    embedding, depth, base = _FIXED
    values = (embedding, depth / math.sqrt(config["layers"]), config["width"] / base)
    config |= dict(zip(_MULTIPLIERS, values, strict=True))
    if not model.longrope:
        return config
    factors = {key: values.tolist() for key, values in model.longrope.items()}
    original = float(fields.get("rope.scaling.original_context_length", int, config["max_position"]))
    table = Fields(fields.path, factors, "rope_factors of ")
    return config | {"rope_scaling": phi3.longrope(table, table, config, original)}


def _with_values(model: gguf_fields.GgufModel, dim: int) -> gguf_fields.GgufModel:
    """The same with the width of a head's values, which such files do not say."""
    return replace(model, fields=model.fields.changed({"attention.value_length": dim}))


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """Return how a file says a configuration, whose multipliers are those that llama.cpp has. Raises UnsupportedError
    where it has no place for it."""
    keys = {"rope.dimension_count": config["rotary_dim"], "attention.kv_lora_rank": config["kv_rank"]}
    keys |= {"attention.q_lora_rank": config["q_rank"], "attention.key_length": config["head_dim"]}
    keys["attention.value_length"] = config["value_dim"]  # the converter leaves it out where llama.cpp derives it
    scaling = config["rope_scaling"] or {}
    gguf_fields.refuse_unsaid(
        config,
        {
            "queries that are not compressed": not config["q_rank"],
            "another scaling of rope": scaling.get("rope_type") not in (None, LONGROPE),
        },
    )
    if not scaling:
        return gguf_fields.GgufForm("minicpm3", "half", keys)
    factors = {key: np.array(scaling[key], np.float32) for key in ("short_factor", "long_factor")}
    return gguf_fields.GgufForm("minicpm3", "half", keys, longrope=factors)
