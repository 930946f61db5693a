"""Logits -> scores: masks, biases, penalties, temperature, in the order of backends/sampling.py, on a copy.

No multiplication is fused with an addition, and divisions round once: scores have the bits of the reference's.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.settings import FREQUENCY, PRESENCE, REPETITION, TEMPERATURE, SampleSettings, real
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "scores"


@triton.jit(do_not_specialize=["mask_stride"])
def _copy(source, settings, mask, out, vocab, source_stride, mask_stride,
          HAS_MASK: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(source + row * source_stride + column, mask=inside, other=0.0)
    if HAS_MASK:  # a NaN stays one: the row that holds it fails
        word = tl.load(mask + row * mask_stride + column // 32, mask=inside, other=0)
        x = tl.where((((word >> (column % 32)) & 1) != 0) | (x != x), x, float("-inf"))
    if SCALE:
        temperature = real(settings, row, TEMPERATURE)
        x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    tl.store(out + row * vocab + column, x, mask=inside)


@triton.jit
def _bias(starts, ids, values, scores, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stop = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        id = tl.load(ids + at, mask=at < stop, other=vocab)
        place, valid = scores + row * vocab + id, id < vocab
        x = tl.load(place, mask=valid, other=0.0)
        value = tl.load(values + at, mask=at < stop, other=0).to(tl.float32, bitcast=True)
        tl.store(place, tl.where(x == float("-inf"), x, x + value), mask=valid)


@triton.jit
def _penalise(starts, ids, counts, settings, scores, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    repetition = real(settings, row, REPETITION)
    presence, frequency = real(settings, row, PRESENCE), real(settings, row, FREQUENCY)
    stop = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        id = tl.load(ids + at, mask=at < stop, other=vocab)
        count = tl.load(counts + at, mask=at < stop, other=0)
        place, valid = scores + row * vocab + id, id < vocab
        x = tl.load(place, mask=valid, other=0.0)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
        tl.store(place, x, mask=valid)


def scores(chip: Chip, logits: Tensor, settings: SampleSettings) -> Tensor:
    """float32 [rows, vocab] of logits float32 [rows, vocab] (rows may lie apart): what top-k and the noise see.

    The ids of a row's bias, and those of its history, are distinct; -inf stays -inf whatever is added to it.
    """
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)  # [rows, vocab]
    tile = tiles.choose(NAME, chip)
    grid, mask = (rows, cdiv(vocab, tile.sizes["BLOCK"])), settings.mask
    adjusted = settings.bias is not None or settings.history is not None
    _copy[grid](
        logits, settings.words, settings.words if mask is None else mask, out, vocab, logits.stride(0),
        0 if mask is None else mask.stride(0), HAS_MASK=mask is not None, SCALE=not adjusted, **tile.launch(),
    )  # fmt: skip
    if settings.bias is not None:
        _bias[(rows,)](*settings.bias, out, vocab, **tile.launch())
    if settings.history is not None:
        _penalise[(rows,)](*settings.history, settings.words, out, vocab, **tile.launch())
    if adjusted:
        _copy[grid](
            out, settings.words, settings.words, out, vocab, vocab, 0, HAS_MASK=False, SCALE=True, **tile.launch()
        )
    return out


def cost(rows: int, vocab: int, adjusted: bool) -> tuple[int, int]:
    """(FLOPs, bytes) of one call; adjusted: with biases or penalties, whose entries are not counted."""
    return rows * vocab, rows * vocab * (16 if adjusted else 8)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Copies with and without mask and temperature, biases, penalties."""
    tile = tiles.choose(NAME, chip)
    copied = pointers(source="f32", settings="i32", mask="i32", out="f32")
    for mask, scale in ((False, True), (True, False), (True, True), (False, False)):
        case, constants = f"copy mask={mask} scale={scale}", {"HAS_MASK": mask, "SCALE": scale}
        yield Compilation(
            kernel=NAME,
            case=case,
            function=_copy,
            signature=copied,
            constants=constants,
            tile=tile,
            aligned=("vocab", "source_stride"),
        )
    lists = pointers(starts="i32", ids="i32", scores="f32")
    yield Compilation(
        kernel=NAME,
        case="bias",
        function=_bias,
        signature=lists | pointers(values="i32"),
        constants={},
        tile=tile,
        aligned=("vocab",),
    )
    punished = lists | pointers(counts="i32", settings="i32")
    yield Compilation(
        kernel=NAME,
        case="penalties",
        function=_penalise,
        signature=punished,
        constants={},
        tile=tile,
        aligned=("vocab",),
    )
