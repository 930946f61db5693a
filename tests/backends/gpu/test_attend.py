"""Paged attention against `ops.attend`, its exactness, and whether planted faults are noticed."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from gpu_paged import TOLERANCE, error, expected, ints, paged, prepared, run

torch = pytest.importorskip("torch")

EDGES = [1, 15, 16, 17, 255, 256, 257, 513]


@pytest.mark.parametrize(
    ("heads", "window", "soft_cap", "alibi", "programs"),
    [
        *((4, 0, 0.0, False, 1), (6, 0, 0.0, False, 1), (2, 37, 0.0, False, 1), (2, 300, 3.0, False, 1)),
        *((14, 0, 0.0, True, 1), (6, 0, 0.0, False, 64), (2, 300, 3.0, False, 64)),
    ],
)
def test_mixed_steps(heads, window, soft_cap, alibi, programs):
    """Decoding, verification of two guesses, a chunk, and a whole prompt in one launch; groups of 1, 2, 3 and 7.

    Splits of keys (64 programs) run with one group and with a window: a split of keys sees neither heads nor scores.
    """
    step = paged([(1, 290), (3, 258), (7, 25), (4, 4), (1, 1)], heads, 2, 16)
    launch = prepared(step, heads, window, programs=programs)
    out, _ = run(step, launch, soft_cap, alibi)
    assert error(out, expected(step, heads, window, soft_cap, alibi)) < TOLERANCE["f32"]


@pytest.mark.parametrize(("window", "programs"), [(0, 1), (0, 64), (20, 1)])
def test_sinks(window, programs):
    """A score of each head that takes its part and has no value: without splits and behind their merge, small beside
    the keys' and above all of them; the groups of 3 leave rows of a tile without a head."""
    sinks = torch.tensor([-9.0, 0.5, 30.0, 2.0, -1.0, 6.0])
    step = paged([(1, 290), (7, 25)], 6, 2, 16)
    launch = prepared(step, 6, window, programs=programs)
    assert (launch.splits > 1) == (programs > 1)
    out, _ = run(step, launch, sinks=sinks)
    assert error(out, expected(step, 6, window, sinks=sinks)) < TOLERANCE["f32"]
    assert error(out, expected(step, 6, window)) > 0.1


@pytest.mark.parametrize(("window", "programs"), [(0, 1), (0, 128), (16, 1), (16, 128), (257, 128)])
def test_context_lengths(window, programs):
    step = paged([(1, context) for context in EDGES], 2, 1, 8)
    launch = prepared(step, 2, window, programs=programs)
    assert (launch.splits > 1) == (programs > 1)
    assert error(run(step, launch)[0], expected(step, 2, window)) < TOLERANCE["f32"]


# A type of each size is enough for the default run: sizes of all kinds meet each type.
SIZES = {"f32": (9, 64, 96, 256), "bf16": (8, 20, 80, 128), "f16": (24, 36, 112)}


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        pytest.param(dtype, dim, marks=() if dim in dims else pytest.mark.slow)
        for dtype, dims in SIZES.items()
        for dim in sorted(sum(SIZES.values(), ()))
    ],
)
def test_head_sizes(dim, dtype):
    step = paged([(1, 70), (20, 33)], 2, 2, dim, dtype)
    want = expected(step, 2)
    assert error(run(step, prepared(step, 2))[0], want) < TOLERANCE[dtype]


@pytest.mark.parametrize("exact", [False, True])
def test_splits_of_heads_of_an_odd_size(exact):
    """What lies behind a head's end is another head, or nothing; NaN there would be seen."""
    from roofline.backends.gpu.kernels.attend_launches import state_start

    step = paged([(1, 600), (1, 300)], 2, 1, 9)
    launch = prepared(step, 2, exact=exact)
    assert launch.splits > 1
    assert state_start(launch) % 4 == 0
    assert error(run(step, launch)[0], expected(step, 2)) < TOLERANCE["f32"]


@pytest.mark.parametrize("seed", range(4))
def test_any_step(seed):
    """Segments of any lengths find their programs."""
    made = random.Random(seed)
    steps = [(made.randint(1, 40), made.choice([0, 3, 16, 150])) for _ in range(made.randint(1, 6))]
    step = paged([(queries, queries + before) for queries, before in steps], 2, 1, 8, seed=seed)
    assert error(run(step, prepared(step, 2, programs=1))[0], expected(step, 2)) < TOLERANCE["f32"]


