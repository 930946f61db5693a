"""Rows picked by number: of an embedding table by token id, of a step's activations by logit row."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "embed"


@triton.jit(do_not_specialize=["rows"])
def _pick(table, numbers, out, rows, width, table_stride, out_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    number = tl.load(numbers + at).to(tl.int64)
    valid = (number >= 0) & (number < rows)
    value = tl.load(table + number * table_stride + column, mask=inside & valid, other=float("nan"))
    tl.store(out + at * out_stride + column, value.to(tl.float32).to(out.dtype.element_ty), mask=inside)


def embed(chip: Chip, ids: Tensor, table: Tensor, *, out: Tensor) -> None:
    """out [tokens, width] = rows of table [vocab, width] by id; ids int32 or int64 [tokens]. The op take_rows too.

    table bf16, f16 or float32, out any of them; rows of both may lie apart. A number outside the table gives a row of
    NaN: what it asked for fails, and nothing beside it.
    """
    tile = tiles.choose(NAME, chip)
    rows, width = table.shape
    assert table.stride(1) == out.stride(1) == 1, "a row lies apart"
    _pick[(ids.shape[0], cdiv(width, tile.sizes["BLOCK"]))](
        table, ids, out, rows, width, table.stride(0), out.stride(0), **tile.launch()
    )


def cost(tokens: int, width: int, table_bytes: int = 2, out_bytes: int = 4) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch."""
    return 0, tokens * (width * (table_bytes + out_bytes) + 4)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """An embedding to float32 and logit rows of 16 bits."""
    tile = tiles.choose(NAME, chip)
    aligned = ("width", "table_stride", "out_stride")
    for table, out in (("bf16", "f32"), ("f16", "f32"), ("bf16", "bf16"), ("f32", "f32")):
        types = pointers(table=table, numbers="i32", out=out)
        yield Compilation(
            kernel=NAME,
            case=f"{table} to {out}",
            function=_pick,
            signature=types,
            constants={},
            tile=tile,
            aligned=aligned,
        )
