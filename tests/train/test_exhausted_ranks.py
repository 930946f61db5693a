"""Memory that ends anywhere in a step, on any rank: all begin the step again, with nothing of the first try."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.run_folder import LOG, read_lines  # noqa: E402
from tests.train import exhausted_ranks, small  # noqa: E402
from tests.train.forks import run_forked  # noqa: E402
from tests.train.test_pairs import write_pairs  # noqa: E402
from tests.train.test_parallel import launch, losses  # noqa: E402

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
    "hybrid_inside": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}, "inside": True},
    "copies_inside": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "hybrid_group": 1}, "inside": True},
    "copies_of_two_inside": {
        "precision": "amp_bf16",
        "fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "hybrid_group": 2, "mixed_precision": "PURE"},
        "inside": True,
    },
    "grad_op_inside": {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}, "inside": True},
    "bf16": {"precision": "amp_bf16", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}},
}
SHARDED = {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}
ANSWERS = {"reward": "exact_match", "kl": 0.1}
PREFERENCES: dict[str, dict[str, Any]] = {
    "pairs": {"dpo": {"beta": 0.5}},
    "pairs_grad_op": {"dpo": {"beta": 0.5, "loss": "ipo"}, **SHARDED},
    "pairs_elastic": {"dpo": {"beta": 0.5}, "elastic": {"virtual_shards": 4}},
    "answers": {"answers": ANSWERS},
    "answers_grad_op": {"answers": ANSWERS | {"loss": "grpo"}, **SHARDED},
}


def setting(folder: Path, kind: str, fails: list[int], rows: int) -> dict[str, Any]:
    """A configuration of which the ranks `fails` fail, with so many rows of a batch."""
    data, changes = folder / "data", KINDS.get(kind, {})
    if kind in PREFERENCES:
        loader = {"name": "finetuning", "dataset": {"local": str(data), "shuffle": True}}
        changes = PREFERENCES[kind] | {"train_loader": loader}
    if not data.exists():
        (write_pairs if kind in PREFERENCES else small.write_rows)(data, 60)
    given = small.mapping(data, folder / "run", device_train_microbatch_size="auto", **changes)
    return given | {"fails": fails, "global_train_batch_size": rows}


@pytest.mark.parametrize(
    "kind",
    [
        "grad_op",
        "hybrid",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("plain", "elastic", "pairs", "answers")),
    ],
)
def test_a_step_that_is_begun_again_has_the_gradients_of_one_without_a_failure(kind: str, tmp_path: Path) -> None:
    """On one process, with and without a group: at some places of a step."""
    assert exhausted_ranks.compare(setting(tmp_path, kind, [0], 6 if kind != "elastic" else 12), 5, leaves=True) >= 3


def places(count: int, kind: str, *fails: list[int], slow: bool = False) -> Any:
    """A case of the test below. slow: it runs with the slow tests, at every sixth place of a step."""
    marks = [pytest.mark.slow] if slow else [pytest.mark.slow, pytest.mark.soak]
    return pytest.param(count, kind, fails, 6 if slow else 1, marks=marks, id=f"{count}-{kind}-{len(fails)}")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("count", "kind", "fails", "every"),
    [
        *(places(2, kind, [1], slow=True) for kind in KINDS),
        places(2, "plain", [0], [0, 1], slow=True),
        *(places(2, kind, [1], slow=True) for kind in ("pairs", "answers_grad_op")),
        *(places(2, kind, [0], [1], [0, 1]) for kind in PREFERENCES),
        *(places(1, kind, [0]) for kind in PREFERENCES),
        *(places(2, kind, [0], [1], [0, 1]) for kind in KINDS),
        *(places(4, kind, [0], [3], [0, 1, 2, 3]) for kind in KINDS),
        *(places(1, kind, [0]) for kind in KINDS if "tensor" not in kind and "two" not in kind),
    ],
)
def test_ranks_begin_a_step_again_together(
    count: int, kind: str, fails: list[list[int]], every: int, tmp_path: Path
) -> None:
    """At each place of a step, in the forward and in the backward pass."""
    rows = 24 if "elastic" in kind else 6 * count
    path = tmp_path / "groups.json"
    settings = [setting(tmp_path, kind, ranks, rows) | {"every": every} for ranks in fails]
    path.write_text(json.dumps([[count, settings]]))
    done = run_forked(["-m", "tests.train.exhausted_ranks", path], timeout=1160)
    assert done.returncode == 0, done.stderr[-4000:]
    tried = [int(number) for number in re.findall(r"(\d+) places", done.stdout)]
    assert len(tried) == count * len(fails)
    assert min(tried) >= 3


LIMITED = """
import resource, sys
from pathlib import Path
from roofline.train.config.read import read_config
from roofline.train.memory.meter import data_bytes
from roofline.train.run.loop import Run, train

plain, more, at = Run.step, int(sys.argv[2]), int(sys.argv[3])

def step(self):
    if self.world.rank == self.world.size - 1 and self.progress.step == at:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (more << 20), resource.RLIM_INFINITY))
    return plain(self)

Run.step = step
train(read_config(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "at"),
    [
        ("full", 20, 3),
        ("tensor", 40, 0),
        pytest.param("copies", 30, 1, marks=pytest.mark.soak),
        pytest.param("elastic", 30, 1, marks=pytest.mark.soak),
    ],
)
def test_a_real_limit_of_one_ranks_memory_halves_the_rows_of_all(kind: str, more: int, at: int, tmp_path: Path) -> None:
    """`more` MiB beside what the last rank has at a step; its losses are those of runs that have enough."""
    model = {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 96}
    common = {"max_seq_len": 256, "train_loader": {"name": "synthetic"}, "model": model, "max_duration": "5ba"}
    common |= {"global_train_batch_size": 48, "memory_limit": "8gb", "dist_timeout": 60, **KINDS[kind]}
    (tmp_path / "limited.py").write_text(LIMITED)
    auto = small.mapping(tmp_path, tmp_path / "auto", **common, device_train_microbatch_size="auto")
    launch(2, auto, str(tmp_path / "limited.py"), str(more), str(at), from_fork=False)
    launch(2, small.mapping(tmp_path, tmp_path / "fixed", **common, device_train_microbatch_size=6))
    lines = [line for line in read_lines(tmp_path / "auto" / LOG) if "lr" in line]
    assert lines[at]["microbatch"] < (24 if kind != "tensor" else 48) // (2 if kind == "elastic" else 1)
    for (loss, norm), (right_loss, right_norm) in zip(
        losses(tmp_path / "auto"), losses(tmp_path / "fixed"), strict=True
    ):
        assert loss == pytest.approx(right_loss, rel=1e-5)
        assert norm == pytest.approx(right_norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [20, *(pytest.param(more, marks=pytest.mark.soak) for more in (60, 160)), 100])
def test_more_memory_trains_where_less_does(more: int, tmp_path: Path) -> None:
    """What a microbatch that did not fit had taken is given back, so that one of half the rows fits."""
    model = {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 96}
    common = {"max_seq_len": 256, "train_loader": {"name": "synthetic"}, "model": model, "max_duration": "2ba"}
    common |= {"global_train_batch_size": 64, "memory_limit": "8gb"}
    (tmp_path / "limited.py").write_text(LIMITED)
    auto = small.mapping(tmp_path, tmp_path / "run", **common, device_train_microbatch_size="auto")
    launch(1, auto, str(tmp_path / "limited.py"), str(more), "0", from_fork=False)
    assert len(losses(tmp_path / "run")) == 2
