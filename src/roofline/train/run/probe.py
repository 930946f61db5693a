"""Probes: what a run's model makes of the same few rows at its start and at each checkpoint, in figures to compare.

The rows are the first of the order's first batch, so two runs of one order have the same, whatever their processes and
microbatches. They go through the model as training does it: sharded, compiled, in its precision. Nothing of the run
changes by it. `roofline parity` reads what is written here.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Shard

from roofline.common.files import write_atomically
from roofline.common.json_types import JsonObject
from roofline.train.data.order import share
from roofline.train.model.modules import IGNORED, Model
from roofline.train.run.gradients import targets
from roofline.train.run.projection import SIZE, sums

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

PROBES = "probes.jsonl"
ROWS = 4  # at most
LEAST_SCALE = 1.0

Sums = NDArray[np.float64]  # [2 + SIZE]: elements, then what `sketch.sums` gives


class Probe:
    """Records the probes of a run into its folder, on rank 0; every rank takes part in them.

    A line: step, precision, device, processes, compiled, rows (sample numbers), tokens (that count), loss (their mean,
    nats), activations and gradients (of that mean) in the order of the forward pass, seconds. An activation has name,
    size, rms and a sketch whose length tells the rms; a gradient has name, size, norm and a sketch whose length tells
    the norm. Lines of steps behind the one the run goes on from are dropped; a line of that very step stays.
    """

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.rows = run.order.batch(0)[:ROWS]
        self.places = share(np.arange(len(self.rows)), run.world.rank, run.world.size)
        self.tokens, self.documents = run.source.rows(self.rows[self.places])
        self.path = run.folder / PROBES
        if run.world.rank == 0:
            write_atomically(self.path, "".join(_kept(self.path, run.progress.step)))

    def record(self) -> None:
        """Write a line of now."""
        run, started = self.run, time.perf_counter()
        model, scaler = run.model, run.gradients.scaler
        held = [parameter.grad for parameter in model.parameters()]
        scale = scaler.scale if scaler else 1.0
        while True:
            model.zero_grad(set_to_none=True)
            found = self._agreed(self._measure(scale))
            finite = all(np.isfinite(each).all() for each in found["gradient"].values())
            if finite or scale <= LEAST_SCALE:
                break
            scale = max(LEAST_SCALE, scale / 16)  # training skips such steps until the scale fits
        for parameter, grad in zip(model.parameters(), held, strict=True):
            parameter.grad = grad
        if run.world.rank == 0:
            line = {**self._about(), **_figures(found, scale), "seconds": round(time.perf_counter() - started, 3)}
            with self.path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        run.log.pause()

    def _about(self) -> JsonObject:
        run = self.run
        return {
            "step": run.progress.step,
            "precision": run.config.precision,
            "device": str(run.world.device),
            "processes": run.world.size,
            "compiled": self._pass()[1],
            "rows": self.rows.tolist(),
        }

    def _measure(self, scale: float) -> dict[str, dict[str, Sums]]:
        """This rank's part of all sums, after a forward and a backward pass over all chunks of rows."""
        run, model = self.run, self.run.model
        goals = targets(self.tokens, self.documents) if len(self.tokens) else self.tokens
        tokens = int(run.world.sum([int((goals != IGNORED).sum())])[0])
        watch = _Watch(model, self.tokens.shape[1])
        if run.gradients.sharded:
            sharded: Any = model
            sharded.set_requires_gradient_sync(True)
        lost, compiled = 0.0, self._pass()[1]
        eager = run.config.compile_config is not None and not compiled
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            for chunk in self._chunks(goals):
                with watch.over(chunk.place, chunk.real):
                    loss = chunk.loss(run)
                (loss * (scale / max(1, tokens))).backward()  # type: ignore[no-untyped-call]
                lost += float(loss.detach())
        own = np.zeros(2 + SIZE)
        own[:2] = tokens if run.world.rank == 0 else 0, lost
        return {"loss": {"loss": own}, "activation": watch.found, "gradient": _gradients(run)}

    def _pass(self) -> tuple[int, bool]:
        """Rows of a pass, and whether it is a compiled one: those have the shape of a microbatch, for another would be
        compiled anew. While `auto` has not found its size, one row without compilation."""
        run = self.run
        size = run.gradients.size or 0
        if size and run.config.compile_config is not None:
            return size, True
        if run.config.device_train_microbatch_size == "auto":
            return 1, False  # what fits in training fits here
        return min(size, -(-len(self.rows) // run.world.size)), False

    def _chunks(self, goals: NDArray[np.int64]) -> "Iterator[_Chunk]":
        """As many on every rank."""
        size, compiled = self._pass()
        for start in range(0, -(-len(self.rows) // self.run.world.size), size):
            part = slice(start, start + size)
            place = int(self.places[start]) if start < len(self.places) else 0
            documents = None if self.documents is None else self.documents[part]
            yield _Chunk(place, self.tokens[part], goals[part], documents, size if compiled else 1)

    def _agreed(self, found: dict[str, dict[str, Sums]]) -> dict[str, dict[str, Sums]]:
        """The sums over all ranks."""
        names = [(kind, name) for kind, each in found.items() for name in each]
        values = self.run.world.sum(np.concatenate([found[kind][name] for kind, name in names]).tolist())
        rows = np.array(values).reshape(len(names), -1)
        summed: dict[str, dict[str, Sums]] = {kind: {} for kind in found}
        for (kind, name), row in zip(names, rows, strict=True):
            summed[kind][name] = row
        return summed


class _Chunk:
    """Rows for one pass, filled up to `least` with rows that do not count.

    Attributes:
        place: of the first among the probe's rows. real: rows that count.
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
        """The sum of its losses."""
        kept = [self.tokens, self.goals, *([] if self.documents is None else [self.documents])]
        with run.gradients.autocast():
            return run.model(*(torch.from_numpy(array).to(run.world.device) for array in kept))


class _Watch:
    """Sums of a model's activations, taken while it computes: nothing is kept."""

    def __init__(self, model: Model, length: int) -> None:
        self.model, self.length = model, length
        names = ["embed", *(f"layer {i}" for i in range(len(model.blocks))), "logits"]
        self.found = {name: np.zeros(2 + SIZE) for name in names}

    @contextmanager
    def over(self, place: int, real: int) -> Iterator[None]:
        """While `real` rows pass, of which the first is row `place` of the probe."""
        model, first, count = self.model, place * self.length, real * self.length
        given, done = model.head_loss, 0

        def head_loss(names: list[str], goals: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            nonlocal done  # the rows come in parts, from the first to the last
            self._logits(x.detach()[: max(0, count - done)], weights, first + done)
            done += len(x)
            return given(names, goals, x, *weights)

        def seen(name: str) -> Callable[..., None]:
            return lambda block, args, out: self._see(name, out.detach()[:count], first)

        blocks = model.blocks
        handles = [blocks[0].register_forward_pre_hook(lambda _, args: seen("embed")(_, args, args[0]))]
        handles += [block.register_forward_hook(seen(f"layer {i}")) for i, block in enumerate(blocks)]
        model.head_loss = head_loss
        try:
            yield
        finally:
            model.head_loss = given
            for handle in handles:
                handle.remove()

    def _logits(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], first: int) -> None:
        """The model's loss never has all of them at once, and neither have we."""
        step = max(1, (1 << 22) // self.model.cfg.vocab)
        with torch.no_grad():
            for start in range(0, len(x), step):
                self._see("logits", self.model.logits(x[start : start + step], weights), first + start)

    def _see(self, name: str, x: torch.Tensor, first: int) -> None:
        self.found[name] += np.concatenate([[x.numel()], sums(name, x, first)])


def _gradients(run: "Run") -> dict[str, Sums]:
    """This rank's part of the sums over each block's gradients, and over what comes before and after the blocks."""
    layers = [f"layer {i}" for i in range(len(run.model.blocks))]
    found = {name: np.zeros(2 + SIZE) for name in ("embed", *layers, "head")}
    rest = "embed"
    for _, param, tensor in run.model.canonical():
        layer = param.name.startswith("layers.")
        group = f"layer {param.name.split('.')[1]}" if layer else rest
        rest = "head" if layer else rest
        if tensor.grad is not None:
            local, first = _local(tensor.grad, run.world.rank)
            found[group] += np.concatenate([[local.numel()], sums(f"gradient/{param.name}", local, first)])
    return found


def _local(grad: torch.Tensor, rank: int) -> tuple[torch.Tensor, int]:
    """The rows of a gradient that this rank answers for, and the number of the first."""
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
    whole = grad.full_tensor()
    return (whole, 0) if rank == 0 else nothing


def _figures(found: dict[str, dict[str, Sums]], scale: float) -> JsonObject:
    """The sums as what they are of."""
    tokens, lost = found["loss"]["loss"][:2]
    activations, gradients = [], []
    for name, (size, squares, *sketch) in found["activation"].items():
        root = math.sqrt(max(1.0, size))
        part = {"name": name, "size": int(size), "rms": math.sqrt(squares) / root}
        activations.append({**part, "sketch": [_short(value / root) for value in sketch]})
    for name, (size, squares, *sketch) in found["gradient"].items():
        part = {"name": name, "size": int(size), "norm": math.sqrt(squares) / scale}
        gradients.append({**part, "sketch": [_short(value / scale) for value in sketch]})
    figures = {"tokens": int(tokens), "loss": lost / max(1.0, tokens)}
    return {**figures, "activations": activations, "gradients": gradients}


def _short(value: float) -> float:
    """Nine digits: float32 has no more."""
    return float(f"{value:.9g}")


def _kept(path: Any, step: int) -> Iterator[str]:
    """Lines of steps up to the one a run goes on from; none where it begins."""
    for line in path.read_text().splitlines() if step and path.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                yield line + "\n"
        except (ValueError, KeyError, TypeError):
            continue  # cut by a crash
