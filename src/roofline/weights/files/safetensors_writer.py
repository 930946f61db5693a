"""Writes safetensors files piece by piece, and the index that says where each tensor is when there are several."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from roofline.common.files import write_atomically
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.files.output import Pieces, write_tensor
from roofline.weights.files.safetensors import INDEX

FILE_BYTES = 5 << 30  # of weights in a file, unless a single tensor has more


def write_tensors(folder: Path, tensors: Sequence[TensorInfo], pieces: Callable[[TensorInfo], Pieces]) -> None:
    """Write all tensors into a folder.

    Args:
        tensors: names as the files have them; formats that the specification has as dtypes (F32, F16, BF16).
        pieces: the bytes of a tensor in order, in contiguous uint8 arrays.
    """
    files = _divided(tensors)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, inside in zip(names, files, strict=True):
        write_file(folder / name, inside, pieces)
    if len(files) > 1:
        placed = {info.name: name for name, inside in zip(names, files, strict=True) for info in inside}
        total = sum(info.nbytes for info in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")


def _divided(tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    files: list[list[TensorInfo]] = [[]]
    size = 0
    for info in tensors:
        if size and size + info.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(info)
        size += info.nbytes
    return files


def write_file(path: Path, tensors: Sequence[TensorInfo], pieces: Callable[[TensorInfo], Pieces]) -> None:
    """Write one new file with all of the tensors; see `write_tensors`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for info in tensors:
        offsets = [at, at + info.nbytes]
        header[info.name] = {"dtype": info.format, "shape": list(info.shape), "data_offsets": offsets}
        at += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for info in tensors:
            write_tensor(stream, info, pieces(info))
