"""Small random models whose layers differ in the shape of their attention, of a family of the tests' own: some layers
are wide, with other heads, a table of rope of their own width and another MLP, and some read the keys of others."""

import sys
from dataclasses import dataclass, replace
from typing import Any

from roofline.models import llama, qwen, registry
from roofline.models.config import KvShape, ModelConfig
from roofline.ops.rope_tables import RopeTable
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.random_weights import random_checkpoint
from tests.backends.cpu_models import with_memory

FAMILY = "tests_shaped"


@dataclass(frozen=True)
class Config(ModelConfig):
    """wide: of each layer, whether it has the sizes that begin so; sources: of each, the layer whose keys it reads,
    empty: its own; wide_style: of its rope."""

    wide: tuple[bool, ...] = ()
    sources: tuple[int, ...] = ()
    wide_heads: int = 4
    wide_kv_heads: int = 1
    wide_dim: int = 32
    wide_rotary: int = 16
    wide_style: str = "half"
    wide_ffn: int = 160

    def kv_shape(self, layer: int) -> KvShape:
        return KvShape(self.wide_kv_heads, self.wide_dim) if self.wide[layer] else super().kv_shape(layer)

    def kv_source(self, layer: int) -> int:
        return self.sources[layer] if self.sources else layer

    def heads_of(self, layer: int) -> int:
        return self.wide_heads if self.wide[layer] else self.heads

    def ffn_of(self, layer: int) -> int:
        return self.wide_ffn if self.wide[layer] else self.ffn

    def attention_scale_of(self, layer: int) -> float:
        return float(self.kv_shape(layer).head_dim ** -0.5)

    def rope_of(self, layer: int) -> RopeTable | None:
        if not self.wide[layer]:
            return self.rope
        return RopeTable.of(self.wide_rotary, 5e5, self.wide_style, None) if self.wide_rotary else None

    def first(self, layers: int) -> "Config":
        return replace(self, layers=layers, wide=self.wide[:layers], sources=self.sources[:layers])


embed, block, head, check, spec = llama.embed, llama.block, llama.head, qwen.check, qwen.spec

BASE: dict[str, Any] = {
    "family": FAMILY,
    "width": 64,
    "layers": 5,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 96,
    "vocab": 200,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_style": "half",
    "max_position": 1024,
    "tied": True,
    "attention_bias": False,
    "qk_norm": False,
    "sliding_window": None,
    "wide": [False, True, False, False, True],
}
SHARING: dict[str, Any] = {**BASE, "qk_norm": True, "layers": 6} | {
    "wide": [False, True, False, False, True, False],
    "sources": [0, 1, 2, 2, 1, 2],
    "layer_windows": [9, 0, 9, 9, 0, 9],
}
MODELS: dict[str, dict[str, Any]] = {
    "apart": BASE,
    "sharing": SHARING,
    "styles": {
        **BASE,
        "wide_style": "interleaved",
        "attention_bias": True,
        "kv_heads": 4,
        "layer_windows": [9, 0, 9, 0, 5],
    },
    "unturned": {**SHARING, "wide_rotary": 0, "qk_norm": False},
    "one-source": {**SHARING, "layers": 3, "wide": [False] * 3, "sources": [0, 0, 0], "layer_windows": []},
    "largest": {**BASE, "layers": 2, "wide": [False, True], "wide_dim": 512, "wide_heads": 2, "wide_rotary": 128},
}
if FAMILY not in registry._FAMILIES:
    registry.register(FAMILY, sys.modules[__name__], like="qwen3")


def checkpoint(model: str, form: str = "F32") -> Checkpoint:
    return with_memory(random_checkpoint(MODELS[model], seed=3, form=form))
