"""Small runs: rows that a model of two layers learns in a few steps, and the configuration of such a run."""

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from roofline.train.config.read import parse_config
from roofline.train.config.schema import TrainConfig
from roofline.train.data.mds import ShardWriter

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
        "probes": False,  # they take as long as the steps of so short a run; tests/train/test_probe.py has them
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
    return parse_config(mapping(data, folder, **changes))


def steps_of(checkpoints: Path) -> list[int]:
    """Steps with a manifest."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in checkpoints.glob("step-*/manifest.json"))


def save(store: Any, step: int, state: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write a checkpoint and wait for it."""
    from roofline.train.checkpoint.checkpoint import Saver

    with closing(Saver(store)) as saver:
        saver.save(step, state, facts)


def stored(checkpoints: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint (default: the last), put together from its pieces as the manifest says."""
    folder = checkpoints / f"step-{step if step is not None else steps_of(checkpoints)[-1]:08d}"
    found = {}
    for name, entry in json.loads((folder / "manifest.json").read_text())["tensors"].items():
        whole = np.zeros(entry["shape"], entry["dtype"])
        covered = 0
        for piece in entry["pieces"]:
            data = (folder / piece["file"]).read_bytes()[piece["start"] : piece["start"] + piece["bytes"]]
            part = np.frombuffer(data, entry["dtype"]).reshape(piece["sizes"])
            whole[tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["sizes"], strict=True))] = part
            covered += part.size
        assert covered == whole.size, name
        found[name] = whole
    return found


def digest(tensors: dict[str, np.ndarray], prefix: str = "") -> str:
    """Of the bits of all tensors whose names begin so."""
    chosen = sorted(name for name in tensors if name.startswith(prefix))
    assert chosen
    return hashlib.sha256(b"".join(name.encode() + tensors[name].tobytes() for name in chosen)).hexdigest()


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of steps and evaluations, without what a clock said."""
    clock = ("seconds", "wait", "tokens_per_s")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in clock} for line in lines if "step" in line]
