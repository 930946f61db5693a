"""Processes that share matrices, and one whose memory ends while the others compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.models.spec import Param  # noqa: E402
from roofline.train.config.schema import FsdpSection  # noqa: E402
from roofline.train.model.tensor_parallel import ParameterPart, TensorRanks, part, pieces  # noqa: E402
from roofline.train.parallel import processes  # noqa: E402
from roofline.train.run_folder import LOG, read_lines  # noqa: E402
from tests.train import small  # noqa: E402
from tests.train.forks import run_forked  # noqa: E402

LLAMA = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": small.VOCAB}


def launch(
    count: int, config: dict[str, Any], script: str | None = None, *arguments: str, from_fork: bool = True
) -> None:
    """Run a configuration on `count` processes. from_fork: False has torchrun start them, each with new memory."""
    folder = Path(config["run_folder"])
    folder.mkdir(parents=True)
    path = folder / "given.yaml"
    path.write_text(json.dumps(config))
    program = [script, str(path), *arguments] if script else ["-m", "roofline.train", str(path)]
    if from_fork:
        done = run_forked(program, count, timeout=180)
    else:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("mixed_precision", "elastic", "compute", "reduce"),
    [
        ("PURE", None, torch.bfloat16, torch.bfloat16),
        ("PURE", object(), torch.bfloat16, torch.float32),
        ("DEFAULT", None, torch.bfloat16, torch.float32),
        ("FULL", None, None, torch.float32),
    ],
)
def test_gradients_are_summed_in_float32_unless_told_otherwise(
    mixed_precision: Any, elastic: object, compute: Any, reduce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[Any] = []
    monkeypatch.setattr(processes, "fully_shard", lambda module, **options: policies.append(options["mp_policy"]))
    monkeypatch.setattr(processes, "_fsdp_modules", lambda model: [])
    world: Any = SimpleNamespace(mesh={"shard": None}, device=torch.device("cpu"))
    section = FsdpSection(mixed_precision=mixed_precision)
    config: Any = SimpleNamespace(fsdp_config=section, precision="amp_bf16", elastic=elastic)
    model: Any = SimpleNamespace(blocks=[None])
    processes.shard(model, world, config)
    assert [(policy.param_dtype, policy.reduce_dtype) for policy in policies] == [(compute, reduce)] * 2


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_lines(folder / LOG) if "loss" in line]


@pytest.mark.parametrize(
    ("param", "size"),
    [
        (Param("w", (12, 5), "column"), 2),
        (Param("w", (12, 5), "column", parts=(6, 2, 4)), 2),
        (Param("w", (24,), "column", parts=(8, 8, 8)), 4),
        (Param("w", (5, 12), "row"), 3),
        (Param("w", (4, 3), "replicate"), 2),
    ],
)
def test_parts_lie_where_they_say(param: Param, size: int) -> None:
    whole = torch.arange(float(torch.Size(param.shape).numel())).view(param.shape)
    seen = torch.zeros(param.shape)
    for rank in range(size):
        held = part(param, TensorRanks(rank, size))
        tensor = held.cut(whole)
        assert tuple(tensor.shape) == held.local
        for at, view in pieces(tensor, held):
            place = tuple(slice(start, start + n) for start, n in zip(at, view.shape, strict=True))
            assert torch.equal(whole[place], view)
            seen[place] += 1
    assert (seen == (size if param.split == "replicate" else 1)).all()


def test_pieces_of_some_rows_of_a_fused_part() -> None:
    held = ParameterPart((12, 2), 0, ((0, 2), (4, 6), (8, 10)))
    assert held.places(1, 4) == [((1, 0), 1, 1), ((4, 0), 2, 2), ((8, 0), 4, 1)]


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel=2 does not divide the 3 of attn\.q"):
        part(Param("attn.q", (3, 4), "column"), TensorRanks(0, 2))


MODELS = {
    "mpt": {},
    "mpt_alibi": {"model__attn_config": {"alibi": True}, "model__no_bias": True},
    "mpt_rope": {
        "model__attn_config": {"rope": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2},
        "model__ffn_config": {"ffn_type": "mptglu"},
        "model__norm_type": "rmsnorm",
    },
    "llama": {"model": {"name": "smollm2-135m", "config_overrides": LLAMA | {"max_position": 64}}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ("llama", "mpt") else pytest.param(name, marks=pytest.mark.soak) for name in MODELS]
)
def test_ranks_that_share_matrices_train_the_same_model(name: str, tmp_path: Path) -> None:
    from roofline.train.run.loop import train

    data = small.write_rows(tmp_path / "data", 60)
    common = {**MODELS[name], "algorithms__gradient_clipping": {}, "save_interval": "4ba", "max_duration": "6ba"}
    alone = small.mapping(data, tmp_path / "alone", **common)
    train(small.parse_config(alone))
    launch(2, small.mapping(data, tmp_path / "two", **common, tensor_parallel=2, stop_after="4ba"))
    # What two ranks wrote in pieces, one takes up whole: its fingerprint is compared on the way.
    resumed = small.mapping(data, tmp_path / "resumed", **common, load_path=str(tmp_path / "two" / "checkpoints"))
    train(small.parse_config(resumed))
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "two") + losses(tmp_path / "resumed")
    assert len(found) == len(expected) == 6
    for a, b in zip(expected, found, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_an_unknown_group_of_ranks_is_refused(tmp_path: Path) -> None:
    from roofline.train.run.loop import train

    data = small.write_rows(tmp_path / "data", 20)
    with pytest.raises(ConfigError, match="tensor_parallel=2 on one process"):
        train(small.config(data, tmp_path / "run", tensor_parallel=2))
    assert presets.names()


FAILING = """
import sys, torch
from pathlib import Path
import roofline.train.model.modules as modules
from roofline.common import env
from roofline.train.config.read import read_config
from roofline.train.run.loop import train

