"""A toy with recurrent state: a slot holds a hash of the ids that one sequence has consumed, and how many they are.

A row's logits depend on the hash alone. Every step checks that what a segment reads from its slot is the hash of the
ids that its pages hold before it, so a slot that is stale, ahead, behind, another's or never written is noticed where
it is read first.
"""

from dataclasses import replace

import numpy as np
from engine_fakes import FakeExecutable, QueueingFake, check_pages, mix, uniform

from roofline.ops.batch import NO_SLOT, PAGE_TOKENS, Batch, BatchLimits
from tests.engine.test_scheduling import Watched

MASK = (1 << 64) - 1
NEVER_WRITTEN = None


def consumed(digest, ids):
    """The hash behind further ids."""
    for token in ids:
        digest = (digest * 6364136223846793005 + token * 1442695040888963407 + 99) & MASK
    return digest


class HybridFake(FakeExecutable):
    slot_bytes = 16

    def __init__(self, state_slots=8, **sizes):
        super().__init__(**sizes)
        limits = self.limits
        self.limits = BatchLimits(limits.tokens, limits.segments, limits.rows, limits.pages, state_slots)
        self.batch = Batch(self.limits)
        self.states = [NEVER_WRITTEN] * state_slots  # (hash, ids consumed)
        self.noticed = []  # what was wrong with a step
        self.fail_late = set()  # numbers of forward calls that raise when a part of the slots is written
        self.saves = 0  # states saved in passing

    def forward(self):
        try:
            self._forward()
        except AssertionError as error:  # which the engine takes for a failure of the step
            self.noticed.append(error)
            raise

    def _forward(self):
        super().forward()
        batch, rows = self.batch, {}
        moves = np.stack([batch.state_in, batch.state_out, batch.save_at, batch.save_to])[:, : batch.segments]
        check_disjoint(moves.T.tolist())
        after = dict[int, tuple[int, int]]()
        for segment, (source, target, save_at, save_to) in enumerate(moves.T.tolist()):
            start, stop, table = self.segments[segment]
            first, ids = int(batch.positions[start]), self._ids()[start:stop].tolist()
            digest = self._source(source, first, table)
            for at, token in enumerate(ids, first + 1):
                digest = consumed(digest, [token])
                rows[start + at - first - 1] = digest
                if save_to != NO_SLOT and at == save_at:
                    after[save_to] = digest, at
                    self.saves += 1
            assert save_to == NO_SLOT or first < save_at <= first + len(ids), "a save outside the segment"
            if target != NO_SLOT:
                after[target] = digest, first + len(ids)
            if self.forwards in self.fail_late and segment >= batch.segments // 2:
                self._write(after)
                raise RuntimeError("the toy was told to fail when slots were written")
        self._write(after)
        self.rows = [self._state_row(rows[int(row)], int(row)) for row in batch.logit_rows[: batch.rows]]

    def _write(self, after):
        for slot, value in after.items():
            self.states[slot] = value

    def _source(self, source, first, table):
        """The hash that a segment begins with, checked against what its pages hold."""
        if source == NO_SLOT:
            assert first == 0, "zeros in place of a state"
            return 0
        at = np.arange(first)
        pairs = self.store[table[at // PAGE_TOKENS], at % PAGE_TOKENS]
        assert pairs[:, 0].tolist() == at.tolist(), "pages of other positions"
        assert self.states[source] is not NEVER_WRITTEN, "a slot that no step has written"
        digest, count = self.states[source]
        assert count == first, f"the state of {count} ids in place of {first}"
        assert digest == consumed(0, pairs[:, 1].tolist()), "the state of other ids"
        return digest

    def _row(self, row):
        return None

    def _state_row(self, digest, row):
        with np.errstate(over="ignore"):
            noise = uniform(mix(np.uint64(digest) ^ self.weights) + np.arange(self.vocab_size, dtype=np.uint64))
        _start, _stop, table = next(s for s in self.segments if s[0] <= row < s[1])
        return (noise * 6 - 3).astype(np.float32), int(self.store[table[0], 0, 1])

    def headless(self):
        hidden = super().headless()
        hidden.limits = replace(hidden.limits, state_slots=self.limits.state_slots)
        hidden.batch, hidden.states = Batch(hidden.limits), self.states
        return hidden


class QueueingHybrid(HybridFake, QueueingFake):
    """The same as a toy device."""


def check_disjoint(moves):
    """Assert that no slot is written by two segments, nor by one and read by another."""
    written = [slot for _, target, _, save_to in moves for slot in (target, save_to) if slot != NO_SLOT]
    assert len(set(written)) == len(written), "a slot that is written twice in a step"
    for number, (source, _, _, save_to) in enumerate(moves):
        others = {slot for i, (_, *move) in enumerate(moves) if i != number for slot in (move[0], move[2])}
        assert source == NO_SLOT or source not in others, "a slot that another segment writes"
        assert save_to == NO_SLOT or save_to != source, "a save into the slot that is read"


class StateWatched(Watched):
    """As `Watched`, with the books of slots."""

    def __init__(self, config, toy=HybridFake, **executable):
        super().__init__(config, toy, **executable)
        stepper, self.restoring = self.engine._stepper, False
        restore = stepper._restore

        def watched_restore(plan):
            self.restoring = True
            try:
                return restore(plan)
            finally:
                self.restoring = False

        stepper._restore = watched_restore

    def check_shares(self, *facts):
        """Left out: prompts may have less than their shares, since a step ends where a snapshot is taken."""

    def check_step(self, executable):
        if not self.restoring:
            super().check_step(executable)

    def step(self):
        super().step()
        if self.executable.noticed:
            raise self.executable.noticed[0]
        state = self.engine.state
        check_pages(state.slots, [slots_of(s) for s in state.running])
        assert all(s.recurrent is None and s.again == 0 for s in state.waiting)

    def run(self, limit=5000):
        outputs = super().run(limit)
        check_pages(self.engine.state.slots, [])
        assert self.engine.state.slots.used == 0
        return outputs


def slots_of(sequence):
    own = sequence.recurrent
    slots = {own.slot, own.source, own.spare} - {NO_SLOT}
    assert not own.reserved
    return [*slots, *own.under_way]