@pytest.mark.parametrize(("window", "exact"), [(0, False), (70, True)])
def test_chunks_that_start_anywhere(window, exact):
    """At each position modulo a tile's 64 keys: a block that some row does not see all of is never taken unmasked."""
    starts = range(window, window + 64)  # with a window: so that it has left the first keys
    step = paged([(3, start + 3) for start in starts], 1, 1, 8)
    launch = prepared(step, 1, window, exact=exact, programs=1)
    sizes = {**launch.tile.sizes, "BLOCK_M": 16, "BLOCK_N": 64, "PEEL": True}
    launch = replace(launch, tile=replace(launch.tile, sizes=sizes))
    assert error(run(step, launch)[0], expected(step, 1, window)) < TOLERANCE["f32"]


@pytest.mark.parametrize(
    "chip", ["sm_80", "gfx942", *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("gfx1100", "gfx1201"))]
)
@pytest.mark.parametrize(("queries", "dim"), [(1, 64), (1, 128), (1, 256), (5, 128), (20, 64), (20, 128)])
def test_tiles_of_chips(chip, queries, dim):
    """Decoding, verification and chunks, each with the tile that the chip has for it."""
    step = paged([(queries, 40), (1, 260)], 4, 1, dim, "f16")
    for exact in (False, True) if queries == 20 else (False,):
        launch = prepared(step, 4, exact=exact, programs=8 if queries == 1 else 1, chip=chip)
        assert error(run(step, launch)[0], expected(step, 4)) < TOLERANCE["f16"]


@pytest.mark.parametrize("heads", [40, 71])
def test_more_heads_than_a_block_has_rows(heads):
    """One kv head for all: several programs share a token's heads."""
    step = paged([(1, 40), (3, 20)], heads, 1, 16)
    for exact in (False, True):
        assert error(run(step, prepared(step, heads, exact=exact))[0], expected(step, heads)) < TOLERANCE["f32"]


def test_queries_inside_wider_rows():
    """q may be a view into the rows of qkv, and keys and values into one pool."""
    step = paged([(1, 20), (9, 30)], 4, 2, 16)
    rows = torch.full((10, 4 * 16 + 64), float("nan"))
    rows[:, :64] = step.q
    pool = torch.full((step.k.shape[0], 2, *step.k.shape[1:]), float("nan"))
    pool[:, 0], pool[:, 1] = step.k, step.v
    views = replace(step, q=rows[:, :64], k=pool[:, 0], v=pool[:, 1])
    assert torch.equal(run(views, prepared(step, 4))[0], run(step, prepared(step, 4))[0])


