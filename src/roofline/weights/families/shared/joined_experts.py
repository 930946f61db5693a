"""Files that hold the gates and ups of all experts of a layer in one tensor, read as a tensor for each expert, and
written so.

As transformers writes gpt-oss: `gate_up_proj` [experts, width, 2 * ffn], its columns in turn gate and up, `down_proj`
[experts, ffn, width], `gate_up_proj_bias` [experts, 2 * ffn], `down_proj_bias` [experts, width], and `sinks` [heads],
whose name has no ".weight".
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from roofline.common.fields import refuse, shorten
from roofline.weights.families.shared.tensor_names import TensorPlace
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.quantised.method import TensorSource
from roofline.weights.quantised.mxfp4 import PROJECTIONS

_JOINED = re.compile(r"(?P<within>.+\.mlp\.experts)\.(?P<part>gate_up_proj|up_proj|down_proj)(?P<bias>_bias)?")
_PLACED = re.compile(r"(?P<within>.+\.mlp\.experts)\.(?:\d+\.)?(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)")
_SINKS = re.compile(r".+\.self_attn\.sinks")
_WORDS = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}  # what a number of each lies in
Take = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Part:
    """What a tensor of ours is of one in the file: the values that `take` gives of its own."""

    stored: TensorInfo
    info: TensorInfo
    take: Take


class _Renamed:
    """See `TensorSource`. names: in place of those of a source -> these."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.tensors = {name: replace(source.tensors[old], name=name) for name, old in names.items()}
        self._source, self._names = source, names

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes]."""
        return self._source.read(self._names[name])


Matrices = Callable[[TensorInfo, re.Match[str]], list[_Part]]


class _Apart:
    """See `TensorSource`."""

    def __init__(self, source: TensorSource, plain: Mapping[str, TensorInfo], parts: Mapping[str, _Part]) -> None:
        self.tensors = {**plain, **{name: part.info for name, part in parts.items()}}
        self._source, self._parts = source, parts

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes]; of a part, copied out of its tensor."""
        part = self._parts.get(name)
        if part is None:
            return self._source.read(name)
        stored = part.stored
        words = np.ascontiguousarray(self._source.read(stored.name)).view(_WORDS[stored.format]).reshape(stored.shape)
        return np.ascontiguousarray(part.take(words)).reshape(-1).view(np.uint8)


def experts_apart(path: Path, source: TensorSource) -> TensorSource:
    """The tensors of a model's files, with those of experts one by one. path: what errors name. Raises ConfigError."""

    def matrices(info: TensorInfo, match: re.Match[str]) -> list[_Part]:
        if match["part"] != "down_proj" and info.shape[-1] % 2:
            _refuse_joined(path, info)
        return _matrices(info, match)

    return _read_apart(path, source, matrices)


def stacked_experts_apart(path: Path, source: TensorSource) -> TensorSource:
    """The same of models that transformers has in memory and mostly writes apart: `gate_up_proj` [experts, 2 * ffn,
    width], all gates above all ups of each expert, or `up_proj` [experts, ffn, width] of experts without a gate, and
    `down_proj` [experts, width, ffn]; or, in files of Qwen3-VL, both with their last dimensions the other way round,
    which the width tells."""

    def matrices(info: TensorInfo, match: re.Match[str]) -> list[_Part]:
        router = source.tensors.get(match["within"].removesuffix("experts") + "gate.weight")
        is_pair = match["part"] == "gate_up_proj"
        inputs_last = router is None or info.shape[2 if is_pair else 1] == router.shape[-1]
        if is_pair and info.shape[1 if inputs_last else 2] % 2:
            _refuse_joined(path, info)
        return _stacked_matrices(info, match, inputs_last)

    return _read_apart(path, source, matrices, lambda match: _in_pairs(match) or not match["bias"])


def halves_apart(source: TensorSource, pattern: re.Pattern[str], names: tuple[str, str]) -> TensorSource:
    """The tensors of a model's files, with the upper and the lower half of the rows of some by themselves. pattern: of
    their names; names: what the halves are called, as replacements for what it matches."""
    plain, parts = {}, {}
    for name, info in source.tensors.items():
        if not pattern.fullmatch(name) or info.format not in _WORDS or info.shape[0] % 2:
            plain[name] = info
            continue
        rows, columns = info.shape[0] // 2, info.shape[1:]
        for half, replacement in enumerate(names):
            take = partial(_half, slice(half * rows, (half + 1) * rows))
            parts[pattern.sub(replacement, name)] = _part(info, pattern.sub(replacement, name), (rows, *columns), take)
    return _Apart(source, plain, parts) if parts else source


def _half(rows: slice, values: np.ndarray) -> np.ndarray:
    """[rows, inputs] of [2 * rows, inputs]."""
    return values[rows]


def _refuse_joined(path: Path, info: TensorInfo) -> NoReturn:
    refuse(path, f"tensor {shorten(info.name)!r}", f"of shape {info.shape} does not hold all experts of a layer")


def renamed(source: TensorSource, rename: Callable[[str], str]) -> TensorSource:
    """The tensors of a source under the names that `rename` gives them; where it gives two the same, as they are."""
    names = {rename(name): name for name in source.tensors}
    return _Renamed(source, names) if len(names) == len(source.tensors) else source


def _in_pairs(match: re.Match[str]) -> bool:
    """Whether a tensor is one of those with gates and ups together."""
    return match["part"] in PROJECTIONS


