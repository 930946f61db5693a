"""The state of a run that a checkpoint holds: tensors by name, and facts as plain data."""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.data.order import Order
from roofline.train.model.tensor_parallel import Part, Pieces, part, pieces

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

WEIGHTS, RANDOM = "model.", "random.cpu"


def weights(run: "Run") -> dict[str, Pieces]:
    """The parameters."""
    rows = run.model.canonical()
    return {f"{WEIGHTS}{name}": _pieces(run, part(param, run.model.ranks), tensor) for name, param, tensor in rows}


def tensors(run: "Run") -> dict[str, Pieces]:
    """All tensors that a run continues from: parameters, optimizer state, the state of the random generator."""
    return _trained_tensors(run) | {RANDOM: Pieces.of(torch.get_rng_state(), run.world.rank, run.world.size)}


def _trained_tensors(run: "Run") -> dict[str, Pieces]:
    """Parameters and optimizer state."""
    names = {tensor: (name, part(param, run.model.ranks)) for name, param, tensor in run.model.canonical()}
    state = weights(run)
    for parameter, values in run.optimizer.states():
        name, part_ = names[parameter]  # type: ignore[index]
        for key, value in values.items():
            state[f"optimizer.{name}.{key}"] = _pieces(run, part_ if value.dim() else Part(()), value)
    return state


def _pieces(run: "Run", part_: Part, tensor: torch.Tensor) -> Pieces:
    """What this rank has of a tensor that FSDP shards; part_: what tensor parallelism leaves it."""
    copy, copies = run.world.rank, run.world.size
    if isinstance(tensor, DTensor):
        copy, copies = (0, 1) if part_.dim is not None else (run.model.ranks.rank, run.model.ranks.size)
        mesh = tensor.device_mesh
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                copy, copies = copy * mesh.size(dim) + mesh.get_local_rank(dim), copies * mesh.size(dim)
    return Pieces(part_.shape, tensor.dtype, pieces(tensor, part_), copy, copies)


def facts(run: "Run") -> JsonObject:
    """What else a run continues from, and how it was configured."""
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


def restore(run: "Run", saved: JsonMapping, tensors: Mapping[str, Pieces]) -> None:
    """Continue from a checkpoint's facts. tensors: the checkpoint's, already loaded into the run's own.

    Raises ConfigError if the order of samples differs (ReceiptLog checks that it leads to the receipt), or if the state
    is not bit for bit what was saved.
    """
    order = Order.from_record(saved["order"])
    if order != run.order:
        raise ConfigError(f"the checkpoint's run reads another order of samples: {_difference(order, run.order)}")
    progress = run.progress
    progress.step, progress.tokens, progress.receipt = saved["step"], saved["tokens"], saved["receipt"]
    if run.gradients.scaler is not None and saved["loss_scale"]:
        run.gradients.scaler.scale, run.gradients.scaler.good = saved["loss_scale"]
    torch.set_rng_state(tensors[RANDOM].chunks[0][1])
    if run.gradients.auto and (run.config.deterministic_mode or run.config.elastic is not None):
        run.gradients.size = saved["microbatch"]  # sums over microbatches of another size have other bits
    actual = f"{fingerprint(run):016x}"
    if actual != saved["fingerprint"]:
        raise ConfigError(
            f"the state at step {progress.step} is not what was saved: its fingerprint is {actual}, the checkpoint's "
            f"is {saved['fingerprint']}"
        )


def _difference(theirs: Order, ours: Order) -> str:
    for key in ("seed", "global_batch"):
        a, b = getattr(theirs, key), getattr(ours, key)
        if a != b:
            return f"{key} is {a} there and {b} here"
    return "its data sets are others (shards, weights or shuffling)"


def fingerprint(run: "Run") -> int:
    """A hash of all parameters and optimizer state that does not depend on how they are sharded.

    It is the sum over elements of (bits + 1) * (an odd number from tensor and place), modulo 2^64, to which each rank
    adds the elements that it has.
    """
    total = 0
    for name, tensor in _trained_tensors(run).items():
        if tensor.copy == 0:
            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
            total += key * sum(_fingerprint(view, at, tensor.shape) for at, view in tensor.chunks)
    return run.world.wrapped_sum(total)


def _fingerprint(view: torch.Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The sum for a piece at offsets `at` of a tensor of that shape."""
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
