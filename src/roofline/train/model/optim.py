"""The optimizers of a run: torch's, and several as one where parameters need different ones."""

from collections.abc import Iterator
from functools import partial

import torch

from roofline.models.spec import Param
from roofline.train.config.schema import OptimizerSection
from roofline.train.model import tensor_parallel
from roofline.train.model.divided_muon import DividedMuon
from roofline.train.model.lion import DecoupledLionW
from roofline.train.model.modules import Model


class Optimizer:
    """One or more torch optimizers that step together.

    Attributes:
        parts: the torch optimizers by the name that they have in checkpoints.
    """

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._rates = {name: [group["lr"] for group in part.param_groups] for name, part in parts.items()}

    def set_factor(self, factor: float) -> None:
        """Set the learning rates to `factor` times those of the configuration."""
        for name, part in self.parts.items():
            for group, rate in zip(part.param_groups, self._rates[name], strict=True):
                group["lr"] = rate * factor

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(next(iter(self.parts.values())).param_groups[0]["lr"])

    def step(self) -> None:
        """Apply the gradients."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def prepare(self) -> None:
        """Create the state that a checkpoint is loaded into, without changing a parameter."""
        groups = [group for part in self.parts.values() for group in part.param_groups]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0  # neither update nor decay
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.step()
        self.zero_grad()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def states(self) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """(parameter, its state) of every parameter that has one."""
        for part in self.parts.values():
            yield from ((p, s) for p, s in part.state.items() if s)


def optimizer(section: OptimizerSection, model: Model, exact: bool = False) -> Optimizer:
    """The configured optimizer. exact: each element's update is the same on any part of a tensor (elastic runs).

    decoupled_adamw is AdamW whose decay follows the schedule and not the learning rate (Loshchilov and Hutter 2019,
    line 12 of their algorithm 2). torch's AdamW multiplies the decay by lr, so it is given decay / lr.
    """
    if section.name == "decoupled_lionw":
        everything = [tensor for _, _, tensor in model.canonical()]
        return Optimizer({"lion": DecoupledLionW(everything, section.lr, section.betas, section.weight_decay)})
    muon = section.name == "muon"
    other_tensors = [tensor for _, param, tensor in model.canonical() if not (muon and is_hidden_matrix(param))]
    decay = section.weight_decay / section.lr if section.name == "decoupled_adamw" else section.weight_decay
    adamw = partial(
        torch.optim.AdamW,
        other_tensors,
        lr=(section.adamw_lr or section.lr) if muon else section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=decay,
        foreach=False if exact else None,
        fused=None if exact else True,
    )
    if not muon:
        return Optimizer({"adamw": adamw()})
    parts = _muon(section, model)
    return Optimizer(parts | ({"adamw": adamw()} if other_tensors else {}))  # an adapter may have matrices alone


def _muon(section: OptimizerSection, model: Model) -> dict[str, torch.optim.Optimizer]:
    """What steps the hidden matrices: torch's Muon, and ours for those that tensor parallelism divides."""
    hidden = [
        (tensor, tensor_parallel.part(param, model.ranks))
        for _, param, tensor in model.canonical()
        if is_hidden_matrix(param)
    ]
    shares = [(tensor, share) for tensor, share in hidden if share.dim is not None]
    complete = [tensor for tensor, share in hidden if share.dim is None]
    rate, decay, momentum = section.lr, section.weight_decay, section.momentum
    parts: dict[str, torch.optim.Optimizer] = {}
    if complete:
        parts["muon"] = torch.optim.Muon(
            complete, lr=rate, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
    if shares:
        assert model.ranks.group is not None
        parts["divided_muon"] = DividedMuon(shares, model.ranks.group, rate, decay, momentum)
    return parts


def is_hidden_matrix(param: Param) -> bool:
    """Whether Muon steps this parameter."""
    return len(param.shape) == 2 and param.name.startswith("layers.")
