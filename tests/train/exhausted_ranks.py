"""Ranks whose memory ends at each place of a step in turn: GROUPS.json holds [processes, configurations] pairs.

A configuration's "fails" are the ranks whose memory ends, its "every" is that of `compare`; with "answers", the
settings of GRPO, each row is an answer; with "inside" it also ends before and behind the collectives of gradients,
within FSDP. Each rank ends with an error unless its gradients, losses and figures are, bit
for bit, those of the step without a failure.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor

from roofline.train.config.objectives import GrpoSection
from roofline.train.config.read import parse_config
from roofline.train.data.loader import Loader, Rows
from roofline.train.parallel import processes
from roofline.train.preference.grpo import AnswerLoss, Apart
from roofline.train.preference.objective import Facts
from roofline.train.run.loop import Run

FIRST, HALF, QUARTER = 4, 2, 1  # rows of a microbatch
# What FSDP calls before a reduce-scatter, and behind the sum over the copies of a model that follows it.
AROUND = ("foreach_reduce_scatter_copy_in", "_div_if_needed", "_to_dtype_if_needed")


class Failing:
    """A model's `watch`, which raises at some of its calls. calls: so far, those for short rows left out."""

    def __init__(self, run: Run, at: tuple[int, ...] = ()) -> None:
        self.lockstep, self.at, self.calls = run.world.lockstep, at, 0

    def __call__(self) -> None:
        if self.lockstep.tokens is not None:
            return
        self.calls += 1
        if self.calls - 1 in self.at:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB")


@dataclass(frozen=True)
class Computed:
    """What a step leaves. numbers: its losses and figures; calls: of `watch`."""

    grads: list[torch.Tensor]
    numbers: tuple[object, ...]
    calls: int

    def is_like(self, other: "Computed") -> bool:
        """Whether another one has the same bits."""
        return self.numbers == other.numbers and all(map(torch.equal, self.grads, other.grads))


def prepared(run: Run, rows: Rows, answers: dict[str, Any] | None) -> tuple[Rows, list[Facts]]:
    """A batch and the facts of its parts, which are those of the run's preference method, if it has one."""
    if run.preference is not None:
        run.preference.begin()
        return run.preference.prepare(rows)
    if answers is None:
        return rows, []
    # Nobody samples, as that takes an engine and a process that is alone: log-probabilities and rewards are drawn.
    run.gradients.objective = AnswerLoss(GrpoSection(**answers))
    random = np.random.default_rng(7 + run.world.data_rank)
    facts = []
    for part in rows.parts:
        drawn = (random.random((2, *part.tokens.shape)) - 0.5).astype(np.float32) - np.float32(
            np.log(run.model.cfg.vocab)
        )
        advantage = random.standard_normal(len(part.tokens)).astype(np.float32)
        facts.append({"old": drawn[0], "reference": drawn[1], "advantage": advantage})
    return rows, facts


def computed(
    run: Run, rows: Rows, facts: list[Facts], size: int, at: tuple[int, ...] = (), fitted: int = 0
) -> Computed:
    """What a batch's step leaves where memory ends at some calls of `watch`.

    fitted: steps that have fitted before; from the second on ranks ask each other once a step.
    """
    gradients, failing = run.gradients, Failing(run, at)
    run.model.watch, gradients.size, gradients._fitted = failing, size, fitted
    objective = gradients.objective
    if isinstance(objective, AnswerLoss):
        objective.apart, objective.fresh = Apart(), sum(len(part.tokens) for part in rows.parts)
    losses = gradients.backward(rows, facts)
    grads = [parameter.grad for parameter in run.model.parameters()]
    local = [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in grads if each is not None]
    run.optimizer.zero_grad()
    assert len(local) == len(grads)
    apart = astuple(objective.apart) if isinstance(objective, AnswerLoss) else ()
    return Computed(local, (losses, gradients.figures, apart), failing.calls)


@contextmanager
def watched_reductions(run: Run) -> Iterator[None]:
    """A context in which `watch` is called around the collectives of gradients, too."""

    def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any) -> Any:
            if run.model.watch is not None:
                run.model.watch()
            return plain(*tensors)

        return call

    watched_calls = {name: watched(getattr(_fsdp_collectives, name)) for name in AROUND}
    with patch.multiple(_fsdp_collectives, **watched_calls):
        yield


def compare_places(run: Run, rows: Rows, facts: list[Facts], is_failing: bool, every: int) -> int:
    """How many places of a step were tried. is_failing: memory ends on this rank."""
    world = run.world
    wanted = {size: computed(run, rows, facts, size) for size in (HALF, QUARTER)}
    assert all(any(map(torch.any, step.grads)) for step in wanted.values())
    calls = int(world.most([computed(run, rows, facts, FIRST).calls])[0])
    # Of each place, in the first try alone and in the second one, too.
    places = [((at,), HALF) for at in range(calls)] + [((at, 2 * at + 1), QUARTER) for at in range(calls)]
    places = places[every - 1 :: every]
    for number, (at, size) in enumerate(places):
        step = computed(run, rows, facts, FIRST, at if is_failing else (), 5 * (number % 2))
        assert run.gradients.size == size, (world.rank, at, run.gradients.size)
        assert step.is_like(wanted[size]), (world.rank, at)
    return len(places)


def compare(given: dict[str, Any], every: int = 1, leaves: bool = False) -> int:
    """How many places of a step were tried. given: a configuration; every: of so many places the last one; leaves:
    whether this process goes on without the group."""
    fails, every, answers = given.pop("fails"), given.pop("every", every), given.pop("answers", None)
    inside = given.pop("inside", False)
    config = parse_config(given)
    world = processes.join(config)
    try:
        run = Run(config, world)
        rows, facts = prepared(run, next(Loader(run.source, run.order, config.train_loader, run.shares, 0)), answers)
        with watched_reductions(run) if inside else nullcontext():
            tried = compare_places(run, rows, facts, world.rank in fails, every)
        run.close()
        del run
    finally:
        if leaves:
            processes.leave(world)
    return tried


def main(groups: Path) -> int:
    """The exit status."""
    from tests.train.together import group

    for processes_count, configs in json.loads(groups.read_text()):
        if not group(processes_count, configs, lambda given: print(f"{compare(given)} places", flush=True)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
