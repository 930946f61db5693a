"""Cases of gpu_kernels.py whose kernels keep recurrent state: a convolution over the last tokens, the delta rule, the
selective scan.

Shapes are those of Qwen3-Next where the others are Llama-2-7B's: half as many key heads as value heads. Scans have
twice as many channels as a model is wide: heads of half an attention head's size with as many states as that has
dimensions, four to a group (Mamba-2), or 16 states with a rate each (Mamba).
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_kernels_case import BF16, F32, Case, result
from benchmarks.gpu_kernels_products import Products
from roofline.backends.gpu.kernels import causal_conv, delta_rule, selective_scan
from roofline.backends.gpu.kernels.causal_conv import StateFields
from roofline.ops.batch import PAGE_TOKENS, STATE_FIELDS, Batch, BatchLimits, Segment, StateMove

TAPS = 4


class States(Products):
    """Cases of sequences of which each goes on from its slot, and keeps what comes of it there."""

    def convolved(self, sequences: int, length: int) -> Case:
        """`length` tokens of each of so many sequences."""
        channels = 2 * self.shapes.heads * self.shapes.head_dim
        x, w = self.normal(sequences * length, channels), self.normal(channels, TAPS, dtype=F32)
        start = self.normal(sequences, (TAPS - 1) * channels, dtype=F32)
        states, out = start.clone(), self.empty(sequences * length, channels)
        fields = self._fields(sequences, length)

        def want() -> tuple[Tensor, Tensor]:
            rows = x.double().view(sequences, length, channels)
            rows = torch.cat([start.double().view(sequences, TAPS - 1, channels), rows], dim=1)
            total = sum(rows[:, tap : tap + length] * w.double()[:, tap] for tap in range(TAPS))
            assert isinstance(total, Tensor)
            return torch.nn.functional.silu(total).flatten(0, 1), rows[:, length:].flatten(1)

        run = partial(causal_conv.causal_conv, self.chip, fields, x, states, w, None, silu=True, out=out)
        results = result(out), result(states, "states", start=start)
        cost = causal_conv.cost(sequences * length, sequences, channels, TAPS)
        return Case(f"causal_conv {sequences} x {length} of {channels}", run, want, results, *cost)

    def recurred(self, sequences: int, length: int) -> Case:
        """The same of the delta rule."""
        value_heads, dim = self.shapes.heads, self.shapes.head_dim
        heads = delta_rule.DeltaHeads(value_heads // 2, value_heads, dim)
        tokens, width = sequences * length, heads.key_heads * dim
        qkv, (a, b) = self.normal(tokens, 2 * width + value_heads * dim), self.normal(2, tokens, value_heads)
        a_log, dt_bias = self.normal(2, value_heads, dtype=F32)
        start = self.normal(sequences, value_heads * dim * dim, dtype=F32)
        states, out = start.clone(), self.empty(tokens, value_heads * dim)
        fields = self._fields(sequences, length)

        def want() -> tuple[Tensor, Tensor]:
            parts = qkv.double().split([width, width, value_heads * dim], dim=1)
            q, k, v = (part.view(sequences, length, -1, dim) for part in parts)
            q, k = ((t / (t.square().sum(-1, keepdim=True) + heads.eps).sqrt()).repeat_interleave(2, 2) for t in (q, k))
            soft = torch.nn.functional.softplus(a.double() + dt_bias.double())
            decay = torch.exp(-a_log.double().exp() * soft).view(sequences, length, value_heads)
            beta = b.double().sigmoid().view(sequences, length, value_heads)
            matrix, rows = start.double().view(sequences, value_heads, dim, dim), []
            for t in range(length):
                matrix = decay[:, t, :, None, None] * matrix
                u = beta[:, t, :, None] * (v[:, t] - torch.einsum("shk,shkv->shv", k[:, t], matrix))
                matrix = matrix + k[:, t, :, :, None] * u[:, :, None, :]
                rows.append(torch.einsum("shk,shkv->shv", q[:, t] * dim**-0.5, matrix))
            return torch.stack(rows, 1).reshape(tokens, -1), matrix.reshape(sequences, -1)

        gates = a, b, a_log, dt_bias
        run = partial(delta_rule.delta_rule, self.chip, fields, qkv, gates, states, heads, out=out)
        results = result(out), result(states, "states", start=start)
        cost = delta_rule.cost(tokens, sequences, heads, dim)
        return Case(f"delta_rule {sequences} x {length}, {value_heads} heads of {dim}", run, want, results, *cost)

    def scanned(self, sequences: int, length: int, rates: bool) -> Case:
        """The same of the selective scan; rates: one for each state of each channel."""
        width, tokens = 2 * self.shapes.width, sequences * length
        heads = width if rates else 2 * width // self.shapes.head_dim
        groups = 1 if rates else heads // 4
        sizes = selective_scan.ScanSizes(16 if rates else self.shapes.head_dim, groups, 0.01, 2.0)
        xbc = self.normal(tokens, width + 2 * groups * sizes.states, dtype=BF16 if rates else F32)
        dt, (dt_bias, d) = self.normal(tokens, heads), self.normal(2, heads, dtype=F32)
        a_log = self.normal(heads, sizes.states, dtype=F32) if rates else self.normal(heads, dtype=F32)
        start = self.normal(sequences, width * sizes.states, dtype=F32)
        states, out = start.clone(), self.empty(tokens, width)
        fields = self._fields(sequences, length)

        def want() -> tuple[Tensor, Tensor]:
            counts = heads, groups, groups
            parts = xbc.double().split([width, groups * sizes.states, groups * sizes.states], dim=1)
            x, b, c = (part.view(sequences, length, count, -1) for part, count in zip(parts, counts, strict=True))
            b, c = (t.repeat_interleave(heads // groups, 2) for t in (b, c))
            soft = torch.nn.functional.softplus(dt.double() + dt_bias.double()).clamp(sizes.least, sizes.most)
            soft, rate = soft.view(sequences, length, heads), -a_log.double().exp()
            matrix = start.double().view(sequences, *((sizes.states, width) if rates else (heads, sizes.states, -1)))
            matrix, rows = matrix.mT[..., None] if rates else matrix, []  # [sequences, heads, states, channels]
            for t in range(length):
                power = soft[:, t, :, None] * (rate if rates else rate[:, None])  # [sequences, heads, states or one]
                matrix = power.exp()[..., None] * matrix
                matrix = matrix + b[:, t, :, :, None] * (soft[:, t, :, None] * x[:, t])[:, :, None, :]
                rows.append(torch.einsum("shn,shnc->shc", c[:, t], matrix) + d.double()[:, None] * x[:, t])
            matrix = matrix[..., 0].mT if rates else matrix
            return torch.stack(rows, 1).reshape(tokens, -1), matrix.reshape(sequences, -1)

        weights = a_log, dt_bias, d
        run = partial(selective_scan.selective_scan, self.chip, fields, xbc, dt, weights, states, sizes, out=out)
        results = result(out), result(states, "states", start=start)
        cost = selective_scan.cost(tokens, sequences, width, heads, sizes, row_bytes=xbc.element_size())
        name = f"selective_scan {sequences} x {length}, {heads} heads of {sizes.states} states"
        return Case(name, run, want, results, *cost)

    def _fields(self, sequences: int, length: int) -> StateFields:
        pages = list(range(length // PAGE_TOKENS + 2))
        batch = Batch(BatchLimits(sequences * length, sequences, 1, sequences * len(pages), state_slots=sequences))
        moves = [StateMove(slot, slot) for slot in range(sequences)]
        batch.fill([Segment(range(length), PAGE_TOKENS, pages, state=move) for move in moves], [0])
        names = ("header", "seg_start", "context_len", *STATE_FIELDS)
        return StateFields(**{name: self.integers(getattr(batch, name)) for name in names})
