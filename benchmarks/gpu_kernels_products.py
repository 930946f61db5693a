"""Cases of gpu_kernels.py whose time is that of a matrix or of a cache: products, experts, adapters, attention."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_kernels_case import BF16, F32, ONCE, TOLERANCE, Case, Maker, Result, of, result, silu_mul
from roofline.backends.gpu.kernels import (
    adapter,
    attend,
    attend_launches,
    dequantize,
    experts,
    float8,
    linear_float,
    linear_fp8,
    linear_quant,
    rope_kv_write,
)
from roofline.backends.gpu.kernels.float8 import FLAVOURS
from roofline.ops.attention import log2_slopes, round_to, slopes_of
from roofline.ops.batch import PAGE_TOKENS


@dataclass(frozen=True)
class Products(Maker):
    """Cases whose time is that of a matrix."""

    def product(
        self, rows: int, columns: int, width: int, *, gate: bool = False, exact: bool = False, bias: bool = False,
        dtype: torch.dtype = BF16, to: torch.dtype | None = None,
    ) -> Case:  # fmt: skip
        x, w = self.rows(rows, width, dtype), self.normal(columns, width, dtype=dtype)
        out = self.empty(rows, columns // 2 if gate else columns, dtype=to or dtype)
        added = self.normal(columns, dtype=F32) if bias else None

        def want() -> tuple[Tensor]:
            both = x.double() @ w.double().T + (0.0 if added is None else added.double())
            return (silu_mul(both) if gate else both,)

        kinds = "exact " * exact + "gated " * gate
        name = f"linear {kinds}{rows} x {columns} x {width}{' + bias' * bias}{of(dtype)}{' to f32' if to else ''}"
        run = partial(linear_float.linear_float, self.chip, x, w, added, out, gated=gate, exact=exact)
        return Case(name, run, want, (result(out),), *linear_float.cost(rows, columns, width))

    def quantised(
        self, form: str, rows: int, columns: int, width: int, *, gate: bool = False, exact: bool = False,
        dtype: torch.dtype = BF16,
    ) -> Case:  # fmt: skip
        """Weights in a format of files; E4M3 too."""
        matrix, x = self.matrix(form, columns, width), self.rows(rows, width, dtype)
        out = self.empty(rows, columns // 2 if gate else columns, dtype=dtype)
        module: Any = linear_fp8 if form == "E4M3" else linear_quant
        launch = linear_fp8.linear_fp8 if form == "E4M3" else linear_quant.linear_quant

        def want() -> tuple[Tensor]:
            both = matrix.product(x)
            return (silu_mul(both) if gate else both,)

        name = f"{form} {'exact ' * exact}{'gated ' * gate}{rows} x {columns} x {width}{of(dtype)}"
        run = partial(launch, self.chip, x, matrix.weight, None, out, gated=gate, exact=exact)
        return Case(name, run, want, (result(out),), *module.cost(rows, matrix.weight))

    def eights(self, rows: int, columns: int, width: int, *, gate: bool = False) -> Case:
        """Weights and rows of 8-bit floats."""
        matrix, (x, scale) = self.matrix("E4M3", columns, width), self.eight(self.rows(rows, width))
        out = self.empty(rows, columns // 2 if gate else columns)

        def want() -> tuple[Tensor]:
            both = matrix.product(x.double() * scale.double()[:, None])
            return (silu_mul(both) if gate else both,)

        name = f"E4M3 x {self.chip.fp8} {'gated ' * gate}{rows} x {columns} x {width}"
        run = partial(linear_fp8.linear_fp8, self.chip, x, matrix.weight, None, out, x_scale=scale, gated=gate)
        cost = linear_fp8.cost(rows, matrix.weight, itemsize=1)
        return Case(name, run, want, (result(out),), *cost, roof="fp8")

    def rounded(self, rows: int, width: int) -> Case:
        """Rows to 8-bit floats: equal codes."""
        x, out = self.normal(rows, width), self.empty(rows, width, dtype=FLAVOURS[self.chip.fp8])
        scale = self.empty(rows, dtype=F32)

        def want() -> tuple[Tensor, Tensor]:
            codes, by = self.eight(x)
            return codes.double(), by

        run = partial(float8.rows_fp8, self.chip, x, out=out, scale=scale)
        results = result(out), result(scale, "scale", tolerance=ONCE)
        return Case(f"rows_fp8 {rows} x {width}", run, want, results, *float8.cost(rows, width))

    def widened(self, form: str, picked: int = 0) -> Case:
        """A matrix as floats, or `picked` of its rows by number."""
        rows, columns = 2 * self.shapes.ffn, self.shapes.width
        matrix = self.matrix(form, rows, columns)
        ids = self.below(rows, picked) if picked else None
        out = self.empty(picked or rows, columns, dtype=F32 if picked else BF16)
        run = partial(dequantize.dequantize, self.chip, matrix.weight, out=out, ids=ids)
        kernel = dequantize.FLOAT8_NAME if form == "E4M3" else dequantize.NAME
        name = f"{kernel} {form} {f'{picked} of ' if picked else ''}{rows} x {columns}"
        cost = dequantize.cost(matrix.weight, picked or rows, out.dtype)
        return Case(name, run, lambda: (matrix.values(ids),), (result(out),), *cost)

    def expert(
        self, tokens: int, top: int, count: int, *, per_slot: bool = False, exact: bool = False,
        dtype: torch.dtype = BF16,
    ) -> Case:  # fmt: skip
        """Rows to the experts of their tokens; per_slot: each of a token's experts has a row of its own."""
        width, ffn, slots_ = self.shapes.width, self.shapes.ffn // 2, tokens * top
        x, w = self.rows(slots_ if per_slot else tokens, width, dtype), self.normal(count, ffn, width, dtype=dtype)
        ids = torch.rand(tokens, count, device=self.device).argsort(1)[:, :top].int()
        plan, out = experts.schedule(self.chip, ids, count, dtype, exact=exact), self.empty(slots_, ffn, dtype=dtype)

        def want() -> tuple[Tensor]:
            rows, to = (x if per_slot else x.repeat_interleave(top, 0)).double(), ids.flatten()
            all_of = torch.zeros(slots_, ffn, dtype=torch.float64, device=self.device)
            for one in range(count):
                all_of[to == one] = rows[to == one] @ w[one].double().T
            return (all_of,)

        name = f"experts {'exact ' * exact}{tokens} of {top} in {count} x {ffn} x {width}{of(dtype)}"
        run = partial(experts.expert_linear, self.chip, x, w, plan, out=out)
        cost = experts.cost(slots_, len(ids.unique()), ffn, width)
        return Case(f"{name}{', a row a slot' * per_slot}", run, want, (result(out),), *cost)

    def lora(self, rows: int, rank: int, dtype: torch.dtype = BF16) -> Case:
        """Each run adds once more; between the two products stand 16 bits."""
        width, count = self.shapes.width, 4
        x, a = self.normal(rows, width, dtype=dtype), self.rows(count * rank, width, dtype).view(count, rank, width)
        b = self.rows(count * width, rank, dtype).view(count, width, rank)
        scales, ids = torch.rand(count, device=self.device) + 0.5, self.below(count + 1, rows)
        start = self.normal(rows, width, dtype=F32)
        out = start.clone()

        def want() -> tuple[Tensor]:
            total = start.double()
            for i in range(count):
                mine = ids == i + 1
                total[mine] += scales[i].double() * (x[mine].double() @ a[i].double().T @ b[i].double().T)
            return (total,)

        run = partial(adapter.adapter, self.chip, x, a, b, scales, ids, out=out)
        hit = int((ids.unique() > 0).sum())
        results = (Result("out", out, TOLERANCE[dtype], start),)
        cost = adapter.cost(rows, width, width, rank, hit)
        return Case(f"adapter {rows} rows, rank {rank}{of(dtype)}", run, want, results, *cost)

    def _places(self, tokens: int) -> tuple[int, Tensor]:
        """Pages, with one to spare, and the slots of a text in shuffled pages, int64."""
        pages = -(-tokens // PAGE_TOKENS) + 1
        order, at = torch.randperm(pages, device=self.device), torch.arange(tokens, device=self.device)
        return pages, order[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS

    def rope(
        self, tokens: int, kv_heads: int, *, interleaved: bool = False, norms: bool = False, part: int = 1,
        dtype: torch.dtype = BF16,
    ) -> Case:  # fmt: skip
        """norms: of single heads, before; part: one of so many dimensions turns."""
        heads, dim = self.shapes.heads, self.shapes.head_dim
        half, (pages, where) = dim // part // 2, self._places(tokens)
        qkv, q = (
            self.normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype),
            self.empty(tokens, heads * dim, dtype=dtype),
        )
        k, v = (self.empty(pages, kv_heads, PAGE_TOKENS, dim, dtype=dtype) for _ in range(2))
        positions = torch.randperm(tokens, device=self.device).int()
        angles = torch.rand(tokens, half, device=self.device) * 6
        cos, sin = angles.cos(), angles.sin()
        weights = (self.normal(dim, dtype=F32), self.normal(dim, dtype=F32)) if norms else None

        def run() -> None:
            rope_kv_write.rope_kv_write(
                self.chip, qkv, positions, where, (cos, sin), weights, 1e-5, interleaved=interleaved, q=q, k=k, v=v
            )  # fmt: skip

        def turned(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is not None:
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
            c, s = (table.double()[positions.long()][:, None] for table in (cos, sin))
            turns, kept = x[..., : 2 * half], x[..., 2 * half :]
            a, b = (turns[..., ::2], turns[..., 1::2]) if interleaved else turns.chunk(2, -1)
            pair = a * c - b * s, b * c + a * s
            both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
            return torch.cat([both, kept], -1)

        def want() -> tuple[Tensor, ...]:
            x = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
            of_q, of_k = weights or (None, None)
            held = [turned(x[1], of_k), x[2]]
            return turned(x[0], of_q).reshape(tokens, -1), *(self._paged(each, pages, where) for each in held)

        name = f"rope_kv_write {tokens}, {heads} / {kv_heads} heads{', interleaved' * interleaved}{', norms' * norms}"
        name += f"{f', a {part}th of {dim}' if part > 1 else ''}{of(dtype)}"
        results = result(q, "q"), result(k, "k"), result(v, "v", tolerance=0.0)
        return Case(name, run, want, results, *rope_kv_write.cost(tokens, heads, kv_heads, dim))

    def _paged(self, x: Tensor, pages: int, where: Tensor) -> Tensor:
        """x [tokens, heads, dim] in pages, NaN where no token is."""
        held = torch.full((pages, x.shape[1], PAGE_TOKENS, x.shape[2]), float("nan"), dtype=x.dtype, device=x.device)
        held[where // PAGE_TOKENS, :, where % PAGE_TOKENS] = x
        return held

    def stored(self, tokens: int) -> Case:
        """Values for a cache of 8-bit floats, some beyond the largest: equal codes."""
        heads, dim = self.shapes.heads, self.shapes.head_dim
        qkv, (pages, where) = 100 * self.normal(tokens, 3 * heads * dim, dtype=F32), self._places(tokens)
        k, v = (self.empty(pages, heads, PAGE_TOKENS, dim, dtype=FLAVOURS[self.chip.fp8]) for _ in range(2))
        positions = torch.arange(tokens, device=self.device).int()

        def run() -> None:
            rope_kv_write.rope_kv_write(
                self.chip, qkv, positions, where, None, None, 0.0, interleaved=False, q=None, k=k, v=v
            )  # fmt: skip

        def want() -> tuple[Tensor, ...]:
            _, *held = qkv.view(tokens, 3, heads, dim).unbind(1)
            return tuple(self._paged(round_to(each, self.chip.fp8).double(), pages, where) for each in held)

        cost = rope_kv_write.cost(tokens, heads, heads, dim, cache_bytes=1)
        return Case(f"rope_kv_write {tokens} to {self.chip.fp8}", run, want, (result(k, "k"), result(v, "v")), *cost)

    def attention(
        self, steps: list[tuple[int, int]], kv_heads: int, *, exact: bool = False, cache: str = "bf16",
        window: int = 0, cap: float = 0.0, alibi: bool = False, dtype: torch.dtype = BF16,
    ) -> Case:  # fmt: skip
        """steps: (queries, context) of each segment, decodes first. NaN lies wherever nothing was written."""
        heads, dim = self.shapes.heads, self.shapes.head_dim
        counts = [-(-context // PAGE_TOKENS) for _, context in steps]
        starts, firsts = ([0, *np.cumsum(x).tolist()] for x in ([queries for queries, _ in steps], counts))
        order = torch.randperm(firsts[-1] + 3, device=self.device)
        kind = dtype if cache == "bf16" else FLAVOURS[cache]
        k, v = (self._cache(order, firsts, steps, kv_heads).to(kind) for _ in range(2))
        q, out = (make(starts[-1], heads * dim, dtype=dtype) for make in (self.normal, self.empty))
        contexts = [context for _, context in steps]
        segments = self.integers(starts), self.integers(contexts), self.integers(firsts)
        pages = order[: firsts[-1]].int()
        decodes = next((i for i, (queries, _) in enumerate(steps) if queries > 1), 0)
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "window": window}
        launches = attend_launches.prepare_all(
            self.chip, tokens=starts[-1], segments=len(steps), decodes=decodes, max_query=max(n for n, _ in steps),
            max_context=max(contexts), exact=exact, cache_bytes=k.element_size(), **shape,
        )  # fmt: skip
        floats = max(attend_launches.workspace_floats(launch) for launch in launches)
        space, slopes = self.empty(max(1, floats), dtype=F32), None
        if alibi:
            slopes = torch.tensor(log2_slopes(heads), device=self.device)
        options: dict[str, Any] = {
            "scale": dim**-0.5,
            "soft_cap": cap,
            "slopes": slopes,
            "workspace": space,
            "out": out,
        }

        def run() -> None:
            for launch in launches:
                attend.attend(launch, q, k, v, *segments, pages, **options)

        def want() -> tuple[Tensor]:
            found = []
            for i, (queries, context) in enumerate(steps):
                keys, values = (_text(t, order[firsts[i] : firsts[i + 1]], context) for t in (k, v))
                rows = q[starts[i] : starts[i + 1]].double().view(queries, kv_heads, -1, dim)
                found.append(_attended(rows, keys, values, window, cap, slopes_of(heads) if alibi else None))
            return (torch.cat(found),)

        name = (
            f"attend {'exact ' * exact}{_told(steps)}, {heads} / {kv_heads} heads{f', window {window}' * bool(window)}"
        )
        name += f"{', soft cap' * bool(cap)}{', ALiBi' * alibi}{f', cache {cache}' * (cache != 'bf16')}{of(dtype)}"
        cost = attend.cost(
            steps, heads=heads, kv_heads=kv_heads, head_dim=dim, window=window, cache_bytes=k.element_size()
        )  # fmt: skip
        return Case(name, run, want, (result(out),), *cost, scratch=(space,))

    def _cache(self, order: Tensor, firsts: list[int], steps: list[tuple[int, int]], kv_heads: int) -> Tensor:
        """Pages of random values, NaN after each segment's last token and in pages of none."""
        held = self.normal(len(order), kv_heads, PAGE_TOKENS, self.shapes.head_dim, dtype=F32)
        held[order[firsts[-1] :]] = float("nan")
        for stop, (_, context) in zip(firsts[1:], steps, strict=True):
            if context % PAGE_TOKENS:
                held[order[stop - 1], :, context % PAGE_TOKENS :] = float("nan")
        return held


def _told(steps: list[tuple[int, int]]) -> str:
    """Segments of a kind together."""
    kinds = dict.fromkeys(steps)
    return " + ".join(f"{steps.count(kind)} x {kind[0]} of {kind[1]}" for kind in kinds)


def _text(cache: Tensor, pages: Tensor, context: int) -> Tensor:
    """float64 [context, kv_heads, head_dim]: what lies in these pages."""
    bits = (
        cache.view(torch.uint8) if cache.element_size() == 1 else cache
    )  # torch does not pick 8-bit floats everywhere
    held = bits[pages].view(cache.dtype).double().transpose(1, 2)
    return held.reshape(-1, *held.shape[2:])[:context]


def _attended(
    q: Tensor, k: Tensor, v: Tensor, window: int, cap: float, slopes: list[float] | None
) -> Tensor:  # fmt: skip
    """[queries, heads * head_dim] of q [queries, kv_heads, group, head_dim], k and v [context, kv_heads, head_dim]."""
    (queries, kv_heads, group, dim), context = q.shape, k.shape[0]
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * dim**-0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    at = torch.arange(context - queries, context, device=q.device)[:, None]
    keys = torch.arange(context, device=q.device)
    if slopes is not None:
        scores += torch.tensor(slopes, dtype=q.dtype, device=q.device).view(kv_heads, group, 1, 1) * (keys - at)
    hidden = (keys > at) | (keys <= at - window) if window else keys > at
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", p, v).reshape(queries, -1)
