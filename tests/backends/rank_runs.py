"""The reference's ranks as processes: CASES, each on as many as it needs.

`python rank_runs.py FOLDER` leaves NAME.RANK.npy, the logits that a rank made or what it passed on, and NAME.txt with
what a rank raised that lost the other.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed
from rank_forks import Unwatched, run_cases
from shard_cases import CHUNKS, LIMITS, build

from roofline.backends.parallel.executable import ParallelExecutable, follow
from roofline.backends.parallel.ranks import RankError, RankGrid, Ranks
from roofline.backends.reference.executable import ReferenceExecutable
from roofline.models.registry import get
from roofline.program.compile import compile_program
from roofline.program.target import CPU, PLAIN

TARGETS = {"plain": PLAIN, "cpu": CPU, "fast": replace(PLAIN, orders={**PLAIN.orders, "all_reduce": ""})}
# name -> (model, format, target, grid)
CASES = {
    "plain2": ("llama", "F32", "plain", RankGrid(2)),
    "plain3": ("groups of three", "Q8_0", "plain", RankGrid(3)),
    "plain4": ("llama", "F32", "plain", RankGrid(4)),
    "fast4": ("llama", "F32", "fast", RankGrid(4)),
    "cpu3": ("groups of three", "Q8_0", "cpu", RankGrid(3)),
    "cpu3 again": ("groups of three", "Q8_0", "cpu", RankGrid(3)),
    "stages2": ("mpt", "Q8_0", "cpu", RankGrid(1, 2)),
    "both": ("llama", "Q8_0", "cpu", RankGrid(2, 2)),
    "rank 0 dies": ("llama", "F32", "plain", RankGrid(2)),
    "rank 1 is deaf": ("llama", "F32", "plain", RankGrid(2)),
}


class Recorded:
    """A share that keeps what its steps gave."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.results = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, carried: Any) -> Any:
        self.results.append(self.inner.run(carried))
        return self.results[-1]


def lead(executable: ParallelExecutable, dies: bool) -> np.ndarray:
    out = []
    for segments, rows in CHUNKS:
        executable.batch.fill(segments, rows)
        executable.forward()
        out.append(executable.logits().copy())
        if dies:
            os._exit(0)
    executable.close()
    return np.concatenate(out)


def work(name: str, rank: int, store: Any, folder: Path) -> None:
    model_name, form, target, grid = CASES[name]
    if name == "rank 1 is deaf":
        return deaf(rank, Ranks(rank, grid, store, patience=1.0), folder / f"{name}.txt")
    model, ranks = build(model_name, form), Ranks(rank, grid, store, patience=60.0)
    torch.set_num_threads(1)
    program = compile_program(get(model.cfg.family), model.cfg, model.tensors, TARGETS[target], share=ranks.share)
    inner: Any = Recorded(ReferenceExecutable(program, model.read, LIMITS, 16, 256, group=ranks))
    if rank == 0:
        executable = ParallelExecutable(inner, ranks, vocab_size=model.cfg.vocab, watch=Unwatched())
        np.save(folder / f"{name}.0.npy", lead(executable, name == "rank 0 dies"))
        return
    try:
        follow(inner, ranks)
    except RankError as error:
        (folder / f"{name}.txt").write_text(str(error))
    np.save(folder / f"{name}.{rank}.npy", torch.cat(inner.results).numpy())
    ranks.close()


def deaf(rank: int, ranks: Ranks, told: Path) -> None:
    """Rank 1 does not ask for the batch until rank 0 has given up."""
    if rank == 1:
        while not told.exists():
            time.sleep(0.02)
        return
    try:
        ranks.share_batch(np.zeros(1 << 20, np.int32))
    except RankError as error:
        told.write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sizes = {name: grid.size for name, (_, _, _, grid) in CASES.items()}
    sys.exit(run_cases(sizes, work, Path(sys.argv[1])))
