"""A sum over the last tokens of each channel by itself, and the columns of it that a sequence goes on from.

Where a token's segment has too few tokens before it, the columns that the segment reads come first: its slot holds
them, float32, the oldest first. Each sum is over the same values in the same order however a text is cut into steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip
from roofline.ops.batch import Header

NAME = "causal_conv"
_UNSPECIALISED = ["channels", "x_stride", "out_stride", "slot_stride"]


@dataclass(frozen=True)
class StateFields:
    """The fields of a step that say which slots of recurrent state its segments read and write, int32, as ops/batch.py
    has them."""

    header: Tensor
    seg_start: Tensor
    context_len: Tensor
    state_in: Tensor
    state_out: Tensor
    save_at: Tensor
    save_to: Tensor

    @property
    def moves(self) -> tuple[Tensor, ...]:
        """What a kernel reads that keeps states behind segments."""
        return self.seg_start, self.context_len, self.state_in, self.state_out, self.save_at, self.save_to


@triton.jit(do_not_specialize=[*_UNSPECIALISED, "capacity"])
def _causal_conv(
    header, seg_start, state_in, x, states, w, bias, out, capacity, channels, x_stride, out_stride, slot_stride,
    TAPS: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, HEADER_TOKENS: tl.constexpr,
    HEADER_SEGMENTS: tl.constexpr, SEGMENTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, inside = token < tl.load(header + HEADER_TOKENS), channel < channels
    segments = tl.load(header + HEADER_SEGMENTS)
    # A token lies in the segment whose index is the number of segments that end at or before it.
    segment = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, segments, SEGMENTS):
        at = first + tl.arange(0, SEGMENTS)
        end = tl.load(seg_start + 1 + at, mask=at < segments, other=2147483647)
        segment += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    start = tl.load(seg_start + segment, mask=real, other=0)
    slot = tl.load(state_in + segment, mask=real, other=-1)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for tap in tl.static_range(TAPS):
        row = token - (TAPS - 1 - tap)
        here = real & (row >= start)
        place = x + row[:, None].to(tl.int64) * x_stride + channel[None, :]
        value = tl.load(place, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        old = real & (row < start) & (slot >= 0)
        column = (row - start + TAPS - 1)[:, None].to(tl.int64) * channels + channel[None, :]
        place = states + slot[:, None].to(tl.int64) * slot_stride + column
        value += tl.load(place, mask=old[:, None] & inside[None, :], other=0.0)  # one of both is 0
        total += tl.load(w + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)[None, :] * value
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    place = out + token[:, None].to(tl.int64) * out_stride + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(token < capacity)[:, None] & inside[None, :])


@triton.jit
def _columns_at(
    x, states, start, end, slot, channel, inside, channels, x_stride, slot_stride,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last TAPS - 1 rows before row `end`, of the segment or of the slot that it reads: [COLUMNS, BLOCK]."""
    column = tl.arange(0, COLUMNS)
    row = end - (TAPS - 1) + column
    here = (column < TAPS - 1) & (row >= start)
    place = x + row[:, None].to(tl.int64) * x_stride + channel[None, :]
    value = tl.load(place, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
    old = (column < TAPS - 1) & (row < start) & (slot >= 0)
    place = states + slot.to(tl.int64) * slot_stride + (row - start + TAPS - 1)[:, None].to(tl.int64) * channels
    return value + tl.load(place + channel[None, :], mask=old[:, None] & inside[None, :], other=0.0)


@triton.jit(do_not_specialize=["channels", "x_stride", "slot_stride"])
def _keep_columns(
    seg_start, context_len, state_in, state_out, save_at, save_to, x, states, channels, x_stride, slot_stride,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    start, stop = tl.load(seg_start + segment), tl.load(seg_start + segment + 1)
    source, target, save = tl.load(state_in + segment), tl.load(state_out + segment), tl.load(save_to + segment)
    first = tl.load(context_len + segment) - (stop - start)
    passed = tl.where(save >= 0, start + tl.load(save_at + segment) - first, stop)
    last = _columns_at(x, states, start, stop, source, channel, inside, channels, x_stride, slot_stride, TAPS, COLUMNS)
    saved = _columns_at(
        x, states, start, passed, source, channel, inside, channels, x_stride, slot_stride, TAPS, COLUMNS
    )
    tl.debug_barrier()  # the target may be the source: all of it is read before any of it is written
    column = tl.arange(0, COLUMNS)
    mask = (column < TAPS - 1)[:, None] & inside[None, :]
    place = column[:, None].to(tl.int64) * channels + channel[None, :]
    tl.store(states + save.to(tl.int64) * slot_stride + place, saved, mask=mask & (save >= 0))
    tl.store(states + target.to(tl.int64) * slot_stride + place, last, mask=mask & (target >= 0))


def causal_conv(
    chip: Chip, fields: StateFields, x: Tensor, states: Tensor, w: Tensor, bias: Tensor | None, *, silu: bool,
    out: Tensor,
) -> None:  # fmt: skip
    """out [tokens, channels] = the op causal_conv of x, and the columns behind each segment in its slots.

    x, out: any float dtypes, rows may lie apart, out is not x; states float32 [slots, (taps - 1) * channels], of one
    layer, slots may lie apart; w [channels, taps], bias [channels], float32. The step's counts are read on the device.
    """
    (tokens, channels), taps = out.shape, w.shape[1]
    assert w.is_contiguous(), "taps of a channel beside each other"
    assert x.stride(1) == out.stride(1) == states.stride(1) == 1, "a row lies apart"
    tile, keeping = tiles.choose(NAME, chip), tiles.choose("keep_columns", chip)
    _causal_conv[(cdiv(tokens, tile.sizes["TOKENS"]), cdiv(channels, tile.sizes["BLOCK"]))](
        fields.header, fields.seg_start, fields.state_in, x, states, w, w if bias is None else bias, out,
        tokens, channels, x.stride(0), out.stride(0), states.stride(0),
        TAPS=taps, SILU=silu, BIAS=bias is not None, **_LAYOUT, **tile.launch(),
    )  # fmt: skip
    _keep_columns[(fields.state_in.shape[0], cdiv(channels, keeping.sizes["BLOCK"]))](
        *fields.moves, x, states, channels, x.stride(0), states.stride(0),
        TAPS=taps, COLUMNS=next_power_of_2(taps - 1), **keeping.launch(),
    )  # fmt: skip


_LAYOUT = {"HEADER_TOKENS": int(Header.TOKENS), "HEADER_SEGMENTS": int(Header.SEGMENTS)}


def cost(tokens: int, segments: int, channels: int, taps: int, row_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of both launches: rows read once, written once; columns of each segment read and written."""
    columns = 2 * 4 * segments * channels * (taps - 1)
    return 2 * taps * tokens * channels, 2 * row_bytes * tokens * channels + 4 * taps * channels + columns


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Four taps and SiLU on rows of bf16, and what is kept of them."""
    tile, keeping = tiles.choose(NAME, chip), tiles.choose("keep_columns", chip)
    fields = dict.fromkeys(("header", "seg_start", "state_in"), "i32")
    yield Compilation(
        kernel=NAME,
        case="taps=4 silu",
        function=_causal_conv,
        signature=pointers(**fields, x="bf16", states="f32", w="f32", bias="f32", out="bf16"),
        constants={"TAPS": 4, "SILU": True, "BIAS": False, **_LAYOUT},
        tile=tile,
    )
    moves = dict.fromkeys(("seg_start", "context_len", "state_in", "state_out", "save_at", "save_to"), "i32")
    yield Compilation(
        kernel="keep_columns",
        case="taps=4",
        function=_keep_columns,
        signature=pointers(**moves, x="bf16", states="f32"),
        constants={"TAPS": 4, "COLUMNS": 4},
        tile=keeping,
    )
