"""What a model asks of a device's memory, read from its Program before anything is allocated."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.ops.batch import BatchLimits
from roofline.ops.symbol import kv_head_bytes
from roofline.program.ir import Program, Recipe

_LAYER = re.compile(r"layers\.(\d+)\.")


def layer_of(weight: str) -> int | None:
    """The layer that a weight belongs to by its name; None: before the first or after the last."""
    match = _LAYER.match(weight)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Needs:
    """Bytes.

    layers: of each layer's weights; ends: of the weights before the first layer and after the last (embedding, last
    norm, head), which every step reads; token: of K and V of one token over all layers; workspace: everything else that
    is there while a step runs; kv_heads: of a layer, which bounds tensor parallelism; others: of what else will lie on
    the same device; others_token: the same for each token of our cache, a part of `token`.
    """

    layers: tuple[int, ...]
    ends: int
    token: int
    workspace: int
    kv_heads: int
    others: int = 0
    others_token: int = 0

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(self.layers) + self.ends

    def total(self, tokens: int) -> int:
        """Bytes with everything on the device and a cache of `tokens`."""
        return self.weights + tokens * self.token + self.workspace + self.others

    def sharing_device_with(self, other: "Needs") -> "Needs":
        """The same on a device that is left room for another model, with as many tokens in its cache."""
        token, once = other.token, other.weights + other.workspace + other.others
        return replace(
            self, token=self.token + token, others=self.others + once, others_token=self.others_token + token
        )

    def over(self, devices: int) -> "Needs":
        """What the fullest of `devices` tensor-parallel devices needs: weights split evenly, the cache by heads."""
        layers = tuple(-(-size // devices) for size in self.layers)
        heads = -(-self.kv_heads // devices)
        token = (self.token - self.others_token) // max(1, self.kv_heads) * heads + self.others_token
        return replace(self, layers=layers, ends=-(-self.ends // devices), token=token, kv_heads=heads)


def needs_of(
    program: Program,
    limits: BatchLimits,
    *,
    weight_format: str | None = None,
    kv_format: str | None = None,
    extra: int = 0,
) -> Needs:
    """The needs of a planned Program, at a largest step of `limits`.

    Args:
        weight_format: as if all matrices were in this format (of `ops.formats`); None: as they are.
        kv_format: the same of the cache ("bf16", "e4m3fn", "f32").
        extra: bytes of the workspace that the Program does not know of (scratch of kernels, captured graphs).

    Raises UnsupportedError for a format that there is not, ConfigError for one whose blocks do not divide a row.
    """
    assert program.plan is not None, "a planned Program"
    layers: dict[int, int] = {}
    ends = 0
    for name, recipe in program.weights.items():
        size = _bytes(recipe, weight_format)
        if (layer := layer_of(name)) is not None:
            layers[layer] = layers.get(layer, 0) + size
        else:
            ends += size
    groups = program.kv_groups.values()
    heads = ((2 * group.layers * group.kv_heads, kv_format or group.format, group.head_dim) for group in groups)
    token = sum(count * kv_head_bytes(form, head_dim) for count, form, head_dim in heads)
    arena = program.plan.arena
    workspace = arena.const + arena.tokens * limits.tokens + arena.rows * limits.rows + extra
    ordered = tuple(layers[index] for index in sorted(layers))
    return Needs(ordered, ends, token, math.ceil(workspace), min((group.kv_heads for group in groups), default=1))


def cheaper(
    program: Program, limits: BatchLimits, extra: int = 0, caches: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Needs]:
    """What could be asked for instead, in words, and its needs: smaller formats of the cache, and weights of 4 bits.

    caches: what may be asked for -> the format that it gives. For `capacity.place`, which names those that would fit.
    """
    model_needs = needs_of(program, limits, extra=extra)
    alternatives = {
        f"kv_cache_dtype={name}": needs_of(program, limits, kv_format=form, extra=extra)
        for name, form in caches.items()
    }
    with suppress(ConfigError):  # a model whose rows are not whole blocks
        alternatives["the weights in 4 bits (Q4_0)"] = needs_of(program, limits, weight_format="Q4_0", extra=extra)
    return {what: needs for what, needs in alternatives.items() if needs.total(1) < model_needs.total(1)}


def _bytes(recipe: Recipe, weight_format: str | None) -> int:
    if recipe.layout == "f32":
        return 4 * math.prod(recipe.shape)
    if weight_format is None or len(recipe.shape) == 1:
        return recipe.resident_bytes
    return formats.get(weight_format).nbytes(recipe.shape)
