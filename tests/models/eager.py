"""Eager use of a family: a cache of two torch tensors for each (layer, sequence), grown by concatenation, and the last
recurrent state of each."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roofline.backends.reference.cache import segments_of
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.ops.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ContiguousCache:
    """A KvCache that is a value: write returns a new one, so gradients flow and a block can be computed twice.

    segments: (start, stop, first_position) of this step's rows; sequences: which sequence each segment belongs to.
    """

    kv_heads: int
    segments: tuple[tuple[int, int, int], ...] = ()
    sequences: tuple[Hashable, ...] = ()
    tensors: "Mapping[tuple[int, Hashable], tuple[Tensor, Tensor]]" = field(default_factory=dict)

    def step(self, segments: Sequence[tuple[int, int, int]], sequences: Sequence[Hashable]) -> "ContiguousCache":
        """The same contents, ready for another step."""
        return replace(self, segments=tuple(segments), sequences=tuple(sequences))

    def write(self, layer: int, k: "Tensor", v: "Tensor") -> "ContiguousCache":
        """With k, v [tokens, kv_heads, head_dim] appended to each segment's sequence."""
        import torch

        tensors = dict(self.tensors)
        for (start, stop, first), sequence in zip(self.segments, self.sequences, strict=True):
            parts = [(k[start:stop], v[start:stop])]
            if (old := self.tensors.get((layer, sequence))) is not None:
                parts = [old, *parts]
            past = 0 if old is None else old[0].shape[0]
            assert past == first, f"sequence {sequence} holds {past} positions, the step starts at {first}"
            keys, values = zip(*parts, strict=True)
            tensors[layer, sequence] = torch.cat(keys), torch.cat(values)
        return replace(self, tensors=tensors)

    def read(self, layer: int, index: int) -> "tuple[Tensor, Tensor]":
        """k, v [context, kv_heads, head_dim] of one segment."""
        return self.tensors[layer, self.sequences[index]]


def caches_of(cfg: ModelConfig) -> list[ContiguousCache]:
    """An empty cache for each group of a model's."""
    return [ContiguousCache(shape.kv_heads) for shape in cfg.kv_shapes]


@dataclass(frozen=True)
class LastStates:
    """A StateStore that is a value, as ContiguousCache is one.

    parts: name -> shape; sequences: that of each stretch.
    """

    parts: "Mapping[str, tuple[int, ...]]"
    stretches: tuple[tuple[int, int], ...] = ()
    sequences: tuple[Hashable, ...] = ()
    tensors: "Mapping[tuple[int, str, Hashable], Tensor]" = field(default_factory=dict)

    def step(self, stretches: Sequence[tuple[int, int]], sequences: Sequence[Hashable]) -> "LastStates":
        """The same contents, ready for another step."""
        return replace(self, stretches=tuple(stretches), sequences=tuple(sequences))

    def read(self, layer: int, part: str, start: int) -> "Tensor":
        import torch

        sequence = self.sequences[[first for first, _ in self.stretches].index(start)]
        old = self.tensors.get((layer, part, sequence))
        return torch.zeros(self.parts[part]) if old is None else old

    def write(self, layer: int, part: str, stop: int, value: "Tensor") -> "LastStates":
        sequence = self.sequences[[last for _, last in self.stretches].index(stop)]
        return replace(self, tensors={**self.tensors, (layer, part, sequence): value})


def eager_batch(
    batch: Batch,
    cache: ContiguousCache | Sequence[ContiguousCache],
    sequences: Sequence[Hashable] | None = None,
    state: LastStates | None = None,
) -> ForwardBatch:
    """A filled batch buffer as torch tensors over `cache`, one or that of each group, and `state`; sequences: one key a
    segment (default: its index)."""
    import torch

    segments = segments_of(batch)
    keys = tuple(sequences) if sequences is not None else tuple(range(len(segments)))
    views = (batch.ids[: batch.tokens], batch.positions[: batch.tokens], batch.logit_rows[: batch.rows])
    ids, positions, rows = (torch.from_numpy(view.astype("int64")) for view in views)
    stretches = [(start, stop) for start, stop, _ in segments]
    states = None if state is None else state.step(stretches, keys)
    each = [cache] if isinstance(cache, ContiguousCache) else cache
    first, *further = (group.step(segments, keys) for group in each)
    return ForwardBatch(ids, positions, rows, first, states, list(further))
