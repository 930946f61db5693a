"""Continuous batching: which tokens of which sequences the next step computes, and what its results change.

Decodes first; then prompts up to the token budget, of those that have begun and of those that wait (`prompts.py`); or,
where a step only decodes, drafted tokens that are verified with it, as far as tokens, rows and pages are left. When
pages run out the sequence that was given them last gives all of its pages back and is computed again later (recompute
pre-emption), so the first always advances and every request ends. Nothing here but integers: no arrays, no clock.
"""

from collections import deque
from dataclasses import dataclass

from roofline.engine.cache.paged import Cache
from roofline.engine.events import FinishReason
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.prompts import plan_prompts
from roofline.engine.schedule.sequence import Sequence
from roofline.engine.schedule.state_moves import (
    advance_moves,
    draft_room,
    land_moves,
    leave_slots,
    plan_moves,
    reserve_for_draft,
    settle_moves,
)
from roofline.ops.batch import PAGE_TOKENS

FAILED = -1  # in place of a sampled id: the sequence ends with an error


@dataclass(frozen=True)
class PendingCommit:
    """What `advance` changed. places: index in `ids` of each of the plan's `sampled`; computed: of each sequence."""

    places: list[int]
    computed: list[int]


def schedule(state: State) -> StepPlan:
    """Choose the next step; empty when nothing can run."""
    plan = StepPlan()
    preemptions = state.preemptions
    chunks = _plan_decodes(state, plan)
    plan_prompts(state, plan, chunks, admits=state.preemptions == preemptions)
    plan_drafts(state, plan)
    if state.slots is not None:
        plan_moves(state, plan)
    return plan


def _plan_decodes(state: State, plan: StepPlan) -> list[Sequence]:
    """Plan each running sequence that waits for one token; return those that still have a prompt to compute."""
    running, grow, room = state.running, state.cache.grow, state.limits.table_pages
    chunks = []
    i = 0
    while i < len(running):
        sequence = running[i]
        i += 1
        length = len(sequence.ids)
        if length >= sequence.end or sequence.computed == length:  # its last step is still under way: see `advance`
            continue
        count = length - sequence.computed
        if count > 1 and (count > 1 + sequence.again or plan.tokens + count + len(running) - i > state.limits.tokens):
            sequence.draft = []
            chunks.append(sequence)
            continue
        if length > len(sequence.pages) * PAGE_TOKENS:
            while not grow(sequence.pages, length):
                victim = running[-1]  # never one already planned: those stand before `sequence`
                preempt(state, victim)
                if victim is sequence:
                    return chunks
        if plan.table_pages + len(sequence.pages) <= room:
            plan.add_decode(sequence, count)
    return chunks


