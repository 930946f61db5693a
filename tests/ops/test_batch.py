"""The buffer of a step: where its fields lie, which every backend knows, and what a step writes into them."""

from itertools import pairwise

import numpy as np
import pytest

from roofline.ops.batch import FIELDS, NO_SLOT, Batch, BatchLimits, Header, Segment, StateMove


def test_fields_lie_where_backends_look_for_them() -> None:
    batch = Batch(BatchLimits(tokens=17, segments=16, rows=5, pages=33))
    assert batch.offsets == {
        "header": 0,
        "ids": 16,
        "positions": 48,
        "seg_start": 80,  # one more than there are segments
        "context_len": 112,
        "page_start": 128,
        "pages": 160,
        "logit_rows": 208,
        "adapters": 224,
        "state_in": 256,
        "state_out": 272,
        "save_at": 288,
        "save_to": 304,
    }
    sizes = [16, 17, 17, 17, 16, 17, 33, 5, 17, 16, 16, 16, 16]
    for name, size in zip(FIELDS, sizes, strict=True):
        view = getattr(batch, name)
        assert view.size == size, name
        assert view.ctypes.data == batch.buffer.ctypes.data + 4 * batch.offsets[name], name
    assert batch.buffer.size == 320
    assert batch.buffer.dtype == np.int32


def test_buffers_start_on_whole_cache_lines() -> None:
    batches = [Batch(BatchLimits(tokens, 1, 1, 1)) for tokens in range(1, 200)]
    assert {batch.buffer.ctypes.data % 64 for batch in batches} == {0}
    assert all(a.buffer.size <= b.buffer.size for a, b in pairwise(batches))


def test_a_step_is_written_segment_by_segment() -> None:
    batch = Batch(BatchLimits(tokens=22, segments=3, rows=4, pages=8))
    batch.buffer[: batch.offsets["adapters"]] = 7  # of what was there nothing stays that the step reads
    batch.header[:] = 0
    batch.fill(
        [Segment([5, 6, 7], 30, [4, 2, 6], adapter=1), Segment([8], 15, [3]), Segment([1, 2], 0, [7, 5])], [2, 5]
    )
    assert batch.ids[:6].tolist() == [5, 6, 7, 8, 1, 2]
    assert batch.positions[:6].tolist() == [30, 31, 32, 15, 0, 1]
    assert batch.adapters[:6].tolist() == [1, 1, 1, 0, 0, 0]
    assert batch.seg_start.tolist() == [0, 3, 4, 6]
    assert batch.context_len.tolist() == [33, 16, 2]
    assert batch.page_start.tolist() == [0, 3, 4, 6]
    assert batch.pages[:6].tolist() == [4, 2, 6, 3, 7, 5]
    assert batch.logit_rows[:2].tolist() == [2, 5]
    assert (batch.tokens, batch.segments, batch.rows, batch.header[Header.PAGES]) == (6, 3, 2, 6)
    assert batch.header.tolist() == [6, 3, 2, 6] + [0] * 12


def test_a_page_holds_sixteen_tokens() -> None:
    batch = Batch(BatchLimits(17, 1, 1, 1))
    batch.fill([Segment(range(16), 0, [0])], [15])
    with pytest.raises(AssertionError, match="without pages"):
        batch.fill([Segment(range(17), 0, [0])], [16])


def test_a_step_names_the_slots_of_recurrent_state() -> None:
    batch = Batch(BatchLimits(tokens=200, segments=4, rows=4, pages=40, state_slots=9))
    moved = StateMove(source=5, target=7, save_at=64, save_to=8)
    pages = range(9)
    batch.fill([Segment(range(70), 10, pages, state=moved), Segment([1], 0, pages), Segment([1], 3, pages)], [])
    assert batch.state_in[:3].tolist() == [5, NO_SLOT, 2]
    assert batch.state_out[:3].tolist() == [7, 1, 2]
    assert (batch.save_at[0], batch.save_to[:3].tolist()) == (64, [8, NO_SLOT, NO_SLOT])
    with pytest.raises(AssertionError, match="a slot of state that there is not"):
        batch.fill([Segment([1], 0, pages, state=StateMove(target=9))], [])
