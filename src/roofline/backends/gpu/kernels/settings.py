"""SampleRows on the device: one int32 buffer, one copy a step; what a kernel reads of it."""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.sampling import SampleRows

# Words of a row's settings, 16 to a row.
TEMPERATURE, TOP_K, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SEED_LOW, SEED_HIGH, SAMPLE_INDEX, POSITION = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
REPETITION, PRESENCE, FREQUENCY, LOGPROBS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)
WORDS = tl.constexpr(16)
NO_ID = tl.constexpr(2147483647)  # above every id


@triton.jit
def integer(settings, row, WORD: tl.constexpr):
    """A row's setting, int32."""
    return tl.load(settings + row * WORDS + WORD)


@triton.jit
def real(settings, row, WORD: tl.constexpr):
    """A row's setting, float32."""
    return tl.load(settings + row * WORDS + WORD).to(tl.float32, bitcast=True)


@dataclass(frozen=True)
class SampleSettings:
    """A step's SampleRows, all tensors int32 views of one buffer (floats by their bits).

    words [rows, 16]; history and bias: (starts [rows + 1], ids, counts or the bits of values), None where no row has
    any; mask [rows, ceil(vocab / 32)] or None. cut, logprobs: whether any row asks for top-k, top-p or min-p, or for
    log-probabilities.
    """

    words: Tensor
    history: tuple[Tensor, Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor, Tensor] | None
    mask: Tensor | None
    cut: bool
    logprobs: bool

    @classmethod
    def of(cls, rows: SampleRows, device: "torch.device | str") -> "SampleSettings":
        """Upload; nothing waits for the device."""
        parts = []
        if rows.hist_ids.size:
            parts += [rows.hist_start, rows.hist_ids, rows.hist_counts]
        if rows.bias_ids.size:
            parts += [rows.bias_start, rows.bias_ids, rows.bias_values.view(np.int32)]
        if rows.mask is not None:
            parts.append(rows.mask.view(np.int32))
        # Each part begins at a multiple of 16 bytes: kernels are compiled anew for one that does not.
        shapes = [(rows.rows, WORDS.value), *(part.shape for part in parts)]
        sizes = [-(-prod(shape) // 4) * 4 for shape in shapes]
        flat = np.zeros(sum(sizes), np.int32)
        words, *sections = np.split(flat, np.cumsum(sizes[:-1]))
        _fill(words.reshape(shapes[0]), rows)
        for piece, part in zip(sections, parts, strict=True):
            piece[: part.size] = part.ravel()
        pieces = to_device(torch.from_numpy(flat), device).split(sizes)
        views = iter([piece[: prod(shape)].view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        sampled = rows.temperature > 0
        return cls(
            words=next(views),
            history=(next(views), next(views), next(views)) if rows.hist_ids.size else None,
            bias=(next(views), next(views), next(views)) if rows.bias_ids.size else None,
            mask=next(views, None),
            cut=bool((sampled & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))).any()),
            logprobs=bool((rows.logprobs >= 0).any()),
        )


def _fill(words: np.ndarray, rows: SampleRows) -> None:
    """The settings of each row, words [rows, 16]."""
    for word, values in (
        (TEMPERATURE, rows.temperature), (TOP_K, rows.top_k), (TOP_P, rows.top_p), (MIN_P, rows.min_p),
        (SAMPLE_INDEX, rows.sample_index), (POSITION, rows.position), (REPETITION, rows.repetition),
        (PRESENCE, rows.presence), (FREQUENCY, rows.frequency), (LOGPROBS, rows.logprobs),
    ):  # fmt: skip
        words[:, word.value] = values.view(np.int32)
    words[:, SEED_LOW.value : SEED_HIGH.value + 1] = rows.seed.astype("<u8", copy=False).view("<i4").reshape(-1, 2)


def to_device(values: Tensor, device: "torch.device | str") -> Tensor:
    """A copy on the device, queued behind what it is doing; `values`, on the host, may be overwritten at once."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    # torch gives this pinned memory to nobody else before the copy is done.
    return values.pin_memory().to(device, non_blocking=True)
