"""The naive scheduler: one sequence at a time, from its first token to its last. The oracle for `scheduler`."""

from roofline.engine.schedule.continuous import plan_drafts
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.prompts import chunk_size, place


def schedule(state: State) -> StepPlan:
    """Continue the one running sequence, or start the first that waits. A prompt is cut only where the batch ends."""
    plan = StepPlan()
    if not state.running and (not state.waiting or not place(state, state.waiting[0], 0, state.limits.table_pages)):
        return plan
    sequence = state.running[0]
    pending = len(sequence.ids) - sequence.computed
    if pending == 1:
        grown = state.cache.grow(sequence.pages, len(sequence.ids))
        assert grown, "a sequence alone in the cache must fit"
        plan.decodes = 1
    plan.add(sequence, chunk_size(state.limits, plan, sequence))
    plan_drafts(state, plan)
    return plan
