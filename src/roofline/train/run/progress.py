"""How far a run is, and what came of it."""

from dataclasses import dataclass, field
from pathlib import Path

from roofline.train.data.receipts import START


@dataclass
class RunProgress:
    """How far a run is: the steps and tokens it has done, its order receipt, and the digests of its rows so far."""

    step: int = 0
    tokens: int = 0
    receipt: str = START
    digests: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Finished:
    """The result of a run. loss: of the last step; evaluations: the last held-out losses that were computed, by label.

    signal: SIGTERM or SIGINT (Ctrl-C), if that stopped it; saved: then the place of the checkpoint, if it was saved.
    reason: why a callback ended it, if one did. written: what rounding did to the model that was written, in words.
    """

    steps: int
    loss: float
    evaluations: dict[str, float]
    folder: Path
    signal: int = 0
    saved: str | None = None
    reason: str | None = None
    written: str = ""

    @property
    def status(self) -> int:
        """The exit status, as a shell gives it."""
        return 128 + self.signal if self.signal else 0
