"""Where top-k and top-p cut a row of scores, without sorting it.

Both keep a beginning of the order (score falling, id rising), so a cut is a score and the last id of it that is kept.
It is searched for two bits at a time in the scores' bits, as counts of ids, or as sums of weights. Weights are whole
numbers of 2^-42: their sum is the same in any order, and has what a float64 sum of float32 weights would have of them.

The largest of each of BLOCK sets of ids say where a cut can lie at the lowest: what they reach, all ids do. Where no
more than BLOCK scores lie as high, these are listed, and the search never leaves a program's registers.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.kernels.settings import MIN_P, TEMPERATURE, TOP_K, TOP_P, SampleSettings, integer, real
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "cutoff"


@triton.jit
def _key(x):
    """uint32 in the order of the floats, both zeros alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _float(key):
    """The inverse of _key."""
    return tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, peak):
    """int64 multiples of 2^-42; an infinite peak has the weight 1 too."""
    return (tl.where(x == peak, 1.0, tl.exp(x - peak)) * 4398046511104.0).to(tl.int64)  # 2^42


@triton.jit
def _amounts(scores, id, vocab, peak, limit, last, WEIGHTS: tl.constexpr):
    """Keys of ids, and what each counts for (int64 weights, or int32 ones): 0 outside the beginning that ends with
    (limit, last)."""
    x = tl.load(scores + id, mask=id < vocab, other=float("-inf"))
    key = _key(x)
    counted = (id < vocab) & ((key > limit) | ((key == limit) & (id <= last)))
    amount = _weight(x, peak) if WEIGHTS else tl.full(id.shape, 1, tl.int32)
    return key, tl.where(counted, amount, 0)


@triton.jit
def _total(scores, vocab, peak, limit, last, floor, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the amounts whose key is at least floor."""
    total = tl.zeros((BLOCK,), tl.int64 if WEIGHTS else tl.int32)
    for first in range(0, vocab, BLOCK):
        key, amount = _amounts(scores, first + tl.arange(0, BLOCK), vocab, peak, limit, last, WEIGHTS)
        total += tl.where(key >= floor, amount, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _cut(scores, vocab, peak, limit, last, need, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """(key, last id) of the shortest beginning, within the one that ends at (limit, last), whose amounts reach need."""
    cut = tl.cast(0, tl.uint32)
    unit = tl.cast(1 << 30, tl.uint32)
    for _ in range(16):  # the largest key that is still reached, two bits more each time
        one = tl.zeros((BLOCK,), tl.int64 if WEIGHTS else tl.int32)
        two, three = one, one
        for first in range(0, vocab, BLOCK):
            key, amount = _amounts(scores, first + tl.arange(0, BLOCK), vocab, peak, limit, last, WEIGHTS)
            one += tl.where(key >= cut + unit, amount, 0)
            two += tl.where(key >= cut + 2 * unit, amount, 0)
            three += tl.where(key >= cut + 3 * unit, amount, 0)
        reached = (tl.sum(one, axis=0) >= need).to(tl.uint32)
        reached += (tl.sum(two, axis=0) >= need).to(tl.uint32)
        reached += (tl.sum(three, axis=0) >= need).to(tl.uint32)
        cut += reached * unit
        unit = unit >> 2
    reached_before = _total(scores, vocab, peak, limit, last, cut + 1, WEIGHTS, BLOCK)
    cut_last = tl.cast(0, tl.int32)
    for first in range(0, vocab, BLOCK):  # of the ids at the cut, those that begin before `need` is reached
        id = first + tl.arange(0, BLOCK)
        key, amount = _amounts(scores, id, vocab, peak, limit, last, WEIGHTS)
        amount = tl.where(key == cut, amount, 0)
        before = reached_before + tl.cumsum(amount, axis=0) - amount
        cut_last = tl.maximum(cut_last, tl.max(tl.where((amount > 0) & (before < need), id, 0), axis=0))
        reached_before += tl.sum(amount, axis=0)
    return cut, cut_last


@triton.jit
def _reached(key, amount, need):
    """The largest key that, with all above it, reaches `need` among these; 0 where all of them do not."""
    cut = tl.cast(0, tl.uint32)
    for bit in range(32):
        higher = cut | (tl.cast(0x80000000, tl.uint32) >> bit)
        cut = tl.where(tl.sum(tl.where(key >= higher, amount, 0), axis=0) >= need, higher, cut)
    return cut


@triton.jit
def _cut_listed(key, amount, need, BLOCK: tl.constexpr):
    """As `_cut`, of a list that lies in registers: places in it instead of ids."""
    cut = _reached(key, amount, need)
    before = tl.sum(tl.where(key > cut, amount, 0), axis=0)
    amount = tl.where(key == cut, amount, 0)
    before += tl.cumsum(amount, axis=0) - amount
    return cut, tl.max(tl.where((amount > 0) & (before < need), tl.arange(0, BLOCK), 0), axis=0)


@triton.jit
def _list(scores, vocab, bound, listed, BLOCK: tl.constexpr):
    """How many scores have a key of at least `bound`; up to BLOCK of them, in their order, and then as many ids in
    `listed`."""
    count = vocab * 0
    for first in range(0, vocab, BLOCK):
        id = first + tl.arange(0, BLOCK)
        x = tl.load(scores + id, mask=id < vocab, other=float("-inf"))
        reaches = (id < vocab) & (_key(x) >= bound)
        place = count + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        fits = reaches & (place < BLOCK)
        tl.store(listed + place, x.to(tl.int32, bitcast=True), mask=fits)
        tl.store(listed + BLOCK + place, id, mask=fits)
        count += tl.sum(reaches.to(tl.int32), axis=0)
    return count


@triton.jit
def _needed(top_p, total):
    """The weight that a beginning has to reach."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _cutoff(scores, settings, thresholds, lasts, peaks, listed, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scores += row * vocab
    listed += row * (2 * BLOCK)
    top_k, top_p = integer(settings, row, TOP_K), real(settings, row, TOP_P)
    sampled = real(settings, row, TEMPERATURE) > 0
    by_count, by_weight = sampled & (top_k > 0) & (top_k < vocab), sampled & (top_p < 1)
    limit, last = tl.cast(0, tl.uint32), vocab
    peak = tl.cast(0.0, tl.float32)
    if by_count | by_weight | (sampled & (real(settings, row, MIN_P) > 0)):
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            id = first + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(scores + id, mask=id < vocab, other=float("-inf")))
        peak = tl.max(best, axis=0)
        total, bound = tl.cast(0, tl.int64), tl.cast(0, tl.uint32)
        if by_count:  # `best` are scores of BLOCK ids: what k of them reach, k of all do
            bound = _reached(_key(best), tl.full((BLOCK,), 1, tl.int32), top_k)
        elif by_weight:
            total = _total(scores, vocab, peak, limit, last, limit, True, BLOCK)
            bound = _reached(_key(best), _weight(best, peak), _needed(top_p, total))
        count = vocab * 0
        if bound > 0x007FFFFF:  # above the key of -inf, which is also what `best` has where there are no ids
            count = _list(scores, vocab, bound, listed, BLOCK)
        if (count > 0) & (count <= BLOCK):
            tl.debug_barrier()  # other threads have written what is read here
            place = tl.arange(0, BLOCK)
            x = tl.load(listed + place, mask=place < count, other=0).to(tl.float32, bitcast=True)
            key, counted, last_place = tl.where(place < count, _key(x), 0), place < count, count
            if by_count:
                limit, last_place = _cut_listed(key, counted.to(tl.int32), top_k, BLOCK)
                counted = (key > limit) | ((key == limit) & (place <= last_place))
            if by_weight:
                weight = tl.where(counted, _weight(x, peak), 0)
                total = tl.sum(weight, axis=0) if by_count else total
                limit, last_place = _cut_listed(key, weight, _needed(top_p, total), BLOCK)
            last = tl.load(listed + BLOCK + last_place)
        else:
            if by_count:
                limit, last = _cut(scores, vocab, peak, limit, last, top_k, False, BLOCK)
                total = _total(scores, vocab, peak, limit, last, limit, True, BLOCK) if by_weight else total
            if by_weight:
                limit, last = _cut(scores, vocab, peak, limit, last, _needed(top_p, total), True, BLOCK)
    tl.store(thresholds + row, tl.where(limit == 0, float("-inf"), _float(limit)))
    tl.store(lasts + row, last)
    tl.store(peaks + row, peak)


