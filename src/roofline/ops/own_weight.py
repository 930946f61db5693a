"""A matrix that is more than one tensor; training's, not the compiler's."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class OwnWeight:
    """What `linear`, `expert_linear` and `embed` take instead of a tensor: the weight computes what they would."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        raise NotImplementedError

    def linear(self, x: "Tensor", bias: "Tensor | None") -> "Tensor":
        """x @ w.T + bias; x [tokens, in]."""
        raise NotImplementedError

    def expert_linear(self, x: "Tensor", ids: "Tensor", experts: int) -> "Tensor":
        """As the op of that name."""
        raise NotImplementedError

    def rows(self, ids: "Tensor") -> "Tensor":
        """Rows [tokens, in] by number; ids int [tokens]."""
        raise NotImplementedError
