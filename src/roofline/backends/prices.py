"""The price of a step, fast enough to ask for at every step: like instructions are added up once, at load."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.base import StepCost
from roofline.ops.batch import Batch
from roofline.program.passes.price import Mixture, RoofRates, rate_of

if TYPE_CHECKING:
    from roofline.ops.cost import Affine, InstructionCost
    from roofline.program.ir import Program


@dataclass(frozen=True)
class PriceTable:
    """Costs of a Program's instructions, equal ones together, as plain numbers.

    windows: of its attentions, 0: full. Of each kind: how many there are, roof of its arithmetic (a field of Roofs) and
    what that is divided by, then the coefficients of 1, tokens, rows, and of context and pairs of each window in turn,
    in its FLOPs, weight and KV bytes. Of a model with experts also `mixture`, how many there are and how many a row
    goes to, and for each kind `experts`, the coefficients of experts and row_experts in its weight bytes.
    """

    windows: list[int]
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
        from roofline.program.passes.price import mixture, price, window_of

        priced = price(program)
        windows = list(priced.windows) or [0]
        kinds: Counter[tuple[InstructionCost, tuple[str, int], int]] = Counter()
        for (instr, cost), rate in zip(priced.instrs, priced.rates, strict=True):
            kinds[cost, rate, windows.index(window_of(instr)) if instr.op == "attend" else 0] += 1

        def columns(amounts: "Affine", at: int) -> list[int]:
            of_window = [amounts.context, amounts.pairs]
            later_windows = len(windows) - at - 1
            return [amounts.const, amounts.tokens, amounts.rows] + [0, 0] * at + of_window + [0, 0] * later_windows

        parts = ("flops", "weight_bytes", "kv_bytes")
        flops, weights, kv = ([columns(getattr(cost, part), at) for cost, _, at in kinds] for part in parts)
        table = cls(
            windows=windows,
            counts=list(kinds.values()),
            rates=[rate for _, rate, _ in kinds],
            flops=flops,
            weights=weights,
            kv=kv,
        )
        experts = mixture(program)
        if experts is None:
            return table
        moved = [[cost.weight_bytes.experts, cost.weight_bytes.row_experts] for cost, _, _ in kinds]
        return replace(table, mixture=list(astuple(experts)), experts=moved)

    def as_json(self) -> dict[str, object]:
        """Its fields, but those of experts where there are none."""
        return {name: value for name, value in asdict(self).items() if value != []}


class StepPrices:
    """Costs of a Program's steps, as products of two small matrices.

    working_set: bytes of weights a step reads; the read roof is taken at this size.
    """

    def __init__(self, table: PriceTable, roofs: RoofRates | None, working_set: int) -> None:
        self._windows, self._rates = table.windows, table.rates
        self._counts = np.array(table.counts, np.float64)
        self._mixture = Mixture(*table.mixture) if table.mixture else None
        # [kinds, 3 + 2 * windows]: the coefficients that PriceTable lists; with a mixture two more for its experts
        self._flops, weights, kv = (np.array(part, np.float64) for part in (table.flops, table.weights, table.kv))
        if table.mixture:
            more = np.zeros((len(self._counts), 2))
            self._flops, kv = np.hstack([self._flops, more]), np.hstack([kv, more])
            weights = np.hstack([weights, np.array(table.experts, np.float64)])
        self._moved = weights + kv
        totals = [self._counts @ part for part in (self._flops, weights, kv)]
        times = () if roofs is None else self._at(roofs, working_set)
        self._all = np.vstack([*totals, *times])  # [3 or 3 + 2 * kinds, columns]: one product a step
        self._work = np.zeros(self._flops.shape[1])
        self._spent = np.zeros(len(self._all))  # of the last step

    def of(self, batch: Batch) -> StepCost:
        """The price of the step in the buffer: each instruction at its own roof, added up."""
        sizes: tuple[float, ...] = _sizes(batch, self._windows)
        if self._mixture is not None:
            sizes = (*sizes, self._mixture.hit(batch.tokens), self._mixture.hit(batch.rows))
        self._work[:] = sizes
        spent = np.matmul(self._all, self._work, out=self._spent)
        limit, kinds = None, len(self._counts)
        if len(spent) > 3:
            limit = float(self._counts.dot(np.maximum(spent[3 : 3 + kinds], spent[3 + kinds :])))
        flops, weights, kv = spent[:3].tolist()
        return StepCost(flops, weights, kv, limit, sizes)

    def last_bounds(self) -> tuple[float, float]:
        """The limit of the last step that was priced, in two parts: seconds of the kinds of instructions that reads
        bound, and of those that arithmetic bounds."""
        kinds = len(self._counts)
        compute, move = self._spent[3 : 3 + kinds], self._spent[3 + kinds :]
        return _bounds(self._counts, compute, move)

    def bounds(self, works: Sequence[tuple[float, ...]], roofs: RoofRates, working_set: int) -> np.ndarray:
        """The same of each of the steps of the sizes `works` at other roofs, float64 [steps, 2]."""
        sizes = np.array(works, np.float64).reshape(-1, len(self._work))  # [steps, columns]
        compute, move = (sizes @ part.T for part in self._at(roofs, working_set))  # [steps, kinds]
        return np.array([_bounds(self._counts, *step) for step in zip(compute, move, strict=True)]).reshape(-1, 2)

    def limit_seconds(self, works: Sequence[tuple[float, ...]], roofs: RoofRates, working_set: int) -> float:
        """The least time for steps of the sizes `works` (`StepCost.work`) at other roofs and another working set."""
        sizes = np.array(works, np.float64).reshape(-1, len(self._work)).T  # [columns, steps]
        compute, move = self._at(roofs, working_set)
        return float((self._counts @ np.maximum(compute @ sizes, move @ sizes)).sum())

    def _at(self, roofs: RoofRates, working_set: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of arithmetic and of reads, [kinds, columns]: coefficients of a step's size."""
        rates = np.array([rate_of(roofs, name) / divisor for name, divisor in self._rates])
        return self._flops / rates[:, None], self._moved / roofs.read_bytes_per_s(working_set)


def _bounds(counts: np.ndarray, compute: np.ndarray, move: np.ndarray) -> tuple[float, float]:
    """Seconds of the kinds, [kinds] of each, that take longer to read than to compute, and of the others."""
    by_reads = float(counts.dot(np.where(move >= compute, move, 0.0)))
    return by_reads, float(counts.dot(np.maximum(compute, move))) - by_reads


def _sizes(batch: Batch, windows: Sequence[int]) -> tuple[int, ...]:
    """1, tokens, rows of the step in the buffer, and for each window the keys read and the query-key pairs: those of
    `program.passes.price.work_of`, over all segments at once."""
    n, tokens = batch.segments, batch.tokens
    context = batch.context_len[:n]
    if n == tokens:  # all segments are one token long
        keys = [int((np.minimum(context, window) if window else context).sum()) for window in windows]
        return 1, n, batch.rows, *(count for key in keys for count in (key, key))
    counts = np.diff(batch.seg_start[: n + 1]).astype(np.int64)
    ends = context.astype(np.int64)
    first = ends - counts
    sizes: list[int] = []
    for window in windows:
        growing = np.clip(window - first, 0, counts) if window else counts  # queries that see everything before them
        pairs = growing * first + growing * (growing + 1) // 2 + (counts - growing) * window
        read = ends - np.maximum(0, first - window + 1) if window else ends
        sizes += [int(read.sum()), int(pairs.sum())]
    return 1, tokens, batch.rows, *sizes
