"""Slots of a step's tokens, and q, k, v turned and written there, against the ops' references."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits, Segment
from roofline.ops.position_factors import PositionFactors
from roofline.ops.rope_tables import RopeTable, cos_sin
from tests.models.eager import ContiguousCache

torch = pytest.importorskip("torch")

SCRATCH = 40


def step(lengths, firsts, capacity=32):
    """A filled batch over shuffled pages, its slots, and the slots that are right."""
    from roofline.backends.gpu.kernels.slots import slots

    free = iter(np.random.default_rng(0).permutation(SCRATCH))
    batch = Batch(BatchLimits(tokens=capacity, segments=80, rows=8, pages=SCRATCH))
    for stale in (batch.positions, batch.pages, batch.seg_start, batch.page_start):
        stale[:] = 7
    batch.positions[:] = 3
    segments, want = [], []
    for length, first in zip(lengths, firsts, strict=True):
        pages = [int(next(free)) for _ in range(-(-(first + length) // PAGE_TOKENS))]
        segments.append(Segment([1] * length, first, pages))
        want += [pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at in range(first, first + length)]
    batch.fill(segments, [0])
    out = torch.full((capacity,), -1, dtype=torch.int64)
    slots(chips.get("sm_90"), *step_fields(batch), SCRATCH, out=out)
    return batch, out, want


def step_fields(batch, sampled=()):
    fields = batch.header, batch.ids, np.array(sampled, np.int32), batch.positions
    return [torch.from_numpy(field) for field in (*fields, batch.seg_start, batch.page_start, batch.pages)]


def test_ids_that_the_host_did_not_know():
    from roofline.backends.gpu.kernels.slots import slots

    batch = Batch(BatchLimits(tokens=8, segments=8, rows=8, pages=SCRATCH))
    batch.ids[:] = -3  # behind the step's own, where nothing may be read or written
    batch.fill([Segment([token], 4, [page]) for page, token in enumerate((7, -1, 0, -4, -2))], [0])
    fields = step_fields(batch, [90, -1, 92, 93])
    slots(chips.get("sm_90"), *fields, SCRATCH, out=torch.zeros(8, dtype=torch.int64))
    assert fields[1].tolist() == [7, 90, 0, 93, 0, -3, -3, -3], "a row that failed gives id 0"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 17)), max_size=8))
def test_slots(segments):
    _, out, want = step([n for n, _ in segments], [first for _, first in segments])
    assert out[: len(want)].tolist() == want
    assert all(slot // PAGE_TOKENS == SCRATCH for slot in out[len(want) :].tolist())


def test_slots_of_more_segments_than_a_tile_has():
    batch, out, want = step([1] * 40, [3] * 40, capacity=48)
    assert out[:40].tolist() == want
    batch.pages[:] = 2**31 // PAGE_TOKENS  # a cache of more than 2^31 slots
    from roofline.backends.gpu.kernels.slots import slots

    slots(chips.get("gfx942"), *step_fields(batch), SCRATCH, out=out)
    assert out[0] == 2**31 + 3


# heads, kv_heads, head_dim, rotary dim, style, norms ("last": behind rope) or factors by position ("scaled"), dtype of
# qkv, of q, of the cache, chip
CASES = [
    (4, 2, 64, 64, "half", False, "bfloat16", "bfloat16", "bfloat16", "sm_90"),
    (3, 1, 32, 32, "interleaved", False, "float16", "float16", "float16", "gfx1100"),
    (9, 3, 64, 64, "half", True, "float32", "float32", "bfloat16", "gfx942"),
    (2, 2, 40, 24, "interleaved", True, "float32", "bfloat16", "float32", "sm_80"),
    (5, 5, 80, 32, "half", False, "bfloat16", "float32", "bfloat16", "gfx90a"),
    (4, 2, 20, 20, "half", False, "bfloat16", "bfloat16", "bfloat16", "sm_90"),
    (3, 1, 36, 10, "interleaved", True, "float32", "bfloat16", "bfloat16", "sm_80"),
    (9, 3, 64, 64, "half", "last", "float32", "float32", "bfloat16", "gfx942"),
    (2, 2, 40, 24, "interleaved", "last", "float32", "bfloat16", "float32", "sm_80"),
    (2, 2, 9, 0, "half", False, "bfloat16", "float32", "float16", "gfx942"),
    (4, 4, 48, 0, "half", False, "bfloat16", "float32", "float16", "sm_90"),
    (4, 1, 16, 0, "half", True, "float32", "float32", "float32", "sm_90"),
    (4, 2, 64, 64, "half", "scaled", "bfloat16", "bfloat16", "bfloat16", "sm_90"),
    (3, 1, 32, 24, "interleaved", "scaled", "float32", "float32", "bfloat16", "gfx942"),
    (4, 2, 48, 0, "half", "scaled", "float32", "bfloat16", "float16", "gfx1100"),
    (4, 2, 64, 64, "half", False, "float32", "float32", "float8_e4m3fn", "sm_90"),
    (4, 2, 64, 64, "half", False, "float32", "float32", "float8_e4m3fnuz", "gfx942"),
]
STEPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def half_step(x, dtype):
    """How far rounding to dtype may move x, and as much again for a result of the other rounding."""
    if dtype in STEPS:
        return x.abs() * STEPS[dtype] + 1e-5
    return x.abs() * 2**-4 + 2**-9


def reference(qkv, batch, table, norms, heads, kv_heads, norm_last, factors):
    """q, and k and v [tokens, kv_heads, head_dim], by the ops in float32."""
    bounds = [int(i) for i in batch.seg_start[: batch.segments + 1]]
    segments = [(a, b, 0) for a, b in itertools.pairwise(bounds)]
    cache = ContiguousCache(kv_heads).step(segments, range(len(segments)))
    positions = torch.from_numpy(batch.positions[: batch.tokens].astype("int64"))
    shared = {"heads": heads, "layer": 0, "eps": 1e-5}
    if table is not None:
        turned = {"table": table, "norm_last": norm_last}
        q, cache = ops.rope_kv_write(qkv, positions, cache, *(norms or (None, None)), **shared, **turned, **factors)
    else:
        at = positions if factors else None
        q, cache = ops.qkv_write(qkv, cache, at, *(norms or (None, None)), **shared, **factors)
    held = [cache.read(0, index) for index in range(len(segments))]
    return q, torch.cat([k for k, _ in held]), torch.cat([v for _, v in held])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_kv_write(case):
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    heads, kv_heads, head_dim, dim, style, form, *dtypes, chip = case
    qkv_dtype, q_dtype, cache_dtype = (getattr(torch, name) for name in dtypes)
    batch, slots, _ = step([5, 1, 2], [0, 20, 9], capacity=11)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = (3 * torch.randn(11, width + 16)).to(qkv_dtype)[:, :width]  # rows that lie apart
    qkv[1] *= 1e-3  # so small that a norm's eps counts
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if form in (True, "last") else None
    factors = {"beta": 0.5, "context": 8} if form == "scaled" else {}  # positions are up to 20
    table = RopeTable(dim, 1e4, style) if dim else None
    turns = tuple(map(torch.from_numpy, cos_sin(table, np.arange(32)))) if table else None
    q = torch.full((11, heads * head_dim), float("nan"), dtype=q_dtype)
    pool = torch.full((SCRATCH + 1, 2, kv_heads, PAGE_TOKENS, head_dim), float("nan")).to(cache_dtype)
    positions = torch.from_numpy(batch.positions)
    rope_kv_write(
        chips.get(chip), qkv, positions, slots, turns, norms, 1e-5,
        interleaved=style == "interleaved", q=q, k=pool[:, 0], v=pool[:, 1], norm_last=form == "last",
        factors=torch.from_numpy(PositionFactors(**factors).at(np.arange(32))) if factors else None,
    )  # fmt: skip
    want_q, *want_kv = reference(qkv[:8].float(), batch, table, norms, heads, kv_heads, form == "last", factors)
    assert ((q[:8].float() - want_q).abs() <= half_step(want_q, q_dtype)).all()
    for layer, want in zip(pool.float().unbind(1), want_kv, strict=True):
        got = layer[slots[:8] // PAGE_TOKENS, :, slots[:8] % PAGE_TOKENS]
        assert ((got - want).abs() <= half_step(want, cache_dtype)).all()
        layer[slots // PAGE_TOKENS, :, slots % PAGE_TOKENS] = float("nan")
        assert layer.isnan().all(), "written where no token of the step belongs"


@pytest.mark.parametrize(
    ("heads", "turned", "rank", "style", "factors", "dtype", "cache", "chip"),
    [
        (3, 64, 512, "interleaved", {}, "bfloat16", "bfloat16", "sm_90"),
        (9, 8, 40, "half", {"beta": 0.5, "context": 8}, "float32", "float16", "gfx942"),
        (1, 32, 256, "interleaved", {"beta": 0.5, "context": 8}, "bfloat16", "float8_e4m3fn", "sm_90"),
    ],
)
def test_compressed_rows(heads, turned, rank, style, factors, dtype, cache, chip):
    """q and one row behind it, which is all that the cache holds of a token."""
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    batch, slots, _ = step([5, 1, 2], [0, 20, 9], capacity=11)
    dim, table = turned + rank, RopeTable(turned, 1e4, style)
    qk = (3 * torch.randn(11, (heads + 1) * dim)).to(getattr(torch, dtype))
    q = torch.full((11, heads * dim), float("nan"), dtype=qk.dtype)
    rows = torch.full((SCRATCH + 1, 1, PAGE_TOKENS, dim), float("nan")).to(getattr(torch, cache))
    rope_kv_write(
        chips.get(chip), qk, torch.from_numpy(batch.positions), slots,
        tuple(map(torch.from_numpy, cos_sin(table, np.arange(32)))), None, 0.0,
        interleaved=style == "interleaved", q=q, k=rows, v=None,
        factors=torch.from_numpy(PositionFactors(**factors).at(np.arange(32))) if factors else None,
    )  # fmt: skip
    segments = ContiguousCache(1).step([(0, 5, 0), (5, 6, 0), (6, 8, 0)], range(3))
    positions = torch.from_numpy(batch.positions[:8].astype("int64"))
    want_q, written = ops.rope_latent_write(
        qk[:8].float(), positions, segments, table=table, heads=heads, layer=0, **factors
    )
    want = torch.cat([written.read(0, index)[0] for index in range(3)])
    assert ((q[:8].float() - want_q).abs() <= half_step(want_q, q.dtype)).all()
    got = rows.float()[slots[:8] // PAGE_TOKENS, :, slots[:8] % PAGE_TOKENS]
    assert ((got - want).abs() <= half_step(want, rows.dtype)).all()
    rows[slots // PAGE_TOKENS, :, slots % PAGE_TOKENS] = float("nan")
    assert rows.float().isnan().all(), "written where no token of the step belongs"


def test_q_may_stay_where_it_is():
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    _, slots, _ = step([3], [0], capacity=3)
    qkv = torch.randn(3, 8 * 32)
    before = qkv.clone()
    k, v = (torch.full((SCRATCH + 1, 2, PAGE_TOKENS, 32), float("nan")) for _ in range(2))
    positions = torch.arange(3, dtype=torch.int32)
    rope_kv_write(chips.get("sm_90"), qkv, positions, slots, None, None, 0.0, interleaved=False, q=None, k=k, v=v)
    assert torch.equal(qkv, before)
    got = torch.cat([pages[slots // PAGE_TOKENS, :, slots % PAGE_TOKENS].flatten(1) for pages in (k, v)], dim=1)
    assert torch.equal(got, qkv[:, 4 * 32 :])


def test_eight_bits_saturate_and_keep_nan_and_know_their_flavour():
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    _, slots, _ = step([1], [0], capacity=1)
    qkv, positions = torch.zeros(1, 3 * 16), torch.zeros(1, dtype=torch.int32)
    qkv[0, 16:20] = torch.tensor([1e4, -1e4, float("inf"), float("nan")])
    for chip, dtype in (("sm_90", torch.float8_e4m3fn), ("gfx942", torch.float8_e4m3fnuz)):
        top = torch.finfo(dtype).max
        k, v = (torch.zeros(SCRATCH + 1, 1, PAGE_TOKENS, 16, dtype=dtype) for _ in range(2))
        write = lambda chip, k=k, v=v: rope_kv_write(  # noqa: E731
            chips.get(chip), qkv, positions, slots, None, None, 0.0, interleaved=False, q=None, k=k, v=v
        )
        write(chip)
        got = k.float()[slots // PAGE_TOKENS, 0, slots % PAGE_TOKENS][0]
        assert got[:3].tolist() == [top, -top, top]
        assert got[3].isnan()
        for other in ("sm_80", "gfx942" if chip == "sm_90" else "sm_90"):
            with pytest.raises(UnsupportedError, match="cache of e4m3"):
                write(other)


def test_a_token_is_the_same_alone_and_in_company():
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    turns = tuple(map(torch.from_numpy, cos_sin(RopeTable(64, 1e4), np.arange(64))))
    qkv, positions = torch.randn(6, 8 * 64).bfloat16(), torch.randint(0, 64, (6,), dtype=torch.int32)
    norms, slots = (torch.randn(64), torch.randn(64)), torch.arange(6)

    def run(rows):
        k, v = (torch.zeros(1, 2, PAGE_TOKENS, 64).bfloat16() for _ in range(2))
        q = torch.zeros(len(rows), 4 * 64).bfloat16()
        rope_kv_write(
            chips.get("sm_90"), qkv[rows], positions[rows], slots[rows], turns, norms, 1e-6,
            interleaved=False, q=q, k=k, v=v,
        )  # fmt: skip
        return q, k, v

    together, alone = run([0, 1, 2, 3, 4, 5]), run([4])
    assert torch.equal(together[0][4:5], alone[0])
    assert all(torch.equal(a[:, :, 4], b[:, :, 4]) for a, b in zip(together[1:], alone[1:], strict=True))
