"""A family's spec table: what parameters there are, their shapes, and how tensor parallelism splits them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from roofline.common.errors import ConfigError

# How a parameter is split over tensor-parallel ranks. column: by output rows; row: by input columns (its product is
# summed over the ranks); vocab: by vocabulary rows; replicate: whole on each rank.
SPLITS = ("column", "row", "vocab", "replicate")


@dataclass(frozen=True)
class Param:
    """One row of the table.

    `{layer}` in the name stands for each layer; tied_to: the parameter this one is; parts: row counts of a fused
    column parameter, each of which is split by itself.
    """

    name: str
    shape: tuple[int, ...]
    split: str
    tied_to: str | None = None
    parts: tuple[int, ...] = ()


def expand(table: Iterable[Param], layers: int) -> tuple[Param, ...]:
    """The table with one row for each layer of the indexed parameters."""
    rows = []
    for param in table:
        indexed = range(layers) if "{layer}" in param.name else (0,)
        rows += [replace(param, name=param.name.format(layer=layer)) for layer in indexed]
    return tuple(rows)


def check(table: Iterable[Param], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError unless exactly the table's untied parameters are there with their shapes."""
    table = tuple(table)
    wanted = {p.name: p.shape for p in table if p.tied_to is None}
    for name, shape in wanted.items():
        if name not in shapes:
            raise ConfigError(f"the model file has no {name} (expected {list(shape)})")
        if tuple(shapes[name]) != shape:
            raise ConfigError(f"{name} has shape {list(shapes[name])}, the configuration asks for {list(shape)}")
    spare = sorted(set(shapes) - set(wanted))
    if spare:
        raise ConfigError(f"the model file holds tensors this model does not use: {', '.join(spare[:5])}")


def tree(table: Iterable[Param], tensors: Mapping[str, Any]) -> SimpleNamespace:
    """The parameters as the families read them: w.layers[0].attn.q.weight, .bias (None where there is none)."""
    root = SimpleNamespace()
    for param in table:
        node, path = root, param.name.split(".")
        for step in path[:-1]:
            if not hasattr(node, step):
                setattr(node, step, SimpleNamespace())
            node = getattr(node, step)
        setattr(node, path[-1], tensors[param.tied_to or param.name])
        if path[-1] == "weight" and not hasattr(node, "bias"):
            node.bias = None
    layers = vars(root).get("layers", SimpleNamespace())
    root.layers = [getattr(layers, str(i)) for i in range(len(vars(layers)))]
    return root
