"""Cases of gpu_kernels.py whose kernels have a program for each row, which sees all of it: norms and their kin."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_kernels_case import BF16, F32, ONCE, Case, of, result
from benchmarks.gpu_kernels_state import States
from roofline.backends.gpu.kernels import add_norm, spread


class Rows(States):
    """Cases of rows of the model's width, and of its gates."""

    def norm(
        self, rows: int, width: int, *, delta: bool = True, layer: bool = False, dtype: torch.dtype = BF16,
        weights: int = 1,
    ) -> Case:  # fmt: skip
        """Without delta the norm alone, as of single heads; weights: rows of them, which rows of x take in turns."""
        residual, added = self.normal(rows, width, dtype=F32), self.normal(rows, width, dtype=dtype) if delta else None
        weight = self.normal(weights * width, dtype=F32) if weights else None
        bias = self.normal(width, dtype=F32) if layer else None
        out, total = self.empty(rows, width, dtype=dtype), self.empty(rows, width, dtype=F32) if delta else None

        def run() -> None:
            add_norm.add_norm(self.chip, residual, added, weight, bias, 1e-5, layer=layer, summed=total, out=out)

        def want() -> tuple[Tensor, ...]:
            x = residual.double() + (0.0 if added is None else added.double())
            centred = x - x.mean(1, keepdim=True) if layer else x
            y = centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5)
            y = y if weight is None else y * weight.double().view(weights, width).repeat(rows // weights, 1)
            y = y if bias is None else y + bias.double()
            return (y, x) if delta else (y,)

        results = (result(out),) if total is None else (result(out), result(total, "sum", tolerance=ONCE))
        name = f"{'add_' * delta}{'layer_' * layer}norm {rows} x {width}{of(dtype)}"
        name += "" if weights == 1 else f" weights={weights}"
        return Case(name, run, want, results, *add_norm.cost(rows, width, delta, weights=weights))

    def likened(self, rows: int) -> Case:
        """Rows of 16 bits made as long as others."""
        x, y = self.normal(rows, self.shapes.width), self.normal(rows, self.shapes.width, dtype=F32)
        out = self.empty(rows, self.shapes.width)

        def want() -> tuple[Tensor]:
            length, own = (t.double().square().mean(1, keepdim=True) for t in (y, x))
            return (x.double() * length.sqrt() / own.clamp(min=1e-5).sqrt(),)

        run = partial(spread.like_norm, self.chip, x, y, out=out)
        name, cost = f"like_norm {rows} x {self.shapes.width}", spread.like_cost(rows, self.shapes.width)
        return Case(name, run, want, (result(out),), *cost)

    def above(self, rows: int) -> Case:
        """What of gates lies a deviation above their mean."""
        x, out = self.normal(rows, self.shapes.ffn), self.empty(rows, self.shapes.ffn)

        def want() -> tuple[Tensor]:
            wide = x.double()
            bound = wide.mean(1, keepdim=True) + wide.std(1, keepdim=True, correction=0)
            return ((wide - bound).clamp(min=0.0),)

        run = partial(spread.above_spread, self.chip, x, 1.0, out=out)
        name, cost = f"above_spread {rows} x {self.shapes.ffn}", spread.above_cost(rows, self.shapes.ffn)
        return Case(name, run, want, (result(out),), *cost)
