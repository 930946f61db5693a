"""Which slots of recurrent state a step reads and writes, and where snapshots are taken: integers alone.

A page can be written again with equal bits, a state cannot: it lies at one position and only goes on from there. So
`computed` of a sequence is where its state is. A step that verifies a draft leaves the slot as it is, writes the state
behind the known ids into a second one and that behind the draft into a third, and which of the three is the sequence's
from then on is known when the ids are. What was accepted behind that slot is computed again by the next step, together
with its guesses: K and V get the bits that they have, and nothing has to be taken back.

Snapshots are taken at multiples of 64 tokens: at the last one of a prompt, where found pages ended without one (a
junction), every 4,096 tokens; and the latest one of an answer, in a spare slot, which is found when the answer ends or
loses its pages. Where no slot is free none is taken, and no bit is another.
"""

from roofline.engine.cache.state_slots import SNAPSHOT_TOKENS, SequenceSlots
from roofline.engine.schedule.plan import PlannedMove, SavedState, State, StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS, StateMove

LONG_STRIDE = 4096  # tokens of a long prompt between its snapshots


def trim_to_snapshot(state: State, sequence: Sequence, pages: list[int]) -> None:
    """Release found pages behind the last snapshot within them."""
    assert state.slots is not None, "the model has state"
    usable = state.slots.usable_pages(sequence.keys.keys, len(pages)) if pages else 0
    surplus = pages[usable:]
    del pages[usable:]
    state.cache.release(surplus)


def begin_slots(state: State, sequence: Sequence, pages: int, matched: int) -> bool:
    """Give a sequence that is placed its slot; False: there is none.

    pages: leading ones that it has, with a snapshot at their end; matched: how many were found.
    """
    slots = state.slots
    assert slots is not None, "the model has state"
    source = slots.snapshot(sequence.keys.keys[pages - 1]) if pages else NO_SLOT
    if source != NO_SLOT:
        slots.hold(source)
    slot = slots.take()
    if slot == NO_SLOT and _reclaim_spare(state):
        slot = slots.take()
    if slot == NO_SLOT and source != NO_SLOT and slots.refs[source] == 1:
        slots.adopt(source)
        slot = source
    if slot == NO_SLOT:
        slots.drop(source)
        return False
    end = matched * PAGE_TOKENS // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS
    sequence.recurrent = SequenceSlots(slot, source, junction=end if end > pages * PAGE_TOKENS else 0)
    return True


def _reclaim_spare(state: State) -> bool:
    """Turn the spare slot of some running sequence into a snapshot, which gives way; whether there was one."""
    for sequence in state.running:
        slots = sequence.recurrent
        if slots is not None and slots.spare_at:
            _give_spare(state, sequence, slots)
            return True
    return False


def _give_spare(state: State, sequence: Sequence, slots: SequenceSlots) -> None:
    """Make the snapshot of an answer findable."""
    assert state.slots is not None, "the model has state"
    if slots.spare_at and sequence.finished != "error":
        page = slots.spare_at // PAGE_TOKENS
        state.slots.name(slots.spare, sequence.keys.upto(sequence.ids, page)[page - 1])
    state.slots.drop(slots.spare)
    slots.spare, slots.spare_at = NO_SLOT, 0


def leave_slots(state: State, sequence: Sequence) -> None:
    """Take all slots from a sequence that ends or is pre-empted. A step under way may still write them: whoever gets
    them writes later."""
    slots, recurrent = state.slots, sequence.recurrent
    if slots is None or recurrent is None:
        return
    _give_spare(state, sequence, recurrent)
    for slot in (*recurrent.reserved, *recurrent.under_way, recurrent.slot):
        slots.drop(slot)
    if recurrent.source != recurrent.slot:
        slots.drop(recurrent.source)
    recurrent.reserved, recurrent.under_way, recurrent.live = [], [], False
    sequence.recurrent, sequence.again = None, 0


def cut_at_snapshot(state: State, sequence: Sequence, count: int) -> int:
    """How many of a sequence's next `count` tokens a step computes, which saves one snapshot at most: it ends at the
    first of several."""
    if state.slots is None or count == 0:
        return count
    first = sequence.computed
    places = _snapshot_places(state, sequence, first, first + count)
    return places[0] - first if len(places) > 1 else count


def draft_room(state: State, sequence: Sequence) -> int:
    """How many tokens a sequence may draft: where a snapshot will be taken, all ids before it have to be certain."""
    assert state.slots is not None, "the model has state"
    return SNAPSHOT_TOKENS - 1 - len(sequence.ids) % SNAPSHOT_TOKENS if state.slots.prefix else len(sequence.draft)


def reserve_for_draft(state: State, sequence: Sequence) -> bool:
    """Take the slots in which a draft is verified; False: there is none, and nothing can be drafted."""
    recurrent = sequence.recurrent
    assert state.slots is not None, "the model has state"
    assert recurrent is not None, "it is running"
    for _ in range(2):
        slot = state.slots.take()
        if slot != NO_SLOT:
            recurrent.reserved.append(slot)
    return bool(recurrent.reserved)


def plan_moves(state: State, plan: StepPlan) -> None:
    """Choose the slots of each sequence of a plan."""
    assert state.slots is not None, "the model has state"
    for sequence, count in zip(plan.sequences, plan.counts, strict=True):
        recurrent = sequence.recurrent
        assert recurrent is not None, "it is running"
        planned = _planned(state, sequence, recurrent, count)
        move = planned.move
        assert (move.source == NO_SLOT) == (sequence.computed == 0), "a state from nowhere, or one that nobody reads"
        assert all(slot == NO_SLOT or state.slots.is_writable(slot) for slot in (move.target, move.save_to)), (
            "a snapshot that a step would write"
        )
        plan.moves.append(planned)


