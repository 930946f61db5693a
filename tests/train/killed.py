"""Runs a training in children that are killed (SIGKILL) at some moment, until one of them gets to the end.

WHOLE.json KILLED.json KILLS SEED: the first configuration is run in peace. A quarter of the kills of the second come
at some time, the others at a moment: a step, a piece of an object that is written, an object that got its name, a
deletion. Prints a line of JSON: what each kill left behind.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch._dynamo  # the optimizer's first step would import it, in every child again

from roofline.train.config.read import parse_config
from roofline.train.config.schema import TrainConfig
from roofline.train.run.loop import train
from roofline.train.storage import local as store_local

PIECES = 4  # of an object


def slow(moment: Callable[[], None]) -> None:
    """Objects are written in pieces, and everything that a store does is a moment."""
    plain_file, plain_delete = store_local.atomic_file, store_local.LocalStore.delete

    class Slow:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def write(self, data: Any) -> None:
            view = memoryview(data).cast("B")
            size = -(-len(view) // PIECES)
            for start in range(0, len(view), size):
                self.file.write(view[start : start + size])
                self.file.flush()
                moment()

    @contextmanager
    def atomic_file(path: Path) -> Iterator[Any]:
        with plain_file(path) as file:
            yield Slow(file)
        moment()

    def delete(self: Any, name: str) -> None:
        plain_delete(self, name)
        moment()

    store_local.atomic_file = atomic_file  # type: ignore[assignment]
    store_local.LocalStore.delete = delete  # type: ignore[method-assign]


def child(config: TrainConfig, last: int) -> None:
    """Killed at its `last` moment; 0: by others, or not at all."""
    seen = [0]

    def moment(*_: Any) -> None:
        seen[0] += 1
        if seen[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)

    torch.set_num_threads(1)
    slow(moment)
    train(config, moment)


def forked(config: TrainConfig, last: int, seconds: float | None) -> int:
    """The status of a child."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            child(config, last)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def left(checkpoints: Path) -> dict[str, int]:
    """What a kill left: files that were being written, attempts without a manifest, complete checkpoints."""
    folders = list(checkpoints.glob("step-*"))
    complete = sum((folder / "manifest.json").exists() for folder in folders)
    parts = len(list(checkpoints.glob("step-*/.*.part")))
    return {"parts": parts, "attempts": len(folders) - complete, "complete": complete}


def main() -> None:
    whole, config = (parse_config(json.loads(Path(path).read_text())) for path in sys.argv[1:3])
    choose = random.Random(int(sys.argv[4]))
    assert forked(whole, 0, None) == 0
    found = []
    for kill in range(int(sys.argv[3])):
        last = choose.randrange(1, 30) if kill % 4 else 0
        status = forked(config, last, None if last else choose.uniform(0.05, 0.6))
        found.append({"status": status, **left(Path(str(config.run_folder)) / "checkpoints")})
        if not status:
            break  # it got to the end
    found.append({"status": forked(config, 0, None), **left(Path(str(config.run_folder)) / "checkpoints")})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
