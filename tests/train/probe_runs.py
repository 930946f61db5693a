"""Small runs for the tests of probes and parity: rows, a configuration, runs with a fault planted into the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.train.config.read import parse_config
from roofline.train.data.mds import ShardWriter
from roofline.train.run.launch import launch
from tests.train import small
from tests.train.small import VOCAB

LENGTH, LAYERS = 24, 4


def write_rows(folder: Path, rows: int = 40) -> Path:
    """Rows in which each token follows from the one before; they say where documents end."""
    random = np.random.default_rng(1)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}", "documents": "ndarray:uint32"}
    with ShardWriter(folder, columns) as writer:
        for _ in range(rows):
            tokens = np.empty(LENGTH, np.uint16)
            tokens[0] = random.integers(VOCAB)
            for i in range(1, LENGTH):
                tokens[i] = (5 * int(tokens[i - 1]) + 7 + random.integers(2)) % VOCAB
            writer.write({"tokens": tokens, "documents": np.array([10, LENGTH - 10], np.uint32)})
    return folder


def mapping(data: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as a YAML file gives it. changes: "optimizer.lr" is written optimizer__lr."""
    given = {
        "max_seq_len": LENGTH,
        "model__d_model": 64,
        "model__n_layers": LAYERS,
        "max_duration": "3ba",
        "save_interval": "2ba",
        "global_train_batch_size": 6,
        "probes": True,
    }
    return small.mapping(data, folder, **given | changes)


def train(data: Path, folder: Path, plant: Callable[[Any], None] | None = None, **changes: Any) -> Path:
    """A run's folder. plant: changes its model before it starts."""
    from roofline.train.run import loop, parts

    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            build = parts.model_of

            def model(run: Any) -> Any:
                made = build(run)
                plant(made)
                return made

            patch.setattr(parts, "model_of", model)
        loop.train(parse_config(mapping(data, folder, **changes)))
    return folder


def probes(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's probes."""
    return [json.loads(line) for line in (folder / "probes.jsonl").read_text().splitlines()]


def train_together(data: Path, folder: Path, processes: int, **changes: Any) -> Path:
    """A run of several processes, which find each other as under torchrun."""
    config = folder.with_suffix(".yaml")
    config.write_text(json.dumps(mapping(data, folder, **changes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert launch(processes, config, []) == 0
    return folder
