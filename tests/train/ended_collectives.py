"""Ranks whose memory ends inside a collective: GROUPS.json holds [processes, [configuration]] pairs.

A configuration's "ends" is the rank whose memory ends, the method of torch's process group in which it does, at which
of its calls by FSDP in the first step, and whether the rank has taken part by then. Each rank writes what it is told.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from roofline.common.errors import RooflineError
from roofline.train.config.read import parse_config
from roofline.train.parallel import processes
from roofline.train.run import loop

ROWS = 3  # of a microbatch


class EndsInside:
    """A method of a process group that raises at one of the calls that FSDP makes while gradients are computed."""

    def __init__(self, method: str, at: int, has_taken_part: bool) -> None:
        self.at, self.has_taken_part, self.calls, self.is_counting = at, has_taken_part, 0, False
        self.plain = getattr(dist.ProcessGroup, method)
        ending, update, foreach_reduce = self, loop.Run._update, _fsdp_param_group.foreach_reduce

        def counted_update(run: loop.Run, *batch: Any) -> tuple[float, float]:
            ending.is_counting = method != "allreduce"
            return update(run, *batch)

        def reduce(*tensors: Any) -> Any:
            ending.is_counting = True  # an all-reduce is counted here alone: the run has sums of its own
            try:
                return foreach_reduce(*tensors)
            finally:
                ending.is_counting = method != "allreduce"

        loop.Run._update = counted_update  # type: ignore[method-assign]
        _fsdp_param_group.foreach_reduce = reduce
        setattr(dist.ProcessGroup, method, lambda group, *tensors: ending(group, *tensors))

    def __call__(self, group: dist.ProcessGroup, *tensors: Any) -> dist.Work:
        if self.is_counting:
            self.calls += 1
            if self.calls == self.at + 1:
                if self.has_taken_part:
                    self.plain(group, *tensors).wait()
                raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB")
        work: dist.Work = self.plain(group, *tensors)
        return work


def in_microbatches(update: Callable[..., tuple[float, float]]) -> Callable[..., tuple[float, float]]:
    """`Run._update`, in microbatches of ROWS."""

    def in_rows(run: loop.Run, *batch: Any) -> tuple[float, float]:
        run.gradients.size = ROWS
        return update(run, *batch)

    return in_rows


def end_inside(given: dict[str, Any]) -> None:
    """Train, and write what this rank is told into its file of the run's folder."""
    rank, *place = given.pop("ends")
    loop.leave = processes.leave
    config = parse_config(given)
    folder, here = Path(config.run_folder or ""), int(processes.env.foreign("RANK") or 0)
    loop.Run._update = in_microbatches(loop.Run._update)  # type: ignore[method-assign]
    if here == rank:
        EndsInside(*place)
    try:
        loop.train(config)
        message = "trained"
    except RooflineError as error:
        message = str(error)
    (folder / f"told-{here}.txt").write_text(message)


def main(groups: Path) -> int:
    """The exit status."""
    from tests.train.together import group

    return int(not all(group(count, configs, end_inside) for count, configs in json.loads(groups.read_text())))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
