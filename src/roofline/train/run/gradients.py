"""Computes the gradients of a global batch in microbatches, which become smaller when memory runs out."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from roofline.common import log
from roofline.common.errors import CapacityError
from roofline.common.processes import return_freed_memory
from roofline.train.data.loader import Rows
from roofline.train.data.row_arrays import Counted, RowArrays
from roofline.train.data.row_digest import row_digest
from roofline.train.memory.exhausted import OneDnn, is_out_of_memory, out_of_memory
from roofline.train.memory.meter import give_back_freed_memory
from roofline.train.model.lockstep import is_in_collective
from roofline.train.model.modules import IGNORED, Model
from roofline.train.model.objective import TrainingObjective
from roofline.train.parallel.elastic import TreeSum
from roofline.train.parallel.processes import COMPUTE, OutOfMemory, World, follow, forget_step, fsdp
from roofline.train.preference.objective import Facts, RowObjective, some_rows

LARGEST_SCALE, GROWTH = 2.0**24, 2000
SETTLED = 2  # steps that must fit before ranks stop asking each other after each microbatch whether one has failed
SHORT = 8  # tokens of the row that a rank without memory computes in place of a microbatch

_log = log.get("train")


@dataclass
class Scaler:
    """Loss scaling for fp16, equal on all ranks: halved if a gradient overflows, doubled after GROWTH good steps.

    Source: Micikevicius et al. 2018.
    """

    scale: float = 2.0**16
    good: int = 0

    def settle(self, finite: bool) -> None:
        """Adapt the scale after a step. finite: all gradients were finite on every rank."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % GROWTH == 0:
            self.scale = min(LARGEST_SCALE, self.scale * 2)


