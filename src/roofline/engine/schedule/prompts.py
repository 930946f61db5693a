"""Which prompts the next step computes, how much of each, and who among those that wait is given pages for it.

Prompts are computed by priority, then by how many whole steps they still need, then in order of arrival; one that takes
several steps still needs two at its last. So equal prompts follow each other, each with the whole budget, and a prompt
of one step overtakes a long one that is being computed, whenever it comes.
Four rules keep that fair:

* While others overtake it, the prompt that has waited longest has a quarter of the tokens that a step has for prompts.
* Long prompts that are overtaken make the step no longer than twice what overtakes them, or a sixteenth of the
  budget more: whoever overtook them waits for that step too.
* Prompts of more than four steps, very long ones, have `long_tokens` of each step together, overtaken or not: who comes
  meanwhile waits for the step that is being computed, which is as short as that. It stays so for long contexts: a token
  at `doubling_depth` counts as two. Where others overtake it, a very long prompt has none of three steps in a row and
  that much of the fourth, instead of a part of each.
* Nobody overtakes a waiting prompt for which there are not enough pages: it would never have them.
"""

from collections.abc import Iterable
from itertools import islice

from roofline.engine.cache.state_slots import SNAPSHOT_PAGES, SNAPSHOT_TOKENS
from roofline.engine.config import StepLimits
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.engine.schedule.state_moves import begin_slots, cut_at_snapshot, trim_to_snapshot
from roofline.ops.batch import PAGE_TOKENS

OLDEST_SHARE = 4  # the oldest prompt has at least one part in so many of the tokens that a step has for prompts
OVERTAKEN_SHARE = 16  # an overtaken long prompt may have one part in so many of a step, however short the others are
LONG_STEPS = 4  # a prompt of more steps is very long
DEEPEST_SHARE = 4  # a very long prompt has one part in so many of `long_tokens`, however long its context is
CONSIDERED = 64  # waiting sequences that a step chooses among
Rank = tuple[bool, int, int, int]


def chunk_size(limits: StepLimits, plan: StepPlan, sequence: Sequence, limit: int | None = None) -> int:
    """How many of a sequence's next ids a step has tokens and logit rows for.

    A prompt that is scored takes a row a token, and leaves one for the prompts behind it. limit: tokens that it may
    have; None: all that are left.
    """
    pending, rows = len(sequence.ids) - sequence.computed, limits.rows - plan.rows
    free = limits.tokens - plan.tokens
    count = min(pending, free if limit is None else min(limit, free))
    if limits.undivided and count < pending:
        return 0
    if sequence.scored < sequence.to_score:
        return min(count, sequence.scored - sequence.computed + (rows - 1 if rows > 1 else rows))
    return count if rows > 0 else min(count, pending - 1)


