"""A Program on the C++ core: packed weights, cache and arena in huge pages, one native call a step."""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

import roofline._native as _native
from roofline.backends.base import (
    BackgroundCheck,
    Clock,
    ExpertCounts,
    GuessingExecutable,
    MonotonicClock,
    StepCost,
)
from roofline.backends.capacity import Capacity, host_token_bytes
from roofline.backends.cpu.lowered import AttentionKind, Identity, Lowered
from roofline.backends.cpu.weights_check import StepEdges, WeightsCheck
from roofline.backends.prices import PriceTable, StepPrices
from roofline.backends.sampling import MAX_LOGPROBS, Sampled, SampleRows
from roofline.common.errors import CapacityError, UnsupportedError
from roofline.hardware.detect import detect
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import FIELDS, PAGE_TOKENS, Batch, BatchLimits

if TYPE_CHECKING:
    from torch import Tensor

    from roofline.backends.adapters import AdapterSlots
    from roofline.backends.checkpoint import Tensors
    from roofline.backends.cpu.exchange import Exchange
    from roofline.backends.cpu.layout import ImageLayout
    from roofline.backends.cpu.memory import Image
    from roofline.ops.adapters import PlacedMatrix
    from roofline.ops.collectives import RankGroup
    from roofline.program.ir import ArenaPlace, Program

SMALL_ARENA = 1 << 30  # bytes; every machine has so many


@dataclass(frozen=True)
class CpuModel:
    """A Program lowered for the core.

    lowered: what the core is told; identity: hashes that go into the fingerprint; prices: for `step_cost`; program:
    gives the Program that was lowered, when somebody asks for it; kv_dtype: its cache's format, "bf16" or "int8";
    packed: a Program with all weights of its image, None: the image has those of its own.
    """

    lowered: Lowered
    identity: Identity
    prices: PriceTable
    program: "Callable[[], Program]"
    kv_dtype: str
    packed: "Program | None" = None


