"""Process groups of several sizes, one after the other, each for several runs: RUNS.json holds [processes, runs] pairs.

As torchrun would start them, but forked from a process that has everything imported: most of a short run is that. A run
that is refused leaves `refused.txt` in its folder, with the message.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the optimizer's first step would import it, in every process again
import torch.distributed as dist

from roofline.common.errors import RooflineError
from roofline.train.config.read import parse_config
from roofline.train.memory import estimate
from roofline.train.parallel import processes as parallel
from roofline.train.parallel.processes import World
from roofline.train.run import loop
from tests.train.dry_runs import remembering
from tests.train.forks import fork, wait_for

start = parallel._start_group


def start_once(world: World, *rest: Any) -> None:
    if not dist.is_initialized():
        start(world, *rest)
    world.grouped = world.owner = True


def train(given: dict[str, Any]) -> None:
    """Train as a mapping configures it."""
    try:
        loop.train(parse_config(given))
    except RooflineError as error:
        folder = Path(given["run_folder"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "refused.txt").write_text(str(error))


def work(rank: int, count: int, port: int, runs: list[dict[str, Any]], act: Callable[[dict[str, Any]], None]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    if count > 1:
        os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    parallel._start_group = start_once
    loop.leave = lambda world: None
    estimate.dry_run = remembering(estimate.dry_run)
    for given in runs:
        act(given)
    if dist.is_initialized():
        dist.destroy_process_group()


def group(count: int, runs: list[dict[str, Any]], act: Callable[[dict[str, Any]], None] = train) -> bool:
    """Whether all its processes ended well; when one does not, the others are ended. act: what is done with a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return wait_for({fork(work, rank, count, port, runs, act) for rank in range(count)})


if __name__ == "__main__":
    sys.exit(not all(group(*each) for each in json.loads(Path(sys.argv[1]).read_text())))
