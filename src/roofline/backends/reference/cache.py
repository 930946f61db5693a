"""The paged cache of the reference: one float32 tensor of pages for each of K and V, read through page tables."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from roofline.backends.reference.orders import SegmentContext
from roofline.ops.attention import quantize_heads
from roofline.ops.batch import PAGE_TOKENS, Batch
from roofline.program.ir import KvGroup

if TYPE_CHECKING:
    from torch import Tensor


def segments_of(batch: Batch) -> tuple[tuple[int, int, int], ...]:
    """(start, stop, first_position) of each segment of a filled batch buffer."""
    bounds = [int(i) for i in batch.seg_start[: batch.segments + 1]]
    return tuple((a, b, int(batch.positions[a])) for a, b in itertools.pairwise(bounds))


class ReferencePages:
    """A KvCache over pages of 16 tokens, [layers, pages, 16, kv_heads, head_dim]; unwritten places hold NaN.

    A cache of format "int8" holds whole numbers there, and their scales [layers, pages, 16, kv_heads] beside them.
    Writing changes it in place: a Program's cache values are read and written in one order only.
    """

    def __init__(self, group: KvGroup, num_pages: int) -> None:
        import torch

        shape = (group.layers, num_pages, PAGE_TOKENS, group.kv_heads, group.head_dim)
        self.k, self.v = (torch.full(shape, float("nan")) for _ in range(2))
        self.int8 = group.format == "int8"
        self.scales = [torch.full(shape[:-1], float("nan")) for _ in range(2 if self.int8 else 0)]  # of k, of v
        self.kv_heads = group.kv_heads
        self.segments: Sequence[tuple[int, int, int]] = ()
        self.tables: list[Tensor] = []

    def begin(self, batch: Batch) -> None:
        """Take over the segments and page tables of a step."""
        import torch

        self.segments = segments_of(batch)
        self.tables = []
        for i in range(batch.segments):
            pages = batch.pages[batch.page_start[i] : batch.page_start[i + 1]]
            self.tables.append(torch.from_numpy(pages.astype("int64")))

    def write(self, layer: int, k: "Tensor", v: "Tensor") -> "ReferencePages":
        """Put k, v [tokens, kv_heads, head_dim] at their positions' places; an int8 cache quantises them."""
        import torch

        k_scale = v_scale = torch.empty(0)
        if self.int8:
            (k, k_scale), (v, v_scale) = quantize_heads(k), quantize_heads(v)
        for (start, stop, first), table in zip(self.segments, self.tables, strict=True):
            at = torch.arange(first, first + stop - start)
            page, slot = table[at // PAGE_TOKENS], at % PAGE_TOKENS
            self.k[layer, page, slot] = k[start:stop].detach()
            self.v[layer, page, slot] = v[start:stop].detach()
            for scales, scale in zip(self.scales, (k_scale, v_scale), strict=False):
                scales[layer, page, slot] = scale[start:stop]
        return self

    def read(self, layer: int, index: int) -> "tuple[Tensor, Tensor]":
        """k, v [context, kv_heads, head_dim] of one segment, this step included."""
        stored = self.read_stored(layer, index)
        if stored.k_scale is None or stored.v_scale is None:
            return stored.k, stored.v
        return stored.k * stored.k_scale[..., None], stored.v * stored.v_scale[..., None]

    def read_stored(self, layer: int, index: int) -> SegmentContext:
        """The same as it is stored: an int8 cache's whole numbers and scales."""
        return SegmentContext(*(self._segment(store, layer, index) for store in (self.k, self.v, *self.scales)))

    def _segment(self, store: "Tensor", layer: int, index: int) -> "Tensor":
        start, stop, first = self.segments[index]
        return store[layer, self.tables[index]].flatten(0, 1)[: first + stop - start]
