"""What scheduling knows, and the plan of a step."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from roofline.engine.cache.paged import Cache
from roofline.engine.cache.state_slots import SequenceSlots, StateSlots
from roofline.engine.config import StepLimits
from roofline.engine.schedule.sequence import Request, Sequence
from roofline.ops.batch import StateMove


@dataclass
class State:
    """All that scheduling knows. `running` holds pages, in the order in which they were given; `waiting` holds none,
    and is in order of arrival, but that pre-empted sequences stand before the others. slots: of a model with recurrent
    state."""

    cache: Cache
    limits: StepLimits
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    arrivals: int = 0  # requests so far
    slots: StateSlots | None = None
    snapshot_hits: int = 0  # sequences that began with a snapshot
    snapshot_lost: int = 0  # tokens whose pages were found, for want of a snapshot in vain

    def enqueue(self, request: Request) -> None:
        """Let a request wait for its first step."""
        self.arrivals += 1
        request.arrival = self.arrivals
        self.waiting.extend(request.sequences)


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


SavedState = Literal["", "snapshot", "spare", "certain"]


@dataclass(frozen=True)
class PlannedMove:
    """What a step does with the slots of one sequence. save: what becomes of the slot that is saved to: a "snapshot" of
    the prompt, the sequence's "spare", or its slot from now on, behind all ids that are "certain"; "": nothing is
    saved."""

    slots: SequenceSlots
    move: StateMove
    save: SavedState = ""


@dataclass
class StepPlan:
    """A step: `counts[i]` tokens of `sequences[i]` from its `computed` on, the last of them its `draft`, if it has one.

    `sampled` get new ids, in this order: each has one logit row, and one more for each token of its draft. `scores`
    have logit rows too, one for each of their ids, among those of `sampled`: rows are in the order of `sequences`.
    Sequences that give hidden rows (`Sequence.hidden`) have none of these rows. `moves`: of each of `sequences`, where
    the model has recurrent state.
    """

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    tokens: int = 0
    table_pages: int = 0
    decodes: int = 0  # leading sequences that only decode
    drafted: int = 0  # tokens of drafts
    repeated: int = 0  # tokens that decodes compute again for their state
    vectors: int = 0  # sequences that give vectors instead of answers
    scores: list[PromptScores] = field(default_factory=list)
    scored: int = 0  # rows of `scores`
    moves: list[PlannedMove] = field(default_factory=list)

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
        repeated = [count - 1 - len(s.draft) for i, s, count in rows if i < self.decodes and self.repeated]
        plan = StepPlan(
            sequences=[s for _, s, _ in rows],
            counts=[count for _, _, count in rows],
            tokens=sum(count for _, _, count in rows),
            table_pages=sum(len(s.pages) for s in chosen),
            decodes=sum(i < self.decodes for i, _, _ in rows),
            drafted=sum(len(s.draft) for s in chosen),
            vectors=sum(bool(s.pools) for s in chosen),
            repeated=sum(repeated),
            moves=[self.moves[i] for i, _, _ in rows] if self.moves else [],
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

    def add_decode(self, sequence: Sequence, count: int = 1) -> None:
        """Add the one token that a running sequence waits for; those that decode stand before all others.

        count: with those before it that are computed again for the state.
        """
        self.decodes += 1
        self.repeated += count - 1
        if sequence.pools or sequence.to_score:
            self.add(sequence, count)
            return
        self.sequences.append(sequence)
        self.counts.append(count)
        self.sampled.append(sequence)
        self.tokens += count
        self.table_pages += len(sequence.pages)

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
        scoring = {row for score in self.scores for row in range(score.row, score.row + len(score.ids))}
        return [row for row in range(self.rows) if row not in scoring]
