"""A Program on the C++ core: packed weights, cache and arena in huge pages, one native call a step."""

import hashlib
import math
import platform
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

import roofline._native as _native
from roofline.backends.base import Clock, MonotonicClock, StepCost
from roofline.backends.cpu.lower import PackedPiece, lower
from roofline.backends.cpu.memory import PackedWeights, Source, rope_array
from roofline.backends.cpu.prices import StepPrices
from roofline.backends.sampling import MAX_LOGPROBS, Sampled, SampleRows
from roofline.common.errors import UnsupportedError
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import FIELDS, PAGE_TOKENS, Batch, BatchLimits
from roofline.program.ir import Program


class CpuExecutable:
    """Runs a planned Program; see `backends.base.Executable`.

    Args:
        program: compiled for the target "cpu".
        source: the checkpoint whose bytes are packed.
        weights_hash: identity of the weights, part of the fingerprint; computed beside the packing.
        limits: the largest step.
        num_pages: pages of 16 tokens in the KV cache.
        max_context: positions for which rope tables are made.
        isa, threads: as `resolve_isa` and `usable_threads` chose.
        roofs: measured limits, for `step_cost`; None leaves `limit_seconds` out.

    Raises:
        UnsupportedError: an op, format or shape without a kernel.
    """

    def __init__(
        self,
        program: Program,
        source: Source,
        *,
        weights_hash: Future[str],
        limits: BatchLimits,
        num_pages: int,
        max_context: int,
        isa: str,
        threads: int,
        roofs: Roofs | None = None,
    ) -> None:
        (group,) = program.kv_groups.values()
        if group.head_dim % 16 or group.head_dim > 512:
            raise UnsupportedError(f"head_dim {group.head_dim}", "the cpu backend needs a multiple of 16 up to 512")
        self.isa, self.threads, self.limits = isa, threads, limits
        self.max_context, self.num_pages = max_context, num_pages
        self.clock: Clock = MonotonicClock()
        self.batch = Batch(limits)
        self.vocab_size = program.types()[program.logits].width
        self._weights = PackedWeights(program, source, threads)
        lowered = lower(program, self._weights.addresses)
        self.program = lowered.program
        assert self.program.plan is not None
        self._arena = _native.Memory(self.program.plan.arena.at(tokens=limits.tokens, rows=limits.rows) + 64)
        layer_page = 2 * group.kv_heads * group.head_dim * PAGE_TOKENS * 2  # K and V, bf16
        self.page_bytes = layer_page * group.layers
        self._cache = _native.Memory(self.page_bytes * num_pages)
        attention, self._table = _attention(self.program, max_context)
        attention |= {
            "cache": self._cache.address,
            "page_stride": layer_page,
            "layer_stride": layer_page * num_pages,
        }
        self._core = _native.Executable(
            isa,
            threads,
            np.array(lowered.code, dtype=np.int64),
            attention,
            self.batch.buffer,
            [self.batch.offsets[name] for name in FIELDS],
            self._arena.address,
            list(lowered.logits),
            self.vocab_size,
        )
        self.fingerprint = _fingerprint(program, weights_hash.result(), isa)
        self._prices = StepPrices(self.program, roofs, self._weights.nbytes)
        self._results = Sampled(
            np.empty(limits.rows, np.int32),
            np.empty(limits.rows, np.float32),
            np.empty((limits.rows, MAX_LOGPROBS), np.int32),
            np.empty((limits.rows, MAX_LOGPROBS), np.float32),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices: what a step reads at least once."""
        return self._weights.nbytes

    def packed(self, weight: str) -> tuple[PackedPiece, ...]:
        """Where the pieces of a matrix lie."""
        return self._weights.addresses.matrices[weight]

    def forward(self) -> None:
        """Run the step in `batch`; the GIL is free meanwhile."""
        self._core.forward()

    def logits(self) -> np.ndarray:
        """float32 [rows, vocab_size], a view valid until the next forward."""
        return self._core.logits()

    def sample(self, rows: SampleRows) -> Sampled:
        """One id for each logit row; -1 where a row's logits hold NaN. The arrays are reused by the next call."""
        n = rows.rows
        out = Sampled(
            self._results.ids[:n],
            self._results.logprob[:n],
            self._results.top_ids[:n],
            self._results.top_logprobs[:n],
        )
        self._core.sample(
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seed,
            rows.sample_index,
            rows.position,
            rows.repetition,
            rows.presence,
            rows.frequency,
            rows.hist_start,
            rows.hist_ids,
            rows.hist_counts,
            rows.bias_start,
            rows.bias_ids,
            rows.bias_values,
            rows.logprobs,
            rows.mask,
            out.ids,
            out.logprob,
            out.top_ids,
            out.top_logprobs,
            MAX_LOGPROBS,
        )
        return out

    def step_cost(self) -> StepCost:
        """The price of the step now in `batch`, at the measured roofs where there are any."""
        return self._prices.of(self.batch)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: Roofs, working_set: int) -> float:
        """The least time for steps of these sizes (`StepCost.work`) at `roofs`, reads at `working_set` bytes."""
        return self._prices.limit_seconds(works, roofs, working_set)

    def time_ops(self) -> list[tuple[str, float]]:
        """Run the step and return (op, seconds) for each instruction, as thread 0 saw them, barriers included."""
        return list(zip((i.op for i in self.program.body), self._core.time_ops(), strict=True))

    def close(self) -> None:
        """Drop the core and its memory."""
        del self._core, self._weights, self._arena, self._cache


def _attention(program: Program, max_context: int) -> tuple[dict[str, object], np.ndarray]:
    """What all layers' attention share, and the rope table that must outlive the core."""
    (group,) = program.kv_groups.values()
    writes = [i for i in program.body if i.op == "rope_kv_write"]
    attends = [i for i in program.body if i.op == "attend"]
    (table,) = program.tables.values()
    array = rope_array(table, max_context, group.head_dim)
    scale = np.float32(attends[0].attr("scale") * math.log2(math.e))
    return {
        "heads": int(attends[0].attr("heads")),
        "kv_heads": group.kv_heads,
        "head_dim": group.head_dim,
        "window": int(group.window),
        "interleaved": table.style == "interleaved",
        "q_scale": float(scale),
        "eps": float(writes[0].attr("eps")),
        "table": array.ctypes.data,
    }, array


def _fingerprint(program: Program, weights_hash: str, isa: str) -> str:
    """Same fingerprint: same logit bits. Weights, program with its orders, core, compiler and chip go in."""
    parts = (weights_hash, program.digest(), "cpu", platform.machine(), isa, _native.build_id(), "kv:bf16", "tp:1")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
