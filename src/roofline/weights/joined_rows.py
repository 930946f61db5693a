"""Tensors of files in which rows of several parameters of ours lie in turn: sources apart, and where span row goes.

A family says which rows lie where (`TensorNames.joined`). Rows are moved as bytes, whatever their format.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from roofline.weights.families.shared.tensor_names import JoinedRows, layer_part
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo

Read = Callable[[str], np.ndarray]


def joined_of(config: JsonObject) -> Mapping[str, JoinedRows]:
    """The joined tensors of a layer of that model, by what we call them."""
    return files_of(config["family"]).NAMES.joined(dict(config))


def written_joined(config: JsonObject) -> Mapping[str, JoinedRows]:
    """Those among them that Hugging Face's files have."""
    names = files_of(config["family"]).NAMES
    return {part: rows for part, rows in joined_of(config).items() if names.has_hf(part)}


def holders_of(config: JsonObject) -> Mapping[str, str]:
    """Ours in a layer -> the matrix of Hugging Face's modules in which its rows lie with others'; but for experts."""
    if files_of(config["family"]).NAMES.modules_apart:
        return {}
    rows = written_joined(config)
    return {ours: part for part, members in rows.items() for ours, _ in members if ".experts." not in ours}


def in_files(name: str, holders: Mapping[str, str]) -> str:
    """The matrix of Hugging Face's files that a matrix of ours is, or is a part of."""
    before, part = layer_part(name)
    return f"{before}{holders[part]}.weight" if part in holders else name


def places_of(rows: JoinedRows) -> dict[str, np.ndarray]:
    """Of each parameter in a joined tensor, where its rows lie there, in their order."""
    places: dict[str, list[int]] = {}
    at = 0
    for ours, span in rows:
        order = places.setdefault(ours, [0] * sum(len(r) for other, r in rows if other == ours))
        order[span.start : span.stop] = range(at, at + len(span))
        at += len(span)
    return {ours: np.array(order) for ours, order in places.items()}


def rows_apart(config: JsonObject, tensors: Mapping[str, TensorInfo], read: Read) -> tuple[dict[str, TensorInfo], Read]:
    """The tensors of files with those of ours in place of joined ones, and how they are read.

    tensors: canonical name -> what the files hold; read: uint8 bytes of one of them. A joined tensor whose rows are not
    as many as the configuration says stays as it is, and is no parameter of ours.
    """
    joined = joined_of(config)
    infos: dict[str, TensorInfo] = {}
    sources: dict[str, tuple[str, np.ndarray]] = {}  # ours -> the files' tensor, and which of its rows
    for name, info in tensors.items():
        before, part = layer_part(name)
        rows = joined.get(part, ())
        count = sum(len(span) for _, span in rows)
        if not rows or info.shape[0] != count:
            infos[name] = info
            continue
        for ours, order in places_of(rows).items():
            nbytes = info.nbytes // count * len(order)
            written = replace(info, name=f"{before}{ours}.weight", shape=(len(order), *info.shape[1:]), nbytes=nbytes)
            infos[written.name], sources[written.name] = written, (name, order)

    def read_ours(name: str) -> np.ndarray:
        if name not in sources:
            return read(name)
        stored, order = sources[name]
        return np.ascontiguousarray(read(stored).reshape(tensors[stored].shape[0], -1)[order]).reshape(-1)

    return infos, read_ours


class RowsTogether:
    """The inverse: the rows of parameters that come one after the other, as the files' tensors."""

    def __init__(self, config: JsonObject) -> None:
        self._joined = written_joined(config)
        self._holders = {ours: part for part, rows in self._joined.items() for ours, _ in rows}
        self._waiting: dict[str, dict[str, np.ndarray]] = {}  # the joined tensor of a layer -> what has come of it

    def has(self, name: str) -> bool:
        """Whether a parameter is written together with others."""
        return layer_part(name)[1] in self._holders

    def add(self, name: str, rows: np.ndarray) -> tuple[str, np.ndarray] | None:
        """What we call the joined tensor and its rows, uint8 [rows, bytes], once all of its parameters have come."""
        before, part = layer_part(name)
        holder = self._holders[part]
        order, waiting = self._joined[holder], self._waiting.setdefault(f"{before}{holder}", {})
        waiting[part] = rows
        if len(waiting) < len({ours for ours, _ in order}):
            return None
        del self._waiting[f"{before}{holder}"]
        together = np.concatenate([waiting[ours][span.start : span.stop] for ours, span in order])
        return f"{before}{holder}.weight", together
