"""The price of a step, fast enough to ask for at every step: like instructions are added up once, at load."""

from collections import Counter

import numpy as np

from roofline.backends.base import StepCost
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import Batch
from roofline.program.ir import Program
from roofline.program.passes.price import Amount, price, seconds


class StepPrices:
    """Costs of a Program's steps.

    Args:
        working_set: bytes of weights a step reads; the read roof is taken at this size.
    """

    def __init__(self, program: Program, roofs: Roofs | None, working_set: int) -> None:
        (group,) = program.kv_groups.values()
        self._window, self._roofs, self._working_set = group.window, roofs, working_set
        priced = price(program)
        kinds: Counter[tuple[object, ...]] = Counter()
        example = {}
        for instr, cost in priced.instrs:
            key = (instr.op, cost.flops, cost.weight_bytes, cost.kv_bytes)
            kinds[key] += 1
            example[key] = (instr, cost)
        self._kinds = [(*example[key], count) for key, count in kinds.items()]
        total = priced.total
        self._total = (total.flops, total.weight_bytes, total.kv_bytes)

    def of(self, batch: Batch) -> StepCost:
        """The price of the step in the buffer."""
        work = _work(batch, self._window)
        flops, weights, kv = (amount.at(**work) for amount in self._total)
        limit = None
        if self._roofs is not None:
            limit = 0.0
            for instr, cost, count in self._kinds:
                spent = Amount(cost.flops.at(**work), cost.weight_bytes.at(**work), cost.kv_bytes.at(**work), 0)
                limit += count * seconds(instr, spent, self._roofs, self._working_set)
        return StepCost(float(flops), float(weights), float(kv), limit)


def _work(batch: Batch, window: int) -> dict[str, int]:
    """tokens, rows, keys read, query-key pairs of the step in the buffer."""
    n = batch.segments
    if n == batch.tokens:  # all segments are one token long
        seen = batch.context_len[:n]
        seen = int((np.minimum(seen, window) if window else seen).sum())
        return {"tokens": n, "rows": batch.rows, "context": seen, "pairs": seen}
    from roofline.program.passes.price import work_of

    return dict(vars(work_of(batch, window)))


