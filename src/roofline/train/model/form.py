"""How a frozen parameter lies in memory, and what is trained beside it; without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roofline.models.spec import Param
from roofline.ops import formats
from roofline.weights.names import to_hf


@dataclass(frozen=True)
class ParameterForm:
    """How a parameter of the model lies in memory while it is frozen, and what is trained beside it.

    shape: the parameter's. format: of `ops.formats`. opaque: only ops read it that take an OwnWeight; others get its
    values. experts: matrices one below the other in it, each of which has an adapter of its own. rank: of the adapter,
    0: none; scale: of its product; dora: lengths of rows are trained too; shared: its A is that of the adapted matrix
    before it in the family's table, as PEFT has it for gate and up of experts and for what files have in one tensor.
    """

    shape: tuple[int, ...]
    format: str
    opaque: bool = False
    experts: int = 0
    rank: int = 0
    scale: float = 1.0
    dora: bool = False
    shared: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the tensor that holds it: the values, or of a format of blocks the bytes."""
        form = formats.get(self.format)
        return self.shape if form.block == 1 else (self.shape[0], form.nbytes(self.shape[1:]))

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is trained, by the names that PEFT's modules have; those of experts one below the other."""
        if not self.rank:
            return {}
        count, (rows, columns) = max(1, self.experts), self.shape
        tensors: dict[str, tuple[int, ...]] = {} if self.shared else {"lora_A": (count * self.rank, columns)}
        return tensors | {"lora_B": (rows, self.rank)} | ({"lora_magnitude_vector": (rows,)} if self.dora else {})


def beside(name: str, trained: str) -> str:
    """The name of a tensor that is trained beside a matrix, as PEFT's modules have it."""
    return f"{name.removesuffix('.weight')}.{trained}.weight"


def trained_rows(family: str, param: Param, form: ParameterForm) -> Iterator[tuple[str, Param]]:
    """(name in torch, a row of its own) of each tensor that is trained beside a matrix."""
    for part, shape in form.trained.items():
        name = beside(param.name, part).removesuffix(".weight")
        row = replace(param, name=name, shape=shape, split="replicate", parts=(), experts=0)
        yield beside(to_hf(family, param.name), part), row
