"""Checkpoints: torch's distributed checkpoint (which shards, deduplicates, reshards) on our own files, without pickle.

FOLDER/step-00000200/ATTEMPT-00003.bin: what rank 3 wrote, tensor pieces one behind the other. FOLDER/step-00000200/
manifest.json, written last, by rank 0, when all pieces are stored: where each piece is, with its hash, and the run's
facts; and its own hash. A step without a manifest is an attempt that ended, and is never read.
"""

import json
import re
import secrets
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.storage.open import open_store
from roofline.train.storage.store import MissingError, Store

MANIFEST = "manifest.json"
VERSION = 1
PATIENCE = 1800.0  # seconds that rank 0 waits for the files of the others
_STEP = re.compile(r"step-(\d{8,})/manifest\.json")
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
_DTYPES |= {str(d).removeprefix("torch."): d for d in (torch.uint8, torch.int32, torch.int64, torch.bool)}


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: which file, where in it, and the xxh3-128 of its bytes."""

    file: str
    start: int
    size: int
    hash: str


def folder(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps(store: Store) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    matches = (_STEP.fullmatch(entry.name) for entry in store.list())
    return sorted(int(match[1]) for match in matches if match)


def named(place: str) -> tuple[Store, int | None]:
    """The store of a checkpoint folder, and the step where the place names one (".../step-00000200")."""
    stem, _, last = place.rstrip("/").rpartition("/")
    match = re.fullmatch(r"step-(\d{8,})", last)
    return (open_store(stem or "."), int(match[1])) if match else (open_store(place), None)


def facts(store: Store, step: int) -> JsonObject:
    """What the run said of itself at a checkpoint. Raises ConfigError on one that is not there or damaged."""
    return dict(_manifest(store, step)["facts"])


class Saver:
    """Writes checkpoints beside training: `save` copies, a thread stores; one at a time.

    Args:
        keep: complete checkpoints that stay; below 0: all.
        grouped: all ranks of the default process group save together.

    Attributes:
        replaced: steps of a run that this one writes over: they go when its own first checkpoint is complete.
    """

    def __init__(self, store: Store, keep: int = -1, grouped: bool = False) -> None:
        self.store, self.keep, self.grouped = store, keep, grouped
        self.replaced: list[int] = []
        self._pool = ThreadPoolExecutor(1, "roofline-checkpoint")
        self._running: list[Future[None]] = []

    def save(self, step: int, state: Mapping[str, torch.Tensor], said: JsonMapping) -> None:
        """Copy the state and store it in the background, after the save before is done; a failure of that is raised.

        state: tensors and DTensors by name; those that all ranks hold alike are written by one. said: plain data.
        """
        self.wait()
        writer = _Writer(step, said)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(state), storage_writer=writer, no_dist=not self.grouped)
        self._running = [self._pool.submit(self._store, writer)]

    def wait(self) -> None:
        """Until all is stored. Raises StoreError where that failed."""
        while self._running:
            self._running.pop().result()

    def close(self) -> None:
        """Wait and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _store(self, writer: "_Writer") -> None:
        place = folder(writer.step)
        if writer.buffer.nbytes:
            self.store.put(f"{place}/{writer.file}", writer.buffer.data)
        if writer.manifest is None:
            return
        self._until_stored(place, writer.sizes)
        self.store.put(f"{place}/{MANIFEST}", _sealed(writer.manifest))
        own = {f"{place}/{name}" for name in (MANIFEST, *writer.sizes)}
        for entry in self.store.list(place):
            if entry.name not in own:  # of an attempt that was killed, or of what this one replaces
                self.store.delete(entry.name)
        for step in self.replaced:
            if step != writer.step:
                _delete(self.store, step)
        self.replaced = []
        keep(self.store, self.keep)

    def _until_stored(self, place: str, sizes: Mapping[str, int]) -> None:
        """The manifest comes last: rank 0 looks until every rank's file is there. Files are whole or not there."""
        deadline, wait = time.monotonic() + PATIENCE, 0.05
        while True:
            found = {entry.name: entry.size for entry in self.store.list(place)}
            missing = [name for name, size in sizes.items() if found.get(f"{place}/{name}") != size]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.store.url}/{place}: {missing[0]} of another process never came")
            time.sleep(wait)
            wait = min(2.0, 1.5 * wait)  # a listing of an object store costs


def save(store: Store, step: int, state: Mapping[str, torch.Tensor], said: JsonMapping) -> None:
    """Write a checkpoint alone and wait for it."""
    saver = Saver(store)
    try:
        saver.save(step, state, said)
    finally:
        saver.close()


def load(store: Store, step: int, state: Mapping[str, torch.Tensor], grouped: bool = False) -> None:
    """Fill tensors and DTensors from a checkpoint, however the ranks that wrote it had them.

    Raises ConfigError: a tensor is missing or has another shape; a piece is damaged.
    """
    reader = _Reader(store, step)
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        found = known.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise ConfigError(f"{store.url}/{folder(step)} has no {name}: it is of another model or optimizer")
        if tuple(found.size) != tuple(tensor.shape):
            raise ConfigError(
                f"{store.url}/{folder(step)}: {name} has shape {list(found.size)}, here it is {list(tensor.shape)}"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(state), storage_reader=reader, no_dist=not grouped)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values() if isinstance(cause, ConfigError)]
            raise causes[0] if causes else error from error


