"""Rotary position tables: computed in float64 by absolute position, rounded once to float32.

RoPE: Su et al. 2021 (RoFormer). "half" rotates (x[i], x[i + dim/2]) as Hugging Face does, "interleaved"
(x[2i], x[2i+1]) as the original and GGUF files of Llama do. Scalings: linear (Chen et al. 2023), llama3 (Llama 3.1's
frequency ramp), yarn (Peng et al. 2023), longrope (Ding et al. 2024). Scalings that depend on the length of the text
being served cannot give equal bits for equal prefixes and are refused; of longrope's two sets of factors, that of long
texts is taken wherever the context that is served is longer than the original one, as it is for every text then.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError

STYLES = ("half", "interleaved")
NEEDED: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0
OPTIONAL = {
    "proportional": ("factor",),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
LONGROPE = "longrope"
PROPORTIONAL = "proportional"  # a part of the pairs turns, each as it would if all did
PROPORTIONAL_KEYS = ("partial_rotary_factor",)
LONGROPE_KEYS = ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor")
# Keys that say nothing about the frequencies and may stand in a config's rope_scaling.
_IGNORED = ("rope_type", "type", "rope_theta")


@dataclass(frozen=True)
class RopeTable:
    """Everything a table is made of. dim: dimensions rotated in a head; scaling: sorted (key, value) pairs."""

    dim: int
    theta: float
    style: str = "half"
    kind: str = "none"
    scaling: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ConfigError(f"rope_style {self.style!r} is not one of {', '.join(STYLES)}")
        if self.kind not in NEEDED and self.kind not in (LONGROPE, PROPORTIONAL):
            raise UnsupportedError(f"rope scaling {self.kind!r}", "its tables are unknown here", sorted(NEEDED))
        if self.dim <= 0 or self.dim % 2:
            raise ConfigError(f"rope needs an even number of dimensions, got {self.dim}")
        keys = {key for key, _ in self.scaling}
        if self.kind == LONGROPE:
            if keys != {"attention_factor", *(_factor(i) for i in range(self.dim // 2))}:
                raise ConfigError(f"rope scaling {self.kind!r} needs {self.dim // 2} factors, got {len(keys) - 1}")
            return
        needed = PROPORTIONAL_KEYS if self.kind == PROPORTIONAL else NEEDED[self.kind]
        missing = set(needed) - keys
        unknown = keys - set(needed) - set(OPTIONAL.get(self.kind, ()))
        if missing or unknown:
            raise ConfigError(f"rope scaling {self.kind!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        if self.kind == "yarn" and self.theta == 1:
            raise ConfigError("rope scaling 'yarn': a theta of 1 turns all pairs alike, and yarn tells them apart")

    @classmethod
    def of(cls, dim: int, theta: float, style: str, scaling: Mapping[str, Any] | None, context: int = 0) -> "RopeTable":
        """From a config's rope_scaling mapping with Hugging Face's keys. Raises ConfigError, UnsupportedError.

        context: positions that are served, by which longrope's factors are chosen.
        """
        scaling = scaling or {}
        kind = str(scaling.get("rope_type", scaling.get("type", "none")))
        kind = "none" if kind == "default" else kind
        if kind == LONGROPE:
            return cls(dim, float(theta), style, kind, _longrope_pairs(scaling, context))
        pairs = ((k, float(v)) for k, v in scaling.items() if k not in _IGNORED and v is not None)
        return cls(dim, float(theta), style, kind, tuple(sorted(pairs)) if kind != "none" else ())


def frequencies(table: RopeTable) -> tuple[np.ndarray, float]:
    """Angle per position, float64 [dim / 2], and the factor that multiplies cos and sin."""
    inverse = table.theta ** (-np.arange(0, table.dim, 2, dtype=np.float64) / table.dim)
    options = dict(table.scaling)
    if table.kind == PROPORTIONAL:
        turned = int(options["partial_rotary_factor"] * table.dim // 2)
        inverse[turned:] = 0.0
        return inverse / options.get("factor", 1.0), 1.0
    if table.kind == "linear":
        return inverse / options["factor"], 1.0
    if table.kind == "llama3":
        return _llama3(inverse, options), 1.0
    if table.kind == LONGROPE:
        factors = np.array([options[_factor(i)] for i in range(table.dim // 2)], dtype=np.float64)
        return inverse / factors, options["attention_factor"]
    if table.kind == "yarn":
        return _yarn(inverse, table, options)
    return inverse, 1.0


def cos_sin(table: RopeTable, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin for absolute positions: two float32 arrays [len(positions), dim / 2]."""
    inverse, factor = frequencies(table)
    angles = np.asarray(positions, dtype=np.float64)[:, None] * inverse[None, :]
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _factor(number: int) -> str:
    """The key of a longrope table's factor of one frequency."""
    return f"factor.{number:03d}"


def _longrope_pairs(scaling: Mapping[str, Any], context: int) -> tuple[tuple[str, float], ...]:
    missing = [key for key in LONGROPE_KEYS if key not in scaling]
    if missing:
        raise ConfigError(f"rope scaling {LONGROPE!r}: missing {missing}")
    is_long = context > scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if is_long else "short_factor"]
    pairs = ((_factor(number), float(value)) for number, value in enumerate(factors))
    return (("attention_factor", float(scaling["attention_factor"])), *pairs)


def _llama3(inverse: np.ndarray, options: Mapping[str, float]) -> np.ndarray:
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * inverse / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * (smooth + (1 - smooth) / options["factor"])


def _yarn(inverse: np.ndarray, table: RopeTable, options: Mapping[str, float]) -> tuple[np.ndarray, float]:
    factor, original = options["factor"], options["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The (fractional) dimension that turns so often over the original context."""
        return table.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(table.theta))

    low, high = dimension(options.get("beta_fast", YARN_BETA_FAST)), dimension(options.get("beta_slow", YARN_BETA_SLOW))
    if options.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, table.dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(table.dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
    return inverse * (1 - ramp) + inverse / factor * ramp, _yarn_factor(options)


def _yarn_factor(options: Mapping[str, float]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if options["factor"] <= 1 else 0.1 * weight * math.log(options["factor"]) + 1.0

    if "attention_factor" in options:
        return options["attention_factor"]
    if options.get("mscale") and options.get("mscale_all_dim"):
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)
