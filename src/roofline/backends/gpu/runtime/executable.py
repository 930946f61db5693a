"""Runs a Program on a GPU: holds weights, KV cache and arena, launches kernels, captures CUDA graphs."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.adapters import AdapterSlots
from roofline.backends.base import Clock, MonotonicClock, StepCost
from roofline.backends.checkpoint import damaged_tensor
from roofline.backends.gpu.devices import give_back
from roofline.backends.gpu.memory.weights import DeviceWeights, Read
from roofline.backends.gpu.runtime.adapters import DeviceAdapters
from roofline.backends.gpu.runtime.device_errors import told_if_lost
from roofline.backends.gpu.runtime.graphs import Graphs, padded
from roofline.backends.gpu.runtime.lower import Lowering, by_layer
from roofline.backends.gpu.runtime.matmul import Choices, Products, choices_text
from roofline.backends.gpu.runtime.step import DeviceFields, GpuStep, StepSizes, dtypes
from roofline.backends.gpu.runtime.timing import timed
from roofline.backends.prices import PriceTable, StepPrices
from roofline.backends.sampling import Sampled, SampleRows
from roofline.common.errors import CapacityError, UnsupportedError
from roofline.hardware.chips.chips import Chip
from roofline.hardware.roofs import Roofs
from roofline.ops.adapters import PlacedMatrix
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits
from roofline.ops.collectives import RankGroup
from roofline.ops.position_factors import PositionFactors
from roofline.ops.rope_tables import RopeTable, cos_sin
from roofline.ops.traits import Trait
from roofline.program.ir import KvGroup, Program
from roofline.program.text import program_hash

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Runtime:
    """Where a Program runs. device: torch's name ("cuda:0"; "cpu" for Triton's interpreter); graphs: capture decode
    steps, which needs a GPU; exact: no order of sums that depends on the step; choices: see `Products`; roofs: measured
    limits, for `step_cost`; hosted: layers that live on the host, with which steps are not captured; libraries: what
    torch's follow (`libraries.follow_store`); adapter_slots: adapters that may be there at the same time. On "meta"
    there is no memory and nothing computed: see gpu/ahead/model_steps.py."""

    chip: Chip
    device: str
    exact: bool = False
    graphs: bool = True
    choices: Choices = field(default_factory=dict)
    roofs: Roofs | None = None
    hosted: tuple[int, ...] = ()
    libraries: str = ""
    adapter_slots: int = 0

    def here(self) -> "AbstractContextManager[object]":
        """In which kernels are launched on this device: they go to the thread's current one."""
        import torch

        return torch.cuda.device(self.device) if self.device.startswith("cuda") else nullcontext()


