"""Small runs: rows that a model of two layers learns in a few steps, and the configuration of such a run."""

from pathlib import Path
from typing import Any

import numpy as np

from roofline.train.config import TrainConfig, of
from roofline.train.mds import ShardWriter

VOCAB, LENGTH = 96, 16


def write_rows(folder: Path, rows: int, seed: int = 0, shard: int = 10, documents: bool = False) -> Path:
    """Shards of `shard` rows: each token follows from the one before, whatever the row begins with.

    documents: also where they end, so that rows have different numbers of tokens that count.
    """
    random = np.random.default_rng(seed)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"} | ({"documents": "ndarray:uint32"} if documents else {})
    with ShardWriter(folder, columns, size_limit=shard * (2 * LENGTH + 40) if shard else 1 << 26) as writer:
        for _ in range(rows):
            tokens = np.empty(LENGTH, np.uint16)
            tokens[0] = random.integers(VOCAB)
            for i in range(1, LENGTH):
                tokens[i] = (5 * int(tokens[i - 1]) + 7) % VOCAB
            sample: dict[str, Any] = {"tokens": tokens}
            if documents:
                cuts = np.sort(random.choice(np.arange(1, LENGTH), random.integers(0, 6), replace=False))
                sample["documents"] = np.diff(np.array([0, *cuts, LENGTH])).astype(np.uint32)
            writer.write(sample)
    return folder


def mapping(data: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as a YAML file gives it. changes: "optimizer.lr" is written optimizer__lr."""
    found: dict[str, Any] = {
        "run_folder": str(folder),
        "max_seq_len": LENGTH,
        "model": {"name": "mpt_causal_lm", "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB},
        "train_loader": {"dataset": {"local": str(data), "shuffle": True}},
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "max_duration": "8ba",
        "global_train_batch_size": 12,
        "precision": "fp32",
        "device": "cpu",
        "progress_bar": False,
        "seed": 5,
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        node = found
        for step in path:
            node = node.setdefault(step, {})
        node[last] = value
    return found


def config(data: Path, folder: Path, **changes: Any) -> TrainConfig:
    """`mapping`, read."""
    return of(mapping(data, folder, **changes))
