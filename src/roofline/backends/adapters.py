"""The adapters of an executable: which slot holds which, and where their matrices belong in its Program."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.ops.adapters import AdapterMatrix, PlacedMatrix, served_merged
from roofline.program.ir import Program
from roofline.program.passes.adapt import Site, sites

_MERGED = ("roofline merge, which writes a model with the adapter in it",)
_REASONS = {
    "experts": "each row would have those of its experts",
    "keys and values of compressed rows": "attention multiplies with a part of this matrix for each head",
}
# What a backend does beside keeping them: (slot, its matrices; none: the slot is free again).
Changed = Callable[[int, Sequence[PlacedMatrix]], None]


# Of DoRA: what the results of the model's matrix are multiplied by, and what is added then; float32 [outputs] each.
RowScaling = Callable[[AdapterMatrix], tuple[np.ndarray, np.ndarray]]
# The matrices of an adapter as those of a model: what files have in one tensor apart, heads in the model's order.
OfModel = Callable[[Sequence[AdapterMatrix]], Iterable[AdapterMatrix]]


class AdapterSlots:
    """Slots 1, 2, ... of adapters for a Program that `passes.adapt` made; of any other Program none.

    changed: told of each slot that is filled or freed. Between steps only.

    Attributes:
        row_scaling: for DoRA, set by who has the model's files; None: such adapters are refused.
        of_model: set by who knows the model's configuration; None: matrices are as they are.
    """

    row_scaling: RowScaling | None = None
    of_model: OfModel | None = None

    def __init__(self, program: Program, changed: Changed | None = None) -> None:
        self.sites: Mapping[str, Site] = sites(program)
        self._head_dims = _head_dims(program)
        # Converters to GGUF permute Llama's rows of q and k, whose rotation then turns neighbours. GLM-4's does in
        # every file; it is told apart by turning half of each head, which Llama's never does.
        tables = program.tables.values()
        dims = set(self._head_dims.values())
        self._permutes = any(table.style == "interleaved" and table.dim in dims for table in tables)
        ranks = [i.attr("ranks") // self._parts(i.attr("group")) for i in program.body if i.op == "adapter_down"]
        self.rank = int(ranks[0]) if ranks else 0  # the largest of an adapter
        self.placed: dict[int, Sequence[PlacedMatrix]] = {}
        self._changed = changed or (lambda slot, matrices: None)

    def set(self, slot: int, matrices: Sequence[AdapterMatrix]) -> None:
        """Put an adapter into a free slot. Raises ConfigError for a matrix that the model does not have or of another
        shape, CapacityError for one of more ranks than there is room for."""
        assert slot > 0, "slot 0 stands for no adapter"
        assert slot not in self.placed, "a slot is freed before it is used again"
        if self.of_model is not None:
            matrices = list(self.of_model(matrices))
        placed = sorted((place for matrix in matrices for place in self._place(matrix)), key=_order)
        self._changed(slot, placed)
        self.placed[slot] = placed

    def free(self, slot: int) -> None:
        """Forget an adapter that no step names any more."""
        self._changed(slot, ())
        del self.placed[slot]

    def _place(self, matrix: AdapterMatrix) -> list[PlacedMatrix]:
        assert matrix.a.dtype == matrix.b.dtype == np.float32, "what the kernels read"
        if matrix.magnitude is not None and self.row_scaling is None:
            reason = "it scales the rows of the model's matrices, whose lengths are read from the model's files"
            what = "serving a DoRA adapter beside a bundle, or on this backend,"
            raise UnsupportedError(what, reason, ("the model's files with backend=cpu", *_MERGED))
        site = self.sites.get(matrix.tensor)
        if site is None and (part := served_merged(matrix.tensor)):
            what = f"serving an adapter of {part} ({matrix.tensor})"
            raise UnsupportedError(what, _REASONS[part], _MERGED)
        if site is None:
            raise ConfigError(f"the adapter changes {matrix.tensor}, which is no matrix of this model's layers")
        shapes = (matrix.a.shape[1], matrix.b.shape[1])
        if shapes != (site.inputs, site.outputs):
            what = f"the adapter's matrices for {matrix.tensor} have {shapes[0]} inputs and {shapes[1]} outputs"
            raise ConfigError(f"{what}, the model's have {site.inputs} and {site.outputs}")
        if matrix.rank > self.rank:
            what = f"an adapter of rank {matrix.rank}"
            raise CapacityError(what, matrix.rank, self.rank, "ranks", "Load the model with a larger max_adapter_rank.")
        if self._permutes != matrix.paired and ".".join(matrix.tensor.split(".")[2:4]) in ("attn.q", "attn.k"):
            moved, magnitude = _neighbours if self._permutes else _halves, matrix.magnitude
            dim = self._head_dims[int(matrix.tensor.split(".")[1])]
            if magnitude is not None:
                magnitude = moved(magnitude[None], dim)[0]
            b = moved(matrix.b, dim)
            matrix = replace(matrix, b=b, magnitude=magnitude, paired=self._permutes)
        gain = shift = None
        if matrix.magnitude is not None and self.row_scaling is not None:
            gain, shift = self.row_scaling(matrix)
        first, column = site.part * self.rank, site.column
        return [
            PlacedMatrix(matrix=matrix, group=group, first=first, column=column, gain=gain, shift=shift)
            for group in site.groups
        ]

    def _parts(self, group: int) -> int:
        return 1 + max(site.part for site in self.sites.values() if group in site.groups)


def _order(place: PlacedMatrix) -> tuple[int, int]:
    return place.group, place.first


def _head_dims(program: Program) -> dict[int, int]:
    """The layers that attend, and dimensions of a head there."""
    types, layer, dims = program.types(), 0, {}
    for instr in program.body:
        layer = max(layer, instr.layer or 0)
        if instr.op == "attend":
            dims[layer] = types[instr.inputs[1]].trailing[1]
    return dims


def _neighbours(b: np.ndarray, head_dim: int) -> np.ndarray:
    """[rank, outputs] with each head's columns i and i + head_dim / 2 side by side."""
    rank, outputs = b.shape
    halves = b.reshape(rank, outputs // head_dim, 2, head_dim // 2)
    return np.ascontiguousarray(halves.swapaxes(2, 3).reshape(rank, outputs))


def _halves(b: np.ndarray, head_dim: int) -> np.ndarray:
    """The inverse of `_neighbours`."""
    rank, outputs = b.shape
    pairs = b.reshape(rank, outputs // head_dim, head_dim // 2, 2)
    return np.ascontiguousarray(pairs.swapaxes(2, 3).reshape(rank, outputs))
