"""What of a run a checkpoint holds: tensors by name, and facts."""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.data.order import Order
from roofline.train.model.tensor_parallel import Part, Pieces, part, pieces

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

WEIGHTS = "model."


def weights(run: "Run") -> dict[str, torch.Tensor]:
    """The parameters alone, as a checkpoint takes them."""
    return {name: _saved(run, held, tensor) for name, (held, tensor) in _weights(run).items()}


def tensors(run: "Run") -> dict[str, torch.Tensor]:
    """Everything a run goes on from: parameters, the optimizer's state, the generator of random numbers."""
    found = {name: _saved(run, held, tensor) for name, (held, tensor) in _all(run).items()}
    return found | {"random.cpu": torch.get_rng_state()}


def _weights(run: "Run") -> dict[str, tuple[Part, torch.Tensor]]:
    """Parameters and what of them this rank has."""
    rows = run.model.canonical()
    return {f"{WEIGHTS}{name}": (part(param, run.model.ranks), tensor.detach()) for name, param, tensor in rows}


def _all(run: "Run") -> dict[str, tuple[Part, torch.Tensor]]:
    names = {tensor: (name, part(param, run.model.ranks)) for name, param, tensor in run.model.canonical()}
    found = _weights(run)
    for parameter, held in run.optimizer.states():
        name, placed = names[parameter]  # type: ignore[index]
        for key, value in held.items():
            found[f"optimizer.{name}.{key}"] = (placed if value.dim() else Part(()), value)
    return found


def _saved(run: "Run", held: Part, tensor: torch.Tensor) -> torch.Tensor:
    """Where ranks share matrices, pieces of the whole: any other number of them can load those."""
    if run.model.ranks.size == 1 or not tensor.dim():
        return tensor
    return Pieces(held.shape, tensor, pieces(tensor, held))


def facts(run: "Run") -> JsonObject:
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


def restore(run: "Run", said: JsonMapping, held: Mapping[str, torch.Tensor]) -> None:
    """Take over a checkpoint's facts; `held` are its tensors, loaded into the run's own already.

    Raises ConfigError where the order of samples is another (ReceiptLog checks that it leads to the receipt), or where
    the state is not, bit for bit, what was saved.
    """
    order = Order.from_record(said["order"])
    if order != run.order:
        raise ConfigError(f"the checkpoint's run reads another order of samples: {_other(order, run.order)}")
    progress = run.progress
    progress.step, progress.tokens, progress.receipt = said["step"], said["tokens"], said["receipt"]
    if run.gradients.scaler is not None and said["loss_scale"]:
        run.gradients.scaler.scale, run.gradients.scaler.good = said["loss_scale"]
    torch.set_rng_state(held["random.cpu"])
    if run.gradients.auto and (run.config.deterministic_mode or run.config.elastic is not None):
        run.gradients.size = said["microbatch"]  # sums of other microbatches have other bits
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
    for name, (held, tensor) in _all(run).items():
        if _first_of_its_copies(run, held, tensor):
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
            total += key * sum(_fingerprint(view, at, held.shape) for at, view in pieces(tensor, held))
    return run.world.wrapped_sum(total)


def _first_of_its_copies(run: "Run", held: Part, tensor: torch.Tensor) -> bool:
    """Whether no rank before this one has the same part."""
    if not isinstance(tensor, DTensor):
        return run.world.rank == 0
    place: Any = tensor.device_mesh.get_coordinate() or []
    copies = [at for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    return not any(copies) and (held.dim is not None or run.model.ranks.rank == 0)


def _fingerprint(view: torch.Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Of a piece of a tensor of that shape, at those offsets."""
    rows = view.reshape(view.shape[0], -1) if view.dim() else view.reshape(1, 1)
    start, column = (at[0], at[1] if len(at) > 1 else 0) if at else (0, 0)
    columns, total = math.prod(shape[1:]), 0
    step = max(1, _ELEMENTS // rows.shape[1])
    for first in range(0, len(rows), step):
        some = rows[first : first + step].contiguous()
        bits = some.view(_BITS[some.element_size()]).to(torch.int64) + 1
        down = torch.arange(start + first, start + first + len(some), device=some.device)[:, None] * columns
        places = down + torch.arange(column, column + some.shape[1], device=some.device)
        total += int((bits * (2 * places + 1)).sum())
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS = 1 << 22  # at a time