@pytest.mark.parametrize("flavour", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_float8_cache(flavour):
    step = paged([(1, 40), (9, 30)], 4, 2, 16, "bf16", cache=getattr(torch, flavour))
    assert error(run(step, prepared(step, 4))[0], expected(step, 4)) < TOLERANCE["bf16"]


def test_places_of_64_bits(monkeypatch):
    """A cache of 2^31 elements is not at hand: a small one is taken for one."""
    from roofline.backends.gpu.kernels import attend as module

    step = paged([(1, 20), (9, 30)], 4, 2, 16)
    narrow = run(step, prepared(step, 4))[0]
    monkeypatch.setattr(module, "WIDE", 1)
    assert torch.equal(run(step, prepared(step, 4))[0], narrow)


@pytest.mark.parametrize("queries", [1, 9])
def test_rows_of_no_segment_stay(queries):
    """A captured launch has room for more rows and segments than a step has."""
    step = paged([(queries, 20), (queries, 300)], 2, 1, 16)
    starts, contexts, page_start, pages = step.fields
    used = 2 * queries
    padded = replace(
        step,
        q=torch.cat([step.q, torch.full((6, 32), float("nan"))]),
        fields=[
            torch.cat([starts, starts[-1:].expand(3)]),
            torch.cat([contexts, ints([0, 0, 0])]),
            torch.cat([page_start, page_start[-1:].expand(3)]),
            pages,
        ],
    )
    out, _ = run(padded, prepared(padded, 2))
    assert error(out[:used], expected(step, 2)) < TOLERANCE["f32"]
    assert out[used:].isnan().all()


def alone(step, positions):
    """The step's only segment as segments of one query each, at these positions."""
    starts = list(range(len(positions) + 1))
    fields = [ints(starts), ints([at + 1 for at in positions])]
    count = len(step.fields[3])
    fields += [ints([i * count for i in starts]), step.fields[3].repeat(len(positions))]
    first = step.segments[0][2]
    return replace(step, q=step.q[[at - first for at in positions]], fields=fields)


def chunk(step, start, stop):
    """The queries at positions [start, stop) of the step's only segment."""
    first = step.segments[0][2]
    fields = [ints([0, stop - start]), ints([stop]), *step.fields[2:]]
    return replace(step, q=step.q[start - first : stop - first], fields=fields)


@pytest.mark.parametrize(
    ("dtype", "window", "bends", "flip", "length"),
    [
        pytest.param("f32", 0, {}, False, 300, marks=pytest.mark.slow),
        ("bf16", 270, {"sinks": [1.5, -2.0]}, True, 530),  # the window begins in the second split
        pytest.param("f16", 0, {"soft_cap": 5.0, "alibi": True}, False, 300, marks=pytest.mark.slow),
    ],
)
def test_exact_bits_do_not_depend_on_regime(dtype, window, bends, flip, length, rows_alike):
    """A text at once, in chunks, and positions one by one, with and without an axis of splits: equal bits."""
    heads, cached = 2, length - 30
    bends = {name: torch.tensor(value) if name == "sinks" else value for name, value in bends.items()}
    step = paged([(length - cached, length)], heads, 1, 16, dtype)

    def compute(part, programs):
        launch = prepared(part, heads, window, exact=True, programs=programs)
        assert (launch.splits > 1) == (programs > 1)
        tile = replace(launch.tile, sizes={**launch.tile.sizes, "FLIP": flip})
        return run(part, replace(launch, tile=tile), **bends)[0]

    want = compute(step, programs=1)
    assert error(want, expected(step, heads, window, **bends)) < TOLERANCE[dtype]
    for first, stop in pairwise([cached, cached + 3, cached + 12, length]):
        assert torch.equal(compute(chunk(step, first, stop), programs=256), want[first - cached : stop - cached])
    positions = [cached + at for at in (0, 9, 11, 12, 29)]
    for programs in (1, 1024):
        assert torch.equal(compute(alone(step, positions), programs), want[[at - cached for at in positions]])


def test_workspace_has_a_limit():
    """However long the contexts, also where the order forbids splits to be longer."""
    from roofline.backends.gpu.kernels.attend_launches import prepare, workspace_floats
    from roofline.backends.gpu.partials import workspace_limit
    from roofline.hardware.chips import chips

    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    seen = set()
    for exact in (False, True):
        for tokens, segments, query in [(1, 1, 1), (8, 8, 1), (64, 64, 1), (40, 8, 5), (300, 2, 299), (2048, 1, 2048)]:
            for context in (100, 4096, 131072):
                sizes = {"tokens": tokens, "segments": segments, "max_query": query, "max_context": context}
                launch = prepare(chips.get("sm_90"), **sizes, **shape, exact=exact)
                assert workspace_floats(launch) <= workspace_limit(128)
                seen.add(launch.splits)
                if exact and launch.splits > 1:
                    assert launch.splits == -(-context // 256)
    assert {1, 16, 512} <= seen


def test_splits_reach_every_key_of_a_window():
    """The earliest key that a segment's first query sees, wherever in its split it lies."""
    from roofline.backends.gpu.kernels.attend_launches import prepare
    from roofline.hardware.chips import chips

    shape = {"heads": 1, "kv_heads": 1, "head_dim": 8, "tokens": 16, "segments": 1, "exact": True, "programs": 1 << 20}
    for window in (1, 2, 255, 256, 257, 400):
        for queries in (1, 2, 16):
            for context in range(queries, 1100, 7):
                sizes = {"max_query": queries, "max_context": context, "window": window}
                splits = prepare(chips.get("sm_90"), **shape, **sizes).splits
                first = max(0, context - queries - window + 1)
                assert splits >= len({key // 256 for key in range(first, context)})


FAULTS = {
    "page table shifted": lambda f: [*f[:3], f[3].roll(1)],
    "page start off by one": lambda f: [f[0], f[1], (f[2] - 1).clamp(0), f[3]],
    "one key too few": lambda f: [f[0], f[1] - 1, *f[2:]],
    "segments swapped": lambda f: [f[0], f[1].flip(0), *f[2:]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_indices_are_noticed(fault):
    step = paged([(1, 40), (3, 37)], 4, 2, 16)
    wrong = replace(step, fields=FAULTS[fault](step.fields))
    assert error(run(wrong, prepared(step, 4))[0], expected(step, 4)) > 0.01


@pytest.mark.parametrize(("window", "exact"), [(0, False), (0, True), (300, False)])
def test_merges_of_more_splits_than_are_loaded_at_a_time(window, exact):
    step = paged([(1, 1500), (1, 20), (1, 800)], 2, 1, 8)
    launch = prepared(step, 2, window, exact=exact, programs=64)
    assert launch.splits > 2
    halves = replace(launch, merge_tile=replace(launch.merge_tile, sizes={"CHUNK": 2}))
    assert error(run(step, halves)[0], expected(step, 2, window)) < TOLERANCE["f32"]


@pytest.mark.parametrize("exact", [False, True])
def test_merge_faults_are_noticed(exact):
    """A split that is missing gives other values, one not yet written NaN; in the exact order, splits in another one
    give other bits."""
    from roofline.backends.gpu.kernels.attend_kernels import merge_kernel

    step = paged([(1, 1000)], 4, 2, 32)
    launch = prepared(step, 4, exact=exact, programs=1024)
    want, workspace = run(step, launch)
    cut = 4 * launch.splits * 32
    assert launch.splits == 4

    def merged(change):
        partial = workspace[:cut].view(4, 4, 32).clone()  # [heads, splits, head_dim]
        state = workspace[cut:].view(4, 4, 2).clone()
        partial, state = change(partial, state)
        out = torch.full_like(want, float("nan"))
        merge_kernel[(1, 4, 1)](
            out,
            partial.contiguous(),
            state.contiguous(),
            step.q,  # stands for sinks
            *step.fields[:2],
            0,
            1,
            2,
            4,
            **launch.merge_constants(),
        )
        return out

    def missing(partial, state):
        state[:, 2, 0] = -float("inf")
        return partial, state

    def unwritten(partial, state):
        partial[:, 3] = float("nan")
        return partial, state

    assert torch.equal(merged(lambda partial, state: (partial, state)), want)
    if exact:
        assert not torch.equal(merged(lambda partial, state: (partial.flip(1), state.flip(1))), want)
    assert error(merged(missing), want) > 0.01
    assert merged(unwritten).isnan().all()


def test_refusals():
    from roofline.backends.gpu.kernels.attend import attend
    from roofline.common.errors import UnsupportedError

    step = paged([(1, 600)], 4, 2, 16)
    with pytest.raises(UnsupportedError, match="257 dimensions"):
        prepared(replace(step, k=torch.zeros(1, 2, 16, 257)), 4)
    with pytest.raises(AssertionError, match="workspace"):
        attend(
            prepared(step, 4), step.q, step.k, step.v, *step.fields, scale=1.0, workspace=torch.zeros(8),
            out=torch.zeros_like(step.q),
        )  # fmt: skip


def test_cost_counts_what_is_seen():
    from roofline.backends.gpu.kernels.attend import cost

    for window in (0, 1, 7, 100):
        for queries, context in [(1, 1), (1, 50), (9, 9), (9, 12), (5, 50)]:
            seen = [
                {key for key in range(at + 1) if not window or key > at - window}
                for at in range(context - queries, context)
            ]
            flops, moved = cost([(queries, context)], heads=6, kv_heads=2, head_dim=8, window=window)
            assert flops == 4 * 6 * 8 * sum(map(len, seen))
            assert moved == 2 * (2 * 8 * 2 * len(set.union(*seen)) + queries * 6 * 8 * 2)
