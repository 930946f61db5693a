"""Saves checkpoints while training goes on, loads them on any number of ranks, and deletes old ones.

Each rank stores its pieces of the tensors, one behind the other, as one file: STORE/step-00000200/ATTEMPT-00003.bin is
that of rank 3. Of equal pieces on several ranks one is stored.
"""

import itertools
import math
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.checkpoint.manifest import MANIFEST, encode, folder, read, step_of, steps
from roofline.train.model.tensor_parallel import TensorPieces
from roofline.train.storage.store import LISTING_SECONDS, Store, unlisted

State = Mapping[str, torch.Tensor | TensorPieces]  # full tensors, or what this rank has of them
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_TYPES = (*_FLOATS, torch.uint8, torch.int32, torch.int64, torch.bool)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}
_log = log.get("train")
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

    def save(self, step: int, state: State, facts: JsonMapping) -> None:
        """Copy the state and store it in the background, after the previous save, whose failure is raised here.

        facts: plain data about the run.
        """
        self.wait()
        rank, attempt = 0, [secrets.token_hex(4)]  # tells this attempt's files from those of one that was killed
        if self.grouped:
            rank = dist.get_rank()
            dist.broadcast_object_list(attempt)
        file, tensors = f"{attempt[0]}-{rank:05d}.bin", {name: _pieces(value) for name, value in state.items()}
        buffer, entries = _pack(tensors, file)
        entries_by_rank: list[JsonObject] = [entries]
        if self.grouped:
            entries_by_rank = [{} for _ in range(dist.get_world_size())]
            dist.gather_object(entries, entries_by_rank if rank == 0 else None)
        tensor_entries = _tensor_entries(tensors, entries_by_rank) if rank == 0 else None
        self._running = [self._pool.submit(self._store, step, facts, file, buffer, tensor_entries)]

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

    def _store(
        self, step: int, facts: JsonMapping, file: str, buffer: NDArray[np.uint8], tensors: JsonMapping | None
    ) -> None:
        """Store this rank's file, and on rank 0 the manifest once the files of all ranks are there."""
        place = folder(step)
        if buffer.nbytes:
            self.store.put(f"{place}/{file}", buffer.data)
        if tensors is None:
            return
        sizes: dict[str, int] = {}
        for piece in itertools.chain(*(tensor["pieces"] for tensor in tensors.values())):
            sizes[piece["file"]] = max(sizes.get(piece["file"], 0), piece["start"] + piece["bytes"])
        self._until_stored(place, sizes)
        self.store.put(f"{place}/{MANIFEST}", encode(step, facts, tensors))
        own_files = {f"{place}/{name}" for name in (MANIFEST, *sizes)}
        for entry in self.store.list(place):
            if entry.name not in own_files:  # from an attempt that was killed, or an earlier run
                self.store.delete(entry.name)
        for earlier in self.replaced:
            if earlier != step:
                _delete(self.store, earlier)
        self.replaced = []
        prune(self.store, self.keep)

    def _until_stored(self, place: str, sizes: Mapping[str, int]) -> None:
        """Wait for the files of all ranks, which are written atomically: the manifest must be last."""
        begun, wait = time.monotonic(), 0.05
        unlisted_since: float | None = None
        while True:
            stored_sizes = {entry.name: entry.size for entry in self.store.list(place)}
            missing = [name for name, size in sizes.items() if stored_sizes.get(f"{place}/{name}") != size]
            if not missing:
                return
            now = time.monotonic()
            if f"{place}/{missing[0]}" in stored_sizes or not self.store.exists(f"{place}/{missing[0]}"):
                unlisted_since = None
            elif now - (unlisted_since := unlisted_since or now) > LISTING_SECONDS:
                raise unlisted(self.store, f"{place}/{missing[0]}")
            if now - begun > PATIENCE:
                raise ConfigError(f"{self.store.url}/{place}: {missing[0]} of another process never came")
            time.sleep(wait)
            wait = min(2.0, 1.5 * wait)  # listing an object store costs money


def load(store: Store, step: int, state: State, grouped: bool = False) -> None:
    """Fill tensors from a checkpoint, whatever the number of ranks that wrote it.

    Raises ConfigError, on all ranks, if a tensor is missing or has another shape, or if a piece is damaged.
    """
    stored, place = read(store, step)["tensors"], folder(step)
    tensors = {name: _pieces(value) for name, value in state.items()}
    for name, tensor in tensors.items():
        if name not in stored:
            raise ConfigError(f"{store.url}/{place} has no {name}: it is of another model or optimizer")
        shape = stored[name]["shape"]
        if tuple(shape) != tensor.shape:
            raise ConfigError(f"{store.url}/{place}: {name} has shape {shape}, here it is {list(tensor.shape)}")
    failures: list[ConfigError | None] = [None]
    try:
        for name, tensor in tensors.items():
            _fill(tensor, store, place, name, stored[name])
    except ConfigError as error:
        failures = [error]
    if grouped:
        own, failures = failures[0], [None] * dist.get_world_size()
        dist.all_gather_object(failures, own)
    for failure in failures:
        if failure is not None:
            raise failure


