"""What is found once at the start of a step: the slot in the cache of each token, and ids that the host did not know.

A slot is page * 16 + position % 16. Rows beyond the step's tokens, which a captured graph computes all the same, get
slots of a scratch page that no sequence reads. An id below 0 names a row of the last sampling: see `Queueing` in
backends/base.py.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip
from roofline.ops.batch import PAGE_TOKENS, Header

NAME = "slots"


@triton.jit(do_not_specialize=["capacity", "scratch_page"])
def _slots(
    header, ids, sampled, positions, seg_start, page_start, pages, slots, capacity, scratch_page,
    PAGE: tl.constexpr, HEADER_TOKENS: tl.constexpr, HEADER_SEGMENTS: tl.constexpr,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tl.load(header + HEADER_TOKENS)
    id = tl.load(ids + token, mask=real, other=0)
    last = tl.load(sampled + (-1 - id), mask=id < 0, other=0)
    tl.store(ids + token, tl.maximum(last, 0), mask=id < 0)  # a row that failed has no id: whatever follows is ignored
    segments = tl.load(header + HEADER_SEGMENTS)
    # A token lies in the segment whose index is the number of segments that end at or before it.
    segment = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, segments, SEGMENTS):
        at = first + tl.arange(0, SEGMENTS)
        end = tl.load(seg_start + 1 + at, mask=at < segments, other=2147483647)
        segment += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    position = tl.load(positions + token, mask=real, other=0)
    entry = tl.load(page_start + segment, mask=real, other=0) + position // PAGE
    page = tl.where(real, tl.load(pages + entry, mask=real, other=0), scratch_page)
    slot = page.to(tl.int64) * PAGE + tl.where(real, position % PAGE, token % PAGE)
    tl.store(slots + token, slot, mask=token < capacity)


def slots(
    chip: Chip, header: Tensor, ids: Tensor, sampled: Tensor, positions: Tensor, seg_start: Tensor,
    page_start: Tensor, pages: Tensor, scratch_page: int, *, out: Tensor,
) -> None:  # fmt: skip
    """out int64 [capacity]: the slot of each of a step's tokens; beyond them, slots of scratch_page.

    ids below 0 are replaced: -1 - r by sampled[r], int32, the ids of the last step's logit rows. header, ids,
    positions, seg_start, page_start, pages: the fields of ops/batch.py, int32, on the device. The counts are read
    there, so that a captured launch serves every step of at most `capacity` tokens.
    """
    tile = tiles.choose(NAME, chip)
    _slots[(cdiv(out.shape[0], tile.sizes["TOKENS"]),)](
        header, ids, sampled, positions, seg_start, page_start, pages, out, out.shape[0], scratch_page,
        **_LAYOUT, **tile.launch(),
    )  # fmt: skip


_LAYOUT = {"PAGE": PAGE_TOKENS, "HEADER_TOKENS": int(Header.TOKENS), "HEADER_SEGMENTS": int(Header.SEGMENTS)}


def cost(tokens: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: an id, a position and a page read, a slot written for each token."""
    return 0, tokens * (4 + 4 + 4 + 8)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """The one binary."""
    tile = tiles.choose(NAME, chip)
    names = ("header", "ids", "sampled", "positions", "seg_start", "page_start", "pages")
    types = pointers(**dict.fromkeys(names, "i32"), slots="i64")
    yield Compilation(kernel=NAME, case="step", function=_slots, signature=types, constants=_LAYOUT, tile=tile)
