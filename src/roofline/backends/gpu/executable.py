"""A Program on a GPU: weights, cache and arena in device memory, a list of launches a step, graphs for decode steps."""

import hashlib
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from roofline.backends.base import Clock, MonotonicClock, StepCost
from roofline.backends.gpu.graphs import Graphs, padded
from roofline.backends.gpu.lower import Lowering
from roofline.backends.gpu.products import Choices, Products
from roofline.backends.gpu.step import Sizes, Step, dtypes
from roofline.backends.gpu.weights import DeviceWeights, Read
from roofline.backends.sampling import Sampled, SampleRows
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import Chip
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits
from roofline.ops.collectives import Group
from roofline.ops.rope_tables import cos_sin
from roofline.program.ir import Program
from roofline.program.passes.price import amount, price, work_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Runtime:
    """Where a Program runs. device: torch's name ("cuda:0"; "cpu" for Triton's interpreter); graphs: capture decode
    steps, which needs a GPU; exact: no order of sums that depends on the step; choices: see `Products`."""

    chip: Chip
    device: str
    exact: bool = False
    graphs: bool = True
    choices: Choices = field(default_factory=dict)


class GpuExecutable:
    """Runs a Program compiled for `program.target.gpu(...)`; see `backends.base.Executable`.

    Args:
        program: planned.
        read: file tensor name -> its bytes.
        runtime: chip and device.
        limits, num_pages, max_context: of the batch and the cache.
        weights_hash: identity of the weights, part of the fingerprint.
        group: who shares the matrices, where the Program is one rank's. Its steps are not captured in graphs.

    Raises UnsupportedError for an op or format without a kernel, and for a stage of a pipeline.
    """

    def __init__(
        self,
        program: Program,
        read: Read,
        runtime: Runtime,
        *,
        limits: BatchLimits,
        num_pages: int,
        max_context: int,
        weights_hash: str,
        group: Group | None = None,
    ) -> None:
        import torch

        if program.share.stages > 1:
            raise UnsupportedError("a stage of a pipeline on a GPU", "what a stage goes on from has no place there")
        self.program, self.runtime = program, runtime
        self.limits, self.num_pages, self.max_context = limits, num_pages, max_context
        self.exact = runtime.exact
        self.clock: Clock = MonotonicClock()
        self.batch = Batch(limits)
        types = program.types()
        self.vocab_size = types[program.logits].width
        self.page_bytes = sum(PAGE_TOKENS * group.token_bytes for group in program.kv_groups.values())
        dtype = activations(program)
        self.weights = DeviceWeights(program, read, dtype, runtime.device)
        self.weight_bytes = self.weights.nbytes
        products = Products(runtime.chip, dtype, runtime.exact, runtime.choices)
        tables = {name: self._turns(table) for name, table in program.tables.items()}
        lowering = Lowering(
            program, runtime.chip, self.weights, products, tables, runtime.device, runtime.exact, group
        )  # fmt: skip
        self._launches = lowering.launches()
        self._scratch_page = num_pages
        self._caches = {
            name: self._pages(group.layers, group.kv_heads, group.head_dim, group.format)
            for name, group in program.kv_groups.items()
        }
        assert program.plan is not None, "a planned Program"
        size = program.plan.arena.at(tokens=limits.tokens, rows=limits.rows)
        self._arena = torch.empty(size, dtype=torch.uint8, device=runtime.device)
        self._scratch = torch.empty(self._scratch_bytes(products), dtype=torch.uint8, device=runtime.device)
        self._slots = torch.empty(limits.tokens, dtype=torch.int64, device=runtime.device)  # [tokens]
        self._host = torch.from_numpy(self.batch.buffer)
        self._uploaded = None if runtime.device == "cpu" else torch.cuda.Event()
        if self._uploaded is not None:
            self._host = self._host.clone().pin_memory()
        self._fields = torch.zeros(self.batch.buffer.size, dtype=torch.int32, device=runtime.device)
        captured = runtime.graphs and runtime.device != "cpu" and group is None
        self._graphs = Graphs(self._run, self.step_of) if captured else None
        self._price = price(program)
        self._last: Step | None = None
        self.fingerprint = self._fingerprint(weights_hash)

    def forward(self) -> None:
        """Queue the step described by `batch`; nothing waits for the device."""
        batch = self.batch
        lengths = np.diff(batch.seg_start[: batch.segments + 1])
        context = int(batch.context_len[: batch.segments].max(initial=1))
        assert context <= self.max_context, "a position beyond the context"
        sizes = Sizes(batch.tokens, batch.rows, batch.segments, int(lengths.max(initial=1)), context)
        if self._graphs is not None and sizes.max_query == 1 and sizes.tokens <= self.limits.segments:
            sizes = padded(sizes, min(self.limits.segments, self.limits.rows), self.max_context)
            self._pad(sizes)
            self._upload()
            self._last = self._graphs.step(sizes)
        else:
            self._upload()
            self._last = self.step_of(sizes)
            self._run(self._last)

    def _pad(self, sizes: Sizes) -> None:
        """Empty segments behind the step's own: their rows write to the scratch page, and nobody reads them."""
        batch = self.batch
        n, rows = batch.segments, batch.rows
        batch.seg_start[n + 1 : sizes.segments + 1] = batch.seg_start[n]
        batch.page_start[n + 1 : sizes.segments + 1] = batch.page_start[n]
        batch.context_len[n : sizes.segments] = 0
        batch.logit_rows[rows : sizes.rows] = 0
        batch.ids[batch.tokens : sizes.tokens] = 0
        batch.positions[batch.tokens : sizes.tokens] = 0

    def _upload(self) -> None:
        import torch

        batch = self.batch
        if self._uploaded is not None:  # what is copied from is about to change
            self._uploaded.synchronize()
        tables, rows = batch.offsets["pages"], batch.offsets["logit_rows"]
        used = int(batch.page_start[batch.segments])
        for start, stop in ((0, tables), (tables, tables + used), (rows, rows + self.limits.rows)):
            if self._uploaded is not None:
                self._host[start:stop] = torch.from_numpy(batch.buffer[start:stop])
            self._fields[start:stop].copy_(self._host[start:stop], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def step_of(self, sizes: Sizes) -> Step:
        """The tensors that a step of these sizes works on."""
        fields = {}
        lengths = {"segments": sizes.segments, "tokens": sizes.tokens, "rows": sizes.rows}
        for name, count in (
            ("header", 16), ("ids", lengths["tokens"]), ("positions", lengths["tokens"]),
            ("seg_start", lengths["segments"] + 1), ("context_len", lengths["segments"]),
            ("page_start", lengths["segments"] + 1), ("pages", self.limits.pages), ("logit_rows", lengths["rows"]),
        ):  # fmt: skip
            start = self.batch.offsets[name]
            fields[name] = self._fields[start : start + count]
        slots = self._slots[: sizes.tokens]
        return Step(self.program, sizes, fields, slots, self._caches, self._arena, self._scratch)

    def _run(self, step: Step) -> None:
        self._fill_slots(step)
        for _, launch in self._launches:
            launch(step)

    def _fill_slots(self, step: Step) -> None:
        from roofline.backends.gpu.kernels.slots import slots

        fields = {name: step.fields[name] for name in ("header", "positions", "seg_start", "page_start", "pages")}
        slots(self.runtime.chip, **fields, scratch_page=self._scratch_page, out=step.slots)

    def _device_logits(self) -> "Tensor":
        assert self._last is not None, "no step was run"
        return self._last.value(self.program.logits)[: self.batch.rows]

    def logits(self) -> np.ndarray:
        """float32 [rows, vocab_size] of the last step, copied from the device."""
        logits: np.ndarray = self._device_logits().cpu().numpy()
        return logits

    def sample(self, rows: SampleRows) -> Sampled:
        """One id for each logit row; -1 where a row's logits hold NaN. Waits for the device."""
        from roofline.backends.gpu.kernels.sample import sample

        return sample(self.runtime.chip, self._device_logits(), rows).fetch()

    def step_cost(self) -> StepCost:
        """The price of the step now in `batch`."""
        window = min(group.window for group in self.program.kv_groups.values())
        work = work_of(self.batch, window)
        spent = amount(self._price.total, work)
        sizes = (1, work.tokens, work.rows, work.context, work.pairs)
        return StepCost(spent.flops, spent.weight_bytes, spent.kv_bytes, None, sizes)

    def time_ops(self) -> list[tuple[str, float]]:
        """Run the step from the list and return (op, seconds on the device) for each instruction; views take none."""
        import torch

        sizes = self._last.sizes if self._last is not None and self._graphs is None else None
        batch = self.batch
        lengths = np.diff(batch.seg_start[: batch.segments + 1])
        context = int(batch.context_len[: batch.segments].max(initial=1))
        sizes = sizes or Sizes(batch.tokens, batch.rows, batch.segments, int(lengths.max(initial=1)), context)
        self._upload()
        step = self.step_of(sizes)
        self._last = step
        self._fill_slots(step)
        if self.runtime.device == "cpu":
            seconds = []
            for _, launch in self._launches:
                start = time.perf_counter()
                launch(step)
                seconds.append(time.perf_counter() - start)
        else:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(self._launches) + 1)]
            marks[0].record()
            for (_, launch), mark in zip(self._launches, marks[1:], strict=True):
                launch(step)
                mark.record()
            marks[-1].synchronize()
            seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
        taken = {id(instr): s for (instr, _), s in zip(self._launches, seconds, strict=True)}
        return [(instr.op, taken.get(id(instr), 0.0)) for instr in self.program.body]

    def close(self) -> None:
        """Free the device's memory."""
        if self._graphs is not None:
            self._graphs.close()
        del self._arena, self._scratch, self._caches, self.weights, self._launches
        self._last = None

    def _turns(self, table: Any) -> "tuple[Tensor, Tensor]":
        import torch

        cos, sin = cos_sin(table, np.arange(self.max_context))
        device = self.runtime.device
        return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

    def _pages(self, layers: int, kv_heads: int, head_dim: int, form: str) -> "tuple[Tensor, Tensor]":
        """k, v [layers, pages + 1, kv_heads, 16, head_dim]; the last page is for rows that are nobody's."""
        import torch

        if form not in dtypes():
            raise UnsupportedError(f"a cache of {form!r} on a GPU", "its kernels do not read it", ("bf16", "f16"))
        shape = (layers, self.num_pages + 1, kv_heads, PAGE_TOKENS, head_dim)
        k, v = (torch.empty(shape, dtype=dtypes()[form], device=self.runtime.device) for _ in range(2))
        return k, v

    def _scratch_bytes(self, products: Products) -> int:
        """The most that one launch of any step may want: products, and attention's partial results."""
        from roofline.backends.gpu.kernels.attend import prepare, workspace_floats

        most = max(products.scratch_bytes(parts, self.limits.tokens) for parts in self.weights.matrices.values())
        for instr in self.program.body:
            if instr.op != "attend":
                continue
            kv_heads, head_dim = self.program.types()[instr.inputs[1]].trailing
            shape = {"heads": instr.attr("heads"), "kv_heads": kv_heads, "head_dim": head_dim}
            for tokens, query in ((self.limits.segments, 1), (self.limits.tokens, self.limits.tokens)):
                how = prepare(
                    self.runtime.chip, tokens=tokens, segments=1 if query > 1 else tokens, max_query=query,
                    max_context=self.max_context, window=instr.attr("window"), exact=self.runtime.exact, **shape,
                )  # fmt: skip
                most = max(most, 4 * workspace_floats(how, tokens), 4 * 512 * 2 * 256 * (head_dim + 2))
        return most

    def _fingerprint(self, weights_hash: str) -> str:
        import torch
        import triton

        chip, exact = self.runtime.chip.name, self.runtime.exact
        versions = torch.__version__, triton.__version__
        parts = (weights_hash, self.program.digest(), "gpu", chip, *versions, f"exact:{exact}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def activations(program: Program) -> Any:
    """torch's dtype of the rows that linears read."""
    types = program.types()
    found = {types[i.inputs[0]].dtype for i in program.body if i.op.startswith("linear")}
    assert len(found) == 1, "linears read rows of one dtype"
    return dtypes()[found.pop()]
