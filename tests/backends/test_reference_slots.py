"""Slots of recurrent state: what moves read and write, saving in passing, and that unwritten memory is never read."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders

import program_builders as builders

from roofline import ops
from roofline.ops.batch import NO_SLOT, Batch, BatchLimits, Segment, StateMove
from roofline.program.compile import compile_program
from roofline.program.ir import Share, StateGroup
from roofline.program.target import CPU, PLAIN

torch = pytest.importorskip("torch", reason="the reference is written in torch")

from roofline.backends.reference.executable import ReferenceExecutable  # noqa: E402
from roofline.backends.reference.slots import ReferenceSlots  # noqa: E402
from tests.backends.oracle import oracle_logits  # noqa: E402

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


LIMITS = BatchLimits(tokens=64, segments=4, rows=64, pages=64, state_slots=5)
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 96, 40)]


@pytest.fixture(scope="module")
def hybrid():
    """A model whose first and last layer keep state, and its Program in plain arithmetic and in the CPU's."""
    model = builders.build(builders.HYBRID, "Q8_0")
    programs = {t.name: compile_program(model.family, model.cfg, model.tensors, t) for t in (PLAIN, CPU)}
    return model, programs


def executable(hybrid, chosen=CPU):
    model, programs = hybrid
    return ReferenceExecutable(programs[chosen.name], model.read, LIMITS, num_pages=16, max_context=256)


def logits(made, segments):
    """Of each token of a step."""
    made.batch.fill(segments, range(sum(len(segment.ids) for segment in segments)))
    made.forward()
    return made.logits().copy()


def test_chunks_slots_and_neighbours_change_no_bit(hybrid):
    made = executable(hybrid)
    assert made.slot_bytes == 2 * 4 * (3 * 96 + 4 * 16 * 8)
    expected = logits(made, [Segment(IDS, 0, [0, 1, 2])])
    other = Segment(IDS[:9], 0, [8], state=StateMove(NO_SLOT, 4))
    first = logits(made, [Segment(IDS[:17], 0, [4, 11], state=StateMove(NO_SLOT, 2, 12, 0))])
    second = logits(made, [other, Segment(IDS[17:39], 17, [4, 11, 6], state=StateMove(2, 3))])
    third = logits(made, [Segment(IDS[39:], 39, [4, 11, 6], state=StateMove(3, 3))])
    assert np.array_equal(np.concatenate([first, second[9:], third]), expected)
    assert np.array_equal(second[:9], expected[:9])
    made.headless().close()  # shares slots, and leaves them
    resumed = logits(made, [Segment(IDS[12:20], 12, [4, 11], state=StateMove(0, 1))])
    assert np.array_equal(resumed, expected[12:20])


def test_both_arithmetics_are_near_the_family_s_text(hybrid):
    model, _ = hybrid
    oracle = oracle_logits(model.family, model.cfg, model, IDS)
    plain, cpu = (logits(executable(hybrid, chosen), [Segment(IDS, 0, [0, 1, 2])]) for chosen in (PLAIN, CPU))
    assert np.abs(plain - oracle).max() < 1e-4
    assert (plain * cpu).sum() / np.linalg.norm(plain) / np.linalg.norm(cpu) > 0.995


def test_a_model_with_state_and_no_slots_is_a_bug(hybrid):
    model, programs = hybrid
    with pytest.raises(AssertionError, match="no slots"):
        ReferenceExecutable(
            programs[CPU.name], model.read, replace(LIMITS, state_slots=0), num_pages=16, max_context=256
        )


def test_stages_have_the_state_of_their_layers(hybrid):
    """The value that goes from one to the next, and each stage's own slots."""
    model, _ = hybrid
    expected = logits(executable(hybrid), [Segment(IDS, 0, [0, 1, 2])])
    carried = {}
    for number in range(3):
        share = Share(stage=number, stages=3)
        program = compile_program(model.family, model.cfg, model.tensors, CPU, share=share)
        assert sum(group.layers for group in program.state_groups.values()) == (number != 1)
        part = ReferenceExecutable(program, model.read, LIMITS, num_pages=16, max_context=256)
        out = []
        for start, stop in ((0, 17), (17, 40)):
            part.batch.fill([Segment(IDS[start:stop], start, [0, 1, 2])], range(stop - start))
            out.append(part.run({name: rows[start:stop] for name, rows in carried.items()}))
        carried = {program.outputs[0]: torch.cat(out)}
    assert np.array_equal(torch.cat(out).numpy(), expected)
