"""The type of the context that torch hands to both passes of an autograd function."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from roofline.train.model.tensor_parallel import TensorRanks


class AutogradContext(Protocol):
    """What our autograd functions use of it; scale, ranks and per_token are attributes that they set themselves."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    scale: float
    ranks: "TensorRanks"
    per_token: bool

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
