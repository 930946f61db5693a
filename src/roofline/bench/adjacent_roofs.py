"""Roofs measured just before and just after the run that they are compared with.

Other guests of a shared host move a chip's limits within minutes, so a share is taken of what the chip reached in the
same minute: the higher of a measurement just before and one just after, reads at the row's own working set.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from roofline.backends.base import Executable, MeasuresRoofs
from roofline.common.errors import RooflineError, UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.hardware.roofs import Roofs, highest
from roofline.ops.batch import PAGE_TOKENS

TOLERANCE = 1.02  # a larger share of the roof is an error of the measurement
TRIES = 3  # other programs can only lower a measured roof, so measuring again may correct it


@dataclass(frozen=True)
class Roof:
    """The roofs measured around a row, and the least time that its steps can take at the higher of the two.

    working_set: bytes that the row's steps read; before, after: the measurements; limit_seconds: the least time of the
    row's steps.
    """

    working_set: int
    before: Roofs
    after: Roofs
    limit_seconds: float

    @property
    def best(self) -> Roofs:
        """The higher figure of each roof."""
        return highest(self.before, self.after)

    def record(self, seconds: float, moved: float) -> JsonObject:
        """The shares of the roofs that a run of `seconds` reached while it read `moved` bytes of weights and KV.

        share_of_roof is the least time, each op at its own roof, over the measured time; read_share is the read rate
        over the read roof.
        """
        roof = self.best.read_bytes_per_s(self.working_set)
        return {
            "share_of_roof": round(self.limit_seconds / seconds, 4),
            "read_share": round(moved / seconds / roof, 4),
            "read_roof_gb_s": round(roof / 1e9, 2),
            "working_set": self.working_set,
            "roofs": {"before": asdict(self.before), "after": asdict(self.after)},
        }


class AdjacentRoofs:
    """Measures the roofs at construction, and again in `roof`, after the row has run.

    executable: whose threads and instruction set, or device, are measured; tokens: in the cache halfway through the
    row. Raises UnsupportedError where the executable cannot measure roofs.
    """

    def __init__(self, executable: Executable, tokens: int) -> None:
        if not isinstance(executable, MeasuresRoofs):
            raise UnsupportedError("a share of the roof", "this backend does not measure roofs", ("backend=cpu",))
        self._executable: MeasuresRoofs = executable
        kv_bytes = -(-tokens // PAGE_TOKENS) * executable.page_bytes
        self.working_set = self._executable.weight_bytes + kv_bytes
        self.before = self._measure()

    def roof(self, name: str, seconds: float, works: Sequence[tuple[float, ...]]) -> Roof:
        """Measures the roofs again, for steps of the sizes `works` that took `seconds`.

        Raises RooflineError when the steps were faster than the roofs allow: then one of the measurements is wrong.
        """
        after = self._measure()
        for _ in range(TRIES):
            best = highest(self.before, after)
            limit = self._executable.limit_seconds(works, best, self.working_set)
            if limit <= seconds * TOLERANCE:
                return Roof(self.working_set, self.before, after, limit)
            after = highest(after, self._measure())
        raise RooflineError(
            f"{name} reached {limit / seconds:.0%} of the roofs measured beside it, which cannot be. "
            "Other programs keep the machine busy: run it again on an idle one."
        )

    def _measure(self) -> Roofs:
        return self._executable.measure_roofs((self.working_set,))
