"""Lion (Chen et al. 2023) with LLM Foundry's weight decay, which follows the schedule and not the learning rate."""

from collections.abc import Iterable

import torch


class DecoupledLionW(torch.optim.Optimizer):
    """Steps by the sign of momentum between gradients; one moment a parameter.

    betas: the weight of the moment in the step, and in its own update. A parameter loses weight_decay of itself times
    the schedule's factor, which is lr by the lr that the optimizer was made with.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "initial_lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing is evaluated anew
        """Apply the gradients."""
        for group in self.param_groups:
            (of_step, of_moment), rate = group["betas"], group["lr"]
            decay = group["weight_decay"] * rate / group["initial_lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                if decay:
                    parameter.mul_(1 - decay)
                parameter.add_(state["exp_avg"].lerp(parameter.grad, 1 - of_step).sign_(), alpha=-rate)
                state["exp_avg"].lerp_(parameter.grad, 1 - of_moment)
