"""Pages of a CPU's cache, copied out of one executable into other pages of another: the same logits follow them."""

import sys
from pathlib import Path

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import checkpoint, executable  # noqa: E402

from roofline.backends.base import KeepsPages  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402

IDS = list(range(3, 45))  # two full pages, and ten more


def logits(model, ids, first, pages) -> np.ndarray:
    model.batch.fill([Segment(ids, first, pages)], range(len(ids)))
    model.forward()
    return model.logits().copy()


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_copied_pages_are_read_as_the_ones_they_were_copied_from(kv_dtype: str) -> None:
    source, target = (executable(checkpoint("llama", "Q4_1"), isa=native.isas()[0], kv_dtype=kv_dtype) for _ in "ab")
    assert isinstance(source, KeepsPages)
    expected = logits(source, IDS, 0, [2, 5, 1])
    logits(target, IDS[::-1], 0, [2, 5, 1])  # what lies in its pages is something else
    for page, place in ((2, 7), (5, 0)):
        parts = source.page_views(page)
        assert sum(part.nbytes for part in parts) == source.page_bytes
        for part, copy in zip(parts, target.page_views(place), strict=True):
            copy[:] = part
    assert logits(target, IDS[32:], 32, [7, 0, 3]).tobytes() == expected[32:].tobytes()
    again = logits(target, IDS[::-1][32:], 32, [2, 5, 1])
    assert again.tobytes() == logits(source, IDS[::-1], 0, [8, 9, 10])[32:].tobytes(), "other pages stay as they were"
