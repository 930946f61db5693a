"""Attention over compressed rows against `ops.attend`, its exactness, and whether planted faults are noticed."""

from dataclasses import replace
from itertools import pairwise

import pytest
from gpu_paged import TOLERANCE, error, ints, paged

from roofline import ops
from roofline.backends.gpu.partials import workspace_limit
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")
TURNED, RANK = 8, 24
EDGES = [1, 15, 16, 17, 255, 256, 257, 513]


def rows(steps, heads, turned=TURNED, rank=RANK, **options):
    """A step over pages of rows, NaN in those that nobody wrote; what stands for pages of values is not read."""
    step = paged(steps, heads, 1, turned + rank, **options)
    return replace(step, contexts=[(k, k) for k, _ in step.contexts])


def prepared(step, heads, turned=TURNED, *, exact=False, programs=64, chip="sm_90", decodes=0):
    from roofline.backends.gpu.kernels.attend_launches import prepare_all

    starts, contexts = step.fields[:2]
    return prepare_all(
        chips.get(chip), tokens=step.q.shape[0], segments=len(contexts), max_query=int(starts.diff().max()),
        max_context=int(contexts.max()), decodes=decodes, heads=heads, kv_heads=1, turned=turned,
        head_dim=step.k.shape[3] - turned, exact=exact, element_bytes=step.q.element_size(), programs=programs,
        cache_bytes=step.k.element_size(),
    )  # fmt: skip


def run(step, launches):
    from roofline.backends.gpu.kernels.attend_launches import workspace_floats
    from roofline.backends.gpu.kernels.attend_rows import attend_rows

    (heads, rank) = launches[0].heads, launches[0].head_dim
    out = torch.full((step.q.shape[0], heads * rank), float("nan"), dtype=step.q.dtype)
    for launch in launches:
        space = torch.full((workspace_floats(launch),), float("nan"))
        scale = step.k.shape[3] ** -0.5
        attend_rows(launch, step.q, step.k, *step.fields, scale=scale, workspace=space, out=out)
    return out


def expected(step, heads, rank=RANK):
    return ops.attend(step.q.contiguous().float(), step, 0, heads, step.k.shape[3] ** -0.5, value_dim=rank)


SLOW = [pytest.param(40, 64, marks=pytest.mark.slow), pytest.param(71, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("heads", "programs"), [(1, 1), (6, 64), (20, 1), *SLOW])
def test_mixed_steps(heads, programs):
    """Decodes, verification, a chunk and a whole prompt in one launch, of heads that are one and several blocks."""
    step = rows([(1, 290), (3, 258), (7, 25), (4, 4), (1, 1)], heads)
    launches = prepared(step, heads, programs=programs)
    assert error(run(step, launches), expected(step, heads)) < TOLERANCE["f32"]


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decodes_beside_chunks(exact):
    """Two launches where decodes come first."""
    step = rows([(1, 270), (1, 17), (20, 41)], 6)
    launches = prepared(step, 6, decodes=2, exact=exact, programs=32)
    assert len(launches) == 2
    assert error(run(step, launches), expected(step, 6)) < TOLERANCE["f32"]


@pytest.mark.parametrize("programs", [1, 128])
def test_context_lengths(programs):
    step = rows([(1, context) for context in EDGES], 2)
    launches = prepared(step, 2, programs=programs)
    assert (launches[0].splits > 1) == (programs > 1)
    assert error(run(step, launches), expected(step, 2)) < TOLERANCE["f32"]


@pytest.mark.parametrize(
    ("turned", "rank", "dtype"),
    [(4, 9, "f32"), (16, 40, "f16"), (32, 256, "bf16"), pytest.param(64, 512, "bf16", marks=pytest.mark.slow)],
)
def test_sizes_of_rows(turned, rank, dtype):
    step = rows([(1, 270), (20, 33)], 3, turned, rank, dtype=dtype)
    for programs in (1, 64):
        launches = prepared(step, 3, turned, programs=programs)
        assert error(run(step, launches), expected(step, 3, rank)) < TOLERANCE[dtype]


@pytest.mark.parametrize("chip", [pytest.param(name, marks=pytest.mark.slow) for name in chips.chips()])
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (32, 1), (40, 20)])
def test_tiles_of_chips(chip, heads, queries):
    """Decodes of up to 16 and 32 heads, and chunks, each with the tile that the chip has for it."""
    step = rows([(queries, 40), (1, 260)], heads, dtype="f16")
    for exact in (False, True):
        launches = prepared(step, heads, exact=exact, programs=8 if queries == 1 else 1, chip=chip)
        assert error(run(step, launches), expected(step, heads)) < TOLERANCE["f16"]


@pytest.mark.parametrize(("flavour", "chip"), [("float8_e4m3fn", "sm_90"), ("float8_e4m3fnuz", "gfx942")])
def test_rows_of_8_bits(flavour, chip):
    step = rows([(1, 40), (9, 30)], 4, dtype="bf16", cache=getattr(torch, flavour))
    assert error(run(step, prepared(step, 4, chip=chip)), expected(step, 4)) < TOLERANCE["bf16"]


