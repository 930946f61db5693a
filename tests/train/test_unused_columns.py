"""Columns of shards that no loader reads are named before a run."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.config.read import parse_config
from roofline.train.data.mds import ShardWriter
from roofline.train.run.preflight import check
from tests.train.small import mapping


def test_columns_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"tokens": "ndarray:uint16", "source": "str", "trained": "ndarray:uint8"}
    with ShardWriter(tmp_path / "rows", columns, hashes=()) as writer:
        for _ in range(3):
            writer.write({"tokens": np.zeros(16, np.uint16), "source": "a", "trained": np.ones(16, np.uint8)})
    for name, expected in (("text", "not used: source, trained (3 rows)"), ("finetuning", "not used: source (3 rows)")):
        made = mapping(tmp_path / "rows", tmp_path / "run", train_loader__name=name)
        caplog.clear()
        check(parse_config(made, ""))
        assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / 'rows'}: {expected}"]
