"""What of a run a checkpoint holds: tensors by name, and facts."""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

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
        "fingerprint": f"{fingerprint(run):016x}",
        "processes": run.world.size,
        "config": run.config.model_dump(mode="json"),
        "model": run.shape,
    }


def restore(run: "Run", said: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> None:
    """Take over a checkpoint's facts; `held` are its tensors, loaded into the run's own already.

    Raises ConfigError where the order of samples is another (ReceiptLog checks that it leads to the receipt), or where
    the state is not, bit for bit, what was saved.
    """
    order = Order.of(said["order"])
    if order != run.order:
        raise ConfigError(f"the checkpoint's run reads another order of samples: {_other(order, run.order)}")
    progress = run.progress
    progress.step, progress.tokens, progress.receipt = said["step"], said["tokens"], said["receipt"]
    if run.gradients.scaler is not None and said["loss_scale"]:
        run.gradients.scaler.scale, run.gradients.scaler.good = said["loss_scale"]
    torch.set_rng_state(held["random.cpu"])
    found = f"{fingerprint(run):016x}"
    if found != said["fingerprint"]:
        raise ConfigError(
            f"the state at step {progress.step} is not what was saved: its fingerprint is {found}, the checkpoint's "
            f"is {said['fingerprint']}"
        )


def _other(theirs: Order, ours: Order) -> str:
    for key in ("seed", "global_batch"):
        a, b = getattr(theirs, key), getattr(ours, key)
        if a != b:
            return f"{key} is {a} there and {b} here"
    return "its data sets are others (shards, weights or shuffling)"


def fingerprint(run: "Run") -> int:
    """A number that says of all parameters and optimizer state whether a bit differs, however they are sharded.

    The sum over elements of (bits + 1) * (an odd number of tensor and place), modulo 2^64: sums of parts are sums of
    the whole, so each rank adds what it has.
    """
    total = 0
    for name, tensor in tensors(run).items():
        if not name.startswith("random."):
            total += _fingerprint(name, tensor, run.world.rank)
    return run.world.wrapped_sum(total)


def _fingerprint(name: str, tensor: torch.Tensor, rank: int) -> int:
    """This rank's part of a tensor; of what several ranks hold alike, only the first one's."""
    shape, offsets, local = tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach()
    if isinstance(local, DTensor):
        place: Any = local.device_mesh.get_coordinate() or []
        copies = [at for at, placement in zip(place, local.placements, strict=True) if placement.is_replicate()]
        offsets = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)[1]
        local = local.to_local()
        if any(copies):
            return 0
    elif rank:
        return 0
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
    flat = local.reshape(local.shape[0], -1) if local.dim() else local.reshape(1, 1)
    start, columns = (offsets[0] if offsets else 0), math.prod(shape[1:])
    assert not any(offsets[1:]), "rows are whole"
    total = 0
    for at in range(0, len(flat), max(1, _ELEMENTS // max(1, columns))):
        rows = flat[at : at + max(1, _ELEMENTS // max(1, columns))]
        bits = rows.contiguous().view(_BITS[rows.element_size()]).to(torch.int64) + 1
        first = (start + at) * columns
        places = torch.arange(first, first + rows.numel(), device=rows.device).view(rows.shape)
        total += int((bits * (2 * places + 1)).sum())
    return total * key


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS = 1 << 22  # at a time
