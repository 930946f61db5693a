"""Files of Phi-3 and Phi-4."""

import math

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import Fields, shorten
from roofline.ops.rope_tables import LONGROPE
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
_LONG_KINDS = (LONGROPE, "su", "yarn")  # what files call it: transformers reads all three alike
_ORIGINAL = "original_max_position_embeddings"
_GGUF_ORIGINAL = "original_context_length"
_FACTORS = ("short_factor", "long_factor")
_PLAIN_KEYS = {"rope_theta", "partial_rotary_factor"}
_LONG_KEYS = {*_PLAIN_KEYS, "rope_type", "type", *_FACTORS, "factor", "attention_factor", _ORIGINAL}


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration. Old files name classes of their own in auto_map, whose mathematics this is."""
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    table = fields.inside(name)
    kind = table.get("rope_type", str) or table.get("type", str, "default")
    plain = fields
    if kind in _LONG_KINDS:
        plain_values = {key: value for key, value in table.values.items() if key in _PLAIN_KEYS}
        plain = fields.changed(
            {"rope_scaling": None, _ORIGINAL: None, "rope_parameters": {**plain_values, "rope_type": "default"}}
        )
    ours = hf_fields.decoder(plain, "phi3", ("auto_map",), eps=1e-5, turned=1.0)
    ours["sliding_window"] = fields.get("sliding_window", int)
    ours = checked(fields, ours, hf_fields.SPELLED)
    if kind in _LONG_KINDS:
        ours["rope_scaling"] = _longrope(fields, table, ours)
    return ours


def _longrope(fields: Fields, table: Fields, ours: Config) -> Config:
    """The two sets of factors, and what cos and sin are multiplied by with either."""
    new = sorted(set(table.values) - _LONG_KEYS)
    if new:
        what = f"{fields.path}: {table.within}{shorten(new[0])}"
        raise UnsupportedError(what, "we do not know what it does to the mathematics")
    original = fields.positive(_ORIGINAL) or 4096.0  # transformers writes it over the one in the table
    if fields.values.get(_ORIGINAL) is None and (table.positive(_ORIGINAL) or original) != original:
        table.refuse(_ORIGINAL, f"is not read there, but the type's {original:g}: write it beside {table.within[:-1]}")
    return longrope(fields, table, ours, original)


def longrope(fields: Fields, table: Fields, ours: Config, original: float) -> Config:
    """The same by the context that the model was trained for first."""
    ratio = table.positive("factor") or ours["max_position"] / original
    factor = table.positive("attention_factor")
    if factor is None:
        factor = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    scaling: Config = {"rope_type": LONGROPE, _ORIGINAL: original, "attention_factor": factor}
    return scaling | {key: _factors(table, key, ours) for key in _FACTORS}


def _factors(table: Fields, key: str, ours: Config) -> list[float]:
    """One number above 0 for each pair that is turned."""
    count = (ours.get("rotary_dim") or ours["head_dim"]) // 2
    factors = table.elements(key, float)
    if factors is None or len(factors) != count or not all(0 < factor < math.inf for factor in factors):
        table.refuse(key, f"is not {count} numbers above 0")
    return [float(factor) for factor in factors]


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    fields = hf_fields.to_hf(config, "phi3", "Phi3") | {"pad_token_id": None}
    scaling = config["rope_scaling"] or {}
    fields |= {_ORIGINAL: int(scaling[_ORIGINAL])} if scaling.get("rope_type") == LONGROPE else {}
    return fields | {"sliding_window": config["sliding_window"]}


def from_gguf(model: gguf_fields.GgufModel, architecture: str) -> Config:
    """The canonical configuration; the factors of longrope are tensors, and its kind is no key."""
    attention, original = "rope.scaling.attn_factor", f"rope.scaling.{_GGUF_ORIGINAL}"
    scaled = (attention,) if model.longrope else ()
    config = gguf_fields.read(model, "phi3", "half", ("rope.dimension_count", *scaled))
    if not model.longrope:
        return config
    fields = model.fields
    if config["rope_scaling"] is not None:
        fields.refuse("rope.scaling.factor", "stands beside rope_factors_long.weight; one of them is too many")
    values = {key: values.tolist() for key, values in model.longrope.items()}
    scaling: Config = {"rope_type": LONGROPE, _ORIGINAL: float(fields.need(original, int))}
    scaling["attention_factor"] = fields.positive(attention) or 1.0
    table = Fields(fields.path, values, "rope_factors of ")
    return config | {"rope_scaling": scaling | {key: _factors(table, key, config) for key in _FACTORS}}


def to_gguf(config: Config) -> gguf_fields.GgufForm:
    """How a file says a configuration: the factors of longrope are tensors, and its kind is no key."""
    keys, scaling = gguf_fields.turned_part(config), config["rope_scaling"] or {}
    if scaling.get("rope_type") != LONGROPE:
        return gguf_fields.GgufForm("phi3", "half", keys)
    keys |= {f"rope.scaling.{_GGUF_ORIGINAL}": int(scaling[_ORIGINAL])}
    keys |= {"rope.scaling.attn_factor": scaling["attention_factor"]}
    factors = {key: np.array(scaling[key], np.float32) for key in _FACTORS}
    return gguf_fields.GgufForm("phi3", "half", keys, longrope=factors)