class GpuExecutable:
    """Runs a Program compiled for `program.target.gpu(...)`; see `backends.base.Executable`.

    Args:
        program: planned.
        weights: file tensor name -> its bytes; or the weights of another executable of the same model, which are
            shared with it.
        runtime: chip and device.
        limits, num_pages, max_context: of the batch and the cache.
        weights_hash: identity of the weights, part of the fingerprint; it may be computed beside the copying of them.
        group: the other ranks, where the Program is one rank's or one stage's. Its steps are not captured in graphs.

    Raises UnsupportedError for an op or format without a kernel.
    """

    def __init__(
        self,
        program: Program,
        weights: Read | DeviceWeights,
        runtime: Runtime,
        *,
        limits: BatchLimits,
        num_pages: int,
        max_context: int,
        weights_hash: str | Future[str],
        group: RankGroup | None = None,
    ) -> None:
        self.program, self.runtime = program, runtime
        self.limits, self.num_pages, self.max_context = limits, num_pages, max_context
        self.exact = runtime.exact
        self.clock: Clock = MonotonicClock()
        self.batch = Batch(limits)
        self._types = program.types()
        self.vocab_size = self._types[program.logits].width
        self.page_bytes = sum(PAGE_TOKENS * group.token_bytes for group in program.kv_groups.values())
        self.slot_bytes = sum(group.slot_bytes for group in program.state_groups.values())
        assert not self.slot_bytes or limits.state_slots, "a model with recurrent state and no slots for it"
        self._group = group
        self._clocks, self._seconds = False, list[float]()
        self.captures = True  # steps in graphs, where there are any: a bench also times them without
        self._here = runtime.here()
        with self._here:
            if not isinstance(weights, DeviceWeights):
                weights = DeviceWeights(program, weights, activations(program), runtime.device, runtime.hosted)
            self.weights = weights
            self._allocate()
        self._weights_hash = weights_hash if isinstance(weights_hash, str) else weights_hash.result()
        self.weight_bytes = self.weights.nbytes
        self._prices = StepPrices(PriceTable.of(program), runtime.roofs, self.weight_bytes)
        self._last: GpuStep | None = None
        self.fingerprint = self._fingerprint()

    def _allocate(self) -> None:
        import torch

        program, runtime, limits = self.program, self.runtime, self.limits
        self.products = _products(runtime, activations(program))
        tables = {name: _turns(table, self.max_context, runtime.device) for name, table in program.tables.items()}
        factors = {PositionFactors.of(instr.attrs) for instr in program.body}
        self.adapters = AdapterSlots(program, self._set_adapter)
        self._adapters = None
        if self.adapters.sites:
            self._adapters = DeviceAdapters(program, runtime.adapter_slots, self.adapters.rank, runtime.device)
        lowering = Lowering(
            program=program,
            chip=runtime.chip,
            weights=self.weights,
            products=self.products,
            tables=tables,
            factors={f: torch.from_numpy(f.at(np.arange(self.max_context))).to(runtime.device) for f in factors if f},
            device=runtime.device,
            exact=runtime.exact,
            group=self._group,
            adapters=self._adapters,
        )
        self._launches = lowering.launches()
        self._sections = by_layer(self._launches) if runtime.hosted else [(None, self._launches)]
        self._caches = {
            name: _cache(group, self.num_pages, runtime.device) for name, group in program.kv_groups.items()
        }
        self._states = {  # float32 [slots, layers, values of a layer]; no slot is read before it was written
            name: torch.empty(limits.state_slots, group.layers, group.layer_values, device=runtime.device)
            for name, group in program.state_groups.items()
        }
        assert program.plan is not None, "a planned Program"
        self._places = program.plan.places
        size = program.plan.arena.at(tokens=limits.tokens, rows=limits.rows)
        self._arena = torch.empty(size, dtype=torch.uint8, device=runtime.device)
        scratch = _scratch_bytes(program, self.weights, self.products, limits.tokens)
        self._scratch = torch.empty(scratch, dtype=torch.uint8, device=runtime.device)
        self._slots = torch.empty(limits.tokens, dtype=torch.int64, device=runtime.device)  # [tokens]
        self._sampled = torch.zeros(limits.rows, dtype=torch.int32, device=runtime.device)  # [rows]
        self._carried = {  # float32 [tokens, width]
            value.name: torch.empty(limits.tokens, value.type.width, device=runtime.device) for value in program.carried
        }
        self._fields = DeviceFields(self.batch, runtime.device)
        captured = runtime.graphs and runtime.device != "cpu" and self._group is None and not runtime.hosted
        self._graphs = Graphs(self.queue, self.step_of) if captured else None

    def variant(self, program: Program, limits: BatchLimits, num_pages: int) -> "GpuExecutable":
        """Another trace of the same model on the same weights, with a cache and a batch of its own.

        program: compiled for the same target and cache; it may lack weights of ours, not have others. Raises
        CapacityError where the device has no room left beside ours.
        """
        import torch

        try:
            return GpuExecutable(
                program,
                self.weights,
                self.runtime,
                limits=limits,
                num_pages=num_pages,
                max_context=self.max_context,
                weights_hash=self._weights_hash,
                group=self._group,
            )
        except torch.OutOfMemoryError as error:
            assert program.plan is not None, "a planned Program"
            needed = program.plan.arena.at(tokens=limits.tokens, rows=limits.rows) + num_pages * self.page_bytes
            needed += limits.state_slots * self.slot_bytes
            remedy = "Ask for a shorter sequence, or load the model with a smaller cache_tokens."
            free = torch.cuda.mem_get_info(self.runtime.device)[0]
            raise CapacityError("another trace of the model", needed, free, "bytes", remedy) from error

    def _set_adapter(self, slot: int, placed: Sequence[PlacedMatrix]) -> None:
        """Put an adapter's matrices on the device; none: take them away."""
        assert self._adapters is not None, "a Program without places for adapters has no site"
        with told_if_lost(self.runtime.device), self._here:
            self._adapters.set(slot, placed)

    def forward(self) -> None:
        """Queue the step described by `batch`; nothing waits for the device, but with clocks on. Raises LostError
        where the device has gone, here and below."""
        sizes = self._fields.sizes()
        assert sizes.max_context <= self.max_context, "a position beyond the context"
        graphs = self._graphs if self.captures and not self._clocks else None
        larger = padded(sizes, self.limits, self.max_context) if graphs is not None else None
        if larger is not None:
            sizes = larger
            self._fields.pad(sizes)
        with told_if_lost(self.runtime.device), self._here:
            self._fields.upload()
            if graphs is not None and larger is not None:
                self._last = graphs.step(sizes)
                return
            self._last = self.step_of(sizes)
            (self._run_timed if self._clocks else self.queue)(self._last)

    def run(self, carried: "Mapping[str, Tensor]") -> "Tensor":
        """The logits of the step described by `batch`, or what the next stage goes on from, on the device; carried:
        what a stage goes on from, by name."""
        for name, value in carried.items():
            self._carried[name][: self.batch.tokens].copy_(value)
        self.forward()
        return self._device_logits()

    def step_of(self, sizes: StepSizes) -> GpuStep:
        """The tensors that a step of these sizes works on."""
        fields, slots = self._fields.of(sizes), self._slots[: sizes.tokens]
        fields |= {name: value[: sizes.tokens] for name, value in self._carried.items()}
        return GpuStep(
            types=self._types,
            places=self._places,
            sizes=sizes,
            fields=fields,
            slots=slots,
            caches=self._caches,
            states=self._states,
            arena=self._arena,
            scratch=self._scratch,
        )

    def queue(self, step: GpuStep) -> None:
        """Queue the launches of a step whose fields are on the device."""
        for launch in self._walk():
            launch(step)

    def _walk(self) -> Iterator[Callable[[GpuStep], None]]:
        """What a step launches, with each layer's weights there while its turn lasts."""
        yield self._fill_slots
        for layer, launches in self._sections:
            with self.weights.using(layer):
                for _, launch in launches:
                    yield launch

    def _run_timed(self, step: GpuStep) -> None:
        self._seconds = timed(self._walk, step, self.runtime.device)

    def _fill_slots(self, step: GpuStep) -> None:
        from roofline.backends.gpu.kernels.slots import slots

        names = ("header", "ids", "positions", "seg_start", "page_start", "pages")
        fields = {name: step.fields[name] for name in names}
        slots(self.runtime.chip, **fields, sampled=self._sampled, scratch_page=self.num_pages, out=step.slots)

    def _device_logits(self) -> "Tensor":
        """The logits [rows, vocab] of the last step, or what a stage that is not the last made [tokens, width]."""
        assert self._last is not None, "no step was run"
        name, batch = self.program.logits, self.batch
        return self._last.value(name)[: batch.rows if self._types[name].leading == "rows" else batch.tokens]

    def logits(self) -> np.ndarray:
        """float32 [rows, vocab_size] of the last step, copied from the device."""
        logits: np.ndarray = self._device_logits().float().cpu().numpy()
        return logits

    def sample(self, rows: SampleRows) -> Sampled:
        """One id for each logit row; -1 where a row's logits hold NaN. Waits for the device."""
        return self.queue_sample(rows)()

    def queue_sample(self, rows: SampleRows) -> Callable[[], Sampled]:
        return self._queue_sample_of(self._device_logits(), rows)

    def sample_of(self, logits: "Tensor", rows: SampleRows) -> Sampled:
        """One id for each row of logits [rows, vocab] on the device; see `sample`."""
        return self._queue_sample_of(logits, rows)()

    def _queue_sample_of(self, logits: "Tensor", rows: SampleRows) -> Callable[[], Sampled]:
        from roofline.backends.gpu.kernels.sample import sample

        with told_if_lost(self.runtime.device), self._here:
            fetch = sample(self.runtime.chip, logits, rows, out=self._sampled[: rows.rows]).fetch

        def fetched() -> Sampled:
            with told_if_lost(self.runtime.device):
                return fetch()

        return fetched

    @property
    def weights_identity(self) -> str:
        return self._weights_hash

    def damaged_tensor(self) -> str | None:
        return damaged_tensor(self.program, self.weights.read)

    def step_cost(self) -> StepCost:
        return self._prices.of(self.batch)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: Roofs, working_set: int) -> float:
        return self._prices.limit_seconds(works, roofs, working_set)

    def measure_roofs(self, reads: Sequence[int]) -> Roofs:
        from roofline.backends.gpu.measure.roofs import measure_op_roofs

        with self._here:
            return measure_op_roofs(self.runtime.device, reads=reads)

    def clocks(self, on: bool) -> None:
        """Whether `forward` takes the time of each op on the device from now on; the step then runs
        eagerly, without a CUDA graph, and twice."""
        self._clocks = on

    def op_seconds(self) -> list[float]:
        """Return the seconds of each op, as the protocol has it; 0 for views."""
        seconds_of = {id(instr): s for (instr, _), s in zip(self._launches, self._seconds[1:], strict=True)}
        return [seconds_of.get(id(instr), 0.0) for instr in self.program.body]

    def graphs_captured(self) -> str:
        if self._graphs is None:
            return "none asked for"
        return f"{self._graphs.count} captured" + (f", no more: {self._graphs.failed}" if self._graphs.failed else "")

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        del self._arena, self._scratch, self._sampled, self._caches, self._states, self._carried
        del self.weights, self._launches, self._sections
        self._last = None
        give_back(self.runtime.device)

    def _fingerprint(self) -> str:
        import torch
        import triton

        chip, exact = self.runtime.chip.name, self.runtime.exact
        versions = torch.__version__, triton.__version__
        parts = [self._weights_hash, program_hash(self.program), "gpu", chip, *versions, f"exact:{exact}"]
        if not exact:  # exact products follow neither
            parts += [text for text in (choices_text(self.runtime.choices), self.runtime.libraries) if text]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _products(runtime: Runtime, dtype: "torch.dtype") -> Products:
    """Return which kernels multiply on a device; exact ones have a tile for each number of rows where these agree."""
    import torch

    from roofline.backends.gpu.kernels.linear_unpacked import ARRIVED
    from roofline.backends.gpu.runtime.agreement import tiles_agree

    return Products(
        chip=runtime.chip,
        dtype=dtype,
        exact=runtime.exact,
        arrived=torch.zeros(ARRIVED, dtype=torch.int32, device=runtime.device),
        choices=runtime.choices,
        one_tile=runtime.exact and not tiles_agree(runtime.chip, dtype, runtime.device),
    )


