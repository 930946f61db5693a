"""Small models for the tests of models, program and the reference backend: a configuration and random weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from roofline.models.config import ModelConfig
from roofline.models.family import Family
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.ops import formats

BASE = {
    "family": "llama",
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "vocab": 96,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_style": "half",
    "max_position": 1024,
    "tied": True,
    "attention_bias": False,
    "qk_norm": False,
    "sliding_window": None,
}
QWEN3 = BASE | {"family": "qwen", "qk_norm": True, "tied": False, "rope_style": "interleaved"}
QWEN2 = BASE | {"family": "qwen", "attention_bias": True}
MISTRAL = BASE | {"sliding_window": 9, "tied": False}
MPT = BASE | {"family": "mpt", "kv_heads": 4, "ffn": 256, "positions": "learned", "bias": True}
MPT_ALIBI = MPT | {"positions": "alibi", "bias": False}
HYBRID = BASE | {"family": "qwen3_5", "qk_norm": True, "tied": False, "layers": 3, "recurrent": [True, False, True]}
HYBRID |= {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 8, "taps": 4, "rotary_dim": 8}
HYBRID |= {"norm_eps": 1e-3}  # rows behind the rule may be near 0: a smaller one would show the rounding before it
# Rows of K-quants are multiples of 256.
WIDE = BASE | {"width": 256, "ffn": 256, "head_dim": 64}


@dataclass(frozen=True)
class Info:
    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A Checkpoint-like model: tensors (name -> Info) and read(name) -> bytes."""

    family: Family
    cfg: ModelConfig
    tensors: dict[str, Info]
    raw: dict[str, np.ndarray]

    def read(self, name: str) -> np.ndarray:
        return self.raw[name]


def build(config: dict[str, Any], default: str = "Q4_1", seed: int = 0, **by_part: str) -> Model:
    """Random weights. by_part: format of the parameters whose name contains the key (embed="Q8_0"); vectors, and
    matrices whose rows are no whole blocks, are F32."""
    family, cfg = configure(config)
    random = np.random.default_rng(seed)
    tensors, raw = {}, {}
    for param in expand(family.spec(cfg), cfg.layers):
        if param.tied_to is not None:
            continue
        kind = next((f for part, f in by_part.items() if f".{part}." in f".{param.name}"), default)
        kind = "F32" if len(param.shape) == 1 or param.shape[1] % formats.get(kind).block else kind
        scale = 1.0 if "norm" in param.name else 0.1
        values = (random.standard_normal(param.shape) * scale + ("norm" in param.name)).astype(np.float32)
        tensors[param.name] = Info(kind, param.shape)
        raw[param.name] = formats.get(kind).quantize(values)
    return Model(family, cfg, tensors, raw)
