"""Several processes: the same losses, samples and evaluation as one, checkpoints of any number for any other.

Those that need no launcher share the start of their processes (tests/train/together.py), which takes longest.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.e2e]
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.data.learn_vocabulary import learn  # noqa: E402
from roofline.train.data.receipts import compare, read, verify  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.names import to_hf  # noqa: E402
from tests.train.forks import run_forked  # noqa: E402
from tests.train.small import config, digest, log_of, mapping, steps_of, stored, write_rows  # noqa: E402

WORLDS = (2, 4, 1)  # in this order: later ones go on from checkpoints of earlier ones
COMMON: dict[str, Any] = {
    "max_duration": "8ba",
    "save_interval": "4ba",
    "eval_interval": "4ba",
    "device_eval_batch_size": 3,
    "algorithms": {"gradient_clipping": {"clipping_threshold": 0.5}},
    "model__attn_config": {"attn_uses_sequence_id": True},
}
ELASTIC: dict[str, Any] = {"precision": "amp_bf16", "elastic": {"virtual_shards": 4}}
# name: what differs from COMMON. All run on 2 and 4 processes, and on one with the same changes but sharding.
RUNS: dict[str, dict[str, Any]] = {
    "full": {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}, "probes": True},
    "hybrid": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "hybrid_group": 2}, "probes": True},
    "copies": {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "hybrid_group": 1}},
    "gradients": {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}, "device_train_microbatch_size": 2},
    "uneven": {"global_train_batch_size": 13, "device_train_microbatch_size": 2},
    "few": {"global_train_batch_size": 3, "probes": True},  # one of four ranks has no row
}
# Bit-equal on 1, 2 and 4 processes.
EXACT: dict[str, dict[str, Any]] = {
    "even": {"device_train_microbatch_size": 2},  # 3 rows a shard: two microbatches
    "uneven shares": {"global_train_batch_size": 10, "fsdp_config": {"mixed_precision": "PURE"}},
    "odd": {"model__d_model": 36, "model__vocab_size": 97, "precision": "fp32"},
}
# name: from which run of which number of processes it goes on, at step 4.
RESUMED = {1: ("even", 4), 2: ("even", None), 4: ("even", 2)}


def write_config(path: Path, given: Any) -> Path:
    path.write_text(json.dumps(given))
    return path


def start(count: int, words: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *map(str, words)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        [sys.executable, *command], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]", seconds: float = 280) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, errors


def in_groups(root: Path, groups: list[tuple[int, list[dict[str, Any]]]]) -> None:
    done = run_forked(["-m", "tests.train.together", write_config(root / "groups.json", groups)])
    assert done.returncode == 0, done.stderr
    refused = list(root.glob("*/refused.txt"))
    assert not refused, [path.read_text() for path in refused]


def data_of(root: Path) -> dict[str, Any]:
    held_out = write_rows(root / "val", 31, seed=1, documents=True)
    write_rows(root / "data", 103, documents=True)
    return {"eval_loader": {"dataset": {"local": str(held_out)}}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME-COUNT of every run; NAME-0 is the plain process of the tests."""
    root = tmp_path_factory.mktemp("together")
    evaluated = data_of(root) | COMMON
    groups: list[tuple[int, list[dict[str, Any]]]] = []
    for count in WORLDS:
        given = {} if count == 1 else {f"{name}-{count}": changes for name, changes in RUNS.items()}
        given |= {f"{name}-{count}": ELASTIC | changes for name, changes in EXACT.items()}
        if count != 2:
            given[f"resumed full-{count}"] = {"load_path": str(root / "full-2/checkpoints/step-00000004")}
            name, before = RESUMED[count]
            path = str(root / f"{name}-{before}/checkpoints/step-00000004")
            given[f"resumed {name}-{count}"] = ELASTIC | EXACT[name] | {"load_path": path}
        groups.append((count, [mapping(root / "data", root / n, **(evaluated | c)) for n, c in given.items()]))
    in_groups(root, groups)
    return root


