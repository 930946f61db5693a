"""What the launches of one step share: sizes, the batch's fields on the device, and the values in the arena."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roofline.ops.symbol import Type
from roofline.program.ir import Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roofline.backends.gpu.kernels.attend_launches import Launch as AttendLaunch


@dataclass(frozen=True)
class Sizes:
    """tokens, rows, segments of a step, padded ones included; max_query, max_context: the most one segment has;
    decodes: leading segments of one query that come before others of more."""

    tokens: int
    rows: int
    segments: int
    max_query: int
    max_context: int
    decodes: int = 0


@dataclass
class Step:
    """One step's sizes and tensors; `values` are views of the arena, made when first asked for.

    types, places: of the Program's values; fields: batch fields, int32, as long as `sizes` says; slots int64 [tokens];
    caches: kv group -> (k, v), each [layers, pages, kv_heads, 16, head_dim]; scratch uint8: for one launch at a time;
    launches: how attention is cut into programs, the same for all layers of a kind.
    """

    types: Mapping[str, Type]
    places: Mapping[str, Place]
    sizes: Sizes
    fields: "dict[str, Tensor]"
    slots: "Tensor"
    caches: "dict[str, tuple[Tensor, Tensor]]"
    arena: "Tensor"
    scratch: "Tensor"
    launches: "dict[object, tuple[AttendLaunch, ...]]" = field(default_factory=dict)
    _views: "dict[str, Tensor]" = field(default_factory=dict)

    def value(self, name: str) -> "Tensor":
        """[rows of the value, width]: a batch field, or a view of the arena."""
        if name in self.fields:
            return self.fields[name]
        if name not in self._views:
            self._views[name] = self._view(name)
        return self._views[name]

    def _view(self, name: str) -> "Tensor":
        kind, place = self.types[name], self.places[name]
        dtype = dtypes()[kind.dtype]
        count = self.sizes.tokens if kind.leading == "tokens" else self.sizes.rows
        start = place.offset.at(tokens=self.sizes.tokens, rows=self.sizes.rows)
        flat = self.arena.view(dtype)
        size = dtype.itemsize
        return flat.as_strided((count, kind.width), (place.stride // size, 1), start // size)

    def space(self, dtype: "torch.dtype", *shape: int) -> "Tensor":
        """Scratch as a tensor, whose contents nobody keeps beyond one launch."""
        size = math.prod(shape) * dtype.itemsize
        assert size <= self.scratch.numel(), "scratch is smaller than planned"
        return self.scratch[:size].view(dtype).view(shape)


def dtypes() -> "dict[str, torch.dtype]":
    """Our names -> torch's."""
    import torch

    return {
        **{"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "e4m3fn": torch.float8_e4m3fn},
        **{"e4m3fnuz": torch.float8_e4m3fnuz, "i64": torch.int64, "i32": torch.int32, "i8": torch.int8},
        "u8": torch.uint8,
    }
