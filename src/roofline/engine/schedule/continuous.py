"""Continuous batching: which tokens of which sequences the next step computes, and what its results change.

Decodes first, oldest first; then prompt chunks up to the token budget; then new requests, first come first served;
or, where a step only decodes, drafted tokens that are verified with it, as far as tokens, rows and pages are left.
When pages run out the youngest sequence gives all of its pages back and is computed again later (recompute
pre-emption), so the oldest always advances and every request ends. Nothing here but integers: no arrays, no clock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from roofline.engine.cache.paged import Cache
from roofline.engine.config import StepLimits
from roofline.engine.events import FinishReason
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import PAGE_TOKENS

FAILED = -1  # in place of a sampled id: the sequence ends with an error


@dataclass
class State:
    """All that scheduling knows. `running` holds pages, `waiting` holds none; both are in order of arrival, and every
    running sequence arrived before every waiting one."""

    cache: Cache
    limits: StepLimits
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there


@dataclass(frozen=True)
class PromptScores:
    """Logit rows of a step, from `row` on, that tell the log-probabilities of `ids`, which follow the first `first` + 1
    ids of the prompt. alternatives: how many of the most likely ids are told beside each."""

    sequence: Sequence
    first: int
    ids: list[int]
    row: int

    @property
    def alternatives(self) -> int:
        return self.sequence.request.params.prompt_logprobs or 0


@dataclass
class StepPlan:
    """A step: `counts[i]` tokens of `sequences[i]` from its `computed` on, the last of them its `draft`, if it has one.

    `sampled` get new ids, in this order: each has one logit row, and one more for each token of its draft. `scores`
    have logit rows too, one for each of their ids, among those of `sampled`: rows are in the order of `sequences`.
    Sequences that give hidden rows (`Sequence.hidden`) have none of these rows.
    """

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    tokens: int = 0
    table_pages: int = 0
    decodes: int = 0  # leading sequences that only decode
    drafted: int = 0  # tokens of drafts
    vectors: int = 0  # sequences that give vectors instead of answers
    scores: list[PromptScores] = field(default_factory=list)
    scored: int = 0  # rows of `scores`

    @property
    def rows(self) -> int:
        """Logit rows."""
        return len(self.sampled) + self.drafted + self.scored

    @property
    def decode_only(self) -> bool:
        """Whether no prompt token is computed."""
        return self.decodes == len(self.sequences)

    @property
    def pooled(self) -> list[Sequence]:
        """The sequences that give hidden rows."""
        return [sequence for sequence in self.sequences if sequence.hidden] if self.vectors else []

    def part(self, sequences: Iterable[Sequence]) -> "StepPlan":
        """The plan of some of its sequences alone."""
        chosen = set(sequences)
        rows = [(i, s, count) for i, (s, count) in enumerate(zip(self.sequences, self.counts, strict=True))]
        rows = [row for row in rows if row[1] in chosen]
        plan = StepPlan(
            sequences=[s for _, s, _ in rows],
            counts=[count for _, _, count in rows],
            tokens=sum(count for _, _, count in rows),
            table_pages=sum(len(s.pages) for s in chosen),
            decodes=sum(i < self.decodes for i, _, _ in rows),
            drafted=sum(len(s.draft) for s in chosen),
            vectors=sum(bool(s.pools) for s in chosen),
        )
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            plan._add_rows(sequence, count)
        return plan

    def add(self, sequence: Sequence, count: int) -> None:
        self.sequences.append(sequence)
        self.counts.append(count)
        self.tokens += count
        self.table_pages += len(sequence.pages)
        self.vectors += bool(sequence.pools)
        self._add_rows(sequence, count)

    def _add_rows(self, sequence: Sequence, count: int) -> None:
        """The logit rows of the next `count` ids of a sequence, behind those of the sequences before."""
        end = sequence.computed + count
        if sequence.scored < sequence.to_score and end > sequence.scored:
            following = sequence.ids[sequence.scored + 1 : min(end, sequence.to_score) + 1]
            self.scores.append(PromptScores(sequence, sequence.scored, following, self.rows))
            self.scored += len(following)
        if end >= len(sequence.ids) and not sequence.hidden:
            self.sampled.append(sequence)

    def sampled_rows(self) -> list[int]:
        """Which of the step's rows are those of `sampled`, in a step that scores prompt tokens, so has no drafts."""
        scoring = {row for each in self.scores for row in range(each.row, each.row + len(each.ids))}
        return [row for row in range(self.rows) if row not in scoring]


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
    for sequence in chunks:
        _plan_chunk(state, plan, sequence)
    if state.preemptions == preemptions:
        _admit(state, plan)
    plan_drafts(state, plan)
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
        if length - sequence.computed > 1:
            chunks.append(sequence)
            continue
        if length > len(sequence.pages) * PAGE_TOKENS:
            while not grow(sequence.pages, length):
                victim = running[-1]  # never one already planned: those are older than `sequence`
                preempt(state, victim)
                if victim is sequence:
                    return chunks
        if plan.table_pages + len(sequence.pages) <= room:
            plan.add(sequence, 1)
            plan.decodes += 1
    return chunks


def chunk_size(limits: StepLimits, plan: StepPlan, sequence: Sequence) -> int:
    """How many of a sequence's next ids a step has tokens and logit rows for.

    A prompt that is scored takes a row a token, and leaves one for the prompts behind it.
    """
    pending, rows = len(sequence.ids) - sequence.computed, limits.rows - plan.rows
    count = min(pending, limits.tokens - plan.tokens)
    if limits.undivided and count < pending:
        return 0
    if sequence.scored < sequence.to_score:
        return min(count, sequence.scored - sequence.computed + (rows - 1 if rows > 1 else rows))
    return count if rows > 0 else min(count, pending - 1)


