"""Writes and reads the tensors of torch's distributed checkpoint as our own files, without pickle.

torch decides which rank writes which piece of a tensor, and how pieces fit the ranks that load them. Each rank writes
one file, STORE/step-00000200/ATTEMPT-00003.bin for rank 3, which has its pieces one behind the other.
"""

import secrets
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch
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
from torch.futures import Future

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.checkpoint import manifest as manifests
from roofline.train.storage.store import Store

Plan = TypeVar("Plan", SavePlan, LoadPlan)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_TYPES = (*_FLOATS, torch.uint8, torch.int32, torch.int64, torch.bool)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


class _Unused:
    """What torch requires of both sides, and neither needs."""

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def prepare_local_plan(self, plan: Plan) -> Plan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class Writer(_Unused, StorageWriter):
    """One rank's side of a save: copies its pieces into a buffer; rank 0 also makes the manifest.

    Attributes:
        buffer: uint8, the content of this rank's `file`. manifest, sizes: on rank 0, with the bytes of every file.
    """

    def __init__(self, step: int, facts: JsonMapping) -> None:
        self.step, self.facts = step, facts
        self.file, self.buffer = "", np.empty(0, np.uint8)
        self.manifest: JsonObject | None = None
        self.sizes: dict[str, int] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        attempt = secrets.token_hex(4)  # tells this attempt's files from those of one that was killed
        return [replace(plan, storage_data=(attempt, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        import xxhash

        attempt, rank = plan.storage_data
        self.file = f"{attempt}-{rank:05d}.bin"
        tensors = [cast(torch.Tensor, planner.resolve_data(item)) for item in plan.items]
        self.buffer = np.empty(sum(tensor.nbytes for tensor in tensors), np.uint8)
        results, at = [], 0
        for item, tensor in zip(plan.items, tensors, strict=True):
            data = self.buffer[at : at + tensor.nbytes]
            if tensor.numel():
                data[:] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = xxhash.xxh3_128_hexdigest(data.data)
            piece = {"file": self.file, "start": at, "bytes": data.nbytes, "xxh3": digest}
            results.append(WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=piece))
            at += data.nbytes
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for each in results for r in each}
        tensors: JsonObject = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            chunks = []
            for chunk in tensor.chunks:
                piece = pieces.get((name, tuple(chunk.offsets))) or pieces[name, ()]
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **piece})
                if piece["bytes"]:  # a rank without bytes writes no file
                    self.sizes[piece["file"]] = max(self.sizes.get(piece["file"], 0), piece["start"] + piece["bytes"])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": chunks}
        facts = dict(self.facts)
        self.manifest = {"version": manifests.VERSION, "step": self.step, "facts": facts, "tensors": tensors}


class Reader(_Unused, StorageReader):
    """One rank's side of a load. Raises ConfigError on a piece that is not what was written."""

    def __init__(self, store: Store, step: int) -> None:
        self.store, self.step = store, step
        self.manifest = manifests.read(store, step)
        self.pieces: dict[tuple[str, tuple[int, ...]], JsonObject] = {}  # of the manifest, by tensor and offsets

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in self.manifest["tensors"].items():
            chunks = []
            for piece in entry["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"])))
                self.pieces[name, tuple(piece["offsets"])] = piece
            properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            described[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            part = self._piece(item.storage_index)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, index: MetadataIndex) -> torch.Tensor:
        import xxhash

        piece = self.pieces[index.fqn, tuple(index.offset or ())]
        place = f"{manifests.folder(self.step)}/{piece['file']}"
        data = self.store.get_range(place, piece["start"], piece["bytes"]) if piece["bytes"] else b""
        if xxhash.xxh3_128_hexdigest(data) != piece["xxh3"]:
            raise ConfigError(f"{self.store.url}/{place} is damaged: {index.fqn} is not what was written")
        dtype = _DTYPES[self.manifest["tensors"][index.fqn]["dtype"]]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0)
        return flat.view(piece["sizes"])
