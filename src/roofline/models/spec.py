"""A family's spec table: what parameters there are, their shapes, and how tensor parallelism splits them."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roofline.common.errors import ConfigError

# How a parameter is split over tensor-parallel ranks. column: by output rows; row: by input columns (its product is
# summed over the ranks); expert_column, expert_row: the same of each expert's matrix by itself, where the model is
# served (training computes all experts on each rank); vocab: by vocabulary rows; replicate: whole on each rank; shared:
# whole on each rank, which uses it on its own heads.
SPLITS = ("column", "row", "expert_column", "expert_row", "vocab", "replicate", "shared")


@dataclass(frozen=True)
class Param:
    """One row of the table.

    `{layer}` in the name stands for each layer; tied_to: the parameter this one is; parts: row counts of a fused
    column parameter, each of which is split by itself; experts: so many matrices lie one below the other in it, which
    files may have as one tensor or as one each (`file_shapes`); layers: those that have it, None: all.
    """

    name: str
    shape: tuple[int, ...]
    split: str
    tied_to: str | None = None
    parts: tuple[int, ...] = ()
    experts: int = 0
    layers: Collection[int] | None = None

    def is_of(self, layer: int) -> bool:
        """Whether a layer has it."""
        return self.layers is None or layer in self.layers

    def expert(self, number: int) -> str:
        """What the tensor of one expert is called: its number behind "experts"."""
        before, _, after = self.name.rpartition(".experts.")
        return f"{before}.experts.{number}.{after}"


def expand(table: Iterable[Param], layers: int) -> tuple[Param, ...]:
    """The table with one row for each layer of the indexed parameters."""
    rows = []
    for param in table:
        indexed = filter(param.is_of, range(layers)) if "{layer}" in param.name else (0,)
        rows += [replace(param, name=param.name.format(layer=layer)) for layer in indexed]
    return tuple(rows)


def file_shapes(table: Iterable[Param], names: Container[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor that a file must hold for the table's untied parameters; names: what it holds, which
    says of each parameter of experts whether it is one tensor or several."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param in table:
        if param.tied_to is not None:
            continue
        if param.experts and param.name not in names and param.expert(0) in names:
            expert_shape = (param.shape[0] // param.experts, *param.shape[1:])
            shapes |= dict.fromkeys(map(param.expert, range(param.experts)), expert_shape)
        else:
            shapes[param.name] = param.shape
    return shapes


def check(table: Iterable[Param], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError unless exactly the table's untied parameters are there with their shapes."""
    expected = file_shapes(table, shapes)
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"the model file has no {name} (expected {list(shape)})")
        if tuple(shapes[name]) != shape:
            raise ConfigError(f"{name} has shape {list(shapes[name])}, the configuration asks for {list(shape)}")
    spare = sorted(set(shapes) - set(expected))
    if spare:
        raise ConfigError(f"the model file holds tensors this model does not use: {', '.join(spare[:5])}")


class Weights:
    """Parameters as the families read them: w.layers[0].attn.q.weight, .bias (None where there is none).

    A plain class and not a SimpleNamespace: torch.compile follows how it is built.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...


def hybrid_table(table: Iterable[Param], recurrent: Sequence[bool], mixer: Sequence[Param]) -> tuple[Param, ...]:
    """A decoder's table of which only some layers attend. recurrent: those that do not; mixer: what these have instead,
    behind the norm of attention."""
    attending = tuple(layer for layer, instead in enumerate(recurrent) if not instead)
    params: list[Param] = []
    for param in table:
        params.append(replace(param, layers=attending) if ".attn." in param.name else param)
        if param.name == "layers.{layer}.attn_norm.weight":
            params += mixer
    return tuple(params)


def tree(table: Iterable[Param], tensors: Mapping[str, object]) -> Weights:
    """The Weights of a table."""
    table = tuple(table)
    root = nest([p.name for p in table], [tensors[p.tied_to or p.name] for p in table])
    layers = vars(root).get("layers", Weights())
    root.layers = [getattr(layers, str(i)) for i in range(len(vars(layers)))]
    return root


def nest(names: Sequence[str], values: Sequence[object]) -> Weights:
    """Weights by dotted names; beside a weight alone stands the bias None."""
    root = Weights()
    for name, value in zip(names, values, strict=True):
        node, path = root, name.split(".")
        for step in path[:-1]:
            if not hasattr(node, step):
                setattr(node, step, Weights())
            node = getattr(node, step)
        setattr(node, path[-1], value)
        if path[-1] == "weight" and not hasattr(node, "bias"):
            node.bias = None
    return root
