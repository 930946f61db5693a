"""Muon for matrices of which each rank has a part: the step is that of the full matrix.

Muon orthogonalises its update by an iteration that multiplies the matrix by a polynomial of its Gram matrix (Jordan et
al. 2024). The Gram matrix over the dimension that is divided is a sum over the ranks, and small, because mostly the
longer dimension is divided: so ranks add up Gram matrices, and none has more of the matrix than its part.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from roofline.train.model.tensor_parallel import ParameterPart

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of X, (X X') X and (X X')^2 X; these, ITERATIONS and EPS as in torch's Muon
ITERATIONS, EPS = 5, 1e-7


class DividedMuon(torch.optim.Optimizer):
    """torch's Muon with adjust_lr_fn="match_rms_adamw", of matrices that are divided over the ranks of a group.

    matrices: this rank's part of each matrix, sharded by FSDP or not, and which part that is.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[Tensor, ParameterPart]],
        group: dist.ProcessGroup,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        super().__init__(
            [tensor for tensor, _ in matrices], {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        )
        self._parts, self._ranks = dict(matrices), group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing is evaluated anew
        """Apply the gradients. All ranks of the group take part."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, part = self.state[parameter], self._parts[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(state["momentum_buffer"], momentum)
                parameter.mul_(1 - rate * group["weight_decay"])
                of_shape = 0.2 * math.sqrt(max(part.shape))  # the step's elements are as large as those of AdamW
                parameter.add_(orthogonalized(update, part.dim, self._ranks), alpha=-rate * of_shape)


def orthogonalized(matrix: Tensor, dim: int | None, ranks: dist.ProcessGroup) -> Tensor:
    """This rank's part of a matrix near to the orthogonal one that is nearest to the full matrix, in bfloat16.

    matrix: this rank's part. dim: the dimension that is divided.
    """
    x = matrix.bfloat16()
    x = x.T if dim == 0 else x
    norm = _summed(torch.linalg.vector_norm(x, dtype=torch.float32).square(), ranks).sqrt()
    x = x / norm.clamp(min=EPS).to(x.dtype)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = _summed(x @ x.T, ranks)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if dim == 0 else x


def _summed(tensor: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a group; of what FSDP shards, with the same on all of its ranks."""
    if not isinstance(tensor, DTensor):
        total = tensor.clone()
        dist.all_reduce(total, group=ranks)
        return total
    mesh = tensor.device_mesh
    return DTensor.from_local(_summed(tensor.full_tensor(), ranks), mesh, [Replicate()] * mesh.ndim, run_check=False)