class Gradients:
    """Computes the gradients of batches into a model's parameters.

    Args:
        size: rows of a microbatch; None: all of this rank's rows, halved where memory ends.
        sync_last: reduce gradients once a step, not with each microbatch.
        tree: add this rank's parts, and the ranks, in a fixed tree (parallel.elastic).

    Attributes:
        size: rows of a microbatch now, None before the first step. halved: how often it was halved.
        scaler: for fp16, else None. row_digest, counted: of the rows of the last global batch. keeps_padding: compute
            the padding at the end of rows as well, so that all microbatches have one shape.
        is_compiled: the model is. predicted: bytes that the run is predicted to take, for an error's text.
        objective: replaces the sum of cross entropies. figures: its own, means over the last global batch.
    """

    def __init__(
        self, model: Model, world: World, precision: str, size: int | None, sync_last: bool = False, tree: bool = False
    ) -> None:
        self.model, self.world, self.size, self.sync_last = model, world, size, sync_last
        self.auto, self.tree, self.halved, self._fitted, self._computed = size is None, tree, 0, 0, 0
        self.compute = COMPUTE[precision]
        self.scaler = Scaler() if precision == "amp_fp16" else None
        self.row_digest = b""
        self.counted = Counted()
        self.keeps_padding = self.is_compiled = False
        self._failure: CapacityError | None = None  # of this rank, in this step
        self._reported: CapacityError | None = None  # of any rank, on rank 0: why the last step was begun again
        self.predicted: int | None = None
        self.objective: RowObjective | None = None
        self.figures: dict[str, float] = {}
        self._noted: torch.Tensor | None = None
        model.watch = OneDnn().check if world.device.type == "cpu" else None

    def backward(self, rows: Rows, facts: Sequence[Facts] = ()) -> tuple[float, int]:
        """Leave the gradients of a global batch in the parameters; returns its sum of losses, and how many tokens count
        (of an objective: units).

        facts: of each part, for the objective. Raises CapacityError if not even one row fits into memory.
        """
        # The rows of the largest part of any rank: all ranks take equally many microbatches.
        most = max(1, -(-rows.ids.size // (len(rows.parts) * self.world.data_size))) * rows.each
        if self.size is None or (self.auto and self.size > most):
            self.size = most
        counts = [targets(*part) != IGNORED for part in rows.parts]
        real = sum(part.real() for part in rows.parts)
        count, own = sum(int(count.sum()) for count in counts), self._units(counts, facts)
        tokens, units, all_real, *row_sums = map(int, self.world.sum([count, own, real, *rows.sums.tolist()]))
        self.row_digest = row_digest(row_sums)
        again = False
        while True:
            if self.objective is not None:
                self.objective.begin(again)
            self.world.watching = self.auto and self.world.grouped and self._fitted < SETTLED
            self._computed, self._noted, self._failure = 0, None, None
            try:
                losses = self._parts(rows, -(-most // self.size), units, facts)
                every = self.world.gather_ranks([*losses, self._computed, self._failure is not None])
                if any(failed for *_, failed in every):
                    raise OutOfMemory
            except OutOfMemory:
                pass
            else:
                self._fitted += 1
                self._report()
                every = every[:: self.world.tensor.size]
                self.counted = Counted(all_real, int(sum(computed for *_, computed, _ in every)), tokens)
                over_tokens = self.objective is not None and self.objective.over_tokens
                self.figures = self.means(tokens if over_tokens else units)
                return math.fsum(loss for *of_parts, _, _ in every for loss in of_parts), units
            # Outside of `except` the error is gone, and with its frames the tensors of the failed microbatch.
            self._halve()
            again = True

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the run computes."""
        kind = self.world.device.type
        return torch.autocast(kind, self.compute) if self.compute is not None else nullcontext()

    def loss(
        self,
        tokens: np.ndarray,
        documents: np.ndarray | None = None,
        trained: np.ndarray | None = None,
        facts: Facts | None = None,
    ) -> torch.Tensor:
        """The sum of the losses of rows (`RowArrays`); without rows a zero, for which other ranks wait."""
        device = self.world.device
        if not len(tokens):
            tokens = np.zeros((1, tokens.shape[1]), np.int64)
            documents = None if documents is None else np.zeros_like(tokens)
            goals = np.full_like(tokens, IGNORED)
            facts = {name: np.zeros((1, *array.shape[1:]), array.dtype) for name, array in (facts or {}).items()}
        else:
            goals = targets(tokens, documents, trained)
            tokens, documents, _ = self._without_padding(RowArrays(tokens, documents, trained))
            goals = goals[:, : tokens.shape[1]]
        self._computed += goals.size
        self.model.skips = trained is not None and not self.keeps_padding
        ids, of_targets, of_documents = [
            None if a is None else torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True)
            for a in (tokens, goals, documents)
        ]
        with self.autocast():
            if self.objective is None:
                return self.model(ids, of_targets, of_documents)
            assert of_targets is not None
            objective = self._objective(self.objective, of_targets, of_documents, facts or {})
            return self.model(ids, of_targets, of_documents, objective=objective)

    def held_out(self, rows: RowArrays, facts: Facts | None = None) -> tuple[float, int]:
        """The sum of the losses of held-out rows, and of how many tokens (of an objective: units) it is."""
        loss = float(self.loss(*rows, facts))
        return loss, self._units([targets(*rows) != IGNORED], [facts or {}]) if len(rows.tokens) else 0

    def _units(self, counts: Sequence[np.ndarray], facts: Sequence[Facts]) -> int:
        """What the losses of parts are the mean over; counts: which of their targets count."""
        if self.objective is None:
            return sum(int(count.sum()) for count in counts)
        return sum(self.objective.units(*counted) for counted in zip(counts, facts, strict=True))

    def _objective(
        self, objective: RowObjective, goals: torch.Tensor, documents: torch.Tensor | None, facts: Facts
    ) -> TrainingObjective:
        """The objective of rows that are on the device."""
        arrays = {name: array[:, : goals.shape[1]] if array.ndim == 2 else array for name, array in facts.items()}
        on_device = {name: torch.from_numpy(array.copy()).to(goals.device) for name, array in arrays.items()}
        value = objective.value(goals != IGNORED, documents, on_device, self._note)
        return TrainingObjective(value, objective.temperature)

    def _note(self, sums: torch.Tensor) -> None:
        self._noted = sums.double() if self._noted is None else self._noted + sums

    def means(self, count: int) -> dict[str, float]:
        """The objective's figures: means over `count` tokens or units since the last call, of all ranks."""
        if self.objective is None:
            return {}
        names = self.objective.figures
        own = [0.0] * len(names) if self._noted is None else self._noted.tolist()
        self._noted = None
        return {name: total / max(1, count) for name, total in zip(names, self.world.sum(own), strict=True)}

    def _parts(self, rows: Rows, count: int, total: int, facts: Sequence[Facts] = ()) -> list[float]:
        """The sum of losses of each of this rank's parts; leaves their gradients."""
        each = [(part, of_part) for part, of_part in zip(rows.parts, facts or [{}] * len(rows.parts), strict=True)]
        if not self.tree:
            return [self._add_part(*part, count, total) for part in each]
        sums, losses = TreeSum(), []
        for part in each:
            losses.append(self._add_part(*part, count, total))
            sums.push([parameter.grad for parameter in self.model.parameters()])
            self.model.zero_grad(set_to_none=True)
        for parameter, grad in zip(self.model.parameters(), sums.total(), strict=True):
            parameter.grad = grad
        return losses

    def _add_part(self, part: RowArrays, facts: Facts, count: int, total: int) -> float:
        """Add the gradients of a part in `count` microbatches, with losses divided by `total`."""
        assert self.size is not None
        size = self.size
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        scale = (self.scaler.scale if self.scaler else 1.0) / max(1, total)
        for index in range(count):
            some = slice(index * size, (index + 1) * size)
            rows = part.rows(some)
            if not self.world.grouped and not len(rows.tokens):
                break  # nobody waits for a process that is alone
            if self.world.grouped:
                fsdp(self.model).set_requires_gradient_sync(index == count - 1 or not self.sync_last)
            failure: CapacityError | None = None  # the error itself would keep this frame and its tensors alive
            try:
                if self._failure is not None:
                    self._follow(rows, facts, scale)  # of a step that is given up in any case
                else:
                    loss_sum += self._microbatch(rows, some_rows(facts, some), scale)
            except (RuntimeError, MemoryError) as error:
                if not self._can_halve(error):
                    raise
                failure = self._exhausted(str(error) or type(error).__name__)
            if failure is not None:
                self._failure = failure
                if self.world.device.type == "cpu":
                    give_back_freed_memory()
                self._give_up()
                if not self.world.grouped:
                    raise OutOfMemory
                self._follow(rows, facts, scale, joins=True)
            self.world.agree(self._failure is not None)
        return float(loss_sum)

    def _microbatch(self, rows: RowArrays, facts: Facts, scale: float) -> torch.Tensor:
        """Add the gradients of rows; their sum of losses."""
        self.world.lockstep.begin()
        loss = self.loss(*rows, facts)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        if self.model.watch is not None:
            self.model.watch()
        return loss.detach()

    def _can_halve(self, error: BaseException) -> bool:
        """Whether the step can be begun again with smaller microbatches, on all ranks."""
        if not self.auto or self._failure is not None or not is_out_of_memory(error):
            return False
        return not self.world.grouped or (self.world.lockstep.is_complete and not is_in_collective(error))

    def _exhausted(self, message: str) -> CapacityError:
        """What this rank's memory had no room for."""
        assert self.size is not None
        rows = "one row" if self.size == 1 else f"{self.size} rows"
        place = f" on rank {self.world.rank}" if self.world.grouped else ""
        return out_of_memory(f"a microbatch of {rows}{place}", message, None if self.halved else self.predicted)

    def _follow(self, rows: RowArrays, facts: Facts, scale: float, joins: bool = False) -> None:
        """Take part in the collectives of a microbatch without computing it; joins: in those that are left of it."""
        short = RowArrays(*(None if array is None else array[:0, :SHORT] for array in rows))  # type: ignore[arg-type]
        tokens = rows.tokens[:1].size if not len(rows.tokens) else self._without_padding(rows).tokens.size
        eager = torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()
        with follow(self.model, self.world, tokens, joins), eager:
            (self.loss(*short, facts) * scale).backward()  # type: ignore[no-untyped-call]

    def _without_padding(self, rows: RowArrays) -> RowArrays:
        """What is computed of rows."""
        return rows if self.keeps_padding else rows.without_padding()

    def _give_up(self) -> None:
        """Forget the step, and give back what it has taken."""
        self.model.zero_grad(set_to_none=True)  # also of parameters that are gathered when a step fails
        if self.world.grouped:
            forget_step(self.model)
        if self.world.device.type == "cpu":
            return_freed_memory()
        else:
            torch.accelerator.empty_cache()

    def _halve(self) -> None:
        """Begin the step again with half of the rows, on all ranks. Raises the error of a rank that had one row."""
        assert self.size is not None
        self._give_up()
        failures = [failure for failure in self.world.collect(self._failure) if failure is not None]
        if self.size == 1:
            self.world.raise_together(failures[0] if failures else None)
        self._reported = failures[0] if failures else None
        self.size = (self.size + 1) // 2
        self.halved += 1

    def _report(self) -> None:
        """Say once, on rank 0, why a step was begun again."""
        failure, self._reported = self._reported, None
        if failure is not None:
            _log.warning(
                "%s needs %s bytes, %s are available: microbatches have %d rows from now on",
                failure.what,
                f"{failure.needed:,}",
                f"{failure.available:,}",
                self.size,
            )


def targets(tokens: np.ndarray, documents: np.ndarray | None = None, trained: np.ndarray | None = None) -> np.ndarray:
    """The next token of each position, int64 [rows, length]; IGNORED at the end of a row and of each document, and
    where the next token is none that is trained on."""
    goals = np.roll(tokens, -1, 1)
    goals[:, -1] = IGNORED
    if documents is not None:
        goals[:, :-1][documents[:, :-1] != documents[:, 1:]] = IGNORED
    if trained is not None:
        goals[:, :-1][~trained[:, 1:]] = IGNORED
    return goals
