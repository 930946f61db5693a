"""How long a step takes: the price of its Program at the roofs, made longer by a calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.base import StepCost
from roofline.backends.prices import PriceTable, StepPrices
from roofline.backends.simulated.calibration import Calibration
from roofline.ops.batch import Batch
from roofline.program.passes.price import RoofRates, price

if TYPE_CHECKING:
    from roofline.program.ir import Program


@dataclass(frozen=True)
class LinkTraffic:
    """What devices that share layers send each other in a step, as coefficients of (1, tokens, rows) in bytes that one
    of them receives, and how many exchanges that is."""

    received: tuple[int, int, int]
    exchanges: int

    @classmethod
    def of(cls, program: "Program") -> "LinkTraffic":
        """Those of a Program, which is one device's share."""
        costs = [cost.link_bytes for _, cost in price(program).instrs]
        received = tuple(sum(getattr(cost, name) for cost in costs) for name in ("const", "tokens", "rows"))
        return cls((received[0], received[1], received[2]), sum(any(vars(cost).values()) for cost in costs))


class SimulatedStepTimes:
    """Prices and times of the steps of a model on simulated devices.

    Args:
        programs: of each stage, which run one after the other; of what several devices share, the fullest one's.
        roofs: of each device.
        link_bytes_per_s: that a device receives from those it shares layers with; None: exchanges take link_seconds
            of the calibration alone.
    """

    def __init__(
        self,
        programs: "Sequence[Program]",
        roofs: RoofRates,
        calibration: Calibration,
        link_bytes_per_s: float | None = None,
    ) -> None:
        self.calibration = calibration
        self._prices = [_prices_of(program, roofs) for program in programs]
        links = [LinkTraffic.of(program) for program in programs]
        received = np.sum([link.received for link in links], axis=0)  # [3]: of (1, tokens, rows)
        self._per_link = (received / link_bytes_per_s if link_bytes_per_s else 0.0 * received).tolist()
        self._exchanging = calibration.link_seconds * sum(link.exchanges for link in links)

    def of(self, batch: Batch) -> tuple[float, StepCost]:
        """Seconds of the step in a buffer, and its price."""
        cost = self._prices[0].of(batch)
        for prices in self._prices[1:]:
            cost = cost + prices.of(batch)
        reads = arithmetic = 0.0
        for prices in self._prices:
            by_reads, by_arithmetic = prices.last_bounds()
            reads, arithmetic = reads + by_reads, arithmetic + by_arithmetic
        rows, tokens = batch.rows, batch.tokens
        const, per_token, per_row = self._per_link
        links = self._exchanging + const + per_token * tokens + per_row * rows
        return self.calibration.seconds(reads, arithmetic, rows, tokens) + links, cost


def _prices_of(program: "Program", roofs: RoofRates) -> StepPrices:
    return StepPrices(PriceTable.of(program), roofs, price(program).weight_bytes)
