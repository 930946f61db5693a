"""Several runs in one process group, one after the other: torchrun starts this with RUNS.json, their configurations.

A run that is refused leaves `refused.txt` in its folder, with the message. Saves the start of a group for each run.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from roofline.common.errors import RooflineError
from roofline.train import loop, parallel
from roofline.train.config import of
from roofline.train.parallel import World

start = parallel._start_group


def start_once(world: World) -> None:
    if not dist.is_initialized():
        start(world)
    world.grouped = True


def main() -> None:
    parallel._start_group = start_once
    loop.leave = lambda world: None
    for given in json.loads(Path(sys.argv[1]).read_text()):
        config = of(given)
        try:
            loop.train(config)
        except RooflineError as error:
            folder = Path(given["run_folder"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "refused.txt").write_text(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
