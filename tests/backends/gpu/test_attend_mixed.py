"""Attention in steps of decodes and chunks of prompts, which is two launches: against the reference and one launch."""

from dataclasses import replace

import numpy as np
import pytest
from gpu_paged import TOLERANCE, error, expected, paged, prepared, run

from roofline.hardware.chips import chips
from roofline.ops.batch import Batch, BatchLimits, Segment

torch = pytest.importorskip("torch")
STEPS = {
    "no decode": [(20, 30), (1, 40)],
    "one decode": [(1, 270), (20, 41)],
    "several decodes": [(1, 1), (1, 290), (1, 17), (20, 25), (1, 5)],
}
KINDS = {  # heads, of them kv heads; window, soft cap, ALiBi; dtypes of q and of the cache
    "grouped": (6, 2, 0, 0.0, False, "f32", None),
    "window": (4, 2, 37, 0.0, False, "f32", None),
    "window over splits": (4, 2, 270, 0.0, False, "f16", None),
    "soft cap": (4, 2, 0, 3.0, False, "f32", None),
    "alibi": (6, 2, 0, 0.0, True, "f32", None),
    "float8": (4, 1, 0, 0.0, False, "bf16", "float8_e4m3fn"),
    "float8 of MI300": (4, 1, 300, 0.0, False, "bf16", "float8_e4m3fnuz"),
}


def launches(step, heads, decodes, window=0, exact=False, chip="sm_90", programs=12):
    from roofline.backends.gpu.kernels.attend_launches import prepare_all

    starts, contexts = step.fields[:2]
    return prepare_all(
        chips.get(chip), tokens=step.q.shape[0], segments=len(contexts), decodes=decodes, programs=programs,
        max_query=int(starts.diff().max()), max_context=int(contexts.max()), heads=heads, kv_heads=step.k.shape[1],
        head_dim=step.k.shape[3], window=window, exact=exact, element_bytes=step.q.element_size(),
    )  # fmt: skip


def leading(steps):
    return next(i for i, (queries, _) in enumerate(steps) if queries > 1)


def run_all(step, cut, soft_cap=0.0, alibi=False):
    """The rows of all launches; NaN in those of none or of two."""
    outs = [run(step, launch, soft_cap, alibi)[0] for launch in cut]
    written = torch.stack([~out.isnan().any(dim=1) for out in outs]).sum(dim=0)
    out = torch.stack(outs).nan_to_num(0.0).sum(dim=0)
    out[written != 1] = float("nan")
    return out


def several_decodes():
    """Parameters of all kinds, of which the default run has three."""
    quick = ("grouped", "window", "alibi")
    return [pytest.param("several decodes", kind, marks=() if kind in quick else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize(
    ("steps", "kind"),
    [("no decode", "grouped"), pytest.param("one decode", "grouped", marks=pytest.mark.slow), *several_decodes()],
)
def test_two_launches_equal_the_reference(kind, steps):
    """How a step is cut does not depend on the kind: the steps of fewer decodes run with one."""
    heads, kv_heads, window, soft_cap, alibi, dtype, cache = KINDS[kind]
    decodes = leading(STEPS[steps])
    step = paged(STEPS[steps], heads, kv_heads, 16, dtype, cache and getattr(torch, cache))
    cut = launches(step, heads, decodes, window)
    assert [(each.first_segment, each.max_query) for each in cut][:-1] == [(0, 1)] * (decodes > 0)
    assert decodes == 0 or cut[0].splits > 1
    out = run_all(step, cut, soft_cap, alibi)
    assert error(out, expected(step, heads, window, soft_cap, alibi)) < TOLERANCE[dtype]


@pytest.mark.parametrize("chip", ["sm_90", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gfx942", "gfx1100"))])
def test_decodes_have_the_tile_of_decodes(chip):
    """And as many splits as without company; the chunk keeps its own."""
    steps = STEPS["several decodes"]
    step = paged(steps, 4, 1, 16, "bf16")
    first, second = launches(step, 4, 3, chip=chip)
    only = prepared(paged(steps[:3], 4, 1, 16, "bf16"), 4, chip=chip, programs=12)
    assert first == only
    assert second.tile.sizes["BLOCK_M"] > first.tile.sizes["BLOCK_M"] == 16
    assert second.blocks < prepared(step, 4, chip=chip, programs=12).blocks
    assert error(run_all(step, (first, second)), expected(step, 4)) < TOLERANCE["bf16"]


@pytest.mark.parametrize(("window", "programs"), [(0, 4), (270, 64)])
@pytest.mark.slow
def test_exact_bits_are_those_of_one_launch(window, programs, rows_alike):
    """Those of decodes are split, the chunks' as well or not."""
    step = paged([(1, 290), (1, 17), (40, 260)], 2, 1, 16, "bf16")
    cut = launches(step, 2, 2, window, exact=True, programs=programs)
    assert len(cut) == 2
    assert (cut[0].splits > 1, cut[1].splits > 1) == (True, programs == 64)
    one = prepared(step, 2, window, exact=True, programs=1)
    assert one.splits == 1
    assert torch.equal(run_all(step, cut), run(step, one)[0])


def test_a_step_without_chunks_is_one_launch():
    """Drafts that are verified beside decodes, and decodes alone."""
    drafts = paged([(1, 40), (5, 60)], 4, 1, 16)
    assert launches(drafts, 4, 1) == (prepared(drafts, 4, programs=12),)
    assert len(launches(paged([(1, 40)], 4, 1, 16), 4, 0)) == 1


SHIFTS = {"one decode too few": (1, 2), "one decode too many": (3, 2), "chunks begin late": (2, 3)}


@pytest.mark.parametrize("shift", SHIFTS)
def test_wrong_cuts_are_noticed(shift):
    """Rows that nobody computes, or both, and chunks of which a decode's launch computes the first row."""
    decodes, first = SHIFTS[shift]
    step = paged([(1, 40), (1, 50), (20, 37), (9, 9)], 4, 2, 16)
    right = launches(step, 4, 2)
    assert error(run_all(step, right), expected(step, 4)) < TOLERANCE["f32"]
    wrong = launches(step, 4, decodes)[0], replace(right[1], first_segment=first)
    assert error(run_all(step, wrong), expected(step, 4)) > 0.01


@pytest.mark.parametrize("field", range(4))
def test_wrong_fields_are_noticed(field):
    step = paged([(1, 40), (1, 50), (20, 37), (9, 19)], 4, 2, 16)
    changes = (lambda f: (f - 1).clamp(0), lambda f: f - 1, lambda f: (f - 1).clamp(0), lambda f: f.roll(1))
    fields = [changes[field](values) if at == field else values for at, values in enumerate(step.fields)]
    for launch, rows in zip(launches(step, 4, 2), (slice(0, 2), slice(2, None)), strict=True):
        out, _ = run(replace(step, fields=fields), launch)
        assert error(out[rows], expected(step, 4)[rows]) > 0.01, "each of the two launches reads it"


@pytest.mark.parametrize(
    ("counts", "decodes"), [([1, 1, 5, 1], 2), ([3, 1], 0), ([1, 1, 1], 0), ([1], 0), ([7], 0), ([1, 2], 1), ([], 0)]
)
def test_leading_decodes_are_counted(counts, decodes):
    from roofline.backends.gpu.runtime.step import DeviceFields

    batch = Batch(BatchLimits(tokens=32, segments=4, rows=4, pages=8))
    batch.fill([Segment(np.zeros(count, np.int32), 0, [0]) for count in counts], [])
    sizes = DeviceFields(batch, "cpu").sizes()
    assert (sizes.decodes, sizes.segments) == (decodes, len(counts))