def activations(program: Program) -> "torch.dtype":
    """torch's dtype of the rows that linears read."""
    return dtypes()[program.rows_dtype()]


def _turns(table: RopeTable, positions: int, device: str) -> "tuple[Tensor, Tensor]":
    """cos and sin of a rope table, float32 [positions, dim / 2]."""
    import torch

    cos, sin = cos_sin(table, np.arange(positions))
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def _cache(group: KvGroup, pages: int, device: str) -> "tuple[Tensor, Tensor]":
    """k, v [layers, pages + 1, kv_heads, 16, head_dim]; the last page is for rows that are nobody's. Of compressed rows
    v is a view of k's columns that are values.

    Raises UnsupportedError for a format that no kernel reads.
    """
    import torch

    if group.format not in dtypes():
        raise UnsupportedError(f"a cache of {group.format!r} on a GPU", "its kernels do not read it", ("bf16", "fp8"))
    shape = (group.layers, pages + 1, group.kv_heads, PAGE_TOKENS, group.head_dim)
    k = torch.empty(shape, dtype=dtypes()[group.format], device=device)
    return k, k[..., -group.value_dim :] if group.value_dim else torch.empty_like(k)


def _scratch_bytes(program: Program, weights: DeviceWeights, products: Products, tokens: int) -> int:
    """The most that one launch of a step of up to so many tokens may want: products, attention's partial results."""
    from roofline.backends.gpu.partials import workspace_limit

    scratch_bytes = [products.scratch_bytes(parts, tokens) for parts in weights.shapes()]
    scratch_bytes += [4 * workspace_limit(group.value_dim or group.head_dim) for group in program.kv_groups.values()]
    of_heads = {instr.weights[0] for instr in program.body if instr.has(Trait.HEAD_PRODUCT)}
    return max([*scratch_bytes, *(2 * prod(program.weights[name].shape) for name in of_heads)])  # widened
