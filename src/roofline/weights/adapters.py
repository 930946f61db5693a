"""LoRA adapters in files: a folder of PEFT's (0.21.2) with adapter_config.json and adapter_model.safetensors, or a GGUF
file of llama.cpp's."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import CapacityError, ConfigError
from roofline.common.files import check_readable, readable
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_config import CONFIG
from roofline.weights.adapter_gguf import GgufAdapter, is_gguf_adapter
from roofline.weights.adapter_peft import WEIGHTS, PeftFolder


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its files say: matrices by the names of our tensors.

    digest: SHA-256 (hex) of what it computes: equal digests, equal results; rank: the largest of its matrices; nbytes:
    of its matrices in memory, as float32.
    """

    path: Path
    digest: str
    rank: int
    matrices: tuple[AdapterMatrix, ...]
    nbytes: int


def read_adapter(path: str | Path, max_bytes: int | None = None) -> Adapter:
    """Read a folder with PEFT's two files, or a GGUF file.

    max_bytes: that its matrices may take in memory. Raises ConfigError naming file and field for what is malformed,
    UnsupportedError for what adapters may have and ours not, CapacityError for one that is too large.
    """
    path = Path(path)
    with readable(path):
        file = _opened(path, max_bytes)
        matrices = tuple(file.matrices())
    return Adapter(path, _digest(matrices), max(matrix.rank for matrix in matrices), matrices, file.nbytes)


def check_adapter(path: str | Path, max_bytes: int | None = None) -> None:
    """Raise as `read_adapter` does, for all but the values of its matrices, which are not read."""
    with readable(Path(path)):
        _opened(Path(path), max_bytes)


def _opened(path: Path, max_bytes: int | None) -> PeftFolder | GgufAdapter:
    if not os.path.lexists(path):
        what = f"an adapter is a folder with {CONFIG} and {WEIGHTS}, or a GGUF file"
        raise ConfigError(f"{path}: there is no such folder or file; {what}")
    check_readable(path)
    if path.is_dir() and not os.path.lexists(path / CONFIG) and (path / "adapter" / CONFIG).is_file():
        raise ConfigError(f"{path} is the folder of a run; its adapter is {path / 'adapter'}")
    file = PeftFolder(path) if path.is_dir() else GgufAdapter(path)
    if max_bytes is not None and file.nbytes > max_bytes:
        raise too_large(path, file.nbytes, max_bytes)
    return file


def is_adapter(path: Path) -> bool:
    """Whether a path is an adapter's and no model's."""
    return (path / CONFIG).is_file() if path.is_dir() else is_gguf_adapter(path)


def too_large(path: str | Path, nbytes: int, left: int) -> CapacityError:
    """For an adapter with more bytes in memory than are left for it."""
    remedy = "Unload another adapter, or raise the limit adapter_bytes (--adapter-bytes)."
    return CapacityError(f"the adapter {path}", nbytes, left, "bytes", remedy)


def _digest(matrices: Sequence[AdapterMatrix]) -> str:
    digest = hashlib.sha256()
    for matrix in matrices:
        facts = f"{matrix.tensor} {matrix.a.shape} {matrix.b.shape} {matrix.scale.hex()}"
        facts += f"{' paired' * matrix.paired}{' tiled' * matrix.tiled}\n"
        digest.update(facts.encode() + matrix.a.tobytes() + matrix.b.tobytes())
        if matrix.magnitude is not None:
            digest.update(matrix.magnitude.tobytes())
    return digest.hexdigest()
