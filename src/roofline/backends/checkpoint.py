"""What a backend reads of a checkpoint, and the hash that identifies its weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from roofline.ops import formats
from roofline.program.trace import TensorInfo


class Tensors(Protocol):
    """Named tensors: format and shape of each, and its bytes."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes] of a tensor."""


class Checkpoint(Tensors, Protocol):
    """A model's weights and configuration, whatever kind of file holds them (`weights.checkpoint.Checkpoint`)."""

    @property
    def path(self) -> Path: ...

    @property
    def kind(self) -> str: ...

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of its ModelConfig."""


def weights_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex) over the tensors' bytes, in the order of their names; of random ones over seed and shapes."""
    digest = hashlib.sha256()
    random = checkpoint.kind == "random"  # seed, name and shape say what is in a tensor, and reading computes it anew
    digest.update(str(checkpoint.path).encode() if random else b"")
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        digest.update(f"{name} {info.format} {info.shape}".encode())
        if random:
            continue
        raw = checkpoint.read(name)
        digest.update(raw.data)
        if formats.packed(info.format).name != info.format:  # what a format from outside means by them may change
            digest.update(formats.packed_bytes(info.format, raw).data)
    return digest.hexdigest()
