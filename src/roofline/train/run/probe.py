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

from roofline.common.json_types import JsonObject
from roofline.train.data.order import share
from roofline.train.model.modules import IGNORED, Model
from roofline.train.model.tensor_parallel import part
from roofline.train.parallel.processes import fsdp
from roofline.train.run.gradients import targets
from roofline.train.run.projection import SIZE, sums
from roofline.train.run_folder import PROBES, keep_lines

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

ROWS = 4  # at most
LEAST_SCALE = 1.0

Sums = NDArray[np.float64]  # [2 + SIZE]: number of elements, then what `projection.sums` returns
Totals = dict[tuple[str, str], Sums]  # by kind (loss, activations, gradients) and name


class RunProbe:
    """Records the probes of a run; every rank takes part, and rank 0 writes the file.

    A line has: step, precision, device, processes, compiled, rows (sample numbers), tokens (that count), loss (their
    mean, nats), activations and gradients (of that mean) in the order of the forward pass, seconds. An activation has
    name, size, rms and a sketch with the length of the rms; a gradient has name, size, norm and a sketch with the
    length of the norm. When a run continues, lines of later steps are dropped.
    """

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.rows = run.order.batch(0)[:ROWS]
        self.places = share(np.arange(len(self.rows)), run.world.data_rank, run.world.data_size)
        self.arrays = run.source.rows(self.rows[self.places])
        self.tokens, self.documents, _ = self.arrays
        self.path = run.folder / PROBES
        if run.world.rank == 0:
            keep_lines(self.path, run.progress.step)

    def record(self) -> None:
        """Measure and write a line."""
        run, started = self.run, time.perf_counter()
        model, scaler = run.model, run.gradients.scaler
        grads = [parameter.grad for parameter in model.parameters()]
        scale = scaler.scale if scaler else 1.0
        while True:
            model.zero_grad(set_to_none=True)
            totals = self._measure(scale)
            finite = all(np.isfinite(each).all() for (kind, _), each in totals.items() if kind == "gradients")
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
                **_figures(totals, scale),
                "seconds": round(time.perf_counter() - started, 3),
            }
            with self.path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        run.log.pause()

    def _measure(self, scale: float) -> Totals:
        """All sums over all ranks, from a forward and a backward pass over all chunks of rows."""
        run, model = self.run, self.run.model
        goals = targets(*self.arrays) if len(self.tokens) else self.tokens
        tokens = int(run.world.sum([int((goals != IGNORED).sum())])[0])
        watch = _Watch(model, self.tokens.shape[1])
        if run.world.grouped:
            fsdp(model).set_requires_gradient_sync(True)
        loss_sum, compiled = 0.0, self._pass()[1]
        eager = run.config.compile_config is not None and not compiled
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            for place, real, arrays in self._chunks(goals):
                with watch.rows(place, real), run.gradients.autocast():
                    loss = model(*(torch.from_numpy(array).to(run.world.device) for array in arrays))
                (loss * (scale / max(1, tokens))).backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
        loss_sums = np.zeros(2 + SIZE)
        loss_sums[:2] = tokens if run.world.data_rank == 0 else 0, loss_sum
        parts = {("loss", ""): loss_sums} | {("activations", name): each for name, each in watch.sums.items()}
        parts |= {("gradients", name): each for name, each in _gradients(run).items()}
        values = run.world.sum(np.concatenate(list(parts.values())).tolist())
        return dict(zip(parts, np.array(values).reshape(len(parts), -1), strict=True))

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
        return min(size, -(-len(self.rows) // run.world.data_size)), False

    def _chunks(self, goals: NDArray[np.int64]) -> Iterator[tuple[int, int, list[NDArray[np.int64]]]]:
        """The rows of each pass of this rank; every rank has equally many passes.

        Yields the index of the first row among the probe's rows, the number of rows, and the model's arguments: tokens,
        targets and perhaps documents, padded with rows that do not count.
        """
        size, compiled = self._pass()
        for start in range(0, -(-len(self.rows) // self.run.world.data_size), size):
            some = slice(start, start + size)
            place = int(self.places[start]) if start < len(self.places) else 0
            real = len(self.tokens[some])
            spare = ((0, max(0, (size if compiled else 1) - real)), (0, 0))
            arrays = [np.pad(self.tokens[some], spare), np.pad(goals[some], spare, constant_values=IGNORED)]
            if self.documents is not None:
                arrays.append(np.pad(self.documents[some], spare))
            yield place, real, arrays


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
        original, done, skips = model.head_loss, 0, model.skips

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
        model.head_loss, model.skips = head_loss, False  # every row is summed up
        try:
            yield
        finally:
            model.head_loss, model.skips = original, skips
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
    """This rank's part of the sums over the gradients of each block, and of what is before and behind the blocks.

    `World.sum` adds them up as those of the shares of a batch: it divides by the ranks that share matrices, as is right
    for a gradient that each of these has. Of a divided one each has a part, which counts as often as it is divided by.
    """
    layers = [f"layer {i}" for i in range(len(run.model.blocks))]
    totals = {name: np.zeros(2 + SIZE) for name in ("embed", *layers, "head")}
    rest = "embed"
    for _, param, tensor in run.model.canonical():
        layer = param.name.startswith("layers.")
        group = f"layer {param.name.split('.')[1]}" if layer else rest
        rest = "head" if layer else rest
        if tensor.grad is not None:
            local, first = _local(tensor.grad, run.world.data_rank)
            piece = part(param, run.model.ranks)
            count = 1 if piece.dim is None else run.model.ranks.size
            for offsets, here, rows in piece.places(first, len(local)):
                view = local[here - first : here - first + rows]
                column = offsets[1] if piece.dim == 1 else 0
                projected = sums(f"gradient/{param.name}", view, offsets[0], column)
                totals[group] += count * np.concatenate([[view.numel()], projected])
    return totals


def _local(grad: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
    """The rows of a gradient that this rank sums up, and the number of the first; rank: among those that shard it."""
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


def _figures(totals: Totals, scale: float) -> JsonObject:
    """The loss, activations and gradients of a line."""
    tokens, loss_sum = totals["loss", ""][:2]
    figures: JsonObject = {"tokens": int(tokens), "loss": loss_sum / max(1.0, tokens)}
    for kind, length in (("activations", "rms"), ("gradients", "norm")):
        figures[kind] = []
        for (of, name), (size, squares, *sketch) in totals.items():
            if of != kind:
                continue
            unit = math.sqrt(max(1.0, size)) if length == "rms" else scale
            entry = {"name": name, "size": int(size), length: math.sqrt(squares) / unit}
            figures[kind].append({**entry, "sketch": [_short(value / unit) for value in sketch]})
    return figures


def _short(value: float) -> float:
    """Rounded to nine digits, as float32 has no more."""
    return float(f"{value:.9g}")