def cutoff(chip: Chip, scores: Tensor, settings: SampleSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Threshold float32, last id int32, largest score float32, each [rows], of scores float32 [rows, vocab].

    Kept are scores above the threshold, and those equal to it up to the last id. Rows that nothing cuts keep all; the
    largest score is that of rows with top-k, top-p or min-p. A weight is exp(score - largest), its exp the chip's: only
    where a sum of weights is within rounding of top_p can another id be the last than in the reference.
    """
    rows, vocab = scores.shape
    assert scores.is_contiguous()
    thresholds, peaks = (torch.empty(rows, dtype=torch.float32, device=scores.device) for _ in range(2))
    lasts = torch.empty(rows, dtype=torch.int32, device=scores.device)
    tile = tiles.choose(NAME, chip)
    listed = torch.empty(rows * 2 * tile.sizes["BLOCK"], dtype=torch.int32, device=scores.device)  # scores' bits, ids
    _cutoff[(rows,)](scores, settings.words, thresholds, lasts, peaks, listed, vocab, **tile.launch())
    return thresholds, lasts, peaks


def cost(rows: int, vocab: int, searches: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch; searches: 1 for top-k or top-p, 2 for both, 0 for min-p. As it is where few scores
    lie as high as a cut can: a row is read for its largest scores, their weights and the list, mostly from a cache."""
    return rows * vocab * (8 if searches else 1), rows * vocab * 4 * (3 if searches else 1)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """The one binary."""
    tile = tiles.choose(NAME, chip)
    types = pointers(scores="f32", settings="i32", thresholds="f32", lasts="i32", peaks="f32", listed="i32")
    yield Compilation(
        kernel=NAME, case="rows", function=_cutoff, signature=types, constants={}, tile=tile, aligned=("vocab",)
    )
