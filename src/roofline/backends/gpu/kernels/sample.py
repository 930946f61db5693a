"""One id for each row of logits, by backends/sampling.py; its naive form is backends/reference/sampling.py.

Greedy rows and plain temperature need one pass over the logits; the rest of what a request may ask for makes scores
first, and cuts them. Gumbel-max: Maddison et al. 2014.
"""

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.kernels.cutoff import cutoff
from roofline.backends.gpu.kernels.logprobs import logprobs
from roofline.backends.gpu.kernels.noise import gumbel, noise_key
from roofline.backends.gpu.kernels.scores import scores
from roofline.backends.gpu.kernels.settings import (
    MIN_P,
    NO_ID,
    POSITION,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    SampleSettings,
    integer,
    real,
)
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.backends.sampling import MAX_LOGPROBS, Sampled, SampleRows
from roofline.hardware.chips.chips import Chip

NAME = "sample"


@triton.jit
def _choose(
    scores, settings, thresholds, lasts, peaks, best_scores, best_ids, vocab, stride,
    SCALED: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = real(settings, row, TEMPERATURE)
    key = noise_key(
        integer(settings, row, SEED_LOW), integer(settings, row, SEED_HIGH),
        integer(settings, row, SAMPLE_INDEX), integer(settings, row, POSITION),
    )  # fmt: skip
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = split * SPLIT + tl.arange(0, BLOCK)  # where every score is -inf: the lowest
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, vocab), BLOCK):
        id = first + tl.arange(0, BLOCK)
        x = tl.load(scores + row * stride + id, mask=id < vocab, other=float("-inf"))
        broken |= (x != x).to(tl.int32)
        if temperature > 0:
            if not SCALED:
                x = tl.div_rn(x, temperature)
            y = x + gumbel(key, id)
            if CUT:
                threshold, peak, min_p = tl.load(thresholds + row), tl.load(peaks + row), real(settings, row, MIN_P)
                admitted = (x > threshold) | ((x == threshold) & (id <= tl.load(lasts + row)))
                admitted = admitted & ((x == peak) | (tl.exp(x - peak) >= min_p))  # all, where min_p is 0
                y = tl.where(admitted, y, float("-inf"))
            x = y
        better = x > best  # ids rise: of equals the first stays
        best, best_id = tl.where(better, x, best), tl.where(better, id, best_id)
    top = tl.max(best, axis=0)
    top_id = tl.min(tl.where(best == top, best_id, NO_ID), axis=0)
    failed = tl.max(broken, axis=0) > 0
    place = row * tl.num_programs(1) + split
    tl.store(best_scores + place, tl.where(failed, float("inf"), top))
    tl.store(best_ids + place, tl.where(failed, -1, top_id))  # infinite, and the lowest of ids: wins over all


@triton.jit(do_not_specialize=["splits"])
def _merge(best_scores, best_ids, ids, splits, SPLITS: tl.constexpr):
    row, split = tl.program_id(0), tl.arange(0, SPLITS)
    score = tl.load(best_scores + row * splits + split, mask=split < splits, other=float("-inf"))
    id = tl.load(best_ids + row * splits + split, mask=split < splits, other=NO_ID)
    tl.store(ids + row, tl.min(tl.where(score == tl.max(score, axis=0), id, NO_ID), axis=0))


class QueuedSample:
    """Sampled, and on its way to the host behind what is queued now, before what is queued later.

    ids: int32 [rows], on the device; logprobs: (logprob, top_ids, top_logprobs), None where no row asked.
    """

    def __init__(self, ids: Tensor, logprobs: tuple[Tensor, Tensor, Tensor] | None) -> None:
        self.ids = ids
        self._parts = [to_host(part) for part in (ids, *(logprobs or ()))]
        self._copied = torch.cuda.Event() if ids.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def fetch(self) -> Sampled:
        """On the host; waits for the device, as far as it must."""
        if self._copied is not None:
            self._copied.synchronize()
        ids, *logprobs = (part.numpy() for part in self._parts)
        if logprobs:
            return Sampled(ids, *logprobs)
        nothing = np.full((len(ids), 1 + MAX_LOGPROBS), np.nan, np.float32)
        no_ids = np.full((len(ids), MAX_LOGPROBS), -1, np.int32)
        return Sampled(ids, nothing[:, 0], no_ids, nothing[:, 1:])


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, complete when the device has done what is queued now: record an event behind it."""
    if not values.is_cuda:
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def sample(chip: Chip, logits: Tensor, rows: SampleRows, *, out: Tensor | None = None) -> QueuedSample:
    """An id for each row of logits float32 [rows, vocab] (rows may lie apart); nothing waits for the device.

    out: int32 [rows], where the ids stay on the device.

    Noise has the reference's bits; its logarithms, and exp in top-p and min-p, may differ in their last places, so that
    two ids whose noisy scores are that close can change places, or one on the border be in or out. A row that holds a
    NaN gets the id -1: it fails, and nothing beside it.
    """
    settings = SampleSettings.of(rows, logits.device)
    scaled = settings.cut or any(part is not None for part in (settings.mask, settings.bias, settings.history))
    source = scores(chip, logits, settings) if scaled else logits
    cut = cutoff(chip, source, settings) if settings.cut else (settings.words,) * 3
    count, vocab = logits.shape
    tile = tiles.choose(NAME, chip)
    splits = cdiv(vocab, tile.sizes["SPLIT"])
    best_scores = torch.empty((count, splits), dtype=torch.float32, device=logits.device)  # [rows, splits]
    best_ids = torch.empty((count, splits), dtype=torch.int32, device=logits.device)  # [rows, splits]
    ids = torch.empty(count, dtype=torch.int32, device=logits.device) if out is None else out  # [rows]
    _choose[(count, splits)](
        source, settings.words, *cut, best_scores, best_ids, vocab, source.stride(0), SCALED=scaled, CUT=settings.cut,
        **tile.launch(),
    )  # fmt: skip
    merging = tile.compiler() | {"num_warps": 1}
    _merge[(count,)](best_scores, best_ids, ids, splits, SPLITS=next_power_of_2(splits), **merging)
    return QueuedSample(ids, logprobs(chip, logits, settings, ids) if settings.logprobs else None)


def cost(rows: int, vocab: int) -> tuple[int, int]:
    """(FLOPs, bytes) of the pass that chooses, with noise on every row."""
    return 60 * rows * vocab, 4 * rows * vocab


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Logits as they are, scores, and scores with a cut; and what joins the splits of a row."""
    tile = tiles.choose(NAME, chip)
    for scaled, cut in ((False, False), (True, False), (True, True)):
        score = "f32" if cut else "i32"  # the settings stand for what is not there
        types = pointers(
            scores="f32", settings="i32", thresholds=score, lasts="i32", peaks=score, best_scores="f32", best_ids="i32"
        )
        case, constants = f"scaled={scaled} cut={cut}", {"SCALED": scaled, "CUT": cut}
        yield Compilation(
            kernel=NAME,
            case=case,
            function=_choose,
            signature=types,
            constants=constants,
            tile=tile,
            aligned=("vocab", "stride"),
        )
    joined = pointers(best_scores="f32", best_ids="i32", ids="i32")
    one = tiles.Tile(1, tile.stages, {}, tile.options)
    yield Compilation(kernel=NAME, case="merge", function=_merge, signature=joined, constants={"SPLITS": 128}, tile=one)
