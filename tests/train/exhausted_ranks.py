"""Ranks whose memory ends at each place of a step in turn: GROUPS.json holds [processes, configurations] pairs.

A configuration's "fails" are the ranks whose memory ends, its "every" is that of `compare`. Each rank ends with an
error unless its gradients are, bit for bit, those of the step without a failure.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from roofline.train.config.read import parse_config
from roofline.train.data.loader import Loader
from roofline.train.parallel import processes
from roofline.train.run.loop import Run

FIRST, HALF, QUARTER = 4, 2, 1  # rows of a microbatch


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


def gradients_of(run: Run, rows: Any, size: int, at: tuple[int, ...], fitted: int) -> tuple[list[torch.Tensor], int]:
    """The gradients of a batch, where memory ends at some calls of `watch`; and how often it was called.

    fitted: steps that have fitted before; from the second on ranks ask each other once a step.
    """
    gradients, failing = run.gradients, Failing(run, at)
    run.model.watch, gradients.size, gradients._fitted = failing, size, fitted
    gradients.backward(rows)
    grads = [parameter.grad for parameter in run.model.parameters()]
    local = [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in grads if each is not None]
    run.optimizer.zero_grad()
    assert len(local) == len(grads)
    return local, failing.calls


def compare(given: dict[str, Any], every: int = 1) -> int:
    """How many places of a step were tried. given: a configuration; every: of so many places the last one."""
    fails, every = given.pop("fails"), given.pop("every", every)
    config = parse_config(given)
    world = processes.join(config)
    run = Run(config, world)
    rows = next(Loader(run.source, run.order, config.train_loader, run.shares, 0))
    failing = world.rank in fails
    wanted = {size: gradients_of(run, rows, size, (), 0)[0] for size in (HALF, QUARTER)}
    _, calls = gradients_of(run, rows, FIRST, (), 0)
    calls = int(world.most([calls])[0])
    # Of each place, in the first try alone and in the second one, too.
    places = [((at,), HALF) for at in range(calls)] + [((at, 2 * at + 1), QUARTER) for at in range(calls)]
    places = places[every - 1 :: every]
    for number, (at, size) in enumerate(places):
        grads, _ = gradients_of(run, rows, FIRST, at if failing else (), 5 * (number % 2))
        assert run.gradients.size == size, (world.rank, at, run.gradients.size)
        assert all(map(torch.equal, grads, wanted[size])), (world.rank, at)
    run.close()
    return len(places)


def main(groups: Path) -> int:
    """The exit status."""
    from tests.train.together import group

    for processes_count, configs in json.loads(groups.read_text()):
        if not group(processes_count, configs, lambda given: print(f"{compare(given)} places", flush=True)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
