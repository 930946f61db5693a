"""Sums over the rows that the matrices of a Program are multiplied with, by the tensors that these are made of."""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops.traits import Trait
from roofline.program.ir import Instr

if TYPE_CHECKING:
    from torch import Tensor

    from roofline.program.ir import Program

_FLOOR = 1e-3  # of the mean: a column that a text never used may still be used by another


class MeasuredProducts(Enum):
    """Of which matrices the products of columns are summed up."""

    NONE = "none"
    WITHOUT_EXPERTS = "all but those of experts"
    ALL = "all"


class ColumnSums:
    """Sums of the squares of columns, and of the products of two of them.

    A weight of a Program may hold several matrices of one size, those of experts or of heads, one below the other; each
    has sums of its own, over the rows that it was multiplied with.
    """

    def __init__(self, program: "Program", products: MeasuredProducts) -> None:
        self._program, self._measured = program, products
        self._squares: dict[str, np.ndarray] = {}  # weight of the Program -> float64 [matrices, cols]
        self._products: dict[str, np.ndarray] = {}  # float32 [matrices, cols, cols]
        self._routed: set[str] = set()  # the weights of experts

    def see(self, instr: Instr, operands: list[object]) -> None:
        """Take in the rows of an instruction that multiplies a matrix."""
        if not instr.has(Trait.PRODUCT, Trait.EXPERTS, Trait.HEAD_PRODUCT):
            return
        import torch

        x = operands[0]
        assert isinstance(x, torch.Tensor), "plain arithmetic keeps rows as floats"
        weight = instr.weights[0]
        if instr.has(Trait.EXPERTS):
            ids = operands[1]
            assert isinstance(ids, torch.Tensor), "ids are no rows of integers"
            count, cols = instr.attr("experts"), self._program.weights[weight].columns
            parts = x.unflatten(1, (-1, cols)).expand(-1, ids.shape[1], -1)  # [tokens, top, cols]
            rows = {expert: parts[ids == expert] for expert in torch.unique(ids).tolist()}
            self._routed.add(weight)
        elif instr.has(Trait.HEAD_PRODUCT):
            count = instr.attr("heads")
            rows = dict(enumerate(x.unflatten(1, (count, -1)).unbind(1)))
        else:
            count, rows = 1, {0: x}
        self._add(weight, count, rows)

    def _add(self, weight: str, count: int, rows: "Mapping[int, Tensor]") -> None:
        import torch

        cols = self._program.weights[weight].columns
        squares = self._squares.setdefault(weight, np.zeros((count, cols)))
        for number, x in rows.items():
            squares[number] += x.to(torch.float64).square().sum(dim=0).numpy()
        if self._measured is MeasuredProducts.NONE:
            return
        if self._measured is MeasuredProducts.WITHOUT_EXPERTS and weight in self._routed:
            return
        products = self._products.setdefault(weight, np.zeros((count, cols, cols), np.float32))
        for number, x in rows.items():
            products[number] += (x.float().T @ x.float()).numpy()

    def importance(self) -> dict[str, np.ndarray]:
        """Return the mean squares of the columns that each tensor is multiplied with, as parts of their mean: float32
        [cols], or [matrices, cols] of a tensor that holds several. An expert that no row was sent to has ones where its
        matrix lies among others, and nothing where it is a tensor.

        Raises ConfigError where what comes in is no number, or always zero.
        """
        unread = self.unread_experts()
        importance = {}
        for name, squares in self._by_tensor(self._squares).items():
            mean = squares.mean(axis=-1, keepdims=True)
            if not np.isfinite(mean).all() or (name not in unread and (mean <= 0).any()):
                raise ConfigError(f"tensor {name!r}: what it is multiplied with is zero, or no number, in this text")
            if squares.ndim == 1 and name in unread:
                continue
            parts = squares / np.where(mean > 0, mean, 1)
            importance[name] = np.where(mean > 0, np.maximum(parts, _FLOOR), 1).astype(np.float32)
        return importance

    def products(self) -> dict[str, np.ndarray]:
        """Return the sums of x^T x of the rows x of each tensor: float32 [cols, cols], or [matrices, cols, cols]; zeros
        of an expert that no row was sent to."""
        unread = self.unread_experts()
        tensors = self._by_tensor(self._products)
        return {name: sums for name, sums in tensors.items() if sums.ndim == 3 or name not in unread}

    def unread_experts(self) -> set[str]:
        """Return the tensors of experts to some of which no row was sent."""
        routed = {weight: sums for weight, sums in self._squares.items() if weight in self._routed}
        return {name for name, squares in self._by_tensor(routed).items() if not squares.any(axis=-1).all()}

    def _by_tensor(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        by_tensor: dict[str, np.ndarray] = {}
        for weight, addend in sums.items():
            for name, numbers in self._matrices_of(weight, len(addend)).items():
                if len(numbers) == 1:
                    part = addend[numbers[0]]
                else:
                    part = addend if numbers == list(range(len(addend))) else addend[numbers]
                by_tensor[name] = by_tensor[name] + part if name in by_tensor else part
        return by_tensor

    def _matrices_of(self, weight: str, count: int) -> dict[str, list[int]]:
        """Return, of each tensor that a weight of so many matrices is made of, the matrices it has rows of."""
        recipe = self._program.weights[weight]
        rows = recipe.shape[0] // count
        numbers: dict[str, set[int]] = {}
        at = 0
        for piece in recipe.pieces:
            stop = at + piece.stop - piece.start
            numbers.setdefault(piece.tensor, set()).update(range(at // rows, -(-stop // rows)))
            at = stop
        return {name: sorted(matrices) for name, matrices in numbers.items()}
