"""The selective scan of Mamba and Mamba-2, one token of a sequence after the other. Sources: Gu and Dao 2023, Dao and
Gu 2024.

A program has the states of some channels in registers, from its slot to its slot: of one head, whose channels have one
rate (Mamba-2), or of channels with a rate for each state (Mamba). All of it is float32 and in the order of tokens, as
the op says, so the result does not depend on how a sequence is cut into steps. Forms that compute many tokens at a time
by matrix products would be faster for long prompts; their sums depend on where blocks of tokens begin.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.kernels.causal_conv import StateFields
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "selective_scan"
_SIZES = ("width", "channels", "count", "groups", "group_heads", "xbc_stride", "dt_stride", "out_stride", "slot_stride")


@triton.jit(do_not_specialize=[*_SIZES])
def _selective_scan(
    seg_start, context_len, state_in, state_out, save_at, save_to, xbc, dt, a_log, dt_bias, d, states, out,
    width, channels, count, groups, group_heads, xbc_stride, dt_stride, out_stride, slot_stride, least, most,
    RATES: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(0), tl.program_id(1)
    state, column = tl.arange(0, STATES), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_state, is_column = state < count, column < channels
    inside = is_state[:, None] & is_column[None, :]
    start, stop = tl.load(seg_start + segment), tl.load(seg_start + segment + 1)
    source, target, save = tl.load(state_in + segment), tl.load(state_out + segment), tl.load(save_to + segment)
    first = tl.load(context_len + segment) - (stop - start)
    passed = tl.where(save >= 0, start + tl.load(save_at + segment) - first, -1)
    place = states + head.to(tl.int64) * count * channels + state[:, None] * channels + column[None, :]
    matrix = tl.load(place + source.to(tl.int64) * slot_stride, mask=inside & (source >= 0), other=0.0)
    x_at = head * channels + column
    b_at = width + head // group_heads * count + state
    c_at = b_at + groups * count
    if RATES:  # each channel is a head
        rate = tl.load(a_log + column[None, :] * count + state[:, None], mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(dt_bias + column, mask=is_column, other=0.0).to(tl.float32)
        skip = tl.load(d + column, mask=is_column, other=0.0).to(tl.float32)
    else:
        rate, shift = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
        skip = tl.load(d + head).to(tl.float32)
    rate = tl.exp(rate)
    token = start.to(tl.int64)
    for _ in range(start, stop):
        row = xbc + token * xbc_stride
        x = tl.load(row + x_at, mask=is_column, other=0.0).to(tl.float32)
        b = tl.load(row + b_at, mask=is_state, other=0.0).to(tl.float32)
        c = tl.load(row + c_at, mask=is_state, other=0.0).to(tl.float32)
        if RATES:
            z = tl.load(dt + token * dt_stride + column, mask=is_column, other=0.0).to(tl.float32) + shift
        else:
            z = tl.load(dt + token * dt_stride + head).to(tl.float32) + shift
        t = tl.exp(-tl.abs(z))  # softplus(z) = max(z, 0) + log(1 + t); what 1 + t rounds off is added to the logarithm
        w = 1.0 + t
        s = tl.where(z < 0.0, 0.0, z) + (tl.log(w) + (t - (w - 1.0)) / w)
        s = tl.where(s < least, least, s)  # a NaN stays one
        s = tl.where(s > most, most, s)
        if RATES:
            decay = tl.exp(-(rate * s[None, :]))
        else:
            decay = tl.exp(-(rate * s))
        matrix = decay * matrix + b[:, None] * (s * x)[None, :]
        y = tl.sum(c[:, None] * matrix, axis=0) + skip * x
        y_at = out + token * out_stride + x_at
        tl.store(y_at, y.to(out.dtype.element_ty), mask=is_column)
        token += 1
        if token == passed:
            tl.store(place + save.to(tl.int64) * slot_stride, matrix, mask=inside)
    tl.store(place + target.to(tl.int64) * slot_stride, matrix, mask=inside & (target >= 0))


@dataclass(frozen=True)
class ScanSizes:
    """The attributes of the op selective_scan: states of a channel, groups of heads that share B and C, bounds of a
    step."""

    states: int
    groups: int = 1
    least: float = 0.0
    most: float = inf


def selective_scan(
    chip: Chip,
    fields: StateFields,
    xbc: Tensor,
    dt: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    sizes: ScanSizes,
    *,
    out: Tensor,
) -> None:
    """out [tokens, width] = the op selective_scan of xbc and dt, and the states behind each segment.

    weights: a_log [heads], or [heads, states] where each channel is a head, dt_bias and d [heads], float32; xbc
    [tokens, width + 2 * groups * states], dt [tokens, heads], out: any float dtypes, rows may lie apart, those beyond
    the step's tokens are left alone; states float32 [slots, width * states], of one layer in the shape of
    `ops.scan.scan_state`, slots may lie apart.
    """
    a_log, dt_bias, d = weights
    assert a_log.is_contiguous(), "rates of a channel beside each other"
    assert xbc.stride(1) == dt.stride(1) == out.stride(1) == states.stride(1) == 1, "a row lies apart"
    heads, width, rates = dt.shape[1], out.shape[1], a_log.dim() == 2
    tile = tiles.choose(NAME, chip, rates=rates)
    programs, channels = (1, width) if rates else (heads, width // heads)
    _selective_scan[(fields.state_in.shape[0], programs, cdiv(channels, tile.sizes["BLOCK"]))](
        *fields.moves, xbc, dt, a_log, dt_bias, d, states, out, width, channels, sizes.states, sizes.groups,
        heads // sizes.groups, xbc.stride(0), dt.stride(0), out.stride(0), states.stride(0), sizes.least, sizes.most,
        RATES=rates, STATES=next_power_of_2(sizes.states), **tile.launch(),
    )  # fmt: skip


def cost(tokens: int, segments: int, width: int, heads: int, sizes: ScanSizes, row_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: rows read and written once, states of each segment read and written. heads: as many
    as the width where there is a rate for each state."""
    values = width * sizes.states
    rows = tokens * (2 * width + 2 * sizes.groups * sizes.states + heads)
    return (14 if heads == width else 5) * tokens * values, row_bytes * rows + 8 * segments * values


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Heads of one rate with 128 and 256 states, whose rows come from a convolution; a rate for each of 16 states."""
    names = ("seg_start", "context_len", "state_in", "state_out", "save_at", "save_to")
    floats = dict.fromkeys(("a_log", "dt_bias", "d", "states"), "f32")
    for rates, states, source in ((False, 128, "f32"), (False, 256, "f32"), (True, 16, "bf16")):
        rows = {"xbc": source, "dt": "bf16", "out": "bf16"}
        types = pointers(**dict.fromkeys(names, "i32"), **rows, **floats) | {"least": "fp32", "most": "fp32"}
        yield Compilation(
            kernel=NAME,
            case=f"states={states} rates={rates}",
            function=_selective_scan,
            signature=types,
            constants={"RATES": rates, "STATES": states},
            tile=tiles.choose(NAME, chip, rates=rates),
        )
