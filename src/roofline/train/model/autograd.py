"""The type of the context that torch hands to both passes of an autograd function."""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class AutogradContext(Protocol):
    """What our autograd functions use of it; scale and group are attributes that they set themselves."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    scale: float
    group: dist.ProcessGroup

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
