"""The gpu backend's ranks and stages as processes over gloo, in Triton's interpreter: CASES.

`python gpu_rank_runs.py FOLDER` leaves NAME.npy, the logits of all steps, and NAME.ids.npy, what was sampled from them.
Rows are f16: the interpreter's product of bf16 would have to be mended.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from rank_forks import Unwatched, run_cases

from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
from roofline.backends.parallel.executable import ParallelExecutable, follow
from roofline.backends.parallel.ranks import RankGrid, Ranks
from roofline.backends.sampling import SampleRows
from roofline.hardware.chips import chips
from roofline.models import registry
from roofline.models.config import ModelConfig
from roofline.ops.batch import BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.weights.random_weights import random_checkpoint

LLAMA = {
    "family": "llama", "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 64, "vocab": 300,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "rope_style": "half", "max_position": 512,
    "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None,
}  # fmt: skip
CASES = {"one": RankGrid(), "stages2": RankGrid(1, 2), "ranks2": RankGrid(2), "both": RankGrid(2, 2)}
LIMITS = BatchLimits(tokens=64, segments=4, rows=8, pages=64)
IDS = np.random.default_rng(0).integers(0, 300, 20).tolist()
CHUNKS = [  # the second wants no logits
    ([Segment(IDS[:5], 0, [3])], [4]),
    ([Segment(IDS[5:6], 5, [3])], []),
    ([Segment(IDS[6:7], 6, [3]), Segment(IDS[:2], 0, [1])], [0, 2]),
]


def share_of(ranks: Ranks) -> GpuExecutable:
    source = random_checkpoint(LLAMA, seed=3, form="F16")
    cfg = ModelConfig.of(source.config)
    program = compile_program(registry.get("llama"), cfg, source.tensors, target.gpu("f16", True), share=ranks.share)
    runtime = Runtime(chips.get("sm_90"), "cpu", exact=True)
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 128, "weights_hash": "7e57"}
    return GpuExecutable(program, source.read, runtime, group=ranks, **shape)


def work(name: str, rank: int, store: Any, folder: Path) -> None:
    ranks = Ranks(rank, CASES[name], store, patience=60.0)
    inner = share_of(ranks)
    if rank:
        follow(inner, ranks)
        ranks.close()
        return
    whole = ParallelExecutable(inner, ranks, vocab_size=300, watch=Unwatched())
    logits, ids = [], []
    for segments, rows in CHUNKS:
        whole.batch.fill(segments, rows)
        whole.forward()
        logits.append(whole.logits().copy())
        ids += whole.sample(SampleRows.greedy(len(rows))).ids.tolist() if rows else []
    np.save(folder / f"{name}.npy", np.concatenate(logits))
    np.save(folder / f"{name}.ids.npy", ids)
    whole.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_cases({name: grid.size for name, grid in CASES.items()}, work, Path(sys.argv[1])))
