"""Recipes -> tensors on the device: matrices as the kernels read them, vectors in float32."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from roofline.backends.gpu.devices import give_back
from roofline.backends.gpu.memory.capacity import BUFFERS
from roofline.backends.gpu.memory.offload import Offload
from roofline.backends.gpu.memory.requirements import layer_of
from roofline.backends.gpu.pack import STAND_INS, pack, stand_in
from roofline.hardware.detect import cores_allowed, cpu_quota, usable_cores
from roofline.ops import formats
from roofline.program.ir import Program, Recipe, WeightPiece

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roofline.backends.gpu.kernels.float8 import Float8Weight
    from roofline.backends.gpu.pack import Packed

    Weight = Tensor | tuple["RowPart", ...]

T = TypeVar("T")
Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class RowPart:
    """Rows start.. of a matrix that are of one kind. weight: a float tensor [rows, columns]; where `quantised` a
    Packed[Tensor]; where `float8` too, a Float8Weight."""

    start: int
    rows: int
    weight: Any
    quantised: bool
    float8: bool = False


class DeviceWeights:
    """All weights of a Program on a device. read: file tensor name -> its bytes, uint8; dtype: of float matrices;
    hosted: layers that live on the host, whose weights are here inside `using` only.

    Neighbouring pieces of one format become one matrix. F32 and the other 16-bit format are rounded to `dtype` here,
    as the products that read them would. Raises UnsupportedError for a format without a kernel.
    """

    def __init__(
        self, program: Program, read: Read, dtype: "torch.dtype", device: str, hosted: Collection[int] = ()
    ) -> None:
        self._recipes, self.read, self._dtype, self._device = program.weights, read, dtype, device
        self.matrices: dict[str, tuple[RowPart, ...]] = {}
        self.vectors: dict[str, Tensor] = {}  # float32, of the recipe's shape: what no product reads
        with ThreadPoolExecutor(usable_cores(cores_allowed(), cpu_quota())) as several:
            resident = [name for name in program.weights if layer_of(name) not in hosted]
            self._bind(dict(zip(resident, several.map(self._make, resident), strict=True)))
        matrices = [part.weight for parts in self.matrices.values() for part in parts]
        self.nbytes = sum(weight.nbytes for weight in (*matrices, *self.vectors.values()))
        self._hosted: HostedWeights | None = None
        if hosted:
            names = {layer: [n for n in program.weights if layer_of(n) == layer] for layer in sorted(hosted)}
            self._device = "cpu"  # where what is left to be made is kept
            self._hosted = HostedWeights(names, self._make, device)
            self.nbytes += self._hosted.nbytes
        give_back(device)  # pieces of matrices, before they were put together

    def _make(self, name: str) -> "Weight":
        recipe = self._recipes[name]
        if len(recipe.shape) == 2 and recipe.layout != "f32":
            return self._matrix(recipe)
        return self._float(recipe, recipe.pieces, None).view(recipe.shape)

    def _bind(self, weights: "Mapping[str, Weight]") -> None:
        for name, weight in weights.items():
            if isinstance(weight, tuple):
                self.matrices[name] = weight
            else:
                self.vectors[name] = weight

    @property
    def hosted_bytes(self) -> int:
        """Of `nbytes`, those that live on the host."""
        return 0 if self._hosted is None else self._hosted.nbytes

    @contextmanager
    def using(self, layer: int | None) -> Iterator[None]:
        """The layer's weights are here, to be read by the current stream inside this block only; None: of no layer."""
        if self._hosted is None or layer not in self._hosted:
            yield
            return
        assert layer is not None, "None is no hosted layer"
        with self._hosted.using(layer) as weights:
            self._bind(weights)
            try:
                yield
            finally:
                for name in weights:
                    self.matrices.pop(name, None), self.vectors.pop(name, None)

    def shapes(self) -> Iterable[tuple[RowPart, ...]]:
        """The parts of every matrix, for their shapes."""
        yield from (parts for _, parts in self.shapes_by_name())

    def shapes_by_name(self) -> Iterator[tuple[str, tuple[RowPart, ...]]]:
        """The same with the name of each."""
        yield from self.matrices.items()
        if self._hosted is not None:
            yield from ((name, parts) for name, parts in self._hosted.shapes.items() if isinstance(parts, tuple))

    def _matrix(self, recipe: Recipe) -> tuple[RowPart, ...]:
        parts, start = [], 0
        for form, pieces in groupby(recipe.pieces, key=lambda piece: _form(piece.format)):
            same = tuple(pieces)
            quantised, float8 = formats.get(form).block > 1, form == "E4M3"
            weight = self._quantised(recipe, same, form) if quantised else self._float(recipe, same, self._dtype)
            rows = sum(piece.stop - piece.start for piece in same)
            parts.append(RowPart(start, rows, weight, quantised, float8))
            start += rows
        return tuple(parts)

    def _quantised(self, recipe: Recipe, pieces: tuple[WeightPiece, ...], form: str) -> "Packed[Tensor] | Float8Weight":
        from roofline.backends.gpu.kernels.float8 import Float8Weight

        raw = []
        for piece in pieces:
            packed = formats.packed_bytes(piece.format, piece.bytes_of(self.read(piece.tensor), recipe.columns))
            raw.append(stand_in(packed, formats.packed(piece.format).name))
        rows = sum(piece.stop - piece.start for piece in pieces)
        if form == "E4M3":
            return Float8Weight.of(np.concatenate(raw), rows, self._device)
        return pack(np.concatenate(raw), form, rows, recipe.columns).to(self._device)

    def _float(self, recipe: Recipe, pieces: tuple[WeightPiece, ...], dtype: "torch.dtype | None") -> "Tensor":
        import torch

        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        parts = []
        for piece in pieces:
            form = formats.packed(piece.format).name
            raw = formats.packed_bytes(piece.format, piece.bytes_of(self.read(piece.tensor), recipe.columns))
            bits = torch.from_numpy(np.ascontiguousarray(raw)).view(kinds[form])
            parts.append(bits.view(-1, recipe.columns).to(self._device).to(dtype or torch.float32))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class HostedWeights:
    """Weights of layers that live in the host's memory, on the device while their layer is used: a tensor or a tuple of
    Parts each.

    Args:
        names: hosted layer -> its weights' names.
        make: a weight's name -> the weight, on the CPU; called once for each, a layer at a time: two copies of all of
            them might not fit.
        device: where they are used.
    """

    def __init__(
        self, names: Mapping[int, Sequence[str]], make: "Callable[[str], Weight]", device: "torch.device | str"
    ) -> None:
        self.shapes: dict[str, Weight] = {}  # the weights, on the meta device
        self.nbytes = 0
        self._names = names
        layers = (self._layer(layer, make) for layer in range(max(names) + 1))
        self._offload = Offload(layers, device, tuple(names), BUFFERS)

    def __contains__(self, layer: int | None) -> bool:
        return layer in self._names

    @contextmanager
    def using(self, layer: int) -> "Iterator[dict[str, Weight]]":
        """The layer's weights on the device, inside this block only."""
        with self._offload.using(layer) as tensors:
            yield {name: _map(self.shapes[name], name, lambda key, _: tensors[key]) for name in self._names[layer]}

    def _layer(self, layer: int, make: "Callable[[str], Weight]") -> "dict[str, Tensor]":
        """All tensors of a hosted layer; none of another."""
        tensors: dict[str, Tensor] = {}

        def take(key: str, tensor: "Tensor") -> "Tensor":
            tensors[key] = tensor
            self.nbytes += tensor.nbytes
            return tensor.to("meta")

        for name in self._names.get(layer, ()):
            self.shapes[name] = _map(make(name), name, take)
        return tensors


def _form(name: str) -> str:
    """The format that a piece is on the device."""
    ours = formats.packed(name).name
    return STAND_INS.get(ours, ours)


def _map(weight: T, key: str, change: "Callable[[str, Tensor], Tensor]") -> T:
    """A weight with other tensors in the place of its own; change: (key, tensor) -> the other tensor."""
    import torch

    if isinstance(weight, torch.Tensor):
        return change(key, weight)  # type: ignore[return-value]
    if isinstance(weight, tuple):  # Parts
        parts = (replace(part, weight=_map(part.weight, f"{key}.{i}", change)) for i, part in enumerate(weight))
        return tuple(parts)  # type: ignore[return-value]
    tensors = ((f.name, getattr(weight, f.name)) for f in fields(weight))  # type: ignore[arg-type]
    changed = {n: change(f"{key}.{n}", t) for n, t in tensors if isinstance(t, torch.Tensor)}
    return replace(weight, **changed)  # type: ignore[type-var]