def keep(store: Store, count: int) -> None:
    """Delete all but the last `count` complete checkpoints, and attempts older than those. Below 0: nothing."""
    if count < 0:
        return
    complete = steps(store)
    kept = complete[-count:] if count else []
    for name in {entry.name.split("/")[0] for entry in store.list()}:
        match = re.fullmatch(r"step-(\d{8,})", name)
        if match and int(match[1]) not in kept and (not complete or int(match[1]) <= complete[-1]):
            _delete(store, int(match[1]))


def _delete(store: Store, step: int) -> None:
    """The manifest first: what is left of a deletion that was cut is no checkpoint."""
    store.delete(f"{folder(step)}/{MANIFEST}")
    store.delete_prefix(folder(step))


class _Writer(StorageWriter):
    """One rank's side of a save: gathers its pieces in one buffer, and on rank 0 what the manifest says.

    Attributes:
        buffer: uint8 of this rank's `file`. manifest, sizes: on rank 0: all there is to say, bytes of every file.
    """

    def __init__(self, step: int, said: JsonMapping) -> None:
        self.step, self.said = step, said
        self.file, self.buffer = "", np.empty(0, np.uint8)
        self.manifest: JsonObject | None = None
        self.sizes: dict[str, int] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        attempt = secrets.token_hex(4)  # files of an attempt that was killed are not mistaken for this one's
        return [replace(plan, storage_data=(attempt, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        import xxhash

        attempt, rank = plan.storage_data
        self.file = f"{attempt}-{rank:05d}.bin"
        tensors = [cast(torch.Tensor, planner.resolve_data(item)) for item in plan.items]  # there is nothing else
        self.buffer = np.empty(sum(tensor.nbytes for tensor in tensors), np.uint8)
        results, at = [], 0
        for item, tensor in zip(plan.items, tensors, strict=True):
            data = self.buffer[at : at + tensor.nbytes]
            if tensor.numel():
                data[:] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            piece = Piece(self.file, at, data.nbytes, xxhash.xxh3_128_hexdigest(data.data))
            results.append(WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=piece))
            at += data.nbytes
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for each in results for r in each}
        tensors: JsonObject = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata), name
            chunks = []
            for chunk in found.chunks:
                piece = pieces.get((name, tuple(chunk.offsets))) or pieces[name, ()]
                where = {"file": piece.file, "start": piece.start, "bytes": piece.size, "xxh3": piece.hash}
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
                if piece.size:  # else the rank may have had nothing to write
                    self.sizes[piece.file] = max(self.sizes.get(piece.file, 0), piece.start + piece.size)
            dtype = str(found.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(found.size), "pieces": chunks}
        self.manifest = {"version": VERSION, "step": self.step, "facts": dict(self.said), "tensors": tensors}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    """One rank's side of a load."""

    def __init__(self, store: Store, step: int) -> None:
        self.store, self.step = store, step
        self.manifest = _manifest(store, step)
        self.pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in self.manifest["tensors"].items():
            chunks = []
            for piece in entry["pieces"]:
                offsets = tuple(piece["offsets"])
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece["sizes"])))
                self.pieces[name, offsets] = Piece(piece["file"], piece["start"], piece["bytes"], piece["xxh3"])
            properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            described[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        for item in plan.items:
            whole = self._tensor(item.storage_index)
            part = whole
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _tensor(self, index: MetadataIndex) -> torch.Tensor:
        import xxhash

        offset = tuple(index.offset or ())
        entry = self.manifest["tensors"][index.fqn]
        piece = self.pieces[index.fqn, offset]
        place = f"{folder(self.step)}/{piece.file}"
        data = self.store.get_range(place, piece.start, piece.size) if piece.size else b""
        if xxhash.xxh3_128_hexdigest(data) != piece.hash:
            raise ConfigError(f"{self.store.url}/{place} is damaged: {index.fqn} is not what was written")
        sizes = next(p["sizes"] for p in entry["pieces"] if tuple(p["offsets"]) == offset)
        flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[entry["dtype"]]) if data else torch.empty(0)
        return flat.view(sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _sealed(manifest: JsonMapping) -> bytes:
    return json.dumps({"xxh3": _hash_of(manifest), **manifest}).encode()


def _hash_of(manifest: JsonMapping) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _manifest(store: Store, step: int) -> JsonObject:
    place = f"{folder(step)}/{MANIFEST}"
    try:
        found = json.loads(store.get(place))
        whole = found.pop("xxh3") == _hash_of(found)
        fits = found["version"] == VERSION and found["step"] == step
    except MissingError as error:
        raise ConfigError(f"{store.url} has no complete checkpoint of step {step}: {MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{store.url}/{place} is damaged: {error!r}") from error
    if not whole:
        raise ConfigError(f"{store.url}/{place} is damaged: it is not what was written")
    if not fits:
        raise ConfigError(f"{store.url}/{place} is of another version, or of another step")
    return dict(found)