class CpuExecutable:
    """Runs a lowered Program; see `backends.base.Executable`. `from_program` makes one from a file's weights.

    Args:
        image: memory that holds the weights, at the offsets that `model.lowered` names.
        capacity: the largest step, the longest context, and the pages of the KV cache.
        isa, threads: as `choose_isa` and `choose_threads` chose.
        roofs: measured limits, for `step_cost`; None leaves `limit_seconds` out.
        exchange: makes of (arena, batch) what the Program has other ranks do (see exchange.py).
        cache: pages of another executable of the same model, and its slots of state, shared with it; None: its own.
    """

    exact = True

    def __init__(
        self,
        model: CpuModel,
        image: "Image",
        capacity: Capacity,
        *,
        isa: str,
        threads: int,
        roofs: Roofs | None = None,
        exchange: "Callable[[np.ndarray, Batch], dict[int, Exchange]] | None" = None,
        cache: "tuple[_native.Memory, _native.Memory | None] | None" = None,
    ) -> None:
        lowered, limits, num_pages = model.lowered, capacity.limits, capacity.num_pages
        code = lowered.checked  # before any of its numbers is used
        self.isa, self.threads, self.limits = isa, threads, limits
        self.max_context, self.num_pages = capacity.max_context, num_pages
        self.clock: Clock = MonotonicClock()
        self.batch = Batch(limits)
        self.vocab_size = lowered.vocab
        self.image, self._model = image, model
        self.weights_check: BackgroundCheck | None = None
        self.guesser: GuessingExecutable | None = None  # see `backends.base.KeepsHidden`
        self._steps = StepEdges()
        self._arena = _native.Memory(_arena_bytes(lowered, limits) + 64)
        self._exchanges = exchange(self._arena.view(), self.batch) if exchange is not None else {}
        self._layer_pages = [(group.layers, _layer_page_bytes(group, model.kv_dtype)) for group in lowered.groups]
        self.page_bytes = sum(layers * size for layers, size in self._layer_pages)
        self.slot_bytes = code.slot_bytes
        state_bytes = self.slot_bytes * limits.state_slots
        if cache is None:
            state = _native.Memory(state_bytes) if state_bytes else None
            cache = _native.Memory(self.page_bytes * num_pages), state
        self._cache, self._state = cache
        self._core = _native.Executable(
            isa,
            threads,
            code,
            image.view(),
            self._rope_table(),
            self._factors(),
            self._arena,
            self._cache,
            self._state,
            model.kv_dtype == "int8",
            self.batch.buffer,
            [self.batch.offsets[name] for name in FIELDS],
            [
                *(limits.tokens, limits.segments, limits.rows, limits.pages),
                *(num_pages, self.max_context, limits.state_slots),
            ],
        )
        self.fingerprint = _fingerprint(model.identity.weights_hash, model.identity.program_hash, isa, model.kv_dtype)
        self.program_hash = model.identity.program_hash
        self._prices = StepPrices(model.prices, roofs, lowered.matrix_bytes)
        self._results = Sampled(
            np.empty(limits.rows, np.int32),
            np.empty(limits.rows, np.float32),
            np.empty((limits.rows, MAX_LOGPROBS), np.int32),
            np.empty((limits.rows, MAX_LOGPROBS), np.float32),
        )

    @classmethod
    def from_program(
        cls,
        program: "Program | tuple[Program, Program]",
        source: "Tensors",
        capacity: Capacity,
        *,
        weights_hash: Future[str],
        isa: str,
        threads: int,
        roofs: Roofs | None = None,
        group: "RankGroup | None" = None,
    ) -> "CpuExecutable":
        """The executable of a Program compiled for the target "cpu".

        Args:
            program: the model's; or that and the Program of its layer that guesses, which shares weights with it.
            source: the checkpoint whose bytes are packed.
            weights_hash: identity of the weights, part of the fingerprint (hex); computed beside the packing.
            group: who shares the matrices, where the Program is one rank's.

        Raises:
            UnsupportedError: an op, format or shape without a kernel, or other ranks than the Program is for.
        """
        from roofline.backends.cpu.exchange import exchanges
        from roofline.backends.cpu.layout import lay_out, with_weights_of
        from roofline.backends.cpu.lower import keep_operands, lower
        from roofline.backends.cpu.memory import pack_image
        from roofline.program.text import program_hash

        program, guesser = program if isinstance(program, tuple) else (program, None)
        weights = program if guesser is None else with_weights_of(program, guesser)
        planned, layout = keep_operands(program), lay_out(weights, capacity.max_context)
        lowered = lower(planned, layout)  # refuses what has no kernel before anything is packed
        if guesser is not None:
            lower(keep_operands(guesser), layout)
        image = pack_image(weights, layout, source, threads)
        model = _model(planned, lowered, Identity(weights_hash.result(), program_hash(program)))
        exchange = partial(exchanges, planned, group=group)
        model = replace(model, packed=None if guesser is None else weights)
        executable = cls(model, image, capacity, isa=isa, threads=threads, roofs=roofs, exchange=exchange)
        if guesser is not None:
            executable.guesser = executable.variant(
                guesser, replace(capacity.limits, state_slots=0), capacity.num_pages, group
            )
        return executable

    def take_fingerprint_of(self, program_hash: str) -> None:
        """Take the fingerprint of a Program that gives the same bits: of this one before it had places for adapters,
        whose rows without an adapter keep their bits. Those with one are told apart by the adapter's digest.
        """
        model = self._model
        self.fingerprint = _fingerprint(model.identity.weights_hash, program_hash, self.isa, model.kv_dtype)

    def variant(
        self, program: "Program", limits: BatchLimits, num_pages: int, group: "RankGroup | None" = None
    ) -> "CpuExecutable":
        """Another trace of the same model on the same packed weights, with a cache and a batch of its own.

        program: compiled for the same target and cache; it may lack weights of ours, not have others; group: who shares
        its matrices, where it is one rank's.
        """
        from roofline.backends.cpu.exchange import exchanges
        from roofline.backends.cpu.lower import keep_operands, lower
        from roofline.program.text import program_hash

        planned = keep_operands(program)
        identity = Identity(self._model.identity.weights_hash, program_hash(program))
        model = replace(_model(planned, lower(planned, self.layout), identity), packed=self._model.packed)
        capacity, exchange = Capacity(limits, self.max_context, num_pages), partial(exchanges, planned, group=group)
        return CpuExecutable(model, self.image, capacity, isa=self.isa, threads=self.threads, exchange=exchange)

    def headless(self) -> "CpuExecutable":
        """See `backends.base.GivesHidden`."""
        from roofline.backends.cpu.lower import keep_operands, lower
        from roofline.program.passes.headless import headless
        from roofline.program.passes.plan import plan
        from roofline.program.text import program_hash

        if self._model.lowered.exchanges:
            raise UnsupportedError("hidden states of a share of a model", "its ranks compute logits alone")
        program = plan(headless(self.program))
        planned = keep_operands(program)
        identity = Identity(self._model.identity.weights_hash, program_hash(program))
        model = replace(_model(planned, lower(planned, self.layout), identity), packed=self._model.packed)
        capacity = Capacity(replace(self.limits, rows=self.limits.tokens), self.max_context, self.num_pages)
        stores = self._cache, self._state
        return CpuExecutable(model, self.image, capacity, isa=self.isa, threads=self.threads, cache=stores)

    @property
    def causal(self) -> bool:
        return not self._model.lowered.checked.both_ways

    @cached_property
    def program(self) -> "Program":
        return self._model.program()

    @property
    def weights_identity(self) -> str:
        return self._model.identity.weights_hash

    @property
    def weight_bytes(self) -> int:
        return self._model.lowered.matrix_bytes

    @cached_property
    def layout(self) -> "ImageLayout":
        """Where the weights lie in `image`."""
        from roofline.backends.cpu.layout import lay_out

        return lay_out(self.packed_program, self._model.lowered.positions)

    @property
    def packed_program(self) -> "Program":
        """A Program with all weights in `image`: its own, or one with those of a layer that guesses too."""
        return self._model.packed or self.program

    def damaged_tensor(self) -> str | None:
        from roofline.backends.cpu.truth import damaged_tensor

        return damaged_tensor(self)

    @cached_property
    def adapters(self) -> "AdapterSlots":
        from roofline.backends.adapters import AdapterSlots

        return AdapterSlots(self.program, self._set_adapter)

    def _set_adapter(self, slot: int, placed: "Sequence[PlacedMatrix]") -> None:
        """Give the core an adapter's matrices in one piece of memory, which it keeps; none: take them away."""
        parts: list[int] = []
        gains: list[int] = []
        arrays: list[np.ndarray] = []
        at = 0
        for place in placed:
            a, b = place.matrix.a, place.matrix.b
            parts += [place.group, place.first, place.column, b.shape[1], a.shape[0], at, at + a.size]
            arrays += [a.reshape(-1), b.reshape(-1)]
            at += a.size + b.size
            gains.append(-1 if place.gain is None else at)
            if place.gain is not None and place.shift is not None:
                arrays += [place.gain, place.shift]
                at += 2 * place.gain.size
        data = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
        scales = np.array([place.matrix.scale for place in placed], np.float32)
        places = [np.array(gains, np.int64)] if max(gains, default=-1) >= 0 else []  # of DoRA alone
        self._core.set_adapter(slot, data, np.array(parts, np.int64), scales, *places)

    def choose(self, ops: Iterable[int], regime: int, variant: str) -> None:
        """How these ops (indices into the Program) are computed in steps of that regime (select.REGIMES).

        Changes time, never a bit. Raises ValueError for a variant that they do not have.
        """
        for op in ops:
            self._core.choose(op, regime, variant)

    def forward(self) -> None:
        """Run the step in `batch`; the GIL is free meanwhile."""
        self._steps.count += 1
        try:
            at = self._core.forward()
            while exchange := self._exchanges.get(at):
                exchange()
                at = self._core.forward(at + 1)
        finally:
            self._steps.count += 1

    def page_views(self, page: int) -> list[memoryview]:
        """See `backends.base.KeepsPages`: a part for each layer, as native/executable.cpp lays them out."""
        assert 0 <= page < self.num_pages
        parts: list[memoryview] = []
        at, cache = 0, self._cache.view()
        for layers, size in self._layer_pages:
            for _ in range(layers):
                parts.append(cache[at + page * size : at + (page + 1) * size].data)
                at += size * self.num_pages
        return parts

    def slot_views(self, slot: int) -> list[memoryview]:
        """See `backends.base.CopiesState`: a slot lies in one piece."""
        assert self._state is not None, "the model has state"
        assert 0 <= slot < self.limits.state_slots
        return [self._state.view()[slot * self.slot_bytes : (slot + 1) * self.slot_bytes].data]

    def run(self, carried: "Mapping[str, Tensor]") -> "Tensor":
        """As `forward`, for ranks: the step's logits, a view valid until the next."""
        import torch

        assert not carried, "the cpu backend has no stages"
        self.forward()
        return torch.from_numpy(self.logits())

    def logits(self) -> np.ndarray:
        return self._core.logits()

    def hidden(self) -> np.ndarray:
        """See `backends.base.KeepsHidden`, and of a layer that guesses `GuessingExecutable`."""
        assert self.program.hidden is not None, "a Program that keeps hidden rows"
        return self._rows_of(self.program.hidden)

    def take_hidden(self, rows: np.ndarray) -> None:
        """See `backends.base.GuessingExecutable`."""
        from roofline.program.ir import HIDDEN

        self._rows_of(HIDDEN)[:] = rows

    @cached_property
    def _places(self) -> "dict[str, tuple[ArenaPlace, bool]]":
        """Places of hidden rows that were asked for, and whether they are of logit rows."""
        return {}

    def _rows_of(self, name: str) -> np.ndarray:
        """float32 [tokens or rows of the step in `batch`, width]: a value where it lies in the arena."""
        if name not in self._places:
            plan = self.program.plan
            assert plan is not None, "planned by keep_operands"
            self._places[name] = plan.places[name], self.program.types()[name].leading == "rows"
        (place, by_row), tokens, rows = self._places[name], self.batch.tokens, self.batch.rows
        start, count = int(place.offset.at(tokens=tokens, rows=rows)), rows if by_row else tokens
        values: np.ndarray = self._arena.view()[start : start + count * place.stride].view(np.float32)
        return values.reshape(count, -1) if count else values.reshape(0, place.stride // 4)

    def sample(self, rows: SampleRows) -> Sampled:
        """One id for each logit row; -1 where a row's logits hold NaN. The arrays are reused by the next call."""
        return self._sample(rows, None)

    def sample_again(self, rows: SampleRows, chosen: np.ndarray) -> Sampled:
        """See `backends.base.Resamples`."""
        return self._sample(rows, chosen)

    def _sample(self, rows: SampleRows, chosen: np.ndarray | None) -> Sampled:
        n = rows.rows
        out = Sampled(*(results[:n] for results in vars(self._results).values()))
        # The core takes the fields of both in the order of their declarations.
        self._core.sample(*vars(rows).values(), *vars(out).values(), MAX_LOGPROBS, chosen)
        return out

    def sample_of(self, logits: "Tensor", rows: SampleRows) -> Sampled:
        """As `sample`, for ranks: each has all of its step's logits, so `logits` are this executable's own."""
        return self.sample(rows)

    def step_cost(self) -> StepCost:
        return self._prices.of(self.batch)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: Roofs, working_set: int) -> float:
        return self._prices.limit_seconds(works, roofs, working_set)

    def measure_roofs(self, reads: Sequence[int]) -> Roofs:
        from roofline.backends.cpu.roofs import measure_roofs

        return measure_roofs(quick=True, threads=self.threads, isa=self.isa, reads=reads)

    def clocks(self, on: bool) -> None:
        self._core.timing = on

    def op_seconds(self) -> list[float]:
        return self._core.op_seconds()

    def expert_counts(self) -> ExpertCounts:
        return ExpertCounts(*self._core.expert_counts())

    def weights_hash(self, nbytes: int) -> str:
        return hashlib.sha256(self.image.view()[:nbytes].data).hexdigest()

    def check_weights(self, nbytes: int, sha256: str, problem: str, ended: Callable[[str | None], None]) -> None:
        self.weights_check = WeightsCheck(self.image, nbytes, sha256, problem, self._steps, ended)
        weakref.finalize(self, self.weights_check.stop)  # a model that nobody has any more need not be checked

    def close(self) -> None:
        if self.weights_check is not None:
            self.weights_check.stop()
        del self._core, self.image, self._arena, self._cache, self._state

    def _rope_table(self) -> np.ndarray | None:
        """Rope tables of our own where more positions are served than the image's have."""
        lowered = self._model.lowered
        if lowered.table < 0 or self.max_context <= lowered.positions:
            return None
        from roofline.backends.cpu.memory import rope_array

        return np.concatenate([rope_array(t, self.max_context).reshape(-1) for t in self.program.tables.values()])

    def _factors(self) -> np.ndarray | None:
        """Factors by position of our own where more positions are served than the image's have."""
        if self.max_context <= self._model.lowered.positions:
            return None
        from roofline.backends.cpu.layout import position_factors

        factors = position_factors(self.program)
        return None if factors is None else factors.at(np.arange(self.max_context))