def plan_drafts(state: State, plan: StepPlan) -> None:
    """Add to each decode as much of its draft as the step has room for. What does not fit is cut off the draft.

    Nobody loses anything to a draft: tokens, rows and pages are those that are left, and `commit` gives the pages back.
    A step with prompt tokens takes none: it is bound by arithmetic, not by the weights that drafts read along.
    """
    limits = state.limits
    for i, sequence in enumerate(plan.sequences[: plan.decodes]):
        if not sequence.draft:
            continue
        if not plan.decode_only or (state.slots is not None and not reserve_for_draft(state, sequence)):
            sequence.draft = []
            continue
        length, pages = len(sequence.ids), sequence.pages
        rows = limits.rows - plan.rows
        count = min(len(sequence.draft), rows, limits.tokens - plan.tokens, sequence.end - length - 1)
        if state.slots is not None:
            count = min(count, draft_room(state, sequence))
        room, page_count = len(pages) * PAGE_TOKENS - length, len(pages)
        if count > room:
            more = -(-(length + count) // PAGE_TOKENS) - page_count
            if plan.table_pages + more > limits.table_pages or not state.cache.grow(pages, length + count):
                count = room
        del sequence.draft[max(0, count) :]
        plan.counts[i] += len(sequence.draft)
        plan.tokens += len(sequence.draft)
        plan.drafted += len(sequence.draft)
        plan.table_pages += len(pages) - page_count


def preempt(state: State, sequence: Sequence) -> None:
    """Take all pages from the running sequence that was given them last, and put it back at the head of the queue."""
    assert state.running[-1] is sequence, "only the last one is pre-empted"
    state.running.pop()
    state.cache.release(sequence.pages)
    if state.slots is not None:
        leave_slots(state, sequence)
    sequence.computed = sequence.published = 0
    sequence.draft = []
    state.waiting.appendleft(sequence)
    state.preemptions += 1


def commit(state: State, plan: StepPlan, ids: list[int]) -> list[list[int]]:
    """Record a step that was computed: one id, or FAILED, for each logit row of `plan.sampled`.

    A row of a draft counts only while all drafted tokens before it are what was sampled there. Returns the new ids of
    each of `plan.sampled`. Pages of a failed sequence are not published: what made its logits useless may lie in them.
    """
    fresh: list[list[int]] = []
    at = 0
    for sequence in plan.sampled:
        if sequence.draft:
            rows = len(sequence.draft) + 1
            fresh.append(_accept(sequence, ids[at : at + rows]))
            at += rows
        else:
            fresh.append(_accept_one(sequence, ids[at]))
            at += 1
    assert at == len(ids), "an id for each logit row"
    _count_scored(plan)
    counts = land_moves(state, plan) if plan.moves else plan.counts
    for sequence, count in zip(plan.sequences, counts, strict=True):
        # The last id is never in the pages yet, unless none will follow; neither is what was drafted in vain.
        sequence.computed = min(sequence.computed + count, len(sequence.ids) - (not sequence.hidden))
        if sequence.hidden and sequence.computed == len(sequence.ids):
            _end_pooled(sequence)
        if sequence.computed // PAGE_TOKENS > sequence.published:
            _publish(state, sequence, sequence.computed)
        if sequence.draft:
            sequence.draft = []
            _give_back(state.cache, sequence)
    ended = [sequence for sequence in plan.sequences if sequence.finished is not None]
    if ended:
        _leave(state, ended)
    return fresh


def advance(state: State, plan: StepPlan) -> PendingCommit:
    """Count a step as computed whose ids are not known yet, so that the next can be scheduled meanwhile.

    In place of an id stands -1 - r, r being its logit row, until `settle`. No sequence of the plan has a draft.
    """
    for sequence, count in zip(plan.sequences, plan.counts, strict=True):
        sequence.computed += count
    places = [len(sequence.ids) for sequence in plan.sampled]
    rows = plan.sampled_rows() if plan.scores else range(len(plan.sampled))
    for row, sequence in zip(rows, plan.sampled, strict=True):
        sequence.ids.append(-1 - row)
    _count_scored(plan)
    if plan.moves:
        advance_moves(state, plan)
    return PendingCommit(places, [sequence.computed for sequence in plan.sequences])


def settle(state: State, plan: StepPlan, pending: PendingCommit, ids: list[int]) -> list[list[int]]:
    """Record the ids of a step that was counted by `advance`: as `commit`, whatever was scheduled since.

    At most one step came after it. What that computed of sequences that end here is ignored: its slots in the cache lie
    behind every published page, and whoever gets those pages writes them later. A sequence that ended meanwhile has no
    new ids; one that was pre-empted has lost its pages.
    """
    fresh: list[list[int]] = []
    ended: list[Sequence] = []
    for sequence, place, token in zip(plan.sampled, pending.places, ids, strict=True):
        if sequence.finished is not None:
            fresh.append([])
            continue
        following = sequence.ids[place + 1 :]
        del sequence.ids[place:]
        fresh.append(_accept_one(sequence, token))
        if sequence.finished is None:
            sequence.ids += following
        else:
            ended.append(sequence)
    if plan.moves:
        settle_moves(state, plan)
    for sequence, computed in zip(plan.sequences, pending.computed, strict=True):
        if sequence.hidden and sequence.finished is None and computed == len(sequence.ids):
            _end_pooled(sequence)
            ended.append(sequence)
        if len(sequence.pages) * PAGE_TOKENS >= computed:
            _publish(state, sequence, computed)
    if ended:
        if not all(sequence.pages for sequence in ended):
            state.waiting = deque(sequence for sequence in state.waiting if sequence.finished is None)
        _leave(state, ended)
    return fresh


def _count_scored(plan: StepPlan) -> None:
    for score in plan.scores:
        score.sequence.scored = score.first + len(score.ids)


def _publish(state: State, sequence: Sequence, computed: int) -> None:
    """Offer the pages that the first `computed` tokens fill to the prefix cache, but for those of a failed sequence."""
    full = computed // PAGE_TOKENS
    if full > sequence.published and sequence.finished != "error":
        state.cache.publish(sequence.keys, sequence.ids, sequence.pages, sequence.published, full)
        sequence.published = full


def _accept_one(sequence: Sequence, token: int) -> list[int]:
    """Do what `_accept` does with the one id of a sequence without a draft, in fewer steps where nothing is special."""
    ids = sequence.ids
    special = sequence.matcher is not None or sequence.pools or token in sequence.stop_ids or token == FAILED
    if special or len(ids) + 1 >= sequence.end:
        return _accept(sequence, [token])
    ids.append(token)
    return [token]


def _accept(sequence: Sequence, ids: list[int]) -> list[int]:
    """Append what was sampled, up to the first token that was drafted wrongly or that ends the answer."""
    accepted: list[int] = []
    if sequence.pools:  # of its logits: the sampled id is nobody's
        _end_pooled(sequence)
        return accepted
    if sequence.request.max_tokens == 0:
        sequence.finished = "error" if ids[0] == FAILED else "length"
        return accepted
    for row, token in enumerate(ids):
        if token == FAILED:
            sequence.finished = "error"
            break
        # An answer that is complete ends, though it could be longer.
        verdict = sequence.matcher.take(token) if sequence.matcher is not None else None
        if verdict == "error":
            sequence.finished = verdict
            break
        sequence.ids.append(token)
        accepted.append(token)
        if token in sequence.stop_ids and sequence.generated >= sequence.request.params.min_tokens:
            sequence.finished = "stop"
            break
        if verdict is not None:
            sequence.finished = verdict
            break
        if len(sequence.ids) >= sequence.end:
            sequence.finished = "length"
            break
        if row < len(sequence.draft) and token != sequence.draft[row]:
            break
    return accepted


def _end_pooled(sequence: Sequence) -> None:
    """Its last token is computed: it has its vector, unless the numbers were none."""
    sequence.finished = "stop" if sequence.vector is not None else "error"


def _give_back(cache: Cache, sequence: Sequence) -> None:
    """Release the pages that only rejected tokens needed."""
    needed = -(-len(sequence.ids) // PAGE_TOKENS)
    surplus = sequence.pages[needed:]
    del sequence.pages[needed:]
    cache.release(surplus)


def finish(state: State, sequences: list[Sequence], reason: FinishReason) -> list[Sequence]:
    """End sequences from outside: aborts and errors. Returns those that had not ended before."""
    ended = [sequence for sequence in sequences if sequence.finished is None]
    for sequence in ended:
        sequence.finished = reason
        while sequence.ids[-1] < 0:  # still under way: nobody will be told
            sequence.ids.pop()
    if ended:
        _leave(state, ended)
        state.waiting = deque(sequence for sequence in state.waiting if sequence.finished is None)
    return ended


def _leave(state: State, ended: list[Sequence]) -> None:
    for sequence in ended:
        state.cache.release(sequence.pages)
        if state.slots is not None:
            leave_slots(state, sequence)
    state.running = [sequence for sequence in state.running if sequence.finished is None]
