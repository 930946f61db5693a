"""What of a run a checkpoint holds: tensors by name, and facts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from roofline.common.errors import ConfigError
from roofline.train.order import Order

if TYPE_CHECKING:
    from roofline.train.loop import Run

WEIGHTS = "model."


def weights(run: "Run") -> dict[str, torch.Tensor]:
    """The parameters alone."""
    return {f"{WEIGHTS}{name}": parameter.detach() for name, _, parameter in run.model.canonical()}


def tensors(run: "Run") -> dict[str, torch.Tensor]:
    """Everything a run goes on from: parameters, the optimizer's state, the generator of random numbers."""
    names = {parameter: name for name, _, parameter in run.model.canonical()}
    found = weights(run)
    for parameter, state in run.optimizer.states():
        found |= {f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()}  # type: ignore[index]
    return found | {"random.cpu": torch.get_rng_state()}


def facts(run: "Run") -> dict[str, Any]:
    """What else it goes on from, and where it came from."""
    scaler = run.gradients.scaler
    return {
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        "receipt": run.progress.receipt,
        "order": run.order.record(),
        "loss_scale": [scaler.scale, scaler.good] if scaler else None,
        "microbatch": run.gradients.size,
        "processes": run.world.size,
        "config": run.config.model_dump(mode="json"),
        "model": run.shape,
    }


def restore(run: "Run", said: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> None:
    """Take over a checkpoint's facts; `held` are its tensors, loaded into the run's own already.

    Raises ConfigError where the order of samples is another; ReceiptLog checks that it leads to the receipt.
    """
    order = Order.of(said["order"])
    if order != run.order:
        raise ConfigError(f"the checkpoint's run reads another order of samples: {_other(order, run.order)}")
    progress = run.progress
    progress.step, progress.tokens, progress.receipt = said["step"], said["tokens"], said["receipt"]
    if run.gradients.scaler is not None and said["loss_scale"]:
        run.gradients.scaler.scale, run.gradients.scaler.good = said["loss_scale"]
    torch.set_rng_state(held["random.cpu"])


def _other(theirs: Order, ours: Order) -> str:
    for key in ("seed", "global_batch"):
        a, b = getattr(theirs, key), getattr(ours, key)
        if a != b:
            return f"{key} is {a} there and {b} here"
    return "its data sets are others (shards, weights or shuffling)"
