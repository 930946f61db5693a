"""Slots of recurrent state: what moves read and write, saving in passing, and that unwritten memory is never read."""

import pytest

from roofline import ops
from roofline.ops.batch import NO_SLOT, Batch, BatchLimits, Segment, StateMove
from roofline.program.ir import StateGroup

torch = pytest.importorskip("torch", reason="the reference is written in torch")

from roofline.backends.reference.slots import ReferenceSlots  # noqa: E402

GROUP = StateGroup(2, (("columns", (3, 5)), ("matrix", (2, 4, 3))))
X, TAPS = torch.randn(40, 5), torch.randn(5, 4)
QKV, A, B = torch.randn(40, 2 * 4 + 2 * 3), torch.randn(40, 2), torch.randn(40, 2)
HEADS = {"key_heads": 1, "value_heads": 2, "key_dim": 4}


def step(slots, segments, rows):
    """The results of both ops in layer 1 for these rows, one segment behind the other."""
    batch = Batch(BatchLimits(64, 8, 0, 64, state_slots=len(slots.values)))
    batch.fill([Segment([0] * len(r), r[0], range(9), 0, move) for r, move in zip(rows, segments, strict=True)], [])
    slots.begin(batch)
    at = torch.tensor([i for r in rows for i in r])
    conv, store = ops.causal_conv(X[at], slots, TAPS, layer=1)
    rule, _ = ops.delta_rule(QKV[at], A[at], B[at], store, torch.zeros(2), torch.zeros(2), layer=1, **HEADS)
    return torch.cat([conv, rule], 1)


def whole():
    return step(ReferenceSlots(GROUP, 1), [StateMove(NO_SLOT, 0)], [range(40)])


def test_a_state_goes_on_in_its_slot_or_in_another_one():
    slots = ReferenceSlots(GROUP, 3)
    first = step(slots, [StateMove(NO_SLOT, 2)], [range(7)])
    kept = slots.values[2, 1].clone()
    second = step(slots, [StateMove(2, 0)], [range(7, 20)])
    assert torch.equal(slots.values[2, 1], kept)
    third = step(slots, [StateMove(0, 0)], [range(20, 40)])
    assert torch.equal(torch.cat([first, second, third]), whole())
    assert torch.isnan(slots.values[1]).all()
    assert torch.isnan(slots.values[:, 0]).all(), "another layer's"


@pytest.mark.parametrize("save_at", [1, 13, 20])
def test_what_is_saved_in_passing_is_what_a_step_that_ends_there_leaves(save_at):
    slots, others = ReferenceSlots(GROUP, 3), ReferenceSlots(GROUP, 3)
    out = step(slots, [StateMove(NO_SLOT, 0, save_at, 1)], [range(20)])
    step(others, [StateMove(NO_SLOT, 0)], [range(save_at)])
    assert torch.equal(out, whole()[:20])
    assert torch.equal(slots.values[1, 1], others.values[0, 1])
    assert torch.equal(step(slots, [StateMove(1, NO_SLOT)], [range(save_at, 40)]), whole()[save_at:])
    assert torch.equal(step(slots, [StateMove(0, 2)], [range(20, 40)]), whole()[20:])


def test_segments_beside_each_other_do_not_meet():
    slots = ReferenceSlots(GROUP, 4)
    moves = [StateMove(NO_SLOT, 3), StateMove(NO_SLOT, NO_SLOT), StateMove(NO_SLOT, 1)]
    out = step(slots, moves, [range(5), range(3), range(8)])
    assert torch.equal(out, torch.cat([whole()[:n] for n in (5, 3, 8)]))
    assert torch.isnan(slots.values[[0, 2]]).all()
    out = step(slots, [StateMove(1, 1), StateMove(3, 0)], [range(8, 40), range(5, 6)])
    assert torch.equal(out, torch.cat([whole()[8:], whole()[5:6]]))


def test_a_slot_that_was_never_written_gives_no_numbers():
    assert torch.isnan(step(ReferenceSlots(GROUP, 2), [StateMove(1, 0)], [range(4, 6)])).any()


@pytest.mark.parametrize(
    ("moves", "complaint"),
    [
        ([StateMove(NO_SLOT, 0), StateMove(NO_SLOT, 0)], "two segments write one slot"),
        ([StateMove(NO_SLOT, 0), StateMove(NO_SLOT, 1, 4, 0)], "two segments write one slot"),
        ([StateMove(NO_SLOT, 0), StateMove(0, 1)], "reads a slot that another one writes"),
        ([StateMove(NO_SLOT, 0, 3, 2), StateMove(NO_SLOT, 1)], "does not pass"),
        ([StateMove(NO_SLOT, 0, 7, 2), StateMove(NO_SLOT, 1)], "does not pass"),
    ],
)
def test_moves_that_contradict_each_other_are_a_bug(moves, complaint):
    with pytest.raises(AssertionError, match=complaint):
        step(ReferenceSlots(GROUP, 3), moves, [range(3, 6), range(3, 6)])


def test_what_a_segment_says_of_its_slots_by_default():
    slots = ReferenceSlots(GROUP, 2)
    out = [step(slots, [None, None], rows) for rows in ([range(3), range(6)], [range(3, 9), range(6, 8)])]
    assert torch.equal(torch.cat([out[0][:3], out[1][:6]]), whole()[:9])
    assert torch.equal(torch.cat([out[0][3:], out[1][6:]]), whole()[:8])
