"""What the processes of a run tell their launcher, by files beside that of their store: that all have met, and how they
stop."""

from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.files import write_atomically

if TYPE_CHECKING:
    from roofline.train.parallel.processes import World

SECONDS = 15.0  # that they have where nothing was said: schedulers end what is there 30 s after SIGTERM
_MET, _ALLOWED, _BEGUN = "met", "stop-timeout", "stopping"


class StopNotes:
    """Notes in a folder, which is that of the launcher; without one nothing is noted.

    A process that hangs never agrees to stop, so its launcher ends it; one that has begun to stop may be writing a
    large checkpoint.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def meet(self) -> None:
        """Note that all processes have come together: from now on one that fails is noticed by the others."""
        self._write(_MET, "")

    def allow(self, seconds: float) -> None:
        """Note in how many seconds after SIGTERM the processes are to have begun to stop."""
        self._write(_ALLOWED, f"{seconds}")

    def begin(self) -> None:
        """Note that all processes have left the loop over steps, and save what is to be saved."""
        self._write(_BEGUN, "")

    @property
    def met(self) -> bool:
        """Whether the processes have come together."""
        return self._read(_MET) is not None

    @property
    def allowed(self) -> float:
        """Seconds from SIGTERM to `begin`."""
        text = self._read(_ALLOWED)
        return float(text) if text else SECONDS

    @property
    def begun(self) -> bool:
        """Whether the processes have left the loop."""
        return self._read(_BEGUN) is not None

    def _write(self, name: str, text: str) -> None:
        if self.folder is not None:
            write_atomically(self.folder / name, text)  # several processes may note the same at a time

    def _read(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text() if self.folder is not None else None
        except FileNotFoundError:
            return None


def notes_of(world: "World") -> StopNotes:
    """The notes of a run that our launcher has started, written by one of its processes."""
    file = world.meeting.file if world.meeting is not None and world.rank == 0 else None
    return StopNotes(file.parent if file is not None else None)
