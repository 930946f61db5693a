"""The naive scheduler: one sequence at a time, from its first token to its last. The oracle for `scheduler`."""

from roofline.engine.schedule.continuous import plan_drafts
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.prompts import chunk_size, place
from roofline.engine.schedule.state_moves import cut_at_snapshot, plan_moves


def schedule(state: State) -> StepPlan:
    """Continue the one running sequence, or start the first that waits. A prompt is cut only where the batch ends."""
    plan = StepPlan()
    if not state.running and (not state.waiting or not place(state, state.waiting[0], 0, state.limits.table_pages)):
        return plan
    sequence = state.running[0]
    pending = len(sequence.ids) - sequence.computed
    if pending <= 1 + sequence.again and pending <= state.limits.tokens:
        grown = state.cache.grow(sequence.pages, len(sequence.ids))
        assert grown, "a sequence alone in the cache must fit"
        plan.decodes, plan.repeated = 1, pending - 1
    else:
        sequence.draft = []
    plan.add(sequence, cut_at_snapshot(state, sequence, chunk_size(state.limits, plan, sequence)))
    plan_drafts(state, plan)
    if state.slots is not None:
        plan_moves(state, plan)
    return plan