@pytest.fixture(scope="module")
def alone(root: Path) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    held_out = {"eval_loader": {"dataset": {"local": str(root / "val")}}}
    for name, changes in RUNS.items():
        plain = {key: value for key, value in changes.items() if key not in ("fsdp_config", "probes")}
        train(config(root / "data", root / f"{name}-0", **(COMMON | held_out | plain)))
    torch.set_num_threads(threads)
    return root


def agree(one: Path, other: Path, tolerance: float = 3e-6, first: int = 0) -> None:
    wanted, found = ([line for line in log_of(path) if line["step"] > first] for path in (one, other))
    assert [line["step"] for line in wanted] == [line["step"] for line in found]
    for a, b in zip(wanted, found, strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            assert (key in a) == (key in b)
            assert b.get(key, 0.0) == pytest.approx(a.get(key, 0.0), rel=tolerance), (key, a["step"])
        for key in ("tokens", "lr", "eval_tokens"):
            assert a.get(key) == b.get(key)


def order_agrees(one: Path, other: Path, steps: int = 8) -> None:
    compared = compare(read(one), read(other))
    assert (compared.steps, compared.step) == (steps, None)
    assert verify(read(other)) is None


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """In short what the slow tests below compare for every kind of run."""
    learn(["to be or not to be"], tmp_path / "words", 264)
    recurring = {
        "generate_callback": {"prompts": ["to be", "or"], "interval": "4ba", "max_new_tokens": 4, "do_sample": True},
        "hf_checkpointer": {"save_folder": str(tmp_path / "{run_name}"), "save_interval": "1dur"},
    }
    told = {"callbacks": recurring, "tokenizer__name": str(tmp_path / "words"), "model__vocab_size": 264}
    common, changes = data_of(tmp_path) | COMMON, {"full": RUNS["full"] | told, "even": ELASTIC | EXACT["even"]}
    groups = []
    for count in (2, 1):
        folders = {name: tmp_path / f"{name}-{count}" for name in changes}
        named = {n: common | c | {"run_name": f"{n}-{count}"} for n, c in changes.items()}
        runs = [mapping(tmp_path / "data", folders[n], **c) for n, c in named.items()]
        groups.append((count, runs))
    in_groups(tmp_path, groups)
    texts = [[line for line in log_of(tmp_path / f"full-{count}") if "samples" in line] for count in (2, 1)]
    assert [line["step"] for line in texts[0]] == [4, 8]
    assert texts[0] == texts[1]
    exported = open_checkpoint(tmp_path / "full-2" / "huggingface" / "ba8")
    weights = stored(tmp_path / "full-2" / "checkpoints")
    for name in exported.tensors:
        assert np.array_equal(exported.dequantize(name), weights[f"model.{to_hf('mpt', name)}"]), name
    agree(tmp_path / "full-1", tmp_path / "full-2")
    order_agrees(tmp_path / "full-1", tmp_path / "full-2")
    bits = [digest(stored(tmp_path / f"even-{count}" / "checkpoints")) for count in (2, 1)]
    assert bits[0] == bits[1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_samples_are_those_of_one_process(alone: Path, name: str, count: int) -> None:
    one, other = alone / f"{name}-0", alone / f"{name}-{count}"
    agree(one, other)
    order_agrees(one, other)
    (a, b) = (stored(path / "checkpoints") for path in (one, other))
    assert {key: (value.shape, value.dtype) for key, value in a.items()} == {
        key: (value.shape, value.dtype) for key, value in b.items()
    }
    start = stored(one / "checkpoints", 4)
    for key in (key for key in a if key.startswith("model.")):
        if key.endswith("Wqkv.bias"):  # a key's changes no score: its gradient is rounding, which AdamW makes a step of
            continue
        moved = a[key] - start[key]
        assert np.linalg.norm(b[key] - a[key]) < 0.05 * np.linalg.norm(moved) + 1e-4, key


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_processes_is_gone_on_from_by_any_number(root: Path, count: int) -> None:
    whole, resumed = root / "full-2", root / f"resumed full-{count}"
    assert steps_of(resumed / "checkpoints") == [8]
    agree(whole, resumed, first=4)
    order_agrees(whole, resumed)
    pieces = {count: set[int]() for count in ("full-2", resumed.name)}
    for name, numbers in pieces.items():
        manifest = json.loads((root / name / "checkpoints" / "step-00000008" / "manifest.json").read_text())
        numbers |= {len(entry["pieces"]) for entry in manifest["tensors"].values()}
    assert pieces == {"full-2": {1, 2}, resumed.name: {1, count}}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_elastic_runs_have_the_same_bits_on_any_number(root: Path, name: str) -> None:
    ends = {count: stored(root / f"{name}-{count}" / "checkpoints") for count in WORLDS}
    assert len({digest(tensors) for tensors in ends.values()}) == 1, "weights and the optimizer's state"
    assert digest(ends[1], "model.") != digest(stored(root / f"{name}-1" / "checkpoints", 4), "model.")
    for count in (2, 4):
        order_agrees(root / f"{name}-1", root / f"{name}-{count}")
    lines = {
        json.dumps([{k: line.get(k) for k in ("loss", "grad_norm")} for line in log_of(root / f"{name}-{count}")])
        for count in WORLDS
    }
    assert len(lines) == 1
    assert max(line.get("grad_norm", 0) for line in log_of(root / f"{name}-1")) > 0.5, "something was clipped"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_also_when_they_go_on_with_another_number(root: Path, count: int) -> None:
    """2 processes, then 4; 4, then one."""
    name, _ = RESUMED[count]
    whole, resumed = (root / f"{kind}-{count}" for kind in (name, f"resumed {name}"))
    assert digest(stored(whole / "checkpoints")) == digest(stored(resumed / "checkpoints"))
    order_agrees(whole, resumed)


PLANTED = """
import os, signal, sys
from roofline.train.run import loop
from roofline.train.__main__ import main

plain = loop.Run.step

def step(self):
    if self.progress.step == 5 and os.environ["RANK"] == os.environ["PLANTED_RANK"]:
        exec(os.environ["PLANTED"])
    return plain(self)

loop.Run.step = step
sys.exit(main())
"""


def planted(tmp_path: Path, what: str, rank: int, **changes: Any) -> tuple[int, str, float]:
    """Two processes, one of which fails at step 5: exit status, errors, seconds."""
    given = mapping(
        tmp_path / "data", tmp_path / "run", **(data_of(tmp_path) | COMMON | {"save_interval": "2ba"} | changes)
    )
    write_config(tmp_path / "run.yaml", given)
    (tmp_path / "planted.py").write_text(PLANTED)
    started = time.monotonic()
    words = (tmp_path / "planted.py", tmp_path / "run.yaml")
    status, _, errors = finish(start(2, words, PLANTED=what, PLANTED_RANK=str(rank)))
    return status, errors, time.monotonic() - started


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_and_the_run_goes_on_with_one(tmp_path: Path) -> None:
    status, errors, seconds = planted(tmp_path, "raise RuntimeError('planted')", rank=1)
    assert status != 0
    assert "RuntimeError: planted" in errors
    assert seconds < 200
    assert set(steps_of(tmp_path / "run" / "checkpoints")) <= {2, 4}
    changes = {**data_of(tmp_path / "again"), **COMMON, "save_interval": "2ba"}
    train(config(tmp_path / "data", tmp_path / "run", autoresume=True, **changes))
    train(config(tmp_path / "data", tmp_path / "whole", **changes))
    agree(tmp_path / "whole", tmp_path / "run")
    order_agrees(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 0, marks=pytest.mark.soak),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
    ],
)
def test_a_killed_rank_ends_all(tmp_path: Path, what: str, rank: int) -> None:
    status, _, seconds = planted(tmp_path, what, rank, elastic={"virtual_shards": 2}, precision="amp_bf16")
    assert status != 0
    assert seconds < 200
    runs = []
    for name in ("run", "whole"):
        changes = data_of(tmp_path / name / "again") | COMMON | {"elastic": {"virtual_shards": 2}, "autoresume": True}
        changes |= {"precision": "amp_bf16", "save_interval": "2ba"}
        runs.append(mapping(tmp_path / "data", tmp_path / name, **changes))
    in_groups(tmp_path, [(1, runs)])
    ends = [digest(stored(tmp_path / name / "checkpoints")) for name in ("run", "whole")]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_the_command_of_several_processes(tmp_path: Path) -> None:
    """torchrun -m roofline.train; what --set says goes before the file; a second start goes on."""
    given = mapping(tmp_path / "data", tmp_path / "run", **(data_of(tmp_path) | COMMON | {"save_interval": "3ba"}))
    path = write_config(tmp_path / "run.yaml", given)
    words = ("-m", "roofline.train", path, "--set", "max_duration=5ba", "--set", "autoresume=true")
    status, out, errors = finish(start(2, words))
    assert status == 0, errors
    assert "2 processes on cpu" in errors
    assert errors.count("step 5/5: loss") == 1, "one rank speaks"
    assert f"5 steps, loss {log_of(tmp_path / 'run')[-2]['loss']:.4f}" in out
    assert steps_of(tmp_path / "run" / "checkpoints") == [3, 5]


