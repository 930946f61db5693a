"""The price of a step, fast enough to ask for at every step: like instructions are added up once, at load."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.base import StepCost
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import Batch
from roofline.program.passes.price import work_of

if TYPE_CHECKING:
    from roofline.ops.cost import Cost
    from roofline.program.ir import Program


@dataclass(frozen=True)
class PriceTable:
    """Costs of a Program's instructions, equal ones together, as plain numbers.

    window: the kv group's. Of each kind: how many there are, roof of its arithmetic (a field of Roofs) and what that is
    divided by, then the coefficients of 1, tokens, rows, context, pairs in its FLOPs, weight and KV bytes.
    """

    window: int
    counts: list[int]
    rates: list[tuple[str, int]]
    flops: list[list[int]]
    weights: list[list[int]]
    kv: list[list[int]]

    @classmethod
    def of(cls, program: "Program") -> "PriceTable":
        """The table of a Program."""
        from roofline.program.passes.price import arithmetic, price

        (group,) = program.kv_groups.values()
        kinds: Counter[tuple[Cost, tuple[str, int]]] = Counter()
        for instr, cost in price(program).instrs:
            kinds[cost, arithmetic(instr)] += 1
        parts = ("flops", "weight_bytes", "kv_bytes")
        columns = [[list(astuple(getattr(cost, part))) for cost, _ in kinds] for part in parts]
        return cls(group.window, list(kinds.values()), [rate for _, rate in kinds], *columns)


class StepPrices:
    """Costs of a Program's steps, as products of two small matrices.

    working_set: bytes of weights a step reads; the read roof is taken at this size.
    """

    def __init__(self, table: PriceTable, roofs: Roofs | None, working_set: int) -> None:
        self._window, self._rates = table.window, table.rates
        self._counts = np.array(table.counts, np.float64)
        # [kinds, 5]: coefficients of 1, tokens, rows, context, pairs
        self._flops, weights, kv = (np.array(part, np.float64) for part in (table.flops, table.weights, table.kv))
        self._moved = weights + kv
        totals = [self._counts @ part for part in (self._flops, weights, kv)]
        times = () if roofs is None else self._at(roofs, working_set)
        self._all = np.vstack([*totals, *times])  # [3 or 3 + 2 * kinds, 5]: one product a step
        self._work = np.zeros(5)

    def of(self, batch: Batch) -> StepCost:
        """The price of the step in the buffer: each instruction at its own roof, added up."""
        sizes = _sizes(batch, self._window)
        self._work[:] = sizes
        spent = self._all @ self._work
        limit, kinds = None, len(self._counts)
        if len(spent) > 3:
            limit = float(self._counts.dot(np.maximum(spent[3 : 3 + kinds], spent[3 + kinds :])))
        flops, weights, kv = spent[:3].tolist()
        return StepCost(flops, weights, kv, limit, sizes)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: Roofs, working_set: int) -> float:
        """The least time for steps of the sizes `works` (`StepCost.work`) at other roofs and another working set."""
        sizes = np.array(works, np.float64).reshape(-1, 5).T  # [5, steps]
        compute, move = self._at(roofs, working_set)
        return float((self._counts @ np.maximum(compute @ sizes, move @ sizes)).sum())

    def _at(self, roofs: Roofs, working_set: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of arithmetic and of reads, [kinds, 5]: coefficients of a step's size."""
        rates = np.array([getattr(roofs, name) / divisor for name, divisor in self._rates])
        return self._flops / rates[:, None], self._moved / roofs.read_bytes_per_s(working_set)


def _sizes(batch: Batch, window: int) -> tuple[int, ...]:
    """1, tokens, rows, keys read, query-key pairs of the step in the buffer."""
    n = batch.segments
    if n == batch.tokens:  # all segments are one token long
        context = batch.context_len[:n]
        keys = int((np.minimum(context, window) if window else context).sum())
        return 1, n, batch.rows, keys, keys
    work = work_of(batch, window)
    return 1, work.tokens, work.rows, work.context, work.pairs
