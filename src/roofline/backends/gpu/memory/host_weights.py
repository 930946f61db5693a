"""Weights of layers that live on the host, as the launches look for them: there while their layer is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, overload

from roofline.backends.gpu.memory.capacity import BUFFERS
from roofline.backends.gpu.memory.offload import Offload

if TYPE_CHECKING:
    from torch import Tensor


class HostedWeights:
    """Weights by layer, each a tensor or a tuple of Parts.

    Args:
        names: hosted layer -> its weights' names.
        make: a weight's name -> the weight, on the CPU; called once for each, a layer at a time.
        device: where they are used.
    """

    def __init__(self, names: Mapping[int, Sequence[str]], make: Callable[[str], Any], device: Any) -> None:
        self.shapes: dict[str, Any] = {}  # the weights, on the meta device
        self.nbytes = 0
        self._names, self._make = names, make
        self._offload = Offload(_Layers(max(names) + 1, self._flat), device, tuple(names), BUFFERS)

    def __contains__(self, layer: int | None) -> bool:
        return layer in self._names

    @contextmanager
    def using(self, layer: int) -> Iterator[dict[str, Any]]:
        """The layer's weights on the device, inside this block only."""
        with self._offload.using(layer) as tensors:
            yield {name: _with(self.shapes[name], name, lambda key, _: tensors[key]) for name in self._names[layer]}

    def _flat(self, layer: int) -> "dict[str, Tensor]":
        """All tensors of a hosted layer; none of another."""
        found: dict[str, Tensor] = {}

        def take(key: str, tensor: "Tensor") -> "Tensor":
            found[key] = tensor
            self.nbytes += tensor.nbytes
            return tensor.to("meta")

        for name in self._names.get(layer, ()):
            self.shapes[name] = _with(self._make(name), name, take)
        return found


class _Layers(Sequence[Mapping[str, Any]]):
    """Layers that are made when they are asked for: two copies of all of them might not fit."""

    def __init__(self, count: int, make: Callable[[int], Mapping[str, Any]]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if index >= self._count:
            raise IndexError(index)
        return self._make(index)


def _with(held: Any, key: str, change: "Callable[[str, Tensor], Tensor]") -> Any:
    """A weight with other tensors in the place of its own; change: (key, tensor) -> the other tensor."""
    import torch

    if isinstance(held, torch.Tensor):
        return change(key, held)
    if isinstance(held, tuple):  # Parts
        parts = enumerate(held)
        return tuple(replace(part, held=_with(part.held, f"{key}.{i}", change)) for i, part in parts)
    tensors = ((f.name, getattr(held, f.name)) for f in fields(held))
    return replace(held, **{n: change(f"{key}.{n}", t) for n, t in tensors if isinstance(t, torch.Tensor)})