@pytest.mark.slow
def test_a_number_of_processes_without_a_tree_is_refused_by_name(tmp_path: Path) -> None:
    changes = data_of(tmp_path) | COMMON | ELASTIC
    path = write_config(tmp_path / "run.yaml", mapping(tmp_path / "data", tmp_path / "run", **changes))
    status, _, errors = finish(start(3, ("-m", "roofline.train", path)))
    assert status != 0
    assert "roofline: elastic.virtual_shards=4 on 3 processes: both must be powers of two" in errors
    assert "Traceback" not in errors.split("roofline: elastic")[0]


@pytest.mark.slow
def test_our_own_launcher(tmp_path: Path) -> None:
    changes = data_of(tmp_path) | COMMON
    path = write_config(tmp_path / "run.yaml", mapping(tmp_path / "data", tmp_path / "run", **changes))
    code = "import sys; from roofline.cli.main import main; sys.exit(main())"
    for change, status in ((), 0), (("--set", "seed=1"), 1):
        command = [sys.executable, "-c", code, "train", str(path), "--nproc", "2", *change]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert (done.returncode != 0) == bool(status), done.stderr
    assert "holds checkpoints up to step 8" in done.stderr
    assert len(log_of(tmp_path / "run")) == 10


OTHERS: tuple[tuple[dict[str, Any], float], ...] = (
    ({"precision": "amp_bf16"}, 2e-2),
    ({"precision": "amp_bf16", "fsdp_config": {"mixed_precision": "PURE"}}, 2e-2),
    ({"precision": "amp_fp16", "fsdp_config": {"mixed_precision": "PURE"}}, 5e-3),
    ({"optimizer": {"name": "muon", "lr": 1e-3}}, 1e-3),
    ({"optimizer": {"name": "decoupled_adamw", "lr": 1e-3, "weight_decay": 1e-3}}, 1e-5),
    ({"fsdp_config": {"activation_checkpointing": True}}, 1e-5),
    ({"fsdp_config": {"activation_checkpointing": "selective"}}, 1e-5),
    ({"algorithms": {"gradient_clipping": {"clipping_type": "value", "clipping_threshold": 0.01}}}, 1e-5),
    ({"model__loss_fn": "torch_crossentropy"}, 1e-5),
)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_what_else_agrees_with_one_process(tmp_path: Path, count: int) -> None:
    common = data_of(tmp_path) | COMMON | {"optimizer": {"name": "adamw", "lr": 1e-3}}
    runs = [
        mapping(tmp_path / "data", tmp_path / f"{i}", **(common | changes)) for i, (changes, _) in enumerate(OTHERS)
    ]
    in_groups(tmp_path, [(count, runs)])
    for index, (changes, tolerance) in enumerate(OTHERS):
        train(config(tmp_path / "data", tmp_path / f"one-{index}", **(common | changes | {"fsdp_config": None})))
        agree(tmp_path / f"one-{index}", tmp_path / f"{index}", tolerance)
        order_agrees(tmp_path / f"one-{index}", tmp_path / f"{index}")