def place(state: State, sequence: Sequence, headroom: int, table_room: int) -> bool:
    """Move a waiting sequence to running, with pages for all of its ids, if `headroom` more pages stay free.

    The headroom is a page for each running sequence: without it a new sequence would be pre-empted at once.
    """
    if _waits_for_leader(sequence):
        return False
    leader = sequence.request.sequences[0]
    shareable = _shareable_pages(sequence)
    cache = state.cache
    pages = cache.match(sequence.keys, sequence.ids) if _may_match(sequence) else []
    if sequence.scored < sequence.to_score:  # what is still to be told has to be computed
        surplus = pages[sequence.scored // PAGE_TOKENS :]
        del pages[sequence.scored // PAGE_TOKENS :]
        cache.release(surplus)
    matched = len(pages)
    if state.slots is not None:
        trim_to_snapshot(state, sequence, pages)
    elif len(pages) < shareable:
        pages += cache.share(leader.pages[len(pages) : shareable])
    total = -(-len(sequence.ids) // PAGE_TOKENS)
    if total - len(pages) + headroom > cache.available or total > table_room:
        cache.release(pages)
        return False
    if state.slots is not None and not begin_slots(state, sequence, len(pages), matched):
        cache.release(pages)
        return False
    sequence.computed, sequence.published = len(pages) * PAGE_TOKENS, len(pages)
    if not sequence.started:
        sequence.started = True
        sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)  # a resumed one has its answer too
        state.prefix_queries += sequence.prompt_length
        state.prefix_hits += sequence.cached_tokens
        if state.slots is not None:
            state.snapshot_hits += bool(pages)
            state.snapshot_lost += (matched - len(pages)) * PAGE_TOKENS
    grown = cache.grow(pages, len(sequence.ids))
    assert grown, "pages counted as available were not"
    sequence.pages = pages
    state.waiting.remove(sequence)
    state.running.append(sequence)
    return True


def plan_prompts(state: State, plan: StepPlan, chunks: list[Sequence], admits: bool) -> None:
    """Add prompts to a plan that has all decodes.

    chunks: running sequences that have more than one id to compute; admits: whether waiting ones may be given pages.
    """
    room = state.limits.tokens - plan.tokens
    prompts = list(chunks)
    if admits and len(state.running) < state.limits.sequences:
        prompts += [each for each in islice(state.waiting, CONSIDERED) if not _waits_for_leader(each)]
    if not prompts or room <= 0:
        return
    if len(prompts) > 1:
        prompts = sorted(prompts, key=lambda sequence: _rank(state, sequence))
    _PromptPlanner(state, plan, prompts, room).run()


class _PromptPlanner:
    """Plans the prompts of one step. prompts: in the order in which they are computed."""

    def __init__(self, state: State, plan: StepPlan, prompts: list[Sequence], room: int) -> None:
        self.state, self.plan, self.prompts = state, plan, prompts
        self.admits, self.decode_tokens = True, plan.tokens
        self.reserve = self.page_reserve = 0
        self.oldest = min(prompts, key=_arrival)
        self.newcomer = None if self.oldest.pages else self.oldest  # before its turn
        if self.newcomer is not None and not self._place(self.oldest):
            self.prompts = [sequence for sequence in prompts if sequence.pages]  # nobody overtakes it
            self.oldest = min(self.prompts, key=_arrival, default=self.oldest)
        self.long_tokens = state.limits.long_tokens or 0  # what very long prompts still have of this step
        self.long_reserve = 0  # how much of it is the oldest's
        if self.prompts and self.oldest is not self.prompts[0] and not state.limits.undivided:
            self._reserve_for_oldest(room)

    def _reserve_for_oldest(self, room: int) -> None:
        """Keep tokens for the prompt that others overtake, and places in the page table."""
        pending, share = len(self.oldest.ids) - self.oldest.computed, max(1, room // OLDEST_SHARE)
        if self._are_very_many(_steps_alone(self.state, self.oldest)):
            if self.oldest.passed_over < OLDEST_SHARE - 1:  # it is not this one's turn
                return
            self.long_reserve = self.long_tokens
            share = min(room, self._at_depth(self.oldest, self.long_tokens))
        self.reserve, self.page_reserve = min(pending, share), len(self.oldest.pages)

    def run(self) -> None:
        """Plan them all."""
        limits, plan = self.state.limits, self.plan
        latest, full = (-1, 0), False  # the latest arrival that is planned; whether only the oldest is still planned
        for number, sequence in enumerate(self.prompts):
            if sequence is self.oldest:
                self.reserve = self.page_reserve = self.long_reserve = 0
            arrival, waiting = _arrival(sequence), not sequence.pages
            steps = _steps_alone(self.state, sequence)
            very_long, overtaken = self._are_very_many(steps), latest > arrival and steps > 1
            full = full or overtaken
            if full and (sequence is not self.oldest or (very_long and overtaken and self._passes_over(sequence))):
                continue
            limit = limits.tokens - plan.tokens - self.reserve
            if very_long:
                limit = min(limit, self._at_depth(sequence, self.long_tokens - self.long_reserve))
            elif overtaken:
                limit = min(limit, max(limits.tokens // OVERTAKEN_SHARE, plan.tokens - self.decode_tokens, 1))
            if limit <= 0:
                continue
            if waiting and (not self.admits or self._follows(sequence, self.prompts[number + 1 :])):
                continue
            if waiting and not self._place(sequence):
                continue
            pending = cut_at_snapshot(self.state, sequence, len(sequence.ids) - sequence.computed)
            count = self._add(sequence, min(limit, pending))
            if count:
                latest, sequence.passed_over = max(latest, arrival), 0
            if very_long and count:
                self.long_tokens -= min(self.long_tokens, self._weight(sequence, count))
            if (waiting or sequence is self.newcomer) and count < pending:
                self.admits = False

    def _are_very_many(self, steps: int) -> bool:
        """Whether a prompt that takes so many steps is a very long one, which has only a part of each."""
        return self.state.limits.long_tokens is not None and steps > LONG_STEPS

    def _passes_over(self, sequence: Sequence) -> bool:
        """Whether a very long prompt that is overtaken has nothing of this step; counts those steps."""
        if sequence.passed_over >= OLDEST_SHARE - 1:
            return False
        sequence.passed_over += 1
        return True

    def _at_depth(self, sequence: Sequence, tokens: int) -> int:
        """How many tokens of a very long prompt cost as much where it has come to as `tokens` at its beginning."""
        depth = self.state.limits.doubling_depth
        if depth is None or tokens <= 0:
            return tokens
        return max(-(-tokens // DEEPEST_SHARE), tokens * depth // (depth + sequence.computed))

    def _weight(self, sequence: Sequence, count: int) -> int:
        """How many tokens at its beginning cost as much as `count` where a prompt has come to."""
        depth = self.state.limits.doubling_depth
        return count if depth is None else -(-count * (depth + sequence.computed) // depth)

    def _place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence pages. Where there are not enough, nobody behind it is given any in this step."""
        state = self.state
        table_room = state.limits.table_pages - self.plan.table_pages - self.page_reserve
        if _waits_for_leader(sequence):  # who was given pages just now
            return False
        if len(state.running) < state.limits.sequences and place(state, sequence, len(state.running), table_room):
            return True
        self.admits = False
        return False

    def _add(self, sequence: Sequence, limit: int) -> int:
        """Plan so many tokens of a prompt, as far as the step has rows and places in the page table for them."""
        plan = self.plan
        count = cut_at_snapshot(self.state, sequence, chunk_size(self.state.limits, plan, sequence, limit))
        if plan.table_pages + len(sequence.pages) + self.page_reserve > self.state.limits.table_pages:
            return 0
        if count:
            plan.add(sequence, count)
        return count

    def _follows(self, sequence: Sequence, behind: Iterable[Sequence]) -> bool:
        """Whether a waiting prompt goes on as an older one that is being computed, and that it would overtake: it waits
        until what the two share is there, instead of computing it a second time."""
        cache = self.state.cache
        if not cache.prefix or not _may_match(sequence):
            return False
        page = _usable(self.state, sequence)
        if page >= (len(sequence.ids) - 1) // PAGE_TOKENS:
            return False
        older = (other for other in behind if other.pages and _arrival(other) < _arrival(sequence))
        return any(_will_share(sequence, other, page) for other in older)


def _will_share(sequence: Sequence, other: Sequence, page: int) -> bool:
    """Whether a sequence has this page in common with another that is being computed; with recurrent state, all up
    to the other's last snapshot, which is still to come."""
    if other.recurrent is not None:
        last = (other.prompt_length - 1) // SNAPSHOT_TOKENS * SNAPSHOT_PAGES
        if last <= page or last > (len(sequence.ids) - 1) // PAGE_TOKENS or last <= other.published:
            return False
        page = last - 1
    if page >= len(other.ids) // PAGE_TOKENS:
        return False
    return other.keys.upto(other.ids, page + 1)[page] == sequence.keys.upto(sequence.ids, page + 1)[page]


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index


def _rank(state: State, sequence: Sequence) -> Rank:
    """Who is computed first: an answer that was interrupted, then by priority, by steps that are needed, by arrival.
    Sorting leaves the answers of a request in their order."""
    steps = -(-_pending(state, sequence) // state.limits.tokens)
    if _is_long(state, sequence):  # whose last part is overtaken as well
        steps = max(2, steps)
    return sequence.generated == 0, sequence.request.priority, steps, sequence.request.arrival


def _is_long(state: State, sequence: Sequence) -> bool:
    """Whether a prompt takes several steps, without what the cache had of it."""
    return _steps_alone(state, sequence) > 1


def _steps_alone(state: State, sequence: Sequence) -> int:
    """How many whole steps a prompt takes from its begin to its end, without what the cache had of it."""
    if sequence.pages:
        return -(-(len(sequence.ids) - sequence.cached_tokens) // state.limits.tokens)
    return -(-_pending(state, sequence) // state.limits.tokens)


def _pending(state: State, sequence: Sequence) -> int:
    """How many ids of a sequence are to be computed; of a long one that waits, without those that the cache has."""
    pending = len(sequence.ids) - sequence.computed
    if sequence.pages or pending <= state.limits.tokens or not _may_match(sequence):
        return pending
    if sequence.scored < sequence.to_score:  # all of it is computed
        return pending
    return pending - _usable(state, sequence) * PAGE_TOKENS


def _usable(state: State, sequence: Sequence) -> int:
    """How many pages the cache has of a sequence that waits, as far as they can be used."""
    pages = state.cache.known(sequence.keys, sequence.ids)
    return pages if state.slots is None else state.slots.usable_pages(sequence.keys.keys, pages)


def _may_match(sequence: Sequence) -> bool:
    """Whether pages of other sequences are of use: a mean needs the hidden rows of all tokens, and pages have none;
    "first" needs that of the first."""
    return sequence.pools not in ("mean", "first")


def _shareable_pages(sequence: Sequence) -> int:
    """Full pages of its prompt that the first sequence of its request has, or will have; with recurrent state, those
    up to the prompt's last snapshot."""
    leader = sequence.request.sequences[0]
    if leader is sequence or not leader.pages:
        return 0
    pages = (sequence.prompt_length - 1) // PAGE_TOKENS
    return pages if leader.recurrent is None else pages - pages % SNAPSHOT_PAGES


def _waits_for_leader(sequence: Sequence) -> bool:
    """Whether the first sequence of its request computes the prompt that they share, or has to tell it first."""
    leader = sequence.request.sequences[0]
    if leader is sequence:
        return False
    # A snapshot is found when its step has landed, as pages are published; pages are shared before.
    full = leader.computed // PAGE_TOKENS if leader.recurrent is None else leader.published
    if full < _shareable_pages(sequence):
        return True
    return leader.scored < leader.to_score and leader.finished is None
