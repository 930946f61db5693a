"""Every optimizer and every clipping under every way to divide a model: losses and weights are those of one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.e2e
pytest.importorskip("torch", reason="training is torch")

from roofline.train.parity.layers import obstacle  # noqa: E402
from roofline.train.run_folder import PROBES  # noqa: E402
from tests.train import small  # noqa: E402
from tests.train.forks import run_forked  # noqa: E402

STEPS = 4
NORM = {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.5}}
VALUE = {"gradient_clipping": {"clipping_type": "value", "clipping_threshold": 0.003}}
# name: (optimizer, clipping, by how much a loss may differ, and by how much of the way from the first step the weights)
EXACT, OF_SIGNS, OF_BF16 = (1e-5, 1e-3), (1e-5, 0.02), (2e-3, 0.1)
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[float, float]]] = {
    "adamw": ({"name": "adamw", "lr": 3e-3, "weight_decay": 0.1}, VALUE, EXACT),
    "decoupled_adamw": ({"name": "decoupled_adamw", "lr": 3e-3, "weight_decay": 1e-3}, NORM, EXACT),
    "lion": ({"name": "decoupled_lionw", "lr": 1e-3, "weight_decay": 1e-3}, {}, OF_SIGNS),
    "muon": ({"name": "muon", "lr": 2e-2, "adamw_lr": 3e-3, "weight_decay": 0.1}, NORM, OF_BF16),
}
ELASTIC = {"elastic": {"virtual_shards": 4}}


def fsdp(strategy: str, **keys: Any) -> dict[str, Any]:
    return {"fsdp_config": {"sharding_strategy": strategy, **keys}}


# (processes, name): what divides the model.
SHARDINGS: dict[tuple[int, str], dict[str, Any]] = {
    (1, "fsdp"): fsdp("FULL_SHARD"),
    (1, "elastic"): ELASTIC,
    (2, "full"): fsdp("FULL_SHARD"),
    (2, "gradients"): fsdp("SHARD_GRAD_OP"),
    (2, "copies"): fsdp("HYBRID_SHARD", hybrid_group=1),
    (2, "tensor"): {"tensor_parallel": 2},
    (2, "elastic"): ELASTIC,
    (3, "uneven"): fsdp("FULL_SHARD"),
    (4, "hybrid"): fsdp("HYBRID_SHARD", hybrid_group=2),
    (4, "tensor"): {"tensor_parallel": 4},
    (4, "tensor and full"): {"tensor_parallel": 2} | fsdp("FULL_SHARD"),
    (4, "tensor and gradients"): {"tensor_parallel": 2} | fsdp("SHARD_GRAD_OP"),
    (4, "tensor and copies"): {"tensor_parallel": 2} | fsdp("HYBRID_SHARD", hybrid_group=1),
    (4, "elastic"): ELASTIC,
}
# The slow run has each sharding with Muon, which needs whole matrices, and with one in turn of the optimizers that go
# over single numbers; the soak run has all.
OF_NUMBERS = [name for name in TRAINED if name != "muon"]
SLOW = {(OF_NUMBERS[place % 3], *key) for place, key in enumerate(SHARDINGS)} | {("muon", *key) for key in SHARDINGS}
CASES = [
    pytest.param(name, *key, marks=[] if (name, *key) in SLOW else [pytest.mark.soak])
    for name in TRAINED
    for key in SHARDINGS
]
REFUSED = {("muon", "elastic"): "elastic with optimizer.name=muon"}


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of each optimizer and sharding that this session tests, and with those of one process."""
    tested = {tuple(item.callspec.params.values()) for item in request.session.items if item.path == request.path}
    root = tmp_path_factory.mktemp("shardings")
    data = small.write_rows(root / "data", 60, documents=True)
    groups: list[tuple[int, list[dict[str, Any]]]] = []
    for count in (1, 2, 3, 4):
        runs = []
        for name, (optimizer, clipping, _) in TRAINED.items():
            common = {
                "optimizer": optimizer,
                "algorithms": clipping,
                "max_duration": f"{STEPS}ba",
                "save_interval": "1ba",
                "probes": True,
                "device_train_microbatch_size": 2,
                "model__attn_config": {"attn_uses_sequence_id": True},
            }
            cases = [(n, how) for n, how in SHARDINGS if n == count and (name, n, how) in tested]
            chosen = {f"{name} {count} {how}": SHARDINGS[n, how] for n, how in cases}
            chosen |= {f"{name} alone": {}} if count == 1 else {}
            runs += [small.mapping(data, root / run, **common, **changes) for run, changes in chosen.items()]
        groups.append((count, runs))
    (root / "groups.json").write_text(json.dumps(groups))
    done = run_forked(["-m", "tests.train.together", root / "groups.json"], timeout=580)
    assert done.returncode == 0, done.stderr
    return root


def compared(folder: Path, step: int) -> Iterator[np.ndarray]:
    """The weights after a step. What is added to all keys of a head changes no attention: its gradient is rounding."""
    for name, weights in sorted(small.stored(folder / "checkpoints", step).items()):
        if not name.startswith("model."):
            continue
        third = len(weights) // 3
        yield np.delete(weights, slice(third, 2 * third), 0) if name.endswith("Wqkv.bias") else weights


def distance(one: Path, other: Path, first: int = STEPS) -> float:
    """The norm of the difference between the weights of two runs; first: the step of the first one."""
    pairs = zip(compared(one, first), compared(other, STEPS), strict=True)
    return float(np.sqrt(sum(np.square(a.astype(np.float64) - b).sum() for a, b in pairs)))


def assert_same_probes(alone: Path, divided: Path) -> None:
    """Probes are those of one process: of the same rows, parameters and lengths where the weights are the same."""
    lines = [[json.loads(line) for line in (run / PROBES).read_text().splitlines()] for run in (alone, divided)]
    assert [[line["step"] for line in of_run] for of_run in lines] == [list(range(STEPS + 1))] * 2
    one, other = lines[0][0], lines[1][0]
    assert obstacle(one, other) is None
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    for kind, length in (("activations", "rms"), ("gradients", "norm")):
        for a, b in zip(one[kind], other[kind], strict=True):
            assert b[length] == pytest.approx(a[length], rel=1e-5), a["name"]
            assert np.linalg.norm(np.subtract(b["sketch"], a["sketch"])) < 1e-5 * a[length], a["name"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "sharding"), CASES)
def test_losses_and_weights_are_those_of_one_process(root: Path, name: str, count: int, sharding: str) -> None:
    alone, divided = root / f"{name} alone", root / f"{name} {count} {sharding}"
    refused = divided / "refused.txt"
    if (name, sharding) in REFUSED:
        assert REFUSED[name, sharding] in refused.read_text()
        return
    assert not refused.exists(), refused.read_text()
    of_losses, of_weights = TRAINED[name][2]
    lines = [[line for line in small.log_of(folder) if "loss" in line] for folder in (alone, divided)]
    assert [len(each) for each in lines] == [STEPS, STEPS]
    for a, b in zip(*lines, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=of_losses), a["step"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=of_losses), a["step"]
    assert distance(alone, divided) < of_weights * distance(alone, alone, 1)
    assert_same_probes(alone, divided)
