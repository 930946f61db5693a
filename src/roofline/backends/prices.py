"""The price of a step, fast enough to ask for at every step: like instructions are added up once, at load."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.base import StepCost
from roofline.hardware.roofs import Roofs
from roofline.ops.batch import Batch
from roofline.program.passes.price import Mixture, work_of

if TYPE_CHECKING:
    from roofline.ops.cost import Cost
    from roofline.program.ir import Program

SIZES = 5  # of a step: 1, tokens, rows, context, pairs


@dataclass(frozen=True)
class PriceTable:
    """Costs of a Program's instructions, equal ones together, as plain numbers.

    window: the kv group's. Of each kind: how many there are, roof of its arithmetic (a field of Roofs) and what that is
    divided by, then the coefficients of 1, tokens, rows, context, pairs in its FLOPs, weight and KV bytes. Of a model
    with experts also `mixture`, how many there are and how many a row goes to, and for each kind `experts`, the
    coefficients of experts and row_experts in its weight bytes.
    """

    window: int
    counts: list[int]
    rates: list[tuple[str, int]]
    flops: list[list[int]]
    weights: list[list[int]]
    kv: list[list[int]]
    mixture: list[int] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, program: "Program") -> "PriceTable":
        """The table of a Program."""
        from roofline.program.passes.price import arithmetic, mixture, price

        (group,) = program.kv_groups.values()
        kinds: Counter[tuple[Cost, tuple[str, int]]] = Counter()
        for instr, cost in price(program).instrs:
            kinds[cost, arithmetic(instr)] += 1
        parts = ("flops", "weight_bytes", "kv_bytes")
        flops, weights, kv = ([list(astuple(getattr(cost, part))[:SIZES]) for cost, _ in kinds] for part in parts)
        table = cls(group.window, list(kinds.values()), [rate for _, rate in kinds], flops, weights, kv)
        experts = mixture(program)
        if experts is None:
            return table
        moved = [[cost.weight_bytes.experts, cost.weight_bytes.row_experts] for cost, _ in kinds]
        return replace(table, mixture=list(astuple(experts)), experts=moved)

    def as_json(self) -> dict[str, object]:
        """Its fields, but those of experts where there are none."""
        return {name: value for name, value in asdict(self).items() if value != []}


class StepPrices:
    """Costs of a Program's steps, as products of two small matrices.

    working_set: bytes of weights a step reads; the read roof is taken at this size.
    """

    def __init__(self, table: PriceTable, roofs: Roofs | None, working_set: int) -> None:
        self._window, self._rates = table.window, table.rates
        self._counts = np.array(table.counts, np.float64)
        self._mixture = Mixture(*table.mixture) if table.mixture else None
        # [kinds, 5]: coefficients of 1, tokens, rows, context, pairs; with a mixture two more for its experts
        self._flops, weights, kv = (np.array(part, np.float64) for part in (table.flops, table.weights, table.kv))
        if table.mixture:
            more = np.zeros((len(self._counts), 2))
            self._flops, kv = np.hstack([self._flops, more]), np.hstack([kv, more])
            weights = np.hstack([weights, np.array(table.experts, np.float64)])
        self._moved = weights + kv
        totals = [self._counts @ part for part in (self._flops, weights, kv)]
        times = () if roofs is None else self._at(roofs, working_set)
        self._all = np.vstack([*totals, *times])  # [3 or 3 + 2 * kinds, 5 or 7]: one product a step
        self._work = np.zeros(self._flops.shape[1])

    def of(self, batch: Batch) -> StepCost:
        """The price of the step in the buffer: each instruction at its own roof, added up."""
        sizes: tuple[float, ...] = _sizes(batch, self._window)
        if self._mixture is not None:
            sizes = (*sizes, self._mixture.hit(batch.tokens), self._mixture.hit(batch.rows))
        self._work[:] = sizes
        spent = self._all @ self._work
        limit, kinds = None, len(self._counts)
        if len(spent) > 3:
            limit = float(self._counts.dot(np.maximum(spent[3 : 3 + kinds], spent[3 + kinds :])))
        flops, weights, kv = spent[:3].tolist()
        return StepCost(flops, weights, kv, limit, sizes)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: Roofs, working_set: int) -> float:
        """The least time for steps of the sizes `works` (`StepCost.work`) at other roofs and another working set."""
        sizes = np.array(works, np.float64).reshape(-1, len(self._work)).T  # [5 or 7, steps]
        compute, move = self._at(roofs, working_set)
        return float((self._counts @ np.maximum(compute @ sizes, move @ sizes)).sum())

    def _at(self, roofs: Roofs, working_set: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of arithmetic and of reads, [kinds, 5 or 7]: coefficients of a step's size."""
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