def _planned(state: State, sequence: Sequence, recurrent: SequenceSlots, count: int) -> PlannedMove:
    first, length = sequence.computed, len(sequence.ids)
    drafted = max(0, first + count - length)
    save_at, save = _save(state, sequence, recurrent, first, first + count - drafted)
    save_to = target = NO_SLOT
    assert state.slots is not None, "the model has state"
    if save == "snapshot":
        save_to = state.slots.take()
        if save_to != NO_SLOT:
            recurrent.under_way.append(save_to)
    elif save == "spare":
        if recurrent.spare == NO_SLOT:
            recurrent.spare = state.slots.take()
        save_to, recurrent.spare_at, recurrent.spare_due = recurrent.spare, 0, save_at
    if save_to == NO_SLOT:
        save_at, save = 0, ""
    if not drafted:
        target = recurrent.slot
    else:
        if not save:
            save_at, save_to, save = length, recurrent.reserved.pop(), "certain"
            recurrent.under_way.append(save_to)
        if recurrent.reserved:
            target = recurrent.reserved.pop()
            recurrent.under_way.append(target)
    for slot in recurrent.reserved:
        state.slots.drop(slot)
    recurrent.reserved = []
    return PlannedMove(recurrent, StateMove(recurrent.source, target, save_at, save_to), save)


def _save(state: State, sequence: Sequence, recurrent: SequenceSlots, first: int, end: int) -> tuple[int, SavedState]:
    """The position behind `first` and up to `end` at which a step saves the state, and as what; (0, "") if nowhere."""
    last = end // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS
    if last <= first or state.slots is None or not state.slots.prefix:
        return 0, ""
    places = _snapshot_places(state, sequence, first, end)
    if places:
        return places[0], "snapshot"
    if last >= sequence.prompt_length and last != recurrent.spare_at:
        return last, "spare"
    return 0, ""


def _snapshot_places(state: State, sequence: Sequence, first: int, end: int) -> list[int]:
    """Where in the prompt, behind `first` and up to `end`, snapshots are wanted that are not there, ascending."""
    slots, recurrent = state.slots, sequence.recurrent
    last = min(end, sequence.prompt_length - 1) // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS
    if slots is None or recurrent is None or not slots.prefix or last <= first:
        return []
    places = {(sequence.prompt_length - 1) // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS, recurrent.junction}
    places.update(range((first // LONG_STRIDE + 1) * LONG_STRIDE, last + 1, LONG_STRIDE))
    keys = sequence.keys.upto(sequence.ids, last // PAGE_TOKENS)
    return [at for at in sorted(places) if first < at <= last and not slots.knows(keys[at // PAGE_TOKENS - 1])]


def land_moves(state: State, plan: StepPlan) -> list[int]:
    """Record what became of the slots of a step whose ids are known; how many tokens further each sequence's state is.

    A sequence that has ended is as far as its K and V are.
    """
    counts = []
    for sequence, count, planned in zip(plan.sequences, plan.counts, plan.moves, strict=True):
        _land_save(state, sequence, planned)
        counts.append(_land_slot(state, sequence, planned, count))
    return counts


def _land_slot(state: State, sequence: Sequence, planned: PlannedMove, count: int) -> int:
    """Decide which slot is the sequence's from now on, and give back the others of the step."""
    slots, recurrent, move = state.slots, planned.slots, planned.move
    assert slots is not None, "the model has state"
    if not sequence.draft:
        _switch(state, recurrent, recurrent.slot)
        if sequence.again:
            sequence.again = max(0, sequence.again - count)
        return count
    if sequence.finished is not None:
        return count
    first, drafted = sequence.computed, len(sequence.draft)
    length, moved, slot = first + count - drafted, 0, recurrent.slot
    if move.target != NO_SLOT and len(sequence.ids) == length + drafted + 1:
        moved, slot = count, move.target
    elif planned.save == "certain":
        moved, slot = count - drafted, move.save_to
    if moved:
        recurrent.under_way.remove(slot)
        _switch(state, recurrent, slot)
    for other in recurrent.under_way:
        slots.drop(other)
    recurrent.under_way = []
    sequence.again = len(sequence.ids) - 1 - first - moved
    return moved


def _switch(state: State, recurrent: SequenceSlots, slot: int) -> None:
    """Make a slot the sequence's, which its next step reads."""
    assert state.slots is not None, "the model has state"
    if recurrent.source != recurrent.slot:
        state.slots.drop(recurrent.source)
    if slot != recurrent.slot:
        state.slots.drop(recurrent.slot)
    recurrent.slot = recurrent.source = slot


def _land_save(state: State, sequence: Sequence, planned: PlannedMove) -> None:
    """Record that the state which a step saved is there."""
    slots, recurrent, move = state.slots, planned.slots, planned.move
    if slots is None or not recurrent.live:
        return
    if planned.save == "snapshot":
        if sequence.finished != "error":
            page = move.save_at // PAGE_TOKENS
            slots.name(move.save_to, sequence.keys.upto(sequence.ids, page)[page - 1])
        recurrent.under_way.remove(move.save_to)
        slots.drop(move.save_to)
    elif planned.save == "spare" and recurrent.spare_due == move.save_at:  # no later step writes it
        recurrent.spare_at = move.save_at


def advance_moves(state: State, plan: StepPlan) -> None:
    """Count a step as computed that is under way: the next one reads what it writes."""
    for planned in plan.moves:
        _switch(state, planned.slots, planned.slots.slot)


def settle_moves(state: State, plan: StepPlan) -> None:
    """Record what a step has saved that was counted by `advance_moves`."""
    for sequence, planned in zip(plan.sequences, plan.moves, strict=True):
        _land_save(state, sequence, planned)
