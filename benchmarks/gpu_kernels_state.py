"""Cases of gpu_kernels.py whose kernels keep recurrent state: a convolution over the last tokens, the delta rule.

Shapes are those of Qwen3-Next where the others are Llama-2-7B's: half as many key heads as value heads.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_kernels_case import F32, Case, result
from benchmarks.gpu_kernels_products import Products
from roofline.backends.gpu.kernels import causal_conv, delta_rule
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

    def _fields(self, sequences: int, length: int) -> StateFields:
        pages = list(range(length // PAGE_TOKENS + 2))
        batch = Batch(BatchLimits(sequences * length, sequences, 1, sequences * len(pages), state_slots=sequences))
        moves = [StateMove(slot, slot) for slot in range(sequences)]
        batch.fill([Segment(range(length), PAGE_TOKENS, pages, state=move) for move in moves], [0])
        names = ("header", "seg_start", "context_len", *STATE_FIELDS)
        return StateFields(**{name: self.integers(getattr(batch, name)) for name in names})