def _read_apart(
    path: Path, source: TensorSource, matrices: Matrices, has_part: Callable[[re.Match[str]], bool] = _in_pairs
) -> TensorSource:
    """matrices: takes those of experts out of a tensor of three dimensions; has_part: of such names, those it knows."""
    plain, parts = {}, {}
    for name, info in source.tensors.items():
        match = _JOINED.fullmatch(name)
        if _SINKS.fullmatch(name):
            parts[f"{name}.weight"] = _part(info, f"{name}.weight", info.shape, lambda values: values)
        elif match is None or info.format not in _WORDS or not has_part(match):
            plain[name] = info
        else:
            odd_bias = match["bias"] and match["part"] != "down_proj" and info.shape[-1] % 2
            if len(info.shape) != (2 if match["bias"] else 3) or odd_bias:
                _refuse_joined(path, info)
            sibling = source.tensors.get(name.removesuffix("_bias"))
            if match["bias"] and sibling is not None and sibling.shape[:1] != info.shape[:1]:
                refuse(
                    path, f"tensor {shorten(name)!r}", f"of shape {info.shape} is not for {sibling.shape[0]} experts"
                )
            each = _biases(info, match["within"], match["part"]) if match["bias"] else matrices(info, match)
            parts |= {part.info.name: part for part in each}
    return _Apart(source, plain, parts)


def _stacked_matrices(info: TensorInfo, match: re.Match[str], inputs_last: bool) -> list[_Part]:
    names = ("gate", "up") if match["part"] == "gate_up_proj" else (match["part"].removesuffix("_proj"),)
    experts, outputs, inputs = info.shape if inputs_last else (info.shape[0], info.shape[2], info.shape[1])
    rows = outputs // len(names)
    parts = []
    for number, (at, each) in itertools.product(range(experts), enumerate(names)):
        take = partial(_rows if inputs_last else _columns, number, slice(at * rows, (at + 1) * rows))
        parts.append(_part(info, f"{match['within']}.{number}.{each}_proj.weight", (rows, inputs), take))
    return parts


def _rows(number: int, rows: slice, values: np.ndarray) -> np.ndarray:
    """[rows, inputs] of [experts, outputs, inputs]."""
    return values[number, rows]


def _columns(number: int, rows: slice, values: np.ndarray) -> np.ndarray:
    """[rows, inputs] of [experts, inputs, outputs]."""
    return values[number, :, rows].T


def _part(stored: TensorInfo, name: str, shape: tuple[int, ...], take: Take) -> _Part:
    nbytes = math.prod(shape) * stored.nbytes // max(1, math.prod(stored.shape))
    return _Part(stored, TensorInfo(name, stored.format, shape, nbytes), take)


def _matrices(info: TensorInfo, match: re.Match[str]) -> list[_Part]:
    experts, inputs, outputs = info.shape
    parts = []
    for name, columns in PROJECTIONS[match["part"]].items():
        rows = len(range(outputs)[columns])
        for number in range(experts):
            take = partial(_matrix, number, columns)
            parts.append(_part(info, f"{match['within']}.{number}.{name}.weight", (rows, inputs), take))
    return parts


def _matrix(number: int, columns: slice, values: np.ndarray) -> np.ndarray:
    """[rows, inputs] of [experts, inputs, outputs]."""
    return values[number, :, columns].T


def _biases(info: TensorInfo, within: str, part: str) -> list[_Part]:
    experts, outputs = info.shape
    parts = []
    for name, columns in PROJECTIONS[part].items():
        rows = experts * len(range(outputs)[columns])
        parts.append(_part(info, f"{within}.{name}.bias", (rows,), partial(_bias, columns)))
    return parts


def _bias(columns: slice, values: np.ndarray) -> np.ndarray:
    """[experts * rows] of [experts, outputs]."""
    return values[:, columns].reshape(-1)


def experts_placed(config: JsonObject, name: str) -> TensorPlace | None:
    """The inverse of `experts_apart`: in which tensor of such files a parameter of Hugging Face's names is, whether the
    name says the number of an expert or stands for all of a layer; None: it has a tensor of its own name."""
    bare = name.removesuffix(".weight")
    if _SINKS.fullmatch(bare):
        return TensorPlace(bare)
    match = _PLACED.fullmatch(name)
    if match is None:
        return None
    return _place(match, "_bias" if match["kind"] == "bias" else "", in_turn=True)


def stacked_experts_placed(name: str) -> TensorPlace | None:
    """Return the place of an expert's matrix in files that have those of all experts as transformers has them in
    memory, which `stacked_experts_apart` reads; None: a parameter has a tensor of its own name."""
    match = _PLACED.fullmatch(name)
    return None if match is None or match["kind"] == "bias" else _place(match, "", in_turn=False)


def _place(match: re.Match[str], suffix: str, *, in_turn: bool) -> TensorPlace:
    if match["part"] == "down":
        return TensorPlace(f"{match['within']}.down_proj{suffix}", 0, 1, in_turn)
    return TensorPlace(f"{match['within']}.gate_up_proj{suffix}", ("gate", "up").index(match["part"]), 2, in_turn)


def side_by_side(parts: Sequence[np.ndarray], in_turn: bool) -> np.ndarray:
    """What such a tensor holds of one expert, of matrices [rows, inputs] or biases [rows]. in_turn: [inputs, parts *
    rows], their outputs in turn; else [parts * rows, inputs], one below the other."""
    if not in_turn:
        return np.concatenate(parts)
    values = np.stack([part.T for part in parts], axis=-1)
    return values.reshape(*values.shape[:-2], -1)
