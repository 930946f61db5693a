"""Probes: figures of a model's activations and gradients on a few fixed rows, at the start and at each checkpoint.

The rows are the first ones of the order's first batch, so all runs with one order use the same rows, whatever their
processes and microbatches. They are computed as in training: sharded, compiled, in the run's precision. The run itself
does not change. `roofline parity` compares the figures of two runs.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Shard

from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.data.order import share
from roofline.train.model.modules import IGNORED, Model
from roofline.train.parallel.processes import fsdp
from roofline.train.run.gradients import targets
from roofline.train.run.projection import SIZE, sums
from roofline.train.run_folder import PROBES, read_lines

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

ROWS = 4  # at most
LEAST_SCALE = 1.0

Sums = NDArray[np.float64]  # [2 + SIZE]: number of elements, then what `projection.sums` returns


class Probe:
    """Records the probes of a run; every rank takes part, and rank 0 writes the file.

    A line has: step, precision, device, processes, compiled, rows (sample numbers), tokens (that count), loss (their
    mean, nats), activations and gradients (of that mean) in the order of the forward pass, seconds. An activation has
    name, size, rms and a sketch with the length of the rms; a gradient has name, size, norm and a sketch with the
    length of the norm. When a run continues, lines of later steps are dropped.
    """

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.rows = run.order.batch(0)[:ROWS]
        self.places = share(np.arange(len(self.rows)), run.world.rank, run.world.size)
        self.tokens, self.documents = run.source.rows(self.rows[self.places])
        self.path = run.folder / PROBES
        if run.world.rank == 0:
            step = run.progress.step
            lines = read_lines(self.path) if step and self.path.exists() else []
            kept_lines = [json.dumps(line) + "\n" for line in lines if line.get("step", step + 1) <= step]
            write_atomically(self.path, "".join(kept_lines))

    def record(self) -> None:
        """Measure and write a line."""
        run, started = self.run, time.perf_counter()
        model, scaler = run.model, run.gradients.scaler
        grads = [parameter.grad for parameter in model.parameters()]
        scale = scaler.scale if scaler else 1.0
        while True:
            model.zero_grad(set_to_none=True)
            sums_by_kind = self._total(self._measure(scale))
            finite = all(np.isfinite(each).all() for each in sums_by_kind["gradient"].values())
            if finite or scale <= LEAST_SCALE:
                break
            scale = max(LEAST_SCALE, scale / 16)  # training skips such steps until the scale is small enough
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        if run.world.rank == 0:
            line = {
                "step": run.progress.step,
                "precision": run.config.precision,
                "device": str(run.world.device),
                "processes": run.world.size,
                "compiled": self._pass()[1],
                "rows": self.rows.tolist(),
                **_figures(sums_by_kind, scale),
                "seconds": round(time.perf_counter() - started, 3),
            }
            with self.path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        run.log.pause()

    def _measure(self, scale: float) -> dict[str, dict[str, Sums]]:
        """This rank's part of all sums, from a forward and a backward pass over all chunks of rows."""
        run, model = self.run, self.run.model
        goals = targets(self.tokens, self.documents) if len(self.tokens) else self.tokens
        tokens = int(run.world.sum([int((goals != IGNORED).sum())])[0])
        watch = _Watch(model, self.tokens.shape[1])
        if run.gradients.sharded:
            fsdp(model).set_requires_gradient_sync(True)
        loss_sum, compiled = 0.0, self._pass()[1]
        eager = run.config.compile_config is not None and not compiled
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            for chunk in self._chunks(goals):
                with watch.rows(chunk.place, chunk.real):
                    loss = chunk.loss(run)
                (loss * (scale / max(1, tokens))).backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
        own = np.zeros(2 + SIZE)
        own[:2] = tokens if run.world.rank == 0 else 0, loss_sum
        return {"loss": {"loss": own}, "activation": watch.sums, "gradient": _gradients(run)}

    def _pass(self) -> tuple[int, bool]:
        """The rows of a pass, and whether it is compiled.

        Compiled passes have the shape of a microbatch: another one would be compiled anew. While `auto` has not found
        its size, passes have one row and are not compiled.
        """
        run = self.run
        size = run.gradients.size or 0
        if size and run.config.compile_config is not None:
            return size, True
        if run.config.device_train_microbatch_size == "auto":
            return 1, False  # if training fits into memory, so does this
        return min(size, -(-len(self.rows) // run.world.size)), False

    def _chunks(self, goals: NDArray[np.int64]) -> "Iterator[_Chunk]":
        """The chunks of this rank's rows; every rank has equally many."""
        size, compiled = self._pass()
        for start in range(0, -(-len(self.rows) // self.run.world.size), size):
            part = slice(start, start + size)
            place = int(self.places[start]) if start < len(self.places) else 0
            documents = None if self.documents is None else self.documents[part]
            yield _Chunk(place, self.tokens[part], goals[part], documents, size if compiled else 1)

    def _total(self, parts: dict[str, dict[str, Sums]]) -> dict[str, dict[str, Sums]]:
        """The sums over all ranks."""
        names = [(kind, name) for kind, each in parts.items() for name in each]
        values = self.run.world.sum(np.concatenate([parts[kind][name] for kind, name in names]).tolist())
        rows = np.array(values).reshape(len(names), -1)
        summed: dict[str, dict[str, Sums]] = {kind: {} for kind in parts}
        for (kind, name), row in zip(names, rows, strict=True):
            summed[kind][name] = row
        return summed


class _Chunk:
    """The rows of one pass, padded to at least `least` rows with rows that do not count.

    Attributes:
        place: index of the first row among the probe's rows. real: rows that are not padding.
    """

    def __init__(
        self,
        place: int,
        tokens: NDArray[np.int64],
        goals: NDArray[np.int64],
        documents: NDArray[np.int64] | None,
        least: int,
    ) -> None:
        self.place, self.real = place, len(tokens)
        spare = ((0, max(0, least - self.real)), (0, 0))
        self.tokens = np.pad(tokens, spare)
        self.goals = np.pad(goals, spare, constant_values=IGNORED)
        self.documents = None if documents is None else np.pad(documents, spare)

    def loss(self, run: "Run") -> torch.Tensor:
        """The sum of the rows' losses."""
        arrays = [self.tokens, self.goals, *([] if self.documents is None else [self.documents])]
        with run.gradients.autocast():
            return run.model(*(torch.from_numpy(array).to(run.world.device) for array in arrays))


class _Watch:
    """Sums up a model's activations while it computes, without keeping them."""

    def __init__(self, model: Model, length: int) -> None:
        self.model, self.length = model, length
        names = ["embed", *(f"layer {i}" for i in range(len(model.blocks))), "logits"]
        self.sums = {name: np.zeros(2 + SIZE) for name in names}

    @contextmanager
    def rows(self, place: int, real: int) -> Iterator[None]:
        """Watch a pass of `real` rows, the first of which is row `place` of the probe."""
        model, first, count = self.model, place * self.length, real * self.length
        original, done = model.head_loss, 0

        def head_loss(goals: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            nonlocal done  # the loss is computed in chunks of rows, in order
            self._logits(x.detach()[: max(0, count - done)], weights, first + done)
            done += len(x)
            return original(goals, x, *weights)

        def hook(name: str) -> Callable[..., None]:
            return lambda block, args, out: self._add(name, out.detach()[:count], first)

        blocks = model.blocks
        handles = [blocks[0].register_forward_pre_hook(lambda _, args: hook("embed")(_, args, args[0]))]
        handles += [block.register_forward_hook(hook(f"layer {i}")) for i, block in enumerate(blocks)]
        model.head_loss = head_loss
        try:
            yield
        finally:
            model.head_loss = original
            for handle in handles:
                handle.remove()

    def _logits(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], first: int) -> None:
        """Sum up the logits of a chunk, some rows at a time: all of them may not fit into memory."""
        step = max(1, (1 << 22) // self.model.cfg.vocab)
        with torch.no_grad():
            for start in range(0, len(x), step):
                self._add("logits", self.model.logits(x[start : start + step], weights), first + start)

    def _add(self, name: str, x: torch.Tensor, first: int) -> None:
        self.sums[name] += np.concatenate([[x.numel()], sums(name, x, first)])


def _gradients(run: "Run") -> dict[str, Sums]:
    """This rank's part of the sums over the gradients of each block, and of what is before and behind the blocks."""
    layers = [f"layer {i}" for i in range(len(run.model.blocks))]
    totals = {name: np.zeros(2 + SIZE) for name in ("embed", *layers, "head")}
    rest = "embed"
    for _, param, tensor in run.model.canonical():
        layer = param.name.startswith("layers.")
        group = f"layer {param.name.split('.')[1]}" if layer else rest
        rest = "head" if layer else rest
        if tensor.grad is not None:
            local, first = _local(tensor.grad, run.world.rank)
            totals[group] += np.concatenate([[local.numel()], sums(f"gradient/{param.name}", local, first)])
    return totals


def _local(grad: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
    """The rows of a gradient that this rank sums up, and the number of the first."""
    if not isinstance(grad, DTensor):
        return grad, 0
    mesh, places = grad.device_mesh, grad.placements
    shards = [dim for dim, placement in enumerate(places) if not placement.is_replicate()]
    nothing = grad.to_local()[:0], 0
    if len(shards) == 1 and places[shards[0]] == Shard(0):
        if any(mesh.get_local_rank(dim) for dim in range(mesh.ndim) if dim not in shards):
            return nothing  # another rank has the same rows
        chunk = -(-grad.shape[0] // mesh.size(shards[0]))  # as torch.chunk cuts
        return grad.to_local(), mesh.get_local_rank(shards[0]) * chunk
    full_grad = grad.full_tensor()
    return (full_grad, 0) if rank == 0 else nothing


def _figures(totals: dict[str, dict[str, Sums]], scale: float) -> JsonObject:
    """The loss, activations and gradients of a line."""
    tokens, loss_sum = totals["loss"]["loss"][:2]
    activations, gradients = [], []
    for name, (size, squares, *sketch) in totals["activation"].items():
        root = math.sqrt(max(1.0, size))
        part = {"name": name, "size": int(size), "rms": math.sqrt(squares) / root}
        activations.append({**part, "sketch": [_short(value / root) for value in sketch]})
    for name, (size, squares, *sketch) in totals["gradient"].items():
        part = {"name": name, "size": int(size), "norm": math.sqrt(squares) / scale}
        gradients.append({**part, "sketch": [_short(value / scale) for value in sketch]})
    figures = {"tokens": int(tokens), "loss": loss_sum / max(1.0, tokens)}
    return {**figures, "activations": activations, "gradients": gradients}


def _short(value: float) -> float:
    """Rounded to nine digits, as float32 has no more."""
    return float(f"{value:.9g}")
