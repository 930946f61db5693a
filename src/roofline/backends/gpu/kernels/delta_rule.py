"""The gated delta rule, one token of a sequence after the other. Source: Yang et al. 2024.

A program has some columns of one head's matrix in registers, from its slot to its slot. All of it is float32 and in the
order of tokens, so the result does not depend on how a sequence is cut into steps. Forms that compute many tokens at a
time by matrix products would be faster for long prompts; their sums depend on where blocks of tokens begin.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.kernels.causal_conv import StateFields
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "delta_rule"
_SIZES = ("key_heads", "key_dim", "value_dim", "qkv_stride", "a_stride", "b_stride", "out_stride", "slot_stride")


@triton.jit
def _head(place, mask, eps):
    """A head of q or k divided by its length."""
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) + eps))


@triton.jit(do_not_specialize=[*_SIZES])
def _delta_rule(
    seg_start, context_len, state_in, state_out, save_at, save_to, qkv, a, b, a_log, dt_bias, states, out,
    key_heads, key_dim, value_dim, qkv_stride, a_stride, b_stride, out_stride, slot_stride, eps, q_scale,
    GROUP: tl.constexpr, TILED: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(0), tl.program_id(1)
    key, column = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = key < key_dim, column < value_dim
    inside = is_key[:, None] & is_column[None, :]
    start, stop = tl.load(seg_start + segment), tl.load(seg_start + segment + 1)
    source, target, save = tl.load(state_in + segment), tl.load(state_out + segment), tl.load(save_to + segment)
    first = tl.load(context_len + segment) - (stop - start)
    passed = tl.where(save >= 0, start + tl.load(save_at + segment) - first, -1)
    place = states + head.to(tl.int64) * key_dim * value_dim + key[:, None] * value_dim + column[None, :]
    matrix = tl.load(place + source.to(tl.int64) * slot_stride, mask=inside & (source >= 0), other=0.0)
    key_head = head % key_heads if TILED else head // GROUP
    q_at, k_at = key_head * key_dim + key, (key_heads + key_head) * key_dim + key
    v_at = 2 * key_heads * key_dim + head * value_dim + column
    rate, shift = tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    token = start.to(tl.int64)
    for _ in range(start, stop):
        row = qkv + token * qkv_stride
        q, k = _head(row + q_at, is_key, eps) * q_scale, _head(row + k_at, is_key, eps)
        v = tl.load(row + v_at, mask=is_column, other=0.0).to(tl.float32)
        x = tl.load(a + token * a_stride + head).to(tl.float32) + shift
        t = tl.exp(-tl.abs(x))  # softplus(x) = max(x, 0) + log(1 + t); what 1 + t rounds off is added to the logarithm
        w = 1.0 + t
        decay = tl.exp(-rate * (tl.where(x < 0.0, 0.0, x) + (tl.log(w) + (t - (w - 1.0)) / w)))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
        u = beta * (v - decay * tl.sum(k[:, None] * matrix, axis=0))
        matrix = decay * matrix + k[:, None] * u[None, :]
        y = tl.sum(q[:, None] * matrix, axis=0)
        y_at = out + token * out_stride + head * value_dim + column
        tl.store(y_at, y.to(out.dtype.element_ty), mask=is_column)
        token += 1
        if token == passed:
            tl.store(place + save.to(tl.int64) * slot_stride, matrix, mask=inside)
    tl.store(place + target.to(tl.int64) * slot_stride, matrix, mask=inside & (target >= 0))


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of the op delta_rule, whose attributes these are."""

    key_heads: int
    value_heads: int
    key_dim: int
    tiled: bool = False
    eps: float = 1e-6


def delta_rule(
    chip: Chip,
    fields: StateFields,
    qkv: Tensor,
    gates: tuple[Tensor, Tensor, Tensor, Tensor],
    states: Tensor,
    heads: DeltaHeads,
    *,
    out: Tensor,
) -> None:
    """out [tokens, value_heads * value_dim] = the op delta_rule of qkv, and the matrices behind each segment.

    gates: a and b [tokens, value_heads], a_log and dt_bias float32 [value_heads]; qkv, a, b, out: any float dtypes,
    rows may lie apart, those beyond the step's tokens are left alone; states float32 [slots, value_heads * key_dim *
    value_dim], of one layer, slots may lie apart.
    """
    a, b, a_log, dt_bias = gates
    assert qkv.stride(1) == out.stride(1) == states.stride(1) == 1, "a row lies apart"
    value_dim = out.shape[1] // heads.value_heads
    tile = tiles.choose(NAME, chip)
    _delta_rule[(fields.state_in.shape[0], heads.value_heads, cdiv(value_dim, tile.sizes["BLOCK"]))](
        *fields.moves, qkv, a, b, a_log, dt_bias, states, out, heads.key_heads, heads.key_dim, value_dim,
        qkv.stride(0), a.stride(0), b.stride(0), out.stride(0), states.stride(0), heads.eps, heads.key_dim**-0.5,
        GROUP=heads.value_heads // heads.key_heads, TILED=heads.tiled, KEYS=next_power_of_2(heads.key_dim),
        **tile.launch(),
    )  # fmt: skip


def cost(tokens: int, segments: int, heads: DeltaHeads, value_dim: int, row_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: rows read and written once, matrices of each segment read and written."""
    values = heads.value_heads * value_dim
    rows = tokens * (2 * heads.key_heads * heads.key_dim + 2 * values + 2 * heads.value_heads)
    return 7 * tokens * values * heads.key_dim, row_bytes * rows + 8 * segments * values * heads.key_dim


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Heads of 128 by 128, two of values to one of keys."""
    tile = tiles.choose(NAME, chip)
    names = ("seg_start", "context_len", "state_in", "state_out", "save_at", "save_to")
    rows = dict.fromkeys(("qkv", "a", "b", "out"), "bf16")
    floats = dict.fromkeys(("a_log", "dt_bias", "states"), "f32")
    types = pointers(**dict.fromkeys(names, "i32"), **rows, **floats) | {"eps": "fp32", "q_scale": "fp32"}
    for tiled in (False, True):
        yield Compilation(
            kernel=NAME,
            case=f"128 x 128 tiled={tiled}",
            function=_delta_rule,
            signature=types,
            constants={"GROUP": 2, "TILED": tiled, "KEYS": 128},
            tile=tile,
        )
