"""The price of a step, fast enough to ask for at every step: like instructions are added up once, at load."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from roofline.backends.base import StepCost
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import Batch
from roofline.ops.cost import Affine, Cost
from roofline.program.ir import Instr, Program
from roofline.program.passes.price import operations_per_second, price, work_of


class StepPrices:
    """Costs of a Program's steps, as products of two small matrices.

    Args:
        working_set: bytes of weights a step reads; the read roof is taken at this size.
    """

    def __init__(self, program: Program, roofs: Roofs | None, working_set: int) -> None:
        (group,) = program.kv_groups.values()
        self._window = group.window
        kinds: Counter[Cost] = Counter()
        example: dict[Cost, Instr] = {}
        for instr, cost in price(program).instrs:
            kinds[cost] += 1
            example[cost] = instr
        self._counts = np.array(list(kinds.values()), np.float64)
        self._examples = [example[cost] for cost in kinds]
        # [kinds, 5]: coefficients of 1, tokens, rows, context, pairs
        self._flops, weights, kv = (
            np.array([astuple(part(cost)) for cost in kinds], np.float64)
            for part in (lambda c: c.flops, lambda c: c.weight_bytes, lambda c: c.kv_bytes)
        )
        self._moved = weights + kv
        self._totals = np.stack([self._counts @ part for part in (self._flops, weights, kv)])  # [3, 5]
        self._seconds = None if roofs is None else self._at(roofs, working_set)

    def of(self, batch: Batch) -> StepCost:
        """The price of the step in the buffer: each instruction at its own roof, added up."""
        sizes = astuple(_work(batch, self._window))
        work = np.array(sizes, np.float64)
        flops, weights, kv = (self._totals @ work).tolist()
        limit = None
        if self._seconds is not None:
            compute, move = self._seconds
            limit = float(self._counts @ np.maximum(compute @ work, move @ work))
        return StepCost(flops, weights, kv, limit, sizes)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: Roofs, working_set: int) -> float:
        """The least time for steps of the sizes `works` (`StepCost.work`) at other roofs and another working set."""
        sizes = np.array(works, np.float64).reshape(-1, 5).T  # [5, steps]
        compute, move = self._at(roofs, working_set)
        return float((self._counts @ np.maximum(compute @ sizes, move @ sizes)).sum())

    def _at(self, roofs: Roofs, working_set: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of arithmetic and of reads, [kinds, 5]: coefficients of a step's size."""
        rates = np.array([operations_per_second(instr, roofs) for instr in self._examples])
        return self._flops / rates[:, None], self._moved / roofs.read_bytes_per_s(working_set)


def _work(batch: Batch, window: int) -> Affine:
    """1, tokens, rows, keys read, query-key pairs of the step in the buffer."""
    n = batch.segments
    if n == batch.tokens:  # all segments are one token long
        context = batch.context_len[:n]
        seen = int((np.minimum(context, window) if window else context).sum())
        return Affine(1, n, batch.rows, seen, seen)
    work = work_of(batch, window)
    return Affine(1, work.tokens, work.rows, work.context, work.pairs)
