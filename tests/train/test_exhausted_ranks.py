"""Memory that ends anywhere in a step, on any rank: all begin the step again, with nothing of the first try."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.parallel import processes  # noqa: E402
from tests.train import exhausted_ranks, small  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
    "grad_op": {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "hybrid": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}},
    "elastic": {"elastic": {"virtual_shards": 4}},
    "copies": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "hybrid_group": 1}},
    "copies_of_two": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "hybrid_group": 2}},
    "tensor": {"tensor_parallel": 2},
    "tensor_grad_op": {"tensor_parallel": 2, "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "tensor_checkpointed": {"tensor_parallel": 2, "fsdp_config": {"activation_checkpointing": True}},
    "bf16": {"precision": "amp_bf16", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
}


def setting(folder: Path, kind: str, fails: list[int], rows: int) -> dict[str, Any]:
    """A configuration of which the ranks `fails` fail, with so many rows of a batch."""
    data = folder / "data"
    if not data.exists():
        small.write_rows(data, 60)
    given = small.mapping(data, folder / "run", device_train_microbatch_size="auto", **KINDS[kind])
    return given | {"fails": fails, "global_train_batch_size": rows}


@pytest.mark.parametrize(
    "kind", ["grad_op", "hybrid", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "elastic"))]
)
def test_a_step_that_is_begun_again_has_the_gradients_of_one_without_a_failure(kind: str, tmp_path: Path) -> None:
    """On one process, with and without a group: at some places of a step."""
    try:
        tried = exhausted_ranks.compare(setting(tmp_path, kind, [0], 6 if kind != "elastic" else 12), every=7)
    finally:
        processes.leave(processes.World(grouped=True, owner=torch.distributed.is_initialized()))
    assert tried >= 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_begin_a_step_again_together(count: int, tmp_path: Path) -> None:
    """At each place of a step, in the forward and in the backward pass, on the first, the last, and all ranks."""
    kinds = [kind for kind in KINDS if count % (2 if "tensor" in kind or "two" in kind else 1) == 0]
    runs = [
        setting(tmp_path, kind, fails, 6 * count if kind != "elastic" else 24)
        for kind in kinds
        for fails in ([0], [count - 1], list(range(count)))[: 1 if count == 1 else 3]
    ]
    for tensor in (1, 2):  # a process group is used for several runs, but the mesh of all is laid out by each
        chosen = [run for run in runs if run.get("tensor_parallel", 1) == tensor]
        if not chosen:
            continue
        path = tmp_path / f"groups{tensor}.json"
        path.write_text(json.dumps([[count, chosen]]))
        command = [sys.executable, "-m", "tests.train.exhausted_ranks", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        tried = list(map(int, done.stdout.split()))
        assert len(tried) == count * len(chosen)
        assert min(tried) > 20
