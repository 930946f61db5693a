"""Saves checkpoints while training goes on, loads them on any number of ranks, and deletes old ones."""

import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping
from roofline.train.checkpoint.manifest import MANIFEST, encode, folder, step_of, steps
from roofline.train.checkpoint.torch_storage import Reader, Writer
from roofline.train.storage.store import Store

PATIENCE = 1800.0  # seconds that rank 0 waits for the files of the others


class Saver:
    """Saves checkpoints one at a time: `save` copies the tensors, and a thread stores the copy.

    Args:
        keep: complete checkpoints that are not deleted; negative: all.
        grouped: all ranks of the default process group save together.

    Attributes:
        replaced: steps of an earlier run, whose checkpoints are deleted once this run's first one is complete.
    """

    def __init__(self, store: Store, keep: int = -1, grouped: bool = False) -> None:
        self.store, self.keep, self.grouped = store, keep, grouped
        self.replaced: list[int] = []
        self._pool = ThreadPoolExecutor(1, "roofline-checkpoint")
        self._running: list[Future[None]] = []

    def save(self, step: int, state: Mapping[str, torch.Tensor], facts: JsonMapping) -> None:
        """Copy the state and store it in the background, after the previous save, whose failure is raised here.

        state: tensors and DTensors by name; replicated ones are written by one rank. facts: plain data about the run.
        """
        self.wait()
        writer = Writer(step, facts)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(state), storage_writer=writer, no_dist=not self.grouped)
        self._running = [self._pool.submit(self._store, writer)]

    def wait(self) -> None:
        """Wait until everything is stored. Raises StoreError if that failed."""
        while self._running:
            self._running.pop().result()

    def close(self) -> None:
        """Wait until everything is stored, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _store(self, writer: Writer) -> None:
        place = folder(writer.step)
        if writer.buffer.nbytes:
            self.store.put(f"{place}/{writer.file}", writer.buffer.data)
        if writer.manifest is None:
            return
        self._until_stored(place, writer.sizes)
        self.store.put(f"{place}/{MANIFEST}", encode(writer.manifest))
        own = {f"{place}/{name}" for name in (MANIFEST, *writer.sizes)}
        for entry in self.store.list(place):
            if entry.name not in own:  # from an attempt that was killed, or an earlier run
                self.store.delete(entry.name)
        for step in self.replaced:
            if step != writer.step:
                _delete(self.store, step)
        self.replaced = []
        prune(self.store, self.keep)

    def _until_stored(self, place: str, sizes: Mapping[str, int]) -> None:
        """Wait for the files of all ranks, which are written atomically: the manifest must be last."""
        deadline, wait = time.monotonic() + PATIENCE, 0.05
        while True:
            stored_sizes = {entry.name: entry.size for entry in self.store.list(place)}
            missing = [name for name, size in sizes.items() if stored_sizes.get(f"{place}/{name}") != size]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.store.url}/{place}: {missing[0]} of another process never came")
            time.sleep(wait)
            wait = min(2.0, 1.5 * wait)  # listing an object store costs money


def load(store: Store, step: int, state: Mapping[str, torch.Tensor], grouped: bool = False) -> None:
    """Fill tensors and DTensors from a checkpoint, whatever the number of ranks that wrote it.

    Raises ConfigError if a tensor is missing or has another shape, or if a piece is damaged.
    """
    reader = Reader(store, step)
    metadata = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        entry = metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError(f"{store.url}/{folder(step)} has no {name}: it is of another model or optimizer")
        if tuple(entry.size) != tuple(tensor.shape):
            raise ConfigError(
                f"{store.url}/{folder(step)}: {name} has shape {list(entry.size)}, here it is {list(tensor.shape)}"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(state), storage_reader=reader, no_dist=not grouped)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values() if isinstance(cause, ConfigError)]
            raise causes[0] if causes else error from error


def prune(store: Store, count: int) -> None:
    """Delete all but the last `count` complete checkpoints, and older unfinished attempts; negative: none."""
    if count < 0:
        return
    complete = steps(store)
    newest = complete[-count:] if count else []
    for step in {step_of(entry.name.split("/")[0]) for entry in store.list()}:
        if step is not None and step not in newest and (not complete or step <= complete[-1]):
            _delete(store, step)


def _delete(store: Store, step: int) -> None:
    """Delete a checkpoint, its manifest first: an interrupted deletion leaves no complete checkpoint."""
    store.delete(f"{folder(step)}/{MANIFEST}")
    store.delete_prefix(folder(step))