def _layer_page_bytes(group: AttentionKind, kv_dtype: str) -> int:
    """Bytes of a page of one layer of a group."""
    return PAGE_TOKENS * host_token_bytes(kv_dtype, group.kv_heads, group.head_dim, group.value_dim)


def _arena_bytes(lowered: Lowered, limits: BatchLimits) -> int:
    """Raises CapacityError where the largest step needs more memory than is free."""
    constant, per_token, per_row = lowered.arena
    needed = constant + per_token * limits.tokens + per_row * limits.rows
    if needed <= SMALL_ARENA:
        return needed  # to look for free memory would take a part of a millisecond
    free = detect().memory_available
    if free is not None and needed > free:
        raise CapacityError("a step", needed, free, "bytes", "Lower max_batch_tokens or max_running.")
    return needed


def _model(planned: "Program", lowered: Lowered, identity: Identity) -> CpuModel:
    (kv_dtype,) = {group.format for group in planned.kv_groups.values()}
    return CpuModel(lowered, identity, PriceTable.of(planned), lambda: planned, kv_dtype)


def _fingerprint(weights_hash: str, program_hash: str, isa: str, kv_dtype: str) -> str:
    """Same fingerprint: same logit bits. Weights, program with its orders, core, compiler and chip go in."""
    parts = (weights_hash, program_hash, "cpu", os.uname().machine, isa, _native.build_id(), f"kv:{kv_dtype}", "tp:1")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
