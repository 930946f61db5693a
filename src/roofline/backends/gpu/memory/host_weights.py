"""Weights of layers that live in the host's memory: on the device while their layer is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

from roofline.backends.gpu.memory.capacity import BUFFERS
from roofline.backends.gpu.memory.offload import Offload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roofline.backends.gpu.memory.weights import Part

    Weight = Tensor | tuple[Part, ...]

T = TypeVar("T")


class HostedWeights:
    """Weights by layer, each a tensor or a tuple of Parts.

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
