"""What a run does every so often beside evaluations and checkpoints, on all of its processes."""

from typing import TYPE_CHECKING, Protocol

from roofline.train.checkpoint.hf_folders import HfFolders
from roofline.train.checkpoint.outcome import TrainedFolder
from roofline.train.run.samples import RunSamples

if TYPE_CHECKING:
    from roofline.train.run.loop import Run


class Recurring(Protocol):
    """It happens every `every` steps and behind the last one; 0: never.

    with_checkpoints: whether it happens too where a signal stops the run and a checkpoint is saved.
    """

    every: int
    with_checkpoints: bool

    def record(self) -> None:
        """Do it, on all ranks together."""


def recurring(run: "Run") -> list[Recurring]:
    """Those that are configured; a row here is what a new one needs."""
    callbacks = run.config.callbacks
    rows: list[Recurring] = []
    if callbacks.samples is not None:
        rows.append(RunSamples(run, callbacks.samples))
    if callbacks.hf_checkpointer is not None:
        rows.append(HfFolders(run, callbacks.hf_checkpointer))
    if run.config.adapter is not None:
        rows.append(TrainedFolder(run))
    return rows