def _plan_chunk(state: State, plan: StepPlan, sequence: Sequence) -> bool:
    """Plan as much of a prompt as the budget allows; True when all of it."""
    pending = len(sequence.ids) - sequence.computed
    count = chunk_size(state.limits, plan, sequence)
    if count == 0 or plan.table_pages + len(sequence.pages) > state.limits.table_pages:
        return False
    plan.add(sequence, count)
    return count == pending


def plan_drafts(state: State, plan: StepPlan) -> None:
    """Add to each decode as much of its draft as the step has room for. What does not fit is cut off the draft.

    Nobody loses anything to a draft: tokens, rows and pages are those that are left, and `commit` gives the pages back.
    A step with prompt tokens takes none: it is bound by arithmetic, not by the weights that drafts read along.
    """
    limits = state.limits
    for i, sequence in enumerate(plan.sequences[: plan.decodes]):
        if not sequence.draft:
            continue
        if not plan.decode_only:
            sequence.draft = []
            continue
        length, pages = len(sequence.ids), sequence.pages
        rows = limits.rows - plan.rows
        count = min(len(sequence.draft), rows, limits.tokens - plan.tokens, sequence.end - length - 1)
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


def _admit(state: State, plan: StepPlan) -> None:
    """Give pages to waiting sequences in order, until something is short. The head waits; nobody overtakes it."""
    while state.waiting and len(state.running) < state.limits.sequences and plan.tokens < state.limits.tokens:
        sequence = state.waiting[0]
        if not place(state, sequence, len(state.running), state.limits.table_pages - plan.table_pages):
            return
        if not _plan_chunk(state, plan, sequence):
            return


def place(state: State, sequence: Sequence, headroom: int, table_room: int) -> bool:
    """Move the first waiting sequence to running, with pages for all of its ids, if `headroom` more pages stay free.

    The headroom is a page for each running sequence: without it a new sequence would be pre-empted at once.
    """
    leader = sequence.request.sequences[0]
    shareable = (sequence.prompt_length - 1) // PAGE_TOKENS if leader is not sequence and leader.pages else 0
    if leader.computed < shareable * PAGE_TOKENS:
        return False  # the prompt is being computed: wait and share it
    if leader is not sequence and leader.scored < leader.to_score and leader.finished is None:
        return False  # the prompt is told before any answer
    cache = state.cache
    # A mean needs the hidden rows of all tokens, and pages have none; "first" needs that of the first.
    pages = cache.match(sequence.keys, sequence.ids) if sequence.pools not in ("mean", "first") else []
    if sequence.scored < sequence.to_score:  # what is still to be told has to be computed
        surplus = pages[sequence.scored // PAGE_TOKENS :]
        del pages[sequence.scored // PAGE_TOKENS :]
        cache.release(surplus)
    if len(pages) < shareable:
        pages += cache.share(leader.pages[len(pages) : shareable])
    total = -(-len(sequence.ids) // PAGE_TOKENS)
    if total - len(pages) + headroom > cache.available or total > table_room:
        cache.release(pages)
        return False
    sequence.computed, sequence.published = len(pages) * PAGE_TOKENS, len(pages)
    if not sequence.started:
        sequence.started = True
        sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)  # a resumed one has its answer too
        state.prefix_queries += sequence.prompt_length
        state.prefix_hits += sequence.cached_tokens
    grown = cache.grow(pages, len(sequence.ids))
    assert grown, "pages counted as available were not"
    sequence.pages = pages
    state.waiting.popleft()
    state.running.append(sequence)
    return True


def preempt(state: State, sequence: Sequence) -> None:
    """Take all pages from the youngest running sequence and put it back at the head of the queue."""
    assert state.running[-1] is sequence, "only the youngest is pre-empted"
    state.running.pop()
    state.cache.release(sequence.pages)
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
        rows = len(sequence.draft) + 1
        fresh.append(_accept(sequence, ids[at : at + rows]))
        at += rows
    assert at == len(ids), "an id for each logit row"
    _count_scored(plan)
    for sequence, count in zip(plan.sequences, plan.counts, strict=True):
        # The last id is never in the pages yet, unless none will follow; neither is what was drafted in vain.
        sequence.computed = min(sequence.computed + count, len(sequence.ids) - (not sequence.hidden))
        if sequence.hidden and sequence.computed == len(sequence.ids):
            _end_pooled(sequence)
        _publish(state, sequence, sequence.computed)
        if sequence.draft:
            sequence.draft = []
            _give_back(state.cache, sequence)
    ended = [sequence for sequence in plan.sequences if sequence.finished is not None]
    if ended:
        _leave(state, ended)
    return fresh


def advance(plan: StepPlan) -> PendingCommit:
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
        fresh.append(_accept(sequence, [token]))
        if sequence.finished is None:
            sequence.ids += following
        else:
            ended.append(sequence)
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
    for each in plan.scores:
        each.sequence.scored = each.first + len(each.ids)


def _publish(state: State, sequence: Sequence, computed: int) -> None:
    """Offer the pages that the first `computed` tokens fill to the prefix cache, but for those of a failed sequence."""
    full = computed // PAGE_TOKENS
    if full > sequence.published and sequence.finished != "error":
        state.cache.publish(sequence.keys, sequence.ids, sequence.pages, sequence.published, full)
        sequence.published = full


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
    state.running = [sequence for sequence in state.running if sequence.finished is None]
