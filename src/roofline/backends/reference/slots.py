"""Slots of recurrent state of the reference: one float32 tensor, read and written by the moves of a step."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from roofline.backends.reference.cache import segments_of
from roofline.ops.batch import NO_SLOT, Batch, StateMove
from roofline.program.ir import StateGroup

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceSlots:
    """A StateStore over slots, [slots, layers, values of a layer]; what was never written holds NaN.

    Writing changes it in place: a Program's state values are read and written in one order only.
    """

    def __init__(self, group: StateGroup, slots: int) -> None:
        import torch

        self.group = group
        self.values = torch.full((slots, group.layers, group.layer_values), float("nan"))
        self._places: dict[str, tuple[int, int, tuple[int, ...]]] = {}  # of each part: where it begins and ends
        at = 0
        for name, shape in group.parts:
            self._places[name] = at, at + math.prod(shape), shape
            at += math.prod(shape)
        self.stretches: Sequence[tuple[int, int]] = ()
        self._sources: dict[int, int] = {}  # first row of a stretch -> the slot that it reads
        self._targets: dict[int, list[int]] = {}  # the row behind a stretch -> the slots that get the state there

    def begin(self, batch: Batch) -> None:
        """Take over the segments and moves of a step: a segment that is saved in passing is two stretches."""
        stretches: list[tuple[int, int]] = []
        self._sources, self._targets = {}, {}
        moves = list(moves_of(batch))
        for (start, stop, first), move in zip(segments_of(batch), moves, strict=True):
            self._sources[start], self._targets[stop] = move.source, [move.target]
            edges = [start, stop]
            if move.save_to != NO_SLOT:
                assert first < move.save_at <= first + stop - start, "a state is saved where its segment does not pass"
                saved = start + move.save_at - first
                self._targets.setdefault(saved, []).append(move.save_to)
                if saved < stop:
                    edges.insert(1, saved)
                    self._sources[saved] = move.save_to
            stretches += itertools.pairwise(edges)
        self.stretches = tuple(stretches)
        _check_moves(moves)

    def read(self, layer: int, part: str, start: int) -> "Tensor":
        import torch

        first, last, shape = self._places[part]
        slot = self._sources[start]
        return torch.zeros(shape) if slot == NO_SLOT else self.values[slot, layer, first:last].clone().view(shape)

    def write(self, layer: int, part: str, stop: int, value: "Tensor") -> "ReferenceSlots":
        first, last, _ = self._places[part]
        for slot in self._targets[stop]:
            if slot != NO_SLOT:
                self.values[slot, layer, first:last] = value.detach().reshape(-1)
        return self


def moves_of(batch: Batch) -> Iterable[StateMove]:
    """The slots of each segment of a filled batch buffer."""
    fields = (batch.state_in, batch.state_out, batch.save_at, batch.save_to)
    return (StateMove(*(int(field[i]) for field in fields)) for i in range(batch.segments))


def _check_moves(moves: Sequence[StateMove]) -> None:
    """Segments of a step are computed beside each other, so no slot may have two writers, and what one segment writes
    no other one may read. To break this is a bug of whoever plans steps."""
    written = [slot for move in moves for slot in (move.target, move.save_to) if slot != NO_SLOT]
    assert len(set(written)) == len(written), "two segments write one slot of state"
    for at, move in enumerate(moves):
        other_slots = {slot for i, other in enumerate(moves) if i != at for slot in (other.target, other.save_to)}
        assert move.source == NO_SLOT or move.source not in other_slots, (
            "a segment reads a slot that another one writes"
        )
