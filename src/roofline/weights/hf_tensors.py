"""The tensors of a folder of safetensors that is written, and what parameters of ours each is made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights import names
from roofline.weights.families.shared.joined_experts import side_by_side
from roofline.weights.families.shared.tensor_names import TensorPlace, layer_part, without_expert
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.hf_values import as_theirs, differs, hf_shape
from roofline.weights.joined_rows import written_joined

_OF_EXPERTS = ".mlp.experts."
_WORDS = {2: "<u2", 4: "<u4"}  # bytes of a number -> what it lies in


@dataclass(frozen=True)
class ParameterRows:
    """Rows of a parameter, of a bias its elements."""

    name: str
    rows: range


@dataclass(frozen=True)
class HfTensor:
    """info: name, format and shape in the file; parts: what its bytes are made of, in order; made: the bytes of a part
    from those of its rows, each a uint8 array; None: there is one of them, which is copied."""

    info: TensorInfo
    parts: tuple[tuple[ParameterRows, ...], ...]
    made: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None


def hf_tensors(
    config: JsonObject, parameters: Sequence[TensorInfo], narrower: Mapping[str, str] | None = None
) -> list[HfTensor]:
    """The tensors of a folder, in the order of the parameters.

    parameters: canonical names, plain formats; the experts of a layer as one parameter each, or one below the other;
    narrower: the formats in the folder of some that have other values there, see `hf_values.is_lacking_in`.

    Raises ConfigError for a parameter that has no name in such files, and for experts of a joined tensor in several
    formats.
    """
    tensors: list[HfTensor] = []
    joined: dict[str, list[tuple[TensorPlace, TensorInfo]]] = {}
    in_rows = _in_rows(config, parameters)
    written = set[str]()
    for info in parameters:
        if (place := in_rows.get(info.name)) is not None:
            if place.info.name not in written:
                tensors.append(place)
            written.add(place.info.name)
            continue
        within = files_of(config["family"]).NAMES.hf_placed(config, names.to_hf(config["family"], info.name))
        if within is not None and within.of:
            joined.setdefault(within.name, []).append((within, info))
        elif within is not None:
            tensors.append(HfTensor(replace(info, name=within.name), _whole(info)))
        elif _OF_EXPERTS in info.name and not without_expert(info.name)[1] and not _is_stacked(config, info.name):
            tensors += _each_expert(config, info)
        else:
            tensors.append(_alone(config, info, (narrower or {}).get(info.name, info.format)))
    return tensors + [_joined(name, parts, config["experts"]) for name, parts in joined.items()]


def _in_rows(config: JsonObject, parameters: Iterable[TensorInfo]) -> dict[str, HfTensor]:
    """Of each parameter whose rows lie in turn with others' in a tensor of the files: that tensor."""
    infos = {info.name: info for info in parameters}
    places: dict[str, HfTensor] = {}
    for before in dict.fromkeys(layer_part(name)[0] for name in infos):
        for part, rows in written_joined(config).items():
            sources = {ours: infos.get(f"{before}{ours}.weight") for ours, _ in rows}
            there = [info for info in sources.values() if info is not None]
            if len(there) < len(sources):
                continue
            name = names.to_hf(config["family"], f"{before}{part}.weight")
            if len({info.format for info in there}) > 1:
                raise ConfigError(f"{name}: its parts have several formats, and such files have them in one tensor")
            shape = (sum(info.shape[0] for info in there), *there[0].shape[1:])
            shape = hf_shape(config, f"{before}{part}.weight", shape)
            info = replace(there[0], name=name, shape=shape, nbytes=sum(info.nbytes for info in there))
            parts = tuple((ParameterRows(f"{before}{ours}.weight", span),) for ours, span in rows)
            places |= dict.fromkeys((info.name for info in there), HfTensor(info, parts))
    return places


def stored_together(config: JsonObject, parameters: Iterable[str]) -> list[list[str]]:
    """The parameters by the tensor that holds them, so that all of one tensor can get one format."""
    family = config["family"]
    placed: dict[str, list[str]] = {}
    holders = {ours: part for part, rows in written_joined(config).items() for ours, _ in rows}
    for name in parameters:
        before, part = layer_part(name)
        if part in holders:
            placed.setdefault(f"{before}{holders[part]}", []).append(name)
            continue
        theirs = names.to_hf(family, name)
        place = files_of(family).NAMES.hf_placed(config, theirs)
        placed.setdefault(theirs if place is None else place.name, []).append(name)
    return list(placed.values())


def _is_stacked(config: JsonObject, name: str) -> bool:
    return files_of(config["family"]).NAMES.is_stacked(name)


def _whole(info: TensorInfo) -> tuple[tuple[ParameterRows, ...], ...]:
    return ((ParameterRows(info.name, range(info.shape[0])),),)


def _alone(config: JsonObject, info: TensorInfo, form: str) -> HfTensor:
    shape, name = hf_shape(config, info.name, info.shape), names.to_hf(config["family"], info.name)
    written = TensorInfo(name, form, shape, formats.get(form).nbytes(shape))
    convert = partial(_as_theirs, config, info, form) if differs(config, info.name) else None
    return HfTensor(written, _whole(info), convert)


def _as_theirs(config: JsonObject, info: TensorInfo, form: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    data = as_theirs(config, info.name, info.shape, parts[0].tobytes(), info.format, form)
    return np.frombuffer(data, np.uint8)


def _each_expert(config: JsonObject, info: TensorInfo) -> list[HfTensor]:
    """A tensor for each expert of a parameter in which they lie one below the other."""
    experts, rows = config["experts"], info.shape[0] // config["experts"]
    before, _, after = info.name.rpartition(".experts.")
    tensors = []
    for number in range(experts):
        name = names.to_hf(config["family"], f"{before}.experts.{number}.{after}")
        written = replace(info, name=name, shape=(rows, *info.shape[1:]), nbytes=info.nbytes // experts)
        tensors.append(HfTensor(written, ((ParameterRows(info.name, range(number * rows, (number + 1) * rows)),),)))
    return tensors


def _joined(name: str, placed: Sequence[tuple[TensorPlace, TensorInfo]], experts: int) -> HfTensor:
    """The tensor of all experts of a layer; placed: the parameters in it, with their place in it."""
    if len({info.format for _, info in placed}) > 1:
        raise ConfigError(f"{name}: its experts have several formats, and such files have them in one tensor")
    parts: dict[int, dict[int, ParameterRows]] = {number: {} for number in range(experts)}
    for place, info in placed:
        number = without_expert(info.name)[1]
        rows = info.shape[0] if number else info.shape[0] // experts
        for each in (int(number),) if number else range(experts):
            first = 0 if number else each * rows
            parts[each][place.at] = ParameterRows(info.name, range(first, first + rows))
    (place, info), rows = placed[0], len(parts[0]) * len(parts[0][0].rows)
    columns = info.shape[1:]  # none of a bias
    shape = (experts, *columns, rows) if place.in_turn else (experts, rows, *columns)
    written = replace(info, name=name, shape=shape, nbytes=sum(part.nbytes for _, part in placed))
    in_order = tuple(tuple(part[at] for at in sorted(part)) for part in parts.values())
    return HfTensor(written, in_order, partial(_of_expert, info.format, columns, place.in_turn))


def _of_expert(form: str, columns: tuple[int, ...], in_turn: bool, parts: Sequence[np.ndarray]) -> np.ndarray:
    words = _WORDS[formats.get(form).block_bytes]
    values = side_by_side([np.ascontiguousarray(part).view(words).reshape(-1, *columns) for part in parts], in_turn)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