def check(store: Store, step: int) -> None:
    """Read all of a checkpoint. Raises ConfigError if something is missing or is not what was written."""
    for name, tensor in read(store, step)["tensors"].items():
        for piece in tensor["pieces"]:
            _read(store, folder(step), name, piece)


def last_intact(store: Store, steps: Sequence[int]) -> int | None:
    """The last of these steps whose checkpoint is what was written, after reading all of it."""
    for step in reversed(steps):
        try:
            check(store, step)
        except ConfigError as error:
            _log.warning("%s", error)
        else:
            return step
    return None


def damage(store: Store, step: int, error: ConfigError, remedy: str) -> str | None:
    """The message for a checkpoint that is damaged, with the last good one before it; None if it is what was written.

    error: what its loading raised. remedy: how to take the other one.
    """
    complete = steps(store)
    if step not in complete:
        return None
    with suppress(ConfigError):
        check(store, step)
        return None
    previous = last_intact(store, [other for other in complete if other < step])
    if previous is None:
        return f"{error}. No checkpoint before it is whole"
    return f"{error}. The one before it that is whole is {store.url}/{folder(previous)}: {remedy}"


def _pieces(value: torch.Tensor | TensorPieces) -> TensorPieces:
    return value if isinstance(value, TensorPieces) else TensorPieces.of(value)


def _pack(tensors: Mapping[str, TensorPieces], file: str) -> tuple[NDArray[np.uint8], JsonObject]:
    """A copy of the pieces that this rank stores, and the manifest's entries for them by the names of their tensors."""
    import xxhash

    # Ranks with equal pieces take turns from tensor to tensor.
    own = {name: tensor for name, tensor in tensors.items() if zlib.crc32(name.encode()) % tensor.copies == tensor.copy}
    buffer = np.empty(sum(view.nbytes for tensor in own.values() for _, view in tensor.chunks), np.uint8)
    entries: JsonObject = {}
    start = 0
    for name, tensor in own.items():
        entries[name] = []
        for offsets, view in tensor.chunks:
            data = buffer[start : start + view.nbytes]
            data[:] = view.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            where = {"file": file, "start": start, "bytes": data.nbytes, "xxh3": xxhash.xxh3_128_hexdigest(data.data)}
            entries[name].append({"offsets": list(offsets), "sizes": list(view.shape), **where})
            start += data.nbytes
    return buffer, entries


def _tensor_entries(tensors: Mapping[str, TensorPieces], entries_by_rank: Sequence[JsonMapping]) -> JsonObject:
    """The manifest's entry of each tensor, from what each rank has packed."""
    tensor_entries: JsonObject = {}
    for name, tensor in tensors.items():
        pieces = [piece for entries in entries_by_rank for piece in entries.get(name, ())]
        assert sum(math.prod(piece["sizes"]) for piece in pieces) == math.prod(tensor.shape), name
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensor_entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "pieces": pieces}
    return tensor_entries


def _fill(tensor: TensorPieces, store: Store, place: str, name: str, entry: JsonMapping) -> None:
    """Copy into a tensor's pieces what the stored pieces have of them. place: the folder of the checkpoint."""
    for piece in entry["pieces"]:
        stored: torch.Tensor | None = None  # read once, for all chunks here that have a part of it
        for offsets, target in tensor.chunks:
            sides = zip(offsets, target.shape, piece["offsets"], piece["sizes"], strict=True)
            common = [(max(a, b), min(a + length, b + other)) for a, length, b, other in sides]
            if any(begin >= end for begin, end in common):
                continue
            if stored is None:
                stored = _read(store, place, name, piece).view(_DTYPES[entry["dtype"]]).view(piece["sizes"])
            source = stored
            for dim, (begin, end) in enumerate(common):
                source = source.narrow(dim, begin - piece["offsets"][dim], end - begin)
                target = target.narrow(dim, begin - offsets[dim], end - begin)
            target.copy_(source)


def _read(store: Store, place: str, name: str, piece: JsonMapping) -> torch.Tensor:
    """The bytes of a stored piece. Raises ConfigError if they are not what was written."""
    import xxhash

    data = store.get_range(f"{place}/{piece['file']}", piece["start"], piece["bytes"])
    if xxhash.xxh3_128_hexdigest(data) != piece["xxh3"]:
        raise ConfigError(f"{store.url}/{place}/{piece['file']} is damaged: {name} is not what was written")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
