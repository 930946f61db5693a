"""Sums and gathered columns among the ranks of a model, which torch computes between two calls of the core."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from roofline.ops.batch import Batch
from roofline.ops.collectives import RankGroup, exchange, require_ranks
from roofline.program.ir import Instr, Program

if TYPE_CHECKING:
    from torch import Tensor

Exchange = Callable[[], None]


def exchanges(program: Program, arena: np.ndarray, batch: Batch, group: RankGroup | None) -> dict[int, Exchange]:
    """Number of an instruction -> what makes its result in the arena, for the step in the batch.

    arena: uint8, as the Program's plan has it. Raises UnsupportedError where the Program is for other ranks than there
    are.
    """
    require_ranks(program.share.ranks, group)
    if group is None:
        return {}
    rows = _Rows(program, arena, batch)

    def exchange_of(instr: Instr) -> Exchange:
        order, widths = instr.attr("order"), instr.attrs.get("widths", ())
        return lambda: exchange(rows[instr.inputs[0]], rows[instr.output.name], group, order, widths)

    return {at: exchange_of(instr) for at, instr in enumerate(program.body) if instr.exchanges}


class _Rows:
    """Values in the arena as tensors."""

    def __init__(self, program: Program, arena: np.ndarray, batch: Batch) -> None:
        assert program.plan is not None, "a planned Program"
        self._places, self._types = program.plan.places, program.types()
        self._arena, self._batch = arena, batch

    def __getitem__(self, name: str) -> "Tensor":
        """float32 [rows of the step, width]."""
        import torch

        kind, place, batch = self._types[name], self._places[name], self._batch
        assert kind.dtype == "f32", "ranks exchange float32 rows"
        start = int(place.offset.at(tokens=batch.tokens, rows=batch.rows))
        count = batch.tokens if kind.leading == "tokens" else batch.rows
        flat: np.ndarray = self._arena[start : start + count * kind.row_bytes].view(np.float32)
        return torch.from_numpy(flat.reshape(count, kind.width))
