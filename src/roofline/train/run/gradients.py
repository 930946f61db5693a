"""The gradient of one global batch: microbatches of any size, losses weighted by tokens, halved where memory ends."""

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roofline.common.errors import CapacityError
from roofline.train.data.loader import Rows
from roofline.train.model.modules import IGNORED, Model
from roofline.train.parallel.elastic import TreeSum
from roofline.train.parallel.processes import COMPUTE, OutOfMemory, World

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|DefaultCPUAllocator", re.IGNORECASE)
LARGEST_SCALE, GROWTH = 2.0**24, 2000
SETTLED = 2  # steps that fitted: then ranks stop asking each other before each collective


@dataclass
class Scaler:
    """Loss scaling of fp16, in step on all ranks: halved when any gradient overflows, doubled after GROWTH good steps.

    Source: Micikevicius et al. 2018.
    """

    scale: float = 2.0**16
    good: int = 0

    def settle(self, finite: bool) -> None:
        """After a step whose gradients were, or were not, finite on every rank."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % GROWTH == 0:
            self.scale = min(LARGEST_SCALE, self.scale * 2)


class Gradients:
    """Computes gradients of batches into a model's parameters.

    Args:
        size: rows of a microbatch; None: all of a rank's, halved until they fit, by the first SETTLED steps.
        sharded: the model is an FSDP2 one. sync_last: gradients travel once a step and not with each microbatch.
        tree: sum a rank's parts, and the ranks, in a fixed tree (train.elastic).

    Attributes:
        size: rows of a microbatch now, None before the first step. halved: how often it was.
        scaler: of fp16, else None.
    """

    def __init__(
        self,
        model: Model,
        world: World,
        precision: str,
        size: int | None,
        sharded: bool = False,
        sync_last: bool = False,
        tree: bool = False,
    ) -> None:
        self.model, self.world, self.size, self.sharded, self.sync_last = model, world, size, sharded, sync_last
        self.auto, self.tree, self.halved, self._fitted = size is None, tree, 0, 0
        self.compute = COMPUTE[precision]
        self.scaler = Scaler() if precision == "amp_fp16" else None

    def backward(self, rows: Rows) -> tuple[float, int]:
        """Leaves the gradients of a global batch in the parameters; the sum of its losses, and of tokens that count.

        Raises CapacityError where not even one row fits.
        """
        # Of the largest part of any rank: all take as many microbatches, whatever the number of ranks.
        most = max(1, -(-rows.ids.size // (len(rows.parts) * self.world.data_size)))
        if self.size is None or (self.auto and self.size > most):
            self.size = most
        counts = [int((targets(*part) != IGNORED).sum()) for part in rows.parts]
        tokens = int(self.world.sum([sum(counts)])[0])
        while True:
            self.world.watching = self.auto and self.world.grouped and self._fitted < SETTLED
            try:
                losses = self._parts(rows, -(-most // self.size), tokens)
            except OutOfMemory as error:
                said = str(error)
            else:
                self._fitted += 1
                return math.fsum(loss for each in self.world.gather(losses) for loss in each), tokens
            # Out here the error is gone, and with its frames the tensors of what failed.
            self._halve(said)

    def autocast(self) -> Any:
        """The precision of the run."""
        kind = self.world.device.type
        return torch.autocast(kind, self.compute) if self.compute is not None else nullcontext()

    def loss(self, tokens: np.ndarray, documents: np.ndarray | None) -> torch.Tensor:
        """The sum of the losses of rows int64 [rows, length]; of none, the zero that keeps ranks in step."""
        device = self.world.device
        if not len(tokens):
            tokens = np.zeros((1, tokens.shape[1]), np.int64)
            documents = None if documents is None else np.zeros_like(tokens)
            wanted = np.full_like(tokens, IGNORED)
        else:
            wanted = targets(tokens, documents)
        ids, goals = (torch.from_numpy(array).to(device, non_blocking=True) for array in (tokens, wanted))
        kept = None if documents is None else torch.from_numpy(documents).to(device)
        with self.autocast():
            return self.model(ids, goals, kept)

    def held_out(self, tokens: np.ndarray, documents: np.ndarray | None) -> tuple[float, int]:
        """The sum of the losses of rows and how many tokens count, without gradients."""
        loss = float(self.loss(tokens, documents))
        return loss, int((targets(tokens, documents) != IGNORED).sum()) if len(tokens) else 0

    def _parts(self, rows: Rows, count: int, total: int) -> list[float]:
        """The loss of each part of this rank."""
        if not self.tree:
            return [self._add(*part, count, total) for part in rows.parts]
        sums, losses = TreeSum(), []
        for part in rows.parts:
            losses.append(self._add(*part, count, total))
            sums.push([parameter.grad for parameter in self.model.parameters()])
            self.model.zero_grad(set_to_none=True)
        for parameter, grad in zip(self.model.parameters(), sums.total(), strict=True):
            parameter.grad = grad
        return losses

    def _add(self, tokens: np.ndarray, documents: np.ndarray | None, count: int, total: int) -> float:
        """Add the gradients of rows in `count` microbatches, their losses divided by `total`."""
        assert self.size is not None
        size = self.size
        lost = torch.zeros((), dtype=torch.float64, device=self.world.device)
        scale = (self.scaler.scale if self.scaler else 1.0) / max(1, total)
        for index in range(count):
            rows = slice(index * size, (index + 1) * size)
            if not self.sharded and not len(tokens[rows]):
                break  # no other rank waits for this one
            if self.sharded:
                sharded: Any = self.model
                sharded.set_requires_gradient_sync(index == count - 1 or not self.sync_last)
            failed: str | None = None  # not the error: this frame would keep it, and it this frame and its tensors
            try:
                loss = self.loss(tokens[rows], None if documents is None else documents[rows])
                (loss * scale).backward()  # type: ignore[no-untyped-call]
                lost += loss.detach()
            except (RuntimeError, MemoryError) as error:
                if not self.auto or not is_out_of_memory(error) or (self.world.grouped and not self.world.watching):
                    raise
                failed = str(error) or type(error).__name__
            self.world.agree(failed is not None)
            if failed is not None:
                raise OutOfMemory(failed)
        return float(lost)

    def _halve(self, said: str) -> None:
        assert self.size is not None
        self.model.zero_grad(set_to_none=True)  # also of parameters that are whole where the step was left
        if self.sharded:
            sharded: Any = self.model
            sharded.reset_iter_state()
            self.model.zero_grad(set_to_none=True)
        if self.size == 1:
            remedy = f"Shard over more ranks, or lower max_seq_len: {' '.join(said.split())}"
            raise CapacityError("a microbatch of one row", 1, 0, "rows", remedy)
        self.size = (self.size + 1) // 2
        self.halved += 1
        if self.world.device.type != "cpu":
            torch.accelerator.empty_cache()


def targets(tokens: np.ndarray, documents: np.ndarray | None) -> np.ndarray:
    """What each position is to predict, int64 [rows, length]: the next token; IGNORED at the end of a row and, where
    documents are kept apart, of a document."""
    wanted = np.roll(tokens, -1, 1)
    wanted[:, -1] = IGNORED
    if documents is not None:
        wanted[:, :-1][documents[:, :-1] != documents[:, 1:]] = IGNORED
    return wanted


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ended: of a GPU of any vendor, or of this process."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def limit_memory(size: int) -> None:
    """More bytes than these, what the process has already among them, are refused to it: an error, and no kill."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
