"""The state of a run that a checkpoint holds: tensors by name, and facts as plain data."""

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.data.loader import Source, read_batch
from roofline.train.data.order import Order
from roofline.train.data.row_arrays import RowArrays
from roofline.train.data.row_digest import BYTES, row_digest, row_sums
from roofline.train.model.tensor_parallel import ParameterPart, TensorPieces, part, pieces

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

WEIGHTS, RANDOM = "model.", "random.cpu"
EVALUATION_ROWS = 8  # that tell a data set from another one
_REMEDY = "Put back what was trained on, or begin a new run with load_path and load_weights_only=true"
_log = log.get("train")


def weights(run: "Run") -> dict[str, TensorPieces]:
    """The parameters."""
    rows = run.model.canonical()
    return {f"{WEIGHTS}{name}": _pieces(run, part(param, run.model.ranks), tensor) for name, param, tensor in rows}


def full_weights(run: "Run", kind: torch.dtype) -> dict[str, torch.Tensor]:
    """All trained parameters by their canonical names, on the CPU of rank 0; elsewhere nothing. All ranks take part."""
    full: dict[str, torch.Tensor] = {}
    names = {f"{WEIGHTS}{name}": param.name for name, param, _ in run.model.canonical()}
    for name, tensor in weights(run).items():
        own = [(at, view.to("cpu", kind, copy=True)) for at, view in tensor.chunks] if not tensor.copy else []
        collected = [piece for each in run.world.collect(own) for piece in each]
        if run.world.rank == 0:
            full[names[name]] = joined = torch.empty(tensor.shape, dtype=kind)
            for at, piece in collected:
                joined[tuple(slice(first, first + size) for first, size in zip(at, piece.shape, strict=True))] = piece
    return full


def tensors(run: "Run") -> dict[str, TensorPieces]:
    """All tensors that a run continues from: parameters, optimizer state, the state of the random generator."""
    return _trained_tensors(run) | {RANDOM: TensorPieces.of(torch.get_rng_state(), run.world.rank, run.world.size)}


def _trained_tensors(run: "Run") -> dict[str, TensorPieces]:
    """Parameters and optimizer state."""
    names = {tensor: (name, part(param, run.model.ranks)) for name, param, tensor in run.model.canonical()}
    state = weights(run)
    for parameter, values in run.optimizer.states():
        name, part_ = names[parameter]  # type: ignore[index]
        for key, value in values.items():
            state[f"optimizer.{name}.{key}"] = _pieces(run, part_ if value.dim() else ParameterPart(()), value)
    return state


def _pieces(run: "Run", part_: ParameterPart, tensor: torch.Tensor) -> TensorPieces:
    """What this rank has of a tensor that FSDP shards; part_: what tensor parallelism leaves it."""
    copy, copies = run.world.rank, run.world.size
    if isinstance(tensor, DTensor):
        copy, copies = (0, 1) if part_.dim is not None else (run.model.ranks.rank, run.model.ranks.size)
        mesh = tensor.device_mesh
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                copy, copies = copy * mesh.size(dim) + mesh.get_local_rank(dim), copies * mesh.size(dim)
    return TensorPieces(part_.shape, tensor.dtype, pieces(tensor, part_), copy, copies)


def facts(run: "Run") -> JsonObject:
    """What else a run continues from, and how it was configured."""
    scaler = run.gradients.scaler
    return {
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        "receipt": run.progress.receipt,
        "rows": base64.b64encode(run.progress.digests).decode(),
        "order": run.order.record(),
        "evaluations": _evaluations(run),
        "shards": _versions(run),
        "loss_scale": [scaler.scale, scaler.good] if scaler else None,
        "microbatch": run.gradients.size,
        "fingerprint": f"{fingerprint(run):016x}",
        "processes": run.world.size,
        "config": run.config.model_dump(mode="json"),
        "model": run.shape,
        "base": run.base,
    }


def restore(run: "Run", saved: JsonMapping, tensors: Mapping[str, TensorPieces]) -> None:
    """Continue from a checkpoint's facts. tensors: the checkpoint's, already loaded into the run's own.

    Raises ConfigError if the order of samples, the rows of the last step (ReceiptLog checks that order and rows lead to
    the receipt) or the data set of an evaluation differ, or if the state is not bit for bit what was saved.
    """
    difference = Order.from_record(saved["order"]).difference(run.order)
    if difference is not None:
        raise ConfigError(f"the checkpoint's run reads another order of samples: {difference}. {_REMEDY}")
    run.world.first(lambda: _check_versions(run, saved))
    progress = run.progress
    progress.step, progress.tokens, progress.receipt = saved["step"], saved["tokens"], saved["receipt"]
    progress.digests = bytearray(base64.b64decode(saved.get("rows", "")))
    _check_rows(run)
    run.world.first(lambda: _check_evaluations(run, saved))
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


