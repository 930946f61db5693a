"""The 8-bit KV cache: its rounding on every instruction set, its bytes in a page, and NaN that stays visible."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import LLAMA, checkpoint, executable  # noqa: E402

from roofline.ops.batch import Segment  # noqa: E402
from roofline.weights.random_weights import random_checkpoint  # noqa: E402

ISAS = native.isas()
KV_HEADS, DIM = LLAMA["kv_heads"], LLAMA["head_dim"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [9, 16, 36, 64, 80, 512])
def test_heads_are_rounded_as_declared(isa: str, dim: int) -> None:
    torch = pytest.importorskip("torch", reason="the reference runs on torch")
    from roofline.ops.attention import quantize_heads

    rng = np.random.default_rng(dim)
    x = (rng.standard_normal((64, dim)) * 10.0 ** rng.integers(-30, 30, (64, 1))).astype(np.float32)
    x[0], x[1, 3], x[2, -1], x[3, 5] = 0.0, np.nan, np.inf, -np.inf
    x[4] = np.arange(dim) % 255 - 127.0  # its scale is 1
    x[5] = x[4] / 2  # halves
    q, scale = np.full((64, -(-dim // 16) * 16), 77, np.int8), np.empty(64, np.float32)
    native.kernels.to_int8(isa, x, dim, q, scale)
    wanted_q, wanted_scale = quantize_heads(torch.from_numpy(x))
    np.testing.assert_array_equal(scale, wanted_scale.numpy())
    np.testing.assert_array_equal(q[:, :dim], wanted_q.numpy())
    assert not q[:, dim:].any(), "a head is filled up with zeros"
    assert np.isnan(scale[1:4]).all()


def run(model: Any, ids: list[int], first: int) -> np.ndarray:
    """float32 [tokens, vocab] of ids at positions first.. of the one sequence."""
    model.batch.fill([Segment(ids, first, [2, 5, 1])], range(len(ids)))
    model.forward()
    return model.logits().copy()


def scale_place(layer: int, page: int, head: int, slot: int, num_pages: int = 64) -> int:
    """Byte of a scale in the cache; heads: those of K, then those of V."""
    head_bytes = 16 * DIM + 16 * 4
    return ((layer * num_pages + page) * 2 * KV_HEADS + head) * head_bytes + 16 * DIM + slot * 4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [False, True], ids=["k", "v"])
def test_a_nan_stays_visible_to_those_who_see_it(isa: str, value: bool) -> None:
    model = executable(checkpoint("llama", "Q4_1"), isa=isa, kv_dtype="int8")
    clean = run(model, list(range(30)), 0)
    at = scale_place(layer=0, page=5, head=KV_HEADS * value, slot=9)
    bytes_at = model._cache.view()[at : at + 4]
    assert 0 < bytes_at.view(np.float32)[0] < 10  # position 25's
    bytes_at[:] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    # Position 24 is computed anew in front of it, in one step with a row that sees it (and writes position 26).
    again = run(model, [24], 24)
    assert again.tobytes() == clean[24].tobytes()
    assert np.isnan(run(model, [26], 26)).all()
    assert np.isnan(run(model, [26, 27, 28], 26)).all()


def test_a_later_nan_does_not_reach_earlier_rows_of_its_tile() -> None:
    """A NaN embedding makes its own row NaN, and all that see it; rows before it in the chunk keep their bits."""
    source = random_checkpoint(LLAMA, seed=3, form="F32")
    name = next(name for name in source.tensors if "embd" in name or "embed" in name)
    raw = source.read(name).copy()
    width = LLAMA["width"] * 4
    raw.reshape(-1)[7 * width : 8 * width] = 0xFF
    read = source.read

    class Poisoned:
        def __getattr__(self, key: str) -> Any:
            return getattr(source, key)

        def read(self, tensor: str) -> np.ndarray:
            return raw if tensor == name else read(tensor)

    model = executable(Poisoned(), isa=ISAS[0], kv_dtype="int8")  # type: ignore[arg-type]
    plain = run(model, [1, 2, 3, 4, 5, 6, 8, 9], 0)
    got = run(model, [1, 2, 3, 4, 5, 7, 8, 9], 0)
    assert got[:5, 8:].tobytes() == plain[:5, 8:].tobytes()  # tied: column 7 of the logits is NaN for all
    assert np.isnan(got[5:, 8:]).all()
