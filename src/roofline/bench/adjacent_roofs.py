"""Roofs measured just before and just after the run that they are compared with.

Other guests of a shared host move a chip's limits within minutes, so a share is taken of what the chip reached in the
same minute: the higher of a measurement just before and one just after, reads at the row's own working set.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from roofline.backends.base import Executable, MeasuresRoofs
from roofline.common.errors import UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.hardware.roofs import Roofs, correction_note, highest, reachable
from roofline.ops.batch import PAGE_TOKENS


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
            "read_share": round(min(1.0, moved / seconds / roof), 4),
            "read_roof_gb_s": round(roof / 1e9, 2),
            "working_set": self.working_set,
            "correction": correction_note(self.best),
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

    def roof(self, seconds: float, works: Sequence[tuple[float, ...]]) -> Roof:
        """Measures the roofs again, for steps of the sizes `works` that took `seconds`; see `hardware.roofs.reachable`
        where they were faster than that."""

        def limit(roofs: Roofs) -> float:
            return self._executable.limit_seconds(works, roofs, self.working_set)

        after = self._measure()
        best = highest(self.before, after)
        roofs = reachable(best, lambda roofs: limit(roofs) / seconds, self._measure)
        return Roof(self.working_set, self.before, after if roofs is best else roofs, min(limit(roofs), seconds))

    def _measure(self) -> Roofs:
        return self._executable.measure_roofs((self.working_set,))