def check_base(run: "Run", saved: JsonMapping) -> None:
    """Raise ConfigError unless the checkpoint's run had trained the same beside the same files."""
    section = run.config.adapter
    now = None if section is None else section.model_dump(mode="json")
    before = saved["config"].get("adapter")
    if now != before:
        keys = sorted({*(now or {}), *(before or {})})
        other = [key for key in keys if (now or {}).get(key) != (before or {}).get(key)]
        raise ConfigError(
            f"the checkpoint's run trained another adapter: adapter.{other[0]} was {(before or {}).get(other[0])!r}. "
            "Set it back, or begin a new run"
        )
    if saved.get("base") != run.base:
        raise ConfigError(
            f"{run.config.model.pretrained_model_name_or_path} is not the model that the checkpoint's adapter belongs "
            "to: put its files back, or begin a new run"
        )


def check_optimizer(run: "Run", saved: JsonMapping) -> None:
    """Raise ConfigError unless the optimizer keeps the state that the checkpoint's had. Both kinds of AdamW do."""
    before, now = saved["config"]["optimizer"]["name"], run.config.optimizer.name
    if before.removeprefix("decoupled_") != now.removeprefix("decoupled_"):
        raise ConfigError(
            f"the checkpoint's run trained by optimizer.name={before}, whose state {now} does not go on from: set it "
            "back, or begin a new run with load_path and load_weights_only=true"
        )


def _versions(run: "Run") -> dict[str, str]:
    """By URL, the versions of the training data's shards that no hash tells of."""
    return run.source.versions if isinstance(run.source, Source) else {}


def _check_versions(run: "Run", saved: JsonMapping) -> None:
    """Raise ConfigError if shards without hashes were replaced in their store since the checkpoint's run read them."""
    before = saved.get("shards") or {}
    for url, digest in _versions(run).items():
        if before.get(url, digest) != digest:
            raise ConfigError(
                f"shards of {url} were replaced since the checkpoint's run began, and their index has no hashes, by "
                f"which equal content would be known. {_REMEDY}"
            )


def _check_rows(run: "Run") -> None:
    """Read the checkpoint's last batch once more. Raises ConfigError if its rows are not what the run had read."""
    progress = run.progress
    if not progress.step:
        return
    if not progress.digests:
        if run.world.rank == 0:
            _log.warning(
                "the checkpoint of step %d is of a version that recorded no rows: that the data set is still the same "
                "cannot be checked",
                progress.step,
            )
        return
    batch = read_batch(run.source, run.order, run.shares, progress.step - 1)
    if row_digest(run.world.sum(batch.sums.tolist())) != progress.digests[-BYTES:]:
        raise ConfigError(
            f"the rows of step {progress.step} are not those that the checkpoint's run read: its data set was changed. "
            f"{_REMEDY}"
        )


def _evaluations(run: "Run") -> JsonObject:
    """By label, what tells the data set of an evaluation from others: its index, and what its first rows hold.

    The index alone does not: those of mosaicml-streaming may be without hashes.
    """
    described: JsonObject = {}
    for label, source in run.held_out.items():
        first = np.arange(min(len(source), EVALUATION_ROWS))
        streams = source.order(1, 0).record()["streams"] if len(source) else []
        index = [{"shards": list(stream["shards"]), "identity": stream["identity"]} for stream in streams]
        rows = source.rows(first)
        digest = row_digest(row_sums(RowArrays(rows.tokens, trained=rows.trained), first).tolist())
        described[label] = {"index": index, "rows": digest.hex()}
    return described


def _check_evaluations(run: "Run", saved: JsonMapping) -> None:
    """Raise ConfigError if an evaluation's data set is not the one that the checkpoint's run had under its label.

    Checkpoints of older versions say nothing of it. Evaluations may come and go.
    """
    before = saved.get("evaluations") or {}
    for label, described in _evaluations(run).items():
        if label in before and before[label] != described:
            what = "rows" if before[label]["index"] == described["index"] else "shards"
            name = "eval_loader" if label == "eval" else f"the eval_loader labelled {label}"
            raise ConfigError(
                f"{name} has other {what} than in the checkpoint's run, so its losses would not go together with those "
                "before. Put back what was evaluated, or give the new data set another label"
            )


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
