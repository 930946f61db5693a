"""The paged cache of the reference: one float32 tensor of pages for each of K and V, read through page tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from roofline.models.cache import segments_of
from roofline.ops.batch import PAGE_TOKENS, Batch
from roofline.program.ir import KvGroup

if TYPE_CHECKING:
    from torch import Tensor


class PagedCache:
    """A KvCache over pages of 16 tokens, [layers, pages, 16, kv_heads, head_dim]; unwritten places hold NaN.

    Writing changes it in place: a Program's cache values are read and written in one order only.
    """

    def __init__(self, group: KvGroup, num_pages: int) -> None:
        import torch

        shape = (group.layers, num_pages, PAGE_TOKENS, group.kv_heads, group.head_dim)
        self.k, self.v = (torch.full(shape, float("nan")) for _ in range(2))
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

    def write(self, layer: int, k: "Tensor", v: "Tensor") -> "PagedCache":
        """Put k, v [tokens, kv_heads, head_dim] at their positions' places."""
        import torch

        for (start, stop, first), table in zip(self.segments, self.tables, strict=True):
            at = torch.arange(first, first + stop - start)
            page, slot = table[at // PAGE_TOKENS], at % PAGE_TOKENS
            self.k[layer, page, slot] = k[start:stop].detach()
            self.v[layer, page, slot] = v[start:stop].detach()
        return self

    def read(self, layer: int, index: int) -> "tuple[Tensor, Tensor]":
        """k, v [context, kv_heads, head_dim] of one segment, this step included."""
        start, stop, first = self.segments[index]
        context = first + stop - start
        k, v = (store[layer, self.tables[index]].flatten(0, 1)[:context] for store in (self.k, self.v))
        return k, v
