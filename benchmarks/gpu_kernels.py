"""Every kernel of the gpu backend on fresh random inputs: its result beside float64's, its time beside the roofs.

Results are poisoned with NaN before a kernel writes them. Shapes are Llama-2-7B's and, for grouped heads, Llama-3-8B's;
tests run the same cases on tiny shapes in Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roofline.backends.gpu.kernels import (
    adapter,
    add_norm,
    attend,
    attend_launches,
    dequantize,
    experts,
    gated,
    linear_float,
    linear_fp8,
    linear_quant,
    rope_kv_write,
    route,
    sample,
    widen_fp8,
)
from roofline.backends.gpu.kernels import rows_fp8 as rows_fp8_kernel
from roofline.backends.gpu.kernels.float8 import Float8Weight
from roofline.backends.gpu.pack import LAYOUTS, pack
from roofline.backends.sampling import SampleRows
from roofline.hardware.chips import Chip
from roofline.ops import formats
from roofline.ops.attention import round_to
from roofline.ops.batch import PAGE_TOKENS
from roofline.ops.matmul import round_rows

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # of ||out - want|| / ||want||; 8 bits: as of 16
DTYPES = {"bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


@dataclass(frozen=True)
class Shapes:
    """What is run: rows of decode and prefill, a model's sizes, contexts."""

    width: int = 4096
    ffn: int = 11008
    vocab: int = 32000
    heads: int = 32
    head_dim: int = 128
    few: tuple[int, ...] = (1, 16)
    some: int = 64
    many: int = 2048
    context: int = 2048
    sequences: tuple[int, ...] = (1, 8, 16, 64)


TINY = Shapes(256, 512, 300, 4, 32, (1, 3), 20, 40, 40, (1, 3))


@dataclass(frozen=True)
class Case:
    """run: writes `out`; want: float64 of the same shape, or equal ids; flops, bytes: the least that it takes."""

    name: str
    run: Callable[[], Any]
    want: Callable[[], Tensor]
    out: Tensor
    flops: int
    nbytes: int
    between: bool = False  # 16-bit values lie between its parts, whatever `out` is

    @property
    def tolerance(self) -> float:
        return TOLERANCE[torch.float32 if self.out.dtype == torch.float32 and not self.between else torch.bfloat16]