plain, calls = modules.Block.forward, [0]

class Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB")

def forward(self, x, rows, *rest):
    calls[0] += rows[1] > 8  # not of the short rows with which a rank follows the others
    if env.foreign("RANK") == "1" and rows[0] > 2 and calls[0] in map(int, sys.argv[3].split(",")):
        if sys.argv[2] == "forward":
            raise RuntimeError("HIP out of memory. Tried to allocate 2 GiB")
        x = Ends.apply(x)
    return plain(self, x, rows, *rest)

modules.Block.forward = forward
train(read_config(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "strategy", "calls"),
    [
        ("forward", "FULL_SHARD", "2,4"),
        pytest.param("backward", "FULL_SHARD", "2,4", marks=pytest.mark.soak),
        # In the second microbatch of a try, when gradients of the first have been accumulated and not synchronised.
        ("forward", "SHARD_GRAD_OP", "2,5"),
        pytest.param("backward", "SHARD_GRAD_OP", "2,5", marks=pytest.mark.soak),
    ],
)
def test_memory_that_ends_on_one_rank_halves_the_rows_of_all(
    where: str, strategy: str, calls: str, tmp_path: Path
) -> None:
    data = small.write_rows(tmp_path / "data", 60)
    (tmp_path / "failing.py").write_text(FAILING)
    common: dict[str, Any] = {"max_duration": "3ba", "algorithms__gradient_clipping": {}}
    common["fsdp_config"] = {"sharding_strategy": strategy}
    given = small.mapping(data, tmp_path / where, **common, device_train_microbatch_size="auto")
    launch(2, given, str(tmp_path / "failing.py"), where, calls)
    launch(2, small.mapping(data, tmp_path / "fixed", **common, device_train_microbatch_size=2))
    lines = [line for line in read_lines(tmp_path / where / LOG) if "loss" in line]
    assert [line["microbatch"] for line in lines] == [2, 2, 2]
    assert losses(tmp_path / where) == losses(tmp_path / "fixed"), "nothing of what was given up is left"


@pytest.mark.slow
def test_a_limit_of_memory_halves_the_rows(tmp_path: Path) -> None:
    data = small.write_rows(tmp_path / "data", 600)
    model = {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 50_000}
    changes = {"model": model, "global_train_batch_size": 512, "max_duration": "1ba", "memory_limit": "0.8gb"}
    given = small.mapping(data, tmp_path / "run", **changes, device_train_microbatch_size="auto")
    launch(1, given, from_fork=False)
    (line,) = (line for line in read_lines(tmp_path / "run" / LOG) if "loss" in line)
    assert 1 <= line["microbatch"] < 512


def thread_names() -> list[str]:
    """The names of this process's threads, native ones too."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), ("auto", "cuda:0"), ("gpu", "cuda:0")])
def test_a_configured_cpu_is_used_although_there_is_an_accelerator(
    device: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roofline.train.parallel.processes import join

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert join(small.config(tmp_path, tmp_path, device=device)).device == torch.device(expected)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")
def test_a_group_that_someone_else_made_is_used_and_left_standing(tmp_path: Path) -> None:
    import torch.distributed as dist

    from roofline.train.run.loop import train

    data = small.write_rows(tmp_path / "data", 40)
    changes: dict[str, Any] = {"max_duration": "2ba", "fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
    train(small.config(data, tmp_path / "own", **changes))
    assert not dist.is_initialized()
    # A thread of gloo that releases a tensor while the interpreter ends aborts the process.
    assert not [name for name in thread_names() if "gloo" in name]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(small.config(data, tmp_path / "found", **changes))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert losses(tmp_path / "own") == losses(tmp_path / "found")
