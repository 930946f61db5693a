"""Cases of gpu_kernels.py for attention over compressed rows: products of each head, the write of rows, attention.

Rows are DeepSeek's where the other shapes are Llama-2-7B's: 64 + 512 columns for heads of 128.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_kernels_case import BF16, F32, Case, of, result
from benchmarks.gpu_kernels_products import Products, _text, _told
from roofline.backends.gpu.kernels import attend_launches, attend_rows, head_linear, rope_kv_write
from roofline.backends.gpu.kernels.float8 import FLAVOURS
from roofline.ops.batch import PAGE_TOKENS
from roofline.ops.rope_tables import RopeTable, cos_sin


class CompressedRows(Products):
    """Cases of a cache that holds one row of a token and layer for all heads."""

    @property
    def turned(self) -> int:
        """Columns of a row that rope turns."""
        return self.shapes.head_dim // 2

    @property
    def rank(self) -> int:
        """The other columns of a row, which are the value."""
        return 4 * self.shapes.head_dim

    def by_head(self, rows: int, back: bool, *, exact: bool = False, dtype: torch.dtype = BF16) -> Case:
        """Queries to where the rows are; back: what heads have seen to their values."""
        heads = self.shapes.heads
        width, columns = (self.rank, self.shapes.head_dim) if back else (self.shapes.head_dim, self.rank)
        x, w = self.rows(rows, heads * width, dtype), self.normal(heads * columns, width, dtype=dtype)
        out = self.empty(rows, heads * columns, dtype=dtype)

        def want() -> tuple[Tensor]:
            parts = x.double().view(rows, heads, width), w.double().view(heads, columns, width)
            return (torch.einsum("rhi,hoi->rho", *parts).flatten(1),)

        name = f"head_linear {'exact ' * exact}{rows} x {heads} of {columns} x {width}{of(dtype)}"
        run = partial(head_linear.head_linear, self.chip, x, w, heads, out=out, exact=exact)
        return Case(name, run, want, (result(out),), *head_linear.cost(rows, heads, columns, width))

    def rows_written(self, tokens: int) -> Case:
        """Queries and rows turned, these into the cache."""
        heads, turned, dim = self.shapes.heads, self.turned, self.turned + self.rank
        qk, (pages, where) = self.normal(tokens, (heads + 1) * dim), self._places(tokens)
        positions = torch.arange(tokens, device=self.device).int()
        angles = cos_sin(RopeTable(turned, 1e4, "interleaved"), np.arange(tokens))
        cos, sin = (torch.from_numpy(table).to(self.device) for table in angles)  # [tokens, turned / 2]
        q, cache = self.empty(tokens, heads * dim), self.empty(pages, 1, PAGE_TOKENS, dim)

        def run() -> None:
            rope_kv_write.rope_kv_write(
                self.chip, qk, positions, where, (cos, sin), None, 0.0, interleaved=True, q=q, k=cache, v=None
            )  # fmt: skip

        def want() -> tuple[Tensor, Tensor]:
            parts = qk.double().view(tokens, heads + 1, dim)
            a, b = parts[..., :turned:2], parts[..., 1:turned:2]
            c, s = cos.double()[:, None], sin.double()[:, None]
            pairs = torch.stack([a * c - b * s, b * c + a * s], dim=3).flatten(2)
            both = torch.cat([pairs, parts[..., turned:]], dim=2)
            return both[:, :heads].flatten(1), self._paged(both[:, heads:], pages, where)

        moved = 2 * (2 * heads + 2) * tokens * dim
        results = result(q, "q"), result(cache, "rows")
        return Case(f"rope_latent_write {tokens}", run, want, results, 3 * qk.numel(), moved)

    def over_rows(self, steps: list[tuple[int, int]], *, exact: bool = False, cache: str = "bf16") -> Case:
        """steps: (queries, context) of each segment, decodes first. NaN lies wherever nothing was written."""
        heads, turned, rank, dim = self.shapes.heads, self.turned, self.rank, self.turned + self.rank
        counts = [-(-context // PAGE_TOKENS) for _, context in steps]
        starts, firsts = ([0, *np.cumsum(x).tolist()] for x in ([queries for queries, _ in steps], counts))
        order = torch.randperm(firsts[-1] + 3, device=self.device)
        store = self.normal(len(order), 1, PAGE_TOKENS, dim, dtype=F32)
        store[order[firsts[-1] :]] = float("nan")
        for stop, (_, context) in zip(firsts[1:], steps, strict=True):
            if context % PAGE_TOKENS:
                store[order[stop - 1], :, context % PAGE_TOKENS :] = float("nan")
        store = store.to(BF16 if cache == "bf16" else FLAVOURS[cache])
        q, out = self.normal(starts[-1], heads * dim), self.empty(starts[-1], heads * rank)
        contexts = [context for _, context in steps]
        segments = self.integers(starts), self.integers(contexts), self.integers(firsts)
        launches = attend_launches.prepare_all(
            self.chip, tokens=starts[-1], segments=len(steps), max_query=max(n for n, _ in steps),
            decodes=next((i for i, (queries, _) in enumerate(steps) if queries > 1), 0), max_context=max(contexts),
            heads=heads, kv_heads=1, head_dim=rank, turned=turned, exact=exact, cache_bytes=store.element_size(),
        )  # fmt: skip
        floats = max(attend_launches.workspace_floats(launch) for launch in launches)
        space, pages = self.empty(max(1, floats), dtype=F32), order[: firsts[-1]].int()

        def run() -> None:
            for launch in launches:
                attend_rows.attend_rows(launch, q, store, *segments, pages, scale=dim**-0.5, workspace=space, out=out)

        def want() -> tuple[Tensor]:
            parts = []
            for i, (queries, context) in enumerate(steps):
                held = _text(store, order[firsts[i] : firsts[i + 1]], context)[:, 0]  # [context, turned + rank]
                rows = q[starts[i] : starts[i + 1]].double().view(queries, heads, dim)
                scores = torch.einsum("qhd,kd->hqk", rows, held) * dim**-0.5
                at = torch.arange(context - queries, context, device=self.device)[:, None]
                hidden = torch.arange(context, device=self.device) > at
                p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                parts.append(torch.einsum("hqk,kd->qhd", p, held[:, turned:]).flatten(1))
            return (torch.cat(parts),)

        name = f"attend_rows {'exact ' * exact}{_told(steps)}, {heads} heads of {turned} + {rank}"
        name += f", cache {cache}" * (cache != "bf16")
        cost = attend_rows.cost(steps, heads=heads, turned=turned, value_dim=rank, cache_bytes=store.element_size())
        return Case(name, run, want, (result(out),), *cost, scratch=(space,))
