"""Recurrent state computed anew where a step failed: it may have been written, and must not be moved on twice."""

from roofline.backends.base import Executable
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS, Segment, StateMove


def restore_states(executable: Executable, state: State, plan: StepPlan) -> Exception | None:
    """Bring the slots that a plan reads to where they were, from the last snapshots on; why that is impossible.

    Slots that the plan does not write are as they were. K and V are written again, with the bits that they have.
    """
    try:
        for sequence, planned in zip(plan.sequences, plan.moves, strict=True):
            if planned.move.source != NO_SLOT and planned.move.source == planned.move.target:
                _restore(executable, state, sequence, planned.move.target)
    except Exception as error:  # whatever a backend raises, as in a step
        return error
    return None


def _restore(executable: Executable, state: State, sequence: Sequence, slot: int) -> None:
    """Compute the state of a sequence behind its first `computed` ids, alone, into a slot."""
    slots, tokens = state.slots, executable.limits.tokens
    assert slots is not None, "the model has state"
    full = sequence.computed // PAGE_TOKENS
    usable = slots.usable_pages(sequence.keys.upto(sequence.ids, full), full) if slots.prefix else 0
    first = usable * PAGE_TOKENS
    source = slots.snapshot(sequence.keys.keys[usable - 1]) if usable else NO_SLOT
    if first == sequence.computed:  # nothing but a copy: computed from the snapshot before, or from the beginning
        usable = slots.usable_pages(sequence.keys.keys, usable - 1)
        first, source = usable * PAGE_TOKENS, slots.snapshot(sequence.keys.keys[usable - 1]) if usable else NO_SLOT
    while first < sequence.computed:
        ids = sequence.ids[first : min(first + tokens, sequence.computed)]
        move = StateMove(source, slot)
        segment = Segment(ids, first, sequence.pages, sequence.request.slot, move)
        executable.batch.fill([segment], [])
        executable.forward()
        first, source = first + len(ids), slot