def test_pages_that_nobody_wrote_are_not_read():
    """Rows behind the last are looked up in the first page, which here holds none."""
    step = rows([(1, 20), (9, 30)], 4)
    first = torch.full_like(step.k[:1], float("nan"))
    moved = replace(step, k=torch.cat([first, step.k]), fields=[*step.fields[:3], step.fields[3] + 1])
    assert torch.equal(run(moved, prepared(moved, 4)), run(step, prepared(step, 4)))


def test_places_of_64_bits(monkeypatch):
    """A cache of 2^31 elements is not at hand: a small one is taken for one."""
    from roofline.backends.gpu.kernels import attend

    step = rows([(1, 20), (9, 30)], 4)
    narrow = run(step, prepared(step, 4))
    monkeypatch.setattr(attend, "WIDE", 1)
    assert torch.equal(run(step, prepared(step, 4)), narrow)


def test_rows_of_no_segment_stay():
    """A captured launch has room for more rows and segments than a step has."""
    step = rows([(1, 20), (1, 300)], 2)
    starts, contexts, page_start, pages = step.fields
    fields = [torch.cat([starts, starts[-1:].expand(3)]), torch.cat([contexts, ints([0, 0, 0])])]
    fields += [torch.cat([page_start, page_start[-1:].expand(3)]), pages]
    padded = replace(step, q=torch.cat([step.q, torch.full((6, step.q.shape[1]), float("nan"))]), fields=fields)
    out = run(padded, prepared(padded, 2))
    assert error(out[:2], expected(step, 2)) < TOLERANCE["f32"]
    assert out[2:].isnan().all()


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_exact_bits_do_not_depend_on_regime(dtype, rows_alike):
    """A text at once, in chunks, and positions one by one, with and without an axis of splits: equal bits."""
    heads, length, cached = 3, 530, 500
    step = rows([(length - cached, length)], heads, dtype=dtype)
    want = run(step, prepared(step, heads, exact=True, programs=1))
    assert error(want, expected(step, heads)) < TOLERANCE[dtype]
    for first, stop in pairwise([cached, cached + 3, cached + 12, length]):
        fields = [ints([0, stop - first]), ints([stop]), *step.fields[2:]]
        part = replace(step, q=step.q[first - cached : stop - cached], fields=fields)
        launches = prepared(part, heads, exact=True, programs=256)
        assert launches[0].splits > 1
        assert torch.equal(run(part, launches), want[first - cached : stop - cached])
    for at in (0, 11, 29):
        part = replace(step, q=step.q[at : at + 1], fields=[ints([0, 1]), ints([cached + at + 1]), *step.fields[2:]])
        for programs in (1, 1024):
            assert torch.equal(run(part, prepared(part, heads, exact=True, programs=programs)), want[at : at + 1])


def test_the_workspace_has_a_limit():
    from roofline.backends.gpu.kernels.attend_launches import prepare, workspace_floats

    splits = set()
    for exact in (False, True):
        for tokens, segments, queries in [(1, 1, 1), (8, 8, 1), (256, 256, 1), (40, 8, 5), (2048, 1, 2048)]:
            for context in (100, 4096, 131072):
                launch = prepare(
                    chips.get("sm_90"), tokens=tokens, segments=segments, max_query=queries, max_context=context,
                    heads=128, kv_heads=1, head_dim=512, turned=64, exact=exact,
                )  # fmt: skip
                assert workspace_floats(launch) <= workspace_limit(512)
                splits.add(launch.splits)
    assert {1, 16} <= splits
    assert max(splits) > 100
    assert workspace_limit(512) * 4 < 160 << 20


FAULTS = {
    "page table shifted": lambda step: replace(step, fields=[*step.fields[:3], step.fields[3].roll(1)]),
    "one key too few": lambda step: replace(step, fields=[step.fields[0], step.fields[1] - 1, *step.fields[2:]]),
    "rows one column further": lambda step: replace(step, k=step.k.roll(1, dims=3)),
    "heads in another order": lambda step: replace(step, q=step.q.roll(TURNED + RANK, dims=1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault):
    step = rows([(1, 40), (3, 37)], 4)
    assert error(run(FAULTS[fault](step), prepared(step, 4)), expected(step, 4)) > 0.01


def test_refusals():
    step = rows([(1, 600)], 4)
    for turned, rank in ((65, 16), (8, 513)):
        with pytest.raises(UnsupportedError, match=rf"compressed rows of {turned} \+ {rank}"):
            prepared(replace(step, k=torch.zeros(1, 1, 16, turned + rank)), 4, turned)
    with pytest.raises(AssertionError, match="rows of another width"):
        run(replace(step, k=torch.zeros(1, 1, 16, 40)), prepared(step, 4))
