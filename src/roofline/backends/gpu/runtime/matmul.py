"""Which kernel multiplies: ours for few rows, quantised weights or exact results; the library's where rows are many.

A quantised matrix is widened once for many rows: from there on the library's product is bound by arithmetic. Between
both, Hopper unpacks codes where it multiplies them (kernels/linear_unpacked.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roofline.backends.gpu.memory.weights import RowPart
from roofline.backends.gpu.runtime.step import GpuStep
from roofline.backends.gpu.tiles import Tile
from roofline.hardware.chips.chips import Chip

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Rows up to which products of quantised weights are scaled once a group (kernels/linear_whole.py) where
# linear_unpacked.py could serve; with scales of two levels it has more to compute. Of an H200 measured.
FEW_ONE_LEVEL, FEW_TWO_LEVELS = 8, 16
WIDEN = 128  # rows from which a quantised matrix is widened
WIDEN_UNPACKED = 192  # where linear_unpacked.py could serve: 128 rows take 0.6 of the time so, 512 take 1.3 to 1.5
# (rows, out, width, with a bias) of a product with 16-bit weights -> our kernel's tile, None: the library's product.
Choices = Mapping[tuple[int, int, int, bool], Tile | None]


def choices_text(choices: Choices) -> str:
    """Choices in one line each, in an order that is theirs alone: equal texts, equal bits."""
    lines = (f"{shape}: {sorted(tile.launch().items()) if tile else None}" for shape, tile in choices.items())
    return "\n".join(sorted(lines))


@dataclass(frozen=True)
class Products:
    """dtype: of activations, torch's; exact: one order for every number of rows, so no library; choices: what was
    measured to be fastest (see tuning/linear.py), followed where results need not be exact; one_tile: tiles of this
    device were found to differ (see runtime/agreement.py), so exact products have one; arrived: of
    kernels/linear_unpacked.py."""

    chip: Chip
    dtype: "torch.dtype"
    exact: bool
    arrived: "Tensor"
    choices: Choices = field(default_factory=dict)
    one_tile: bool = False

    def scratch_bytes(self, parts: tuple[RowPart, ...], tokens: int) -> int:
        """Scratch that products of up to so many rows with this matrix need."""
        from roofline.backends.gpu.kernels.linear_unpacked import sums_bytes

        needed = 0
        for part in parts:
            if not part.quantised:
                needed = max(needed, 2 * tokens * part.rows)  # gate and up before they are joined
                continue
            columns = part.weight.columns
            joined = 2 * tokens * part.rows if tokens >= WIDEN or self._takes_unpacked(part) else 0  # gate and up
            wide = joined + (2 * part.rows * columns if tokens >= WIDEN else 0)
            if self._takes_unpacked(part):
                wide = max(wide, joined + sums_bytes(tokens, part.rows, columns))
            eight = _scales_bytes(tokens) + tokens * columns if part.float8 else 0
            needed = max(needed, wide, eight)
        return needed

    def linear(
        self,
        step: GpuStep,
        x: "Tensor",
        parts: tuple[RowPart, ...],
        bias: "Tensor | None",
        out: "Tensor",
        rows8: bool = False,
    ) -> None:
        """out [rows, sum of the parts' rows] = x @ w.T + bias; rows8: x is rounded to 8-bit floats first."""
        for part in parts:
            columns = slice(part.start, part.start + part.rows)
            column_bias = None if bias is None else bias[columns]
            (self._in_eight if rows8 else self._part)(step, x, part, column_bias, out[:, columns])

    def gated(self, step: GpuStep, x: "Tensor", part: RowPart, out: "Tensor", rows8: bool = False) -> None:
        """out [rows, ffn] = silu(gate) * up of x @ w.T, w [2 * ffn, in]; rows8: as in `linear`."""
        from roofline.backends.gpu.kernels.gated import gated
        from roofline.backends.gpu.kernels.linear_float import FEW_ROWS, fuses_gated, linear_float
        from roofline.backends.gpu.kernels.linear_unpacked import sums_bytes

        if rows8:
            self._in_eight(step, x, part, None, out, gated=True)
            return
        rows, offset = x.shape[0], 0  # offset: of gate and up, behind the scratch that `_part` uses
        if part.quantised:
            if self._widened(x, part):
                offset = 2 * part.rows * x.shape[1]
            elif self._unpacked(x, part):
                offset = sums_bytes(rows, part.rows, x.shape[1])
            else:
                self._quantised(x, part, None, out, gated=True)
                return
        elif fuses_gated(self.chip) and (self.exact or rows <= FEW_ROWS):
            linear_float(self.chip, x, part.weight, None, out, gated=True, exact=self.exact)
            return
        size = rows * part.rows * self.dtype.itemsize
        gate_up = step.scratch[offset : offset + size].view(self.dtype).view(rows, part.rows)
        self._part(step, x, part, None, gate_up)
        gated(self.chip, "silu", gate_up, out=out)

    def _widened(self, x: "Tensor", part: RowPart) -> bool:
        return not self.exact and x.shape[0] >= (WIDEN_UNPACKED if self._takes_unpacked(part) else WIDEN)

    def _takes_unpacked(self, part: RowPart) -> bool:
        """Whether a part has the product of linear_unpacked.py."""
        from roofline.backends.gpu.kernels.linear_unpacked import takes_unpacked

        if not part.quantised or part.float8:
            return False
        return takes_unpacked(self.chip, part.weight.layout, self.dtype, part.rows, part.weight.columns)

    def _unpacked(self, x: "Tensor", part: RowPart) -> bool:
        if not self._takes_unpacked(part):
            return False
        scaled_by_group = FEW_TWO_LEVELS if part.weight.layout.two_level else FEW_ONE_LEVEL
        return not self.one_tile if self.exact else scaled_by_group < x.shape[0] < WIDEN_UNPACKED

    def _part(self, step: GpuStep, x: "Tensor", part: RowPart, bias: "Tensor | None", out: "Tensor") -> None:
        from roofline.backends.gpu.kernels.dequantize import dequantize

        if not part.quantised:
            self._float(x, part.weight, bias, out)
        elif self._widened(x, part):
            wide = step.space(self.dtype, part.rows, x.shape[1])
            dequantize(self.chip, part.weight, out=wide)
            library_product(x, wide, bias, out)
        elif self._unpacked(x, part):
            import torch

            from roofline.backends.gpu.kernels.linear_unpacked import linear_unpacked, sums_bytes

            sums = step.space(torch.float32, sums_bytes(x.shape[0], part.rows, x.shape[1]) // 4)
            linear_unpacked(self.chip, x, part.weight, bias, out, sums=sums, arrived=self.arrived)
        else:
            self._quantised(x, part, bias, out)

    def _in_eight(
        self, step: GpuStep, x: "Tensor", part: RowPart, bias: "Tensor | None", out: "Tensor", gated: bool = False
    ) -> None:
        """The same with rows of 8-bit floats, for any number of them: what a token becomes is not for a step to say."""
        import torch

        from roofline.backends.gpu.kernels.float8 import FLAVOURS, rows_fp8
        from roofline.backends.gpu.kernels.linear_fp8 import linear_fp8

        rows, width = x.shape
        start = _scales_bytes(rows)
        scale = step.space(torch.float32, rows)
        eight = step.scratch[start : start + rows * width].view(FLAVOURS[self.chip.fp8]).view(rows, width)
        rows_fp8(self.chip, x, out=eight, scale=scale)
        linear_fp8(self.chip, eight, part.weight, bias, out, x_scale=scale, gated=gated, exact=self.exact)

    def _float(self, x: "Tensor", w: "Tensor", bias: "Tensor | None", out: "Tensor") -> None:
        from roofline.backends.gpu.kernels.linear_float import FEW_ROWS, linear_float

        rows, key = x.shape[0], (x.shape[0], *w.shape, bias is not None)
        measured = not self.exact and key in self.choices
        tile = self.choices[key] if measured else None
        if tile is not None or (not measured and (self.exact or rows <= FEW_ROWS)):
            linear_float(self.chip, x, w, bias, out, exact=self.exact, one_tile=self.one_tile, tile=tile)
        else:
            library_product(x, w, bias, out)

    def _quantised(self, x: "Tensor", part: RowPart, bias: "Tensor | None", out: "Tensor", gated: bool = False) -> None:
        from roofline.backends.gpu.kernels.linear_fp8 import linear_fp8
        from roofline.backends.gpu.kernels.linear_quant import linear_quant

        product = linear_fp8 if part.float8 else linear_quant
        product(self.chip, x, part.weight, bias, out, gated=gated, exact=self.exact)


def _scales_bytes(rows: int) -> int:
    """Of a float32 for each row, up to where the next tensor may begin."""
    return -(-4 * rows // 16) * 16


def library_product(x: "Tensor", w: "Tensor", bias: "Tensor | None", out: "Tensor") -> None:
    """out = x @ w.T + bias by the library that torch brings; not rounded to 16 bits where out is float32."""
    import torch

    if out.dtype != x.dtype:
        if x.is_cuda and out.is_contiguous():
            torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
        else:
            out.copy_(torch.mm(x, w.t(), out_dtype=out.dtype) if x.is_cuda else x.float() @ w.float().t())
        if bias is not None:
            out += bias
    elif bias is not None:
        out.copy_(torch.addmm(bias.to(x.dtype), x, w.t()))
    elif out.is_contiguous():
        torch.mm(x, w.t(), out=out)
    else:
        out.copy_(torch.mm(x, w.t()))
