"""The Program: a straight list of instructions over named values, weights given as recipes, caches as values.

Everything here is immutable; passes make new Programs. The text form is in text.py, the rules in verify.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roofline.ops import formats, registry
from roofline.ops.cost import Affine, InstructionCost
from roofline.ops.rope_tables import RopeTable
from roofline.ops.state import StateParts, state_values
from roofline.ops.symbol import Q_BYTES, Type, WeightType, kv_head_bytes
from roofline.ops.traits import Trait
from roofline.program.target import STAND_INS

if TYPE_CHECKING:
    import numpy as np

SYMBOLS = ("tokens", "rows")


@dataclass(frozen=True)
class Value:
    """A named result. Names are unique in a Program and assigned once."""

    name: str
    type: Type


@dataclass(frozen=True)
class Columns:
    """Columns start..stop of a tensor that has `of` of them; both edges between blocks of its format."""

    start: int
    stop: int
    of: int


@dataclass(frozen=True)
class WeightPiece:
    """Rows start..stop of a tensor in the file, in the file's format; columns: of these rows, None: all."""

    tensor: str
    start: int
    stop: int
    format: str
    columns: Columns | None = None

    def bytes_of(self, raw: "np.ndarray", width: int) -> "np.ndarray":
        """uint8, row after row: the piece's part of its tensor's bytes; width: columns of the recipe."""
        form = formats.get(self.format)
        cut = self.columns
        if cut is None:
            row = width // form.block * form.block_bytes
            return raw[self.start * row : self.stop * row]
        start, stop, row = (n // form.block * form.block_bytes for n in (cut.start, cut.stop, cut.of))
        return raw.reshape(-1, row)[self.start : self.stop, start:stop].reshape(-1)


@dataclass(frozen=True)
class Recipe:
    """How a weight is made: pieces stacked by rows, all of one width. shape: (rows, columns) or (length,).

    layout: "file" as the pieces are; "f32" widened to float32; "packed" tiles of the backend's own.

    What follows from these is computed once: every pass asks for it, and experts' weights have hundreds of pieces.
    """

    shape: tuple[int, ...]
    pieces: tuple[WeightPiece, ...]
    layout: str = "file"

    @property
    def columns(self) -> int:
        """Elements of one row of a matrix; 1 for a vector, whose rows are its elements."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @cached_property
    def _kinds(self) -> Counter[tuple[str, int]]:
        """How many pieces there are of each format and number of rows: hundreds of experts' are of one kind."""
        return Counter([(piece.format, piece.stop - piece.start) for piece in self.pieces])

    @cached_property
    def nbytes(self) -> int:
        """Bytes the pieces take in the format they are packed as: the file's own, for the formats we have."""
        total = 0
        for (name, rows), count in self._kinds.items():
            form = formats.packed(name)
            total += count * (rows * self.columns // form.block * form.block_bytes)
        return total

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that kernels read of it: its layout may hold some formats in others (`target.STAND_INS`)."""
        stand_ins = STAND_INS.get(self.layout, {})
        total = 0
        for (name, rows), count in self._kinds.items():
            form = formats.packed(name)
            if len(self.shape) == 2 and form.name in stand_ins:
                form = formats.get(stand_ins[form.name])
            total += count * (rows * self.columns // form.block * form.block_bytes)
        return total

    @cached_property
    def type(self) -> WeightType:
        """What ops see of it."""
        names = {name: formats.packed(name).name for name, _ in self._kinds}
        return WeightType(self.shape, tuple([names[piece.format] for piece in self.pieces]), self.resident_bytes)


@dataclass(frozen=True)
class Instr:
    """One operation. inputs: value names; weights: weight names; both by position, trailing optional ones left out.

    attrs: the attributes that differ from the op's defaults. outputs: one Value for each result.
    """

    op: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[Value, ...]

    @property
    def output(self) -> Value:
        """The first result: the only one, or the one that is not a store."""
        return self.outputs[0]

    def has(self, *traits: Trait) -> bool:
        """Whether its op has one of these traits."""
        return registry.has(self.op, *traits)

    @property
    def writes_cache(self) -> bool:
        """Whether one of its results is a store: a cache, or recurrent state."""
        return any(value.type.stored for value in self.outputs)

    @property
    def exchanges(self) -> bool:
        """Whether its result depends on other ranks."""
        return registry.get(self.op).link_bytes is not None

    @property
    def makes_integers(self) -> bool:
        """Whether its result are rows of integers: the input of integer products."""
        return self.output.type.dtype in Q_BYTES

    @property
    def layer(self) -> int | None:
        """The layer of the model that it belongs to, by its weights' names; None where they do not say. The attribute
        `layer` of some ops is another number: that of the layer among those of its store."""
        return max((int(name.split(".")[1]) for name in self.weights if name.startswith("layers.")), default=None)

    def attr(self, name: str) -> Any:
        """An attribute, or the op's default for it."""
        return self.attrs.get(name, registry.get(self.op).attributes[name])


@dataclass(frozen=True)
class KvGroup:
    """The layers whose caches share kind, heads, dims, window (0: none) and format ("f32", "bf16", "f16", "int8",
    "e4m3fn", "e4m3fnuz"). layers: those that write to it; value_dim: as `models.config.KvShape` has it."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int
    format: str
    value_dim: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes K and V of one token take over all layers."""
        tensors = 1 if self.value_dim else 2
        return tensors * self.layers * self.kv_heads * kv_head_bytes(self.format, self.head_dim)


@dataclass(frozen=True)
class StateGroup:
    """The layers that keep recurrent state of each sequence, all of the same parts.

    parts: name and shape of each tensor of float32 that such a layer keeps; they lie one behind the other, row-major,
    layer after layer, in a slot.
    """

    layers: int
    parts: StateParts

    @property
    def layer_values(self) -> int:
        """How many float32 values a layer keeps of a sequence."""
        return state_values(self.parts)

    @property
    def slot_bytes(self) -> int:
        """Bytes that the state of one sequence takes over all layers."""
        return 4 * self.layers * self.layer_values


@dataclass(frozen=True)
class ArenaPlace:
    """Where a value lies in the arena: byte offset of its first row, bytes from one row to the next.

    Rows of q8g32 are not interleaved with their scales: `stride` is then the bytes a row takes in all.
    """

    offset: Affine
    stride: int


@dataclass(frozen=True)
class ArenaPlan:
    """A place for each value that is not a cache or an input, and the arena's size."""

    places: Mapping[str, ArenaPlace]
    arena: Affine


@dataclass(frozen=True)
class Share:
    """What a Program is of a model: the part of rank `rank` of `ranks` that share its matrices, and of the layers those
    of `stage`, one of `stages`."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1


WHOLE = Share()


@dataclass(frozen=True)
class Program:
    """A model lowered to instructions.

    target: "" until legalised. inputs: batch fields and the stores: caches ("kv0.0") and state ("state0.0"); a value
    "kv0.N" belongs to kv group "kv0". A layer that attends without a write of its own reads what another one wrote to
    the group. outputs: the logits, then the last value of each store. share: see
    passes/shard.py and passes/stage.py; the first output of a stage that is not the last is what the next one goes on
    from, and an input there.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Recipe]
    body: tuple[Instr, ...]
    kv_groups: Mapping[str, KvGroup]
    tables: Mapping[str, RopeTable] = field(default_factory=dict)
    target: str = ""
    plan: ArenaPlan | None = None
    share: Share = WHOLE
    state_groups: Mapping[str, StateGroup] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """How many layers of the model it computes."""
        return len({name.split(".")[1] for name in self.weights if name.startswith("layers.")})

    @property
    def logits(self) -> str:
        """Name of the value that holds the logits [rows, vocab]."""
        return self.outputs[0]

    @property
    def carried(self) -> tuple[Value, ...]:
        """What a stage that is not the first goes on from."""
        return self.inputs[-1:] if self.share.stage else ()

    def values(self) -> Iterator[Value]:
        """All values: inputs, then results in order."""
        yield from self.inputs
        for instr in self.body:
            yield from instr.outputs

    def types(self) -> dict[str, Type]:
        """The type of each value."""
        return {value.name: value.type for value in self.values()}

    def rows_dtype(self) -> str:
        """The dtype of the rows that linears read: the `activations` of the target it was legalised for."""
        types = self.types()
        dtypes = {types[instr.inputs[0]].dtype for instr in self.body if instr.has(Trait.PRODUCT)}
        assert len(dtypes) == 1, "linears read rows of one dtype"
        return dtypes.pop()

    def matrix(self, instr: Instr) -> Recipe | None:
        """The matrix that an instruction multiplies with or looks rows up in; of experts, all of theirs."""
        reads = instr.op == "embed" or instr.has(Trait.PRODUCT, Trait.EXPERTS)
        return self.weights[instr.weights[0]] if reads else None

    def weight_types(self, instr: Instr) -> list[WeightType]:
        """The types of an instruction's weights."""
        return [self.weights[name].type for name in instr.weights]

    def price(self, instr: Instr, types: Mapping[str, Type] | None = None) -> InstructionCost:
        """The cost of one instruction of this Program."""
        types = types or self.types()
        op = registry.get(instr.op)
        return op.price(op.call((types[name] for name in instr.inputs), self.weight_types(instr), instr.attrs))


def kv_group_of(cache: str) -> str:
    """ "kv0.3" -> "kv0": the group that a store's value belongs to."""
    return cache.rpartition(".")[0]
