"""The canonical configuration of a model, the same whatever file it came from, and the checks of its values.

The mapping has these keys: family ("llama" | "qwen" | "mpt"), width, layers, heads, kv_heads, head_dim, ffn, vocab,
norm_eps, rope_theta, rope_scaling (None, or a mapping with Hugging Face's keys and "rope_type" linear | llama3 | yarn),
rope_style ("half" | "interleaved"), max_position, tied, attention_bias (on q, k, v), qk_norm, sliding_window (or None),
and of mpt positions and bias: the fields of `models.config.ModelConfig`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roofline.common.errors import UnsupportedError
from roofline.ops.rope_tables import NEEDED, OPTIONAL
from roofline.weights.files.mapped import JsonObject, refuse, shorten

Config = dict[str, Any]

# Upper bounds far above any model, so that a damaged field is named here and not met as a failed allocation.
_INTEGERS = {
    **dict.fromkeys(("layers", "heads", "kv_heads", "head_dim"), 1 << 14),
    **{"width": 1 << 20, "ffn": 1 << 22, "vocab": 1 << 24, "max_position": 1 << 30},
}


def checked(path: Path, config: Config) -> Config:
    """The same mapping, its values within reason. Raises ConfigError naming file and field."""
    for key, largest in _INTEGERS.items():
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            refuse(path, key, f"{value!r} is not a whole number from 1 to {largest}")
    for key in ("norm_eps", "rope_theta"):
        config[key] = _positive(path, key, config[key])
    if config["heads"] % config["kv_heads"]:
        refuse(path, "kv_heads", f"{config['kv_heads']} does not divide the {config['heads']} heads")
    if config["head_dim"] % 2:
        refuse(path, "head_dim", f"{config['head_dim']} is odd; rope turns pairs")
    window = config["sliding_window"]
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        refuse(path, "sliding_window", f"{window!r} is not a whole number of at least 1")
    return config


def refuse_unless_neutral(path: Path, fields: JsonObject, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise UnsupportedError for the first field with a value that changes the mathematics.

    neutral: fields -> the values at which they change nothing; an absent field and null never do.
    """
    for key, values in neutral.items():
        value = fields.get(key)
        if value is not None and value not in values:
            what = f"{path}: {key} = {shorten(str(value))}"
            raise UnsupportedError(what, "it changes the mathematics and we do not have it")


def checked_rope_scaling(path: Path, kind: str, fields: JsonObject) -> Config | None:
    """The canonical rope scaling of a kind; values become floats. Raises ConfigError or UnsupportedError by field."""
    if kind in ("default", "none"):
        return None
    if kind not in NEEDED:
        reason = "only scalings fixed at load by the configuration give equal numbers for equal prefixes"
        raise UnsupportedError(f"{path}: rope scaling {kind!r}", reason, tuple(NEEDED))
    scaling: Config = {"rope_type": kind}
    for key in NEEDED[kind]:
        if fields.get(key) is None:
            refuse(path, f"rope scaling {kind!r}", f"{key} is missing")
        scaling[key] = _positive(path, f"rope scaling {key}", fields[key])
    for key in OPTIONAL.get(kind, ()):
        value = fields.get(key)
        if value is not None:
            scaling[key] = bool(value) if key == "truncate" else _positive(path, f"rope scaling {key}", value)
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        refuse(path, "rope scaling 'llama3'", "high_freq_factor is not above low_freq_factor")
    return scaling


def _positive(path: Path, field: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < math.inf):
        refuse(path, field, f"{value!r} is not a positive number")
    return float(value)