@dataclass(frozen=True)
class Bench:
    """Makes cases on a device."""

    chip: Chip
    device: str
    shapes: Shapes

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def cases(self) -> Iterator[Callable[[], Case]]:
        """Makers of all cases: inputs exist while their case does, no longer."""
        s = self.shapes
        for rows in (*s.few, s.many):
            yield partial(self.norm, rows)
            yield partial(self.gate, rows)
            yield partial(self.rope, rows)
        for rows in s.few:
            for columns, width in ((3 * s.width, s.width), (s.width, s.width), (s.width, s.ffn), (s.vocab, s.width)):
                yield partial(self.product, rows, columns, width, False)
            yield partial(self.product, rows, 2 * s.ffn, s.width, True)
        yield partial(self.product, s.many, s.width, s.width, False)
        yield partial(self.product, s.many, s.width, s.width, False, exact=True)
        yield partial(self.product, s.few[0], s.width, s.width, False, exact=True)
        for name in LAYOUTS:
            for rows in (*s.few, s.some, s.many):
                yield partial(self.quantised, name, rows, 2 * s.ffn, s.width, rows in s.few)
        yield partial(self.quantised, "Q4_0", s.few[0], s.width, s.width, False)
        yield partial(self.quantised, "Q4_0", s.few[0], s.width, s.ffn, False)
        for rows in (*s.few, s.some, s.many):
            yield partial(self.eight, rows, 2 * s.ffn, s.width, rows in s.few)
            if self.chip.fp8:
                yield partial(self.eight, rows, 2 * s.ffn, s.width, rows in s.few, rows_fp8=True)
        yield self.eight_widened
        yield partial(self.widened, "Q4_0")
        yield partial(self.widened, "Q4_K")
        for kv_heads in (s.heads, s.heads // 4):
            for n in s.sequences:
                yield partial(self.attention, n, 1, s.context, kv_heads)
            yield partial(self.attention, 1, s.context, s.context, kv_heads)
            yield partial(self.attention, 1, s.context, s.context, kv_heads, exact=True)
        if self.chip.fp8:
            yield partial(self.stored, s.many)
            for n in s.sequences:
                yield partial(self.attention, n, 1, s.context, s.heads // 4, cache=self.chip.fp8)
            yield partial(self.attention, 1, s.context, s.context, s.heads // 4, cache=self.chip.fp8)
        yield self.expert
        yield self.lora
        for temperature, top_p in ((0.0, 1.0), (0.8, 1.0), (0.8, 0.9)):
            yield partial(self.sampled, s.sequences[-1], temperature, top_p)

    def norm(self, rows: int) -> Case:
        width = self.shapes.width
        residual, delta = self.normal(rows, width, dtype=torch.float32), self.normal(rows, width)
        weight, total, out = (
            self.normal(width, dtype=torch.float32),
            self.empty(rows, width, dtype=torch.float32),
            self.empty(rows, width),
        )

        def run() -> None:
            add_norm.add_norm(self.chip, residual, delta, weight, None, 1e-5, layer=False, summed=total, out=out)

        def want() -> Tensor:
            summed = residual.double() + delta.double()
            return summed * torch.rsqrt(summed.square().mean(1, keepdim=True) + 1e-5) * weight

        return Case(f"add_norm {rows} x {width}", run, want, out, *add_norm.cost(rows, width, True))

    def gate(self, rows: int) -> Case:
        ffn = self.shapes.ffn
        both, out = self.normal(rows, 2 * ffn), self.empty(rows, ffn)

        def want() -> Tensor:
            return torch.nn.functional.silu(both[:, :ffn].double()) * both[:, ffn:].double()

        run = partial(gated.gated, self.chip, "silu", both, out=out)
        return Case(f"silu_mul {rows} x {ffn}", run, want, out, *gated.cost(rows, ffn, True))

    def rope(self, tokens: int) -> Case:
        heads, dim = self.shapes.heads, self.shapes.head_dim
        qkv, out = self.normal(tokens, 3 * heads * dim), self.empty(tokens, heads * dim)
        pages = -(-tokens // PAGE_TOKENS)
        k, v = (self.empty(pages, heads, PAGE_TOKENS, dim) for _ in range(2))
        positions = torch.arange(tokens, dtype=torch.int32, device=self.device)
        angles = torch.rand(tokens, dim // 2, device=self.device) * 6
        cos, sin = angles.cos(), angles.sin()
        where = positions.long()

        def run() -> None:
            rope_kv_write.rope_kv_write(
                self.chip, qkv, positions, where, (cos, sin), None, 0.0, interleaved=False, q=out, k=k, v=v
            )  # fmt: skip

        def want() -> Tensor:
            q = qkv[:, : heads * dim].double().view(tokens, heads, dim)
            a, b = q[..., : dim // 2], q[..., dim // 2 :]
            c, s = cos.double()[:, None], sin.double()[:, None]
            return torch.cat([a * c - b * s, b * c + a * s], -1).view(tokens, -1)

        return Case(f"rope_kv_write {tokens}", run, want, out, *rope_kv_write.cost(tokens, heads, heads, dim))

    def stored(self, tokens: int) -> Case:
        """Values for a cache of 8-bit floats, some beyond the largest."""
        heads, dim = self.shapes.heads, self.shapes.head_dim
        tokens = -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
        qkv = 100 * self.normal(tokens, 3 * heads * dim, dtype=torch.float32)
        k, v = (
            self.empty(tokens // PAGE_TOKENS, heads, PAGE_TOKENS, dim, dtype=DTYPES[self.chip.fp8]) for _ in range(2)
        )
        where = torch.arange(tokens, device=self.device)

        def run() -> None:
            rope_kv_write.rope_kv_write(
                self.chip, qkv, where.int(), where, None, None, 0.0, interleaved=False, q=None, k=k, v=v
            )  # fmt: skip

        def want() -> Tensor:
            given = qkv.view(-1, PAGE_TOKENS, 3, heads, dim)[:, :, 2].transpose(1, 2)
            return round_to(given, self.chip.fp8).double()

        cost = rope_kv_write.cost(tokens, heads, heads, dim, cache_bytes=1)
        return Case(f"rope_kv_write {tokens} to {self.chip.fp8}", run, want, v, *cost)

    def product(self, rows: int, columns: int, width: int, gate: bool, exact: bool = False) -> Case:
        x, w = self.normal(rows, width), self.normal(columns, width)
        out = self.empty(rows, columns // 2 if gate else columns)
        name = f"linear {'exact ' if exact else ''}{'gated ' if gate else ''}{rows} x {columns} x {width}"
        run = partial(linear_float.linear_float, self.chip, x, w, None, out, gated=gate, exact=exact)
        return Case(name, run, partial(_product, x, w.double(), gate), out, *linear_float.cost(rows, columns, width))

    def weight(self, name: str, rows: int, columns: int) -> tuple[linear_quant.DeviceWeight, Tensor]:
        """A quantised matrix of random values, and its values in float64. 256 rows, repeated."""
        count = min(rows, 256)
        values = torch.randn(count, columns).numpy()
        raw = formats.get(name).quantize(values)
        held = torch.from_numpy(formats.get(name).dequantize(raw, values.shape)).double()
        times = -(-rows // count)
        raw = raw.reshape(count, -1)[None].repeat(times, 0).reshape(times * count, -1)[:rows].reshape(-1)
        return linear_quant.DeviceWeight.of(pack(raw, name, rows, columns), self.device), held.repeat(times, 1)[
            :rows
        ].to(self.device)

    def quantised(self, name: str, rows: int, columns: int, width: int, gate: bool) -> Case:
        weight, values = self.weight(name, columns, width)
        x, out = self.normal(rows, width), self.empty(rows, columns // 2 if gate else columns)
        run = partial(linear_quant.linear_quant, self.chip, x, weight, None, out, gated=gate)
        title = f"{name} {'gated ' if gate else ''}{rows} x {columns} x {width}"
        return Case(title, run, partial(_product, x, values, gate), out, *linear_quant.cost(rows, weight))

    def float8(self, rows: int, columns: int) -> tuple[Float8Weight, Tensor]:
        """A matrix of 8-bit floats and its values in float64. 256 rows, repeated."""
        count = min(rows, 256)
        form, values = formats.get("E4M3"), torch.randn(count, columns).numpy()
        raw = form.quantize(values)
        held = torch.from_numpy(form.dequantize(raw, values.shape)).double()
        raw = np.resize(raw, form.nbytes((rows, columns)))
        return Float8Weight.of(raw, rows, self.device), held.repeat(-(-rows // count), 1)[:rows].to(self.device)

    def eight(self, rows: int, columns: int, width: int, gate: bool, rows_fp8: bool = False) -> Case:
        """Weights of 8-bit floats, with rows of 16 bits or, rounded in the same run, of 8."""
        weight, values = self.float8(columns, width)
        x, out = self.normal(rows, width), self.empty(rows, columns // 2 if gate else columns)
        given, scale = x, None
        if rows_fp8:
            given, scale = self.empty(rows, width, dtype=DTYPES[self.chip.fp8]), self.empty(rows, dtype=torch.float32)

        def run() -> None:
            if scale is not None:
                rows_fp8_kernel.rows_fp8(self.chip, x, out=given, scale=scale)
            linear_fp8.linear_fp8(self.chip, given, weight, None, out, x_scale=scale, gated=gate)

        def want() -> Tensor:
            return _product(round_rows(x.float(), self.chip.fp8) if rows_fp8 else x, values, gate)

        rows_are = self.chip.fp8 if rows_fp8 else "bf16"
        title = f"E4M3 x {rows_are} {'gated ' if gate else ''}{rows} x {columns} x {width}"
        return Case(title, run, want, out, *linear_fp8.cost(rows, weight))

    def eight_widened(self) -> Case:
        rows, columns = 2 * self.shapes.ffn, self.shapes.width
        weight, values = self.float8(rows, columns)
        out = self.empty(rows, columns)
        run = partial(widen_fp8.widen_fp8, self.chip, weight, out=out)
        cost = widen_fp8.cost(weight, rows, torch.bfloat16)
        return Case(f"widen_fp8 {rows} x {columns}", run, lambda: values, out, *cost)

    def widened(self, name: str) -> Case:
        rows, columns = 2 * self.shapes.ffn, self.shapes.width
        weight, values = self.weight(name, rows, columns)
        out = self.empty(rows, columns)
        run = partial(dequantize.dequantize, self.chip, weight, out=out)
        cost = dequantize.cost(weight, rows, torch.bfloat16)
        return Case(f"dequantize {name} {rows} x {columns}", run, lambda: values, out, *cost)

    def attention(
        self, count: int, queries: int, context: int, kv_heads: int, exact: bool = False, cache: str = "bf16"
    ) -> Case:
        heads, dim = self.shapes.heads, self.shapes.head_dim
        each = -(-context // PAGE_TOKENS)
        k, v = (self.normal(count * each, kv_heads, PAGE_TOKENS, dim, dtype=DTYPES[cache]) for _ in range(2))
        order = torch.randperm(count * each, device=self.device).int()
        tokens = count * queries
        q, out = self.normal(tokens, heads * dim), self.empty(tokens, heads * dim)
        integers = partial(torch.arange, dtype=torch.int32, device=self.device)
        fields = (
            integers(0, tokens + 1, queries),
            torch.full((count,), context, dtype=torch.int32, device=self.device),
            integers(0, count * each + 1, each),
            order,
        )
        launch = attend_launches.prepare(
            self.chip, tokens=tokens, segments=count, max_query=queries, max_context=context, heads=heads,
            kv_heads=kv_heads, head_dim=dim, exact=exact, cache_bytes=k.element_size(),
        )  # fmt: skip
        space = self.empty(max(1, attend_launches.workspace_floats(launch)), dtype=torch.float32)
        run = partial(attend.attend, launch, q, k, v, *fields, scale=dim**-0.5, workspace=space, out=out)

        def want() -> Tensor:
            held = [
                t.double()[order.long()].view(count, each, kv_heads, PAGE_TOKENS, dim).transpose(1, 2) for t in (k, v)
            ]
            keys, values = (t.reshape(count, kv_heads, -1, dim)[:, :, :context] for t in held)
            rows = q.double().view(count, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
            scores = rows @ keys[:, :, None].transpose(-1, -2) * dim**-0.5
            seen = torch.ones(queries, context, dtype=torch.bool, device=self.device).tril(context - queries)
            p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            return (p @ values[:, :, None]).permute(0, 3, 1, 2, 4).reshape(tokens, -1)

        name = f"attend {'exact ' if exact else ''}{count} x {queries} of {context}, {heads} / {kv_heads} heads"
        name += f", cache {cache}" if cache != "bf16" else ""
        pairs = count * sum(range(context - queries + 1, context + 1))
        moved = 2 * k.element_size() * count * context * kv_heads * dim + 4 * tokens * heads * dim
        return Case(name, run, want, out, 4 * pairs * heads * dim, moved)

    def expert(self) -> Case:
        s, count, top = self.shapes, 8, 2
        ffn = s.ffn // 2
        x, w = self.normal(s.some, s.width), self.normal(count, ffn, s.width)
        logits = self.normal(s.some, count, dtype=torch.float32)
        weights = self.empty(s.some, top, dtype=torch.float32)
        ids = torch.zeros(s.some, top, dtype=torch.int32, device=self.device)
        route.route(self.chip, logits, renormalise=True, weights=weights, ids=ids)
        plan = experts.schedule(self.chip, ids, count, x.dtype)
        out = self.empty(s.some * top, ffn)
        run = partial(experts.expert_linear, self.chip, x, w, plan, out=out)

        def want() -> Tensor:
            rows = x.double().repeat_interleave(top, 0)
            return torch.stack([w[e].double() @ row for e, row in zip(ids.view(-1).tolist(), rows, strict=True)])

        cost = experts.cost(s.some * top, count, ffn, s.width)
        return Case(f"experts {s.some} of 2 in 8 x {ffn} x {s.width}", run, want, out, *cost)

    def lora(self) -> Case:
        s, count, rank = self.shapes, 4, 16
        x, a, b = self.normal(s.some, s.width), self.normal(count, rank, s.width), self.normal(count, s.width, rank)
        scales = torch.rand(count, device=self.device)
        ids = torch.randint(0, count + 1, (s.some,), device=self.device).int()
        start = self.normal(s.some, s.width, dtype=torch.float32)
        out = start.clone()

        def run() -> None:
            out.copy_(start)
            adapter.adapter(self.chip, x, a, b, scales, ids, out=out)

        def want() -> Tensor:
            rows = start.double()
            for i, which in enumerate(ids.tolist()):
                if which:
                    middle = a[which - 1].double() @ x[i].double()
                    rows[i] += scales[which - 1].double() * (b[which - 1].double() @ middle)
            return rows

        cost = adapter.cost(s.some, s.width, s.width, rank, count)
        return Case(f"adapter {s.some} rows, rank {rank}", run, want, out, *cost, between=True)

    def sampled(self, rows: int, temperature: float, top_p: float) -> Case:
        """Held against the reference's ids, which are computed on the host."""
        from roofline.backends.reference.sampling import sample as reference

        logits = 4 * self.normal(rows, self.shapes.vocab, dtype=torch.float32)
        how = SampleRows.greedy(rows)
        how.temperature[:], how.top_p[:] = temperature, top_p
        how.seed[:] = range(1, rows + 1)
        out = torch.zeros(rows, dtype=torch.float32, device=self.device)

        def run() -> None:
            out.copy_(sample.sample(self.chip, logits, how).ids)

        def want() -> Tensor:
            return torch.from_numpy(reference(logits.cpu().numpy(), how).ids).to(self.device).double()

        cost = sample.cost(rows, self.shapes.vocab)
        return Case(f"sample {rows} rows, temperature {temperature}, top_p {top_p}", run, want, out, *cost)


def _product(x: Tensor, w: Tensor, gate: bool) -> Tensor:
    both = x.double() @ w.double().T
    if not gate:
        return both
    half = both.shape[1] // 2
    return torch.nn.functional.silu(both[:, :half]) * both[:, half:]


def error(case: Case) -> float:
    """||out - want|| / ||want|| of a fresh run into a poisoned result; NaN where something was left unwritten."""
    case.out.fill_(float("nan"))
    case.run()
    want = case.want()
    return float((case.out.double() - want).norm() / want.norm())
