"""Optimizers, each a torch one; several of them as one where parameters want different ones."""

from collections.abc import Callable, Iterator

import torch

from roofline.common.json_types import JsonObject
from roofline.models.spec import Param
from roofline.train.config.schema import OptimizerSection
from roofline.train.model.modules import Model


class Optimizer:
    """The optimizers of a run, stepped together.

    Attributes:
        parts: torch optimizers, by a name that checkpoints use.
    """

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._rates = {name: [group["lr"] for group in part.param_groups] for name, part in parts.items()}

    def set_factor(self, factor: float) -> None:
        """Learning rates become `factor` times those of the configuration."""
        for name, part in self.parts.items():
            for group, rate in zip(part.param_groups, self._rates[name], strict=True):
                group["lr"] = rate * factor

    @property
    def lr(self) -> float:
        """Of the first group."""
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
        """Make the state that a checkpoint is loaded into, without changing a parameter."""
        rates = {name: [group["lr"] for group in part.param_groups] for name, part in self.parts.items()}
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = 0.0  # neither update nor decay
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
        self.step()
        self.zero_grad()
        for name, part in self.parts.items():
            for group, rate in zip(part.param_groups, rates[name], strict=True):
                group["lr"] = rate

    def states(self) -> Iterator[tuple[torch.Tensor, JsonObject]]:
        """(parameter, its state) of all that have one."""
        for part in self.parts.values():
            yield from ((p, s) for p, s in part.state.items() if s)


def optimizer(section: OptimizerSection, model: Model, exact: bool = False) -> Optimizer:
    """As configured. exact: element for element the same on any part of a tensor (elastic runs).

    decoupled_adamw is AdamW whose decay follows the schedule and not the rate (Loshchilov and Hutter 2019, line 12 of
    their algorithm 2): torch's multiplies by lr, so what it gets is decay / lr.
    """
    named = [(param, tensor) for _, param, tensor in model.canonical()]

    def adamw(chosen: Callable[[Param], bool], rate: float, decay: float) -> torch.optim.Optimizer:
        tensors = [tensor for param, tensor in named if chosen(param)]
        fast: JsonObject = {"foreach": False} if exact else {"fused": True}
        return torch.optim.AdamW(tensors, lr=rate, betas=section.betas, eps=section.eps, weight_decay=decay, **fast)

    if section.name == "decoupled_adamw":
        return Optimizer({"adamw": adamw(lambda _: True, section.lr, section.weight_decay / section.lr)})
    if section.name == "adamw":
        return Optimizer({"adamw": adamw(lambda _: True, section.lr, section.weight_decay)})
    hidden = [tensor for param, tensor in named if is_hidden_matrix(param)]
    muon = torch.optim.Muon(
        hidden,
        lr=section.lr,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = adamw(lambda p: not is_hidden_matrix(p), section.adamw_lr or section.lr, section.weight_decay)
    return Optimizer({"muon": muon, "adamw": rest})


def is_hidden_matrix(param: Param) -> bool:
    """Whether muon steps it."""
    return len(param.shape) == 2 and param.name.startswith("layers.")
