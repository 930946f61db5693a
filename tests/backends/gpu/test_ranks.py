"""Stages and ranks of the gpu backend as processes over gloo: what they make beside what one process makes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """case -> (logits of all steps, ids sampled)."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parent / "gpu_rank_runs.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return lambda name: (np.load(folder / f"{name}.npy"), np.load(folder / f"{name}.ids.npy").tolist())


@pytest.mark.slow
def test_stages_give_the_bits_of_one_process(runs):
    (logits, ids), (whole, wanted) = runs("stages2"), runs("one")
    assert whole.shape == (3, 300)
    assert np.array_equal(logits, whole)
    assert ids == wanted == whole.argmax(1).tolist()


@pytest.mark.slow
def test_stages_of_ranks_give_the_bits_of_ranks_in_one_stage(runs):
    (logits, ids), (ranks, wanted) = runs("both"), runs("ranks2")
    assert np.array_equal(logits, ranks)
    assert ids == wanted
    whole, _ = runs("one")
    assert np.linalg.norm(ranks - whole) < 0.01 * np.linalg.norm(whole)
