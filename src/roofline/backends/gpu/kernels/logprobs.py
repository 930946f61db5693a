"""Log-probabilities of raw logits: of the chosen id and of a row's largest, for the rows that ask."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.kernels.settings import LOGPROBS, NO_ID, SampleSettings, integer
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.backends.sampling import MAX_LOGPROBS
from roofline.hardware.chips.chips import Chip

NAME = "logprobs"


@triton.jit
def _largest_after(logits, vocab, limit, last, BLOCK: tl.constexpr):
    """(logit, id) that follows (limit, last) in the order (logit falling, id rising); no id: NO_ID."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), NO_ID, tl.int32)
    for first in range(0, vocab, BLOCK):
        id = first + tl.arange(0, BLOCK)
        x = tl.load(logits + id, mask=id < vocab, other=float("-inf"))
        remaining = (id < vocab) & ((x < limit) | ((x == limit) & (id > last)))
        better = remaining & ((x > best) | (best_id == NO_ID))
        best, best_id = tl.where(better, x, best), tl.where(better, id, best_id)
    top = tl.max(tl.where(best_id == NO_ID, float("-inf"), best), axis=0)
    return top, tl.min(tl.where(best == top, best_id, NO_ID), axis=0)


@triton.jit
def _logprobs(logits, settings, ids, logprob, top_ids, top_logprobs, vocab, stride,
              MOST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    count, chosen = integer(settings, row, LOGPROBS), tl.load(ids + row)
    if (count >= 0) & (chosen >= 0):
        peak, top_id = _largest_after(logits, vocab, float("inf"), -1, BLOCK)
        sums = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, vocab, BLOCK):
            id = first + tl.arange(0, BLOCK)
            x = tl.load(logits + id, mask=id < vocab, other=float("-inf"))
            sums += tl.exp(x - peak).to(tl.float64)
        norm = peak.to(tl.float64) + tl.log(tl.sum(sums, axis=0))
        tl.store(logprob + row, (tl.load(logits + chosen).to(tl.float64) - norm).to(tl.float32))
        top = peak
        for rank in range(0, tl.minimum(count, MOST)):
            place, exists = row * MOST + rank, top_id != NO_ID
            tl.store(top_ids + place, tl.where(exists, top_id, -1))
            tl.store(top_logprobs + place, tl.where(exists, (top.to(tl.float64) - norm).to(tl.float32), float("nan")))
            if exists:
                top, top_id = _largest_after(logits, vocab, top, top_id, BLOCK)


def logprobs(chip: Chip, logits: Tensor, settings: SampleSettings, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprob float32 [rows], top_ids int32 and top_logprobs float32 [rows, MAX_LOGPROBS]; NaN and -1 where not asked.

    logits float32 [rows, vocab], rows may lie apart; ids int32 [rows]: the chosen ones, -1 for none. exp is float32,
    its sum and the logarithm are float64.
    """
    rows, vocab = logits.shape
    logprob = torch.full((rows,), float("nan"), device=logits.device)  # [rows]
    top_ids = torch.full((rows, MAX_LOGPROBS), -1, dtype=torch.int32, device=logits.device)  # [rows, MAX_LOGPROBS]
    top_logprobs = torch.full((rows, MAX_LOGPROBS), float("nan"), device=logits.device)  # [rows, MAX_LOGPROBS]
    tile = tiles.choose(NAME, chip)
    _logprobs[(rows,)](
        logits, settings.words, ids, logprob, top_ids, top_logprobs, vocab, logits.stride(0), MOST=MAX_LOGPROBS,
        **tile.launch(),
    )  # fmt: skip
    return logprob, top_ids, top_logprobs


def cost(rows: int, vocab: int, count: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch where each row asks for `wanted` entries; a row is read once for each and once more,
    mostly from a cache."""
    return rows * vocab * (2 + 4 * (count + 1)), rows * vocab * 4 * (2 + count)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """The one binary."""
    tile = tiles.choose(NAME, chip)
    types = pointers(logits="f32", settings="i32", ids="i32", logprob="f32", top_ids="i32", top_logprobs="f32")
    yield Compilation(
        kernel=NAME,
        case="rows",
        function=_logprobs,
        signature=types,
        constants={"MOST": MAX_LOGPROBS},
        tile=tile,
        aligned=("vocab", "stride"),
    )
