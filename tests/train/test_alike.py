"""Processes that would not train the same: what differs is named before the first step, and what may differ is not."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError, SaidElsewhere  # noqa: E402
from roofline.train.config.data_sets import EvalLoaderSection  # noqa: E402
from roofline.train.config.schema import TrainConfig  # noqa: E402
from roofline.train.parallel import alike, processes  # noqa: E402
from roofline.train.parallel.processes import World, join  # noqa: E402
from roofline.train.run import parts  # noqa: E402
from roofline.train.run.loop import Run  # noqa: E402
from tests.train import small  # noqa: E402

CPU = torch.device("cpu")
SAVED = {"save_folder": "/checkpoints", "save_interval": "2ba"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_rows(tmp_path_factory.mktemp("data") / "train", 40)


def checked(*values: dict[str, Any]) -> None:
    """`alike.check` among ranks with these values."""
    replies = iter([[json.dumps(of_rank) for of_rank in values], list(values)])
    world: Any = SimpleNamespace(every=lambda value: next(replies))
    alike.check(world, values[0], "Do this")


@pytest.mark.parametrize(
    ("first", "changes", "message"),
    [
        ({}, {"optimizer__lr": 0.3}, r"optimizer\.lr is 0\.003 on rank 0, 0\.3 on rank 1\. Do this"),
        ({}, {"global_train_batch_size": 8}, "global_train_batch_size is 12 on rank 0, 8 on rank 1"),
        ({}, {"model__d_model": 64}, r"model\.d_model is 32 on rank 0, 64 on rank 1"),
        ({}, {"model__attn_config": {"alibi": True}}, r"attn_config\.alibi is false on rank 0, true on rank 1"),
        ({}, {"eval_interval": "2ba"}, "eval_interval is 0ba on rank 0, 2ba on rank 1"),
        ({}, {"save_interval": "2ba"}, "save_interval is 0ba on rank 0, 2ba on rank 1"),
        ({}, {"max_duration": "3ba"}, "max_duration is 8ba on rank 0, 3ba on rank 1"),
        ({}, {"optimizer__betas": [0.9, 0.99]}, r"optimizer\.betas is \[0\.9, 0\.95\] on rank 0, \[0\.9, 0\.99\]"),
        ({}, {"fsdp_config": {}}, r"strategy is not set on rank 0, FULL_SHARD on rank 1 \(other .*, \d more\)"),
        ({"elastic": {"virtual_shards": 4}}, {"elastic": {"virtual_shards": 8}}, r"virtual_shards is 4 on rank 0, 8"),
        (SAVED, {"save_folder": "s3://bucket/run"}, r"save_folder is a path on rank 0, s3://bucket/run on rank 1"),
        ({}, {"load_path": "/elsewhere"}, "load_path is not set on rank 0, a path on rank 1"),
        ({}, {"train_loader__dataset__streams": {"local": {"split": "a"}}}, r"streams\.local\.split is not set"),
        ({}, {"train_loader__name": "synthetic"}, r"train_loader\.name is text on rank 0, synthetic on rank 1"),
        ({}, {"eval_loader": {"name": "text"}}, r"eval_loader\.name is not set on rank 0, text on rank 1"),
        ({"eval_loader": [{"label": "a"}, {"label": "b"}]}, {"eval_loader": [{"label": "a"}]}, r"count is 2 on rank 0"),
        # What a host may have of its own.
        ({}, {"run_folder": "/scratch/run", "train_loader__dataset__local": "/scratch/rows"}, None),
        ({"load_path": "/here"}, {"load_path": "/there"}, None),
        ({}, {"train_loader__num_workers": 5, "train_loader__prefetch_factor": 4, "dist_timeout": 20}, None),
        ({}, {"progress_bar": True, "loggers": {"tensorboard": {}}, "console_log_interval": "9ba"}, None),
        ({}, {"memory_limit": "8gb", "expandable_segments": True, "run_name": "other"}, None),
        ({"device": "auto"}, {"device": "cpu"}, None),
    ],
)
def test_a_value_that_differs_is_named_with_its_ranks(
    first: dict[str, Any], changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    configs = [small.config(tmp_path, tmp_path / "run", **each) for each in (first, first | changes)]
    values = [alike.of_config(each, CPU) for each in configs]
    if message is None:
        assert values[0] == values[1]
        checked(*values)
    else:
        with pytest.raises(ConfigError, match=message):
            checked(*values)


def test_ranks_are_named_in_ranges_and_long_values_are_cut() -> None:
    one, other = {"prompt": "a" * 100}, {"prompt": "b"}
    with pytest.raises(ConfigError, match=r"prompt is a{60}\.\.\. on ranks 0 to 2, 5, b on ranks 3 and 4\. Do this"):
        checked(one, one, one, other, other, one)
    with pytest.raises(ConfigError, match="key is not set on rank 0, 1 on rank 1, 2 on rank 2"):
        checked({}, {"key": 1}, {"key": 2})


def test_a_host_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for local, error in ((None, ConfigError), ("0", ConfigError), ("1", SaidElsewhere)):
        monkeypatch.setenv("LOCAL_RANK", local) if local else monkeypatch.delenv("LOCAL_RANK", raising=False)
        with pytest.raises(error) as raised:
            checked({"key": 1}, {"key": 2})
        assert type(raised.value) is error


def keys_of(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind)


def test_what_a_host_may_have_of_its_own_are_keys_of_the_configuration() -> None:
    keys = {*keys_of(TrainConfig), *keys_of(EvalLoaderSection)}
    assert {key.rpartition(".")[2] for key in alike.OF_A_HOST | alike.PLACES} <= keys


def test_copies_of_data_are_alike_and_other_rows_are_not(data: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", small.write_rows(tmp_path / "other", 40, seed=9)
    shutil.copytree(data, copy)
    described = []
    for number, folders in enumerate([(data, data), (copy, copy), (other, data), (data, other)]):
        rows, held_out = folders
        evaluated = {"eval_loader": {"dataset": {"local": str(held_out)}}}
        run = Run(small.config(rows, tmp_path / str(number), **evaluated), World())
        described.append(parts.inputs_of(run))
        run.close()
    assert described[0] == described[1]
    trained, evaluated_on = "the data set of train_loader", "the data set of eval_loader (eval)"
    for values, key in ((described[2], trained), (described[3], evaluated_on)):
        assert [name for name, value in values.items() if value != described[0][name]] == [key]


def test_other_weights_under_the_same_names_are_other_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = SimpleNamespace(format="F32", shape=(2, 2))
    digests = set()
    for name, values in (("a", [1, 2]), ("a", [1, 3]), ("b", [1, 2]), ("a", [1, 2])):
        made = SimpleNamespace(tensors={name: info}, read=lambda name, values=values: torch.tensor(values).numpy())
        monkeypatch.setattr(parts, "open_checkpoint", lambda place, made=made: made)
        monkeypatch.setattr(parts, "files", lambda section: tmp_path)
        digests.add(parts._files_digest(small.config(tmp_path, tmp_path)))
    assert len(digests) == 3


def test_ranks_compare_when_they_join_and_when_they_have_opened_their_data(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks this one is the first; the second has one other value."""
    other: dict[str, object] = {}

    def every(self: World, value: Any) -> list[Any]:
        if not isinstance(value, str):
            return [value, {key: other.get(key, mine) for key, mine in value.items()}]
        return [value, "another" if compared.pop(0) else value]

    leaving: list[World] = []
    monkeypatch.setattr(World, "every", every)
    monkeypatch.setattr(processes, "_start_group", lambda world, *rest: setattr(world, "grouped", True))
    monkeypatch.setattr(processes, "leave", leaving.append)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    config = small.config(data, tmp_path / "run")
    cases: list[tuple[bool, str, Any]] = [(True, "torch", "2.0.0"), (False, "optimizer.lr", 0.3)]
    for versions, name, value in cases:
        compared = [True] if versions else [False, True]
        other = {name: value}
        with pytest.raises(ConfigError, match=f"{name} is .* on rank 0, {value} on rank 1"):
            join(config)
    assert len(leaving) == 2
    compared, other = [True], {"the data set of train_loader": "another"}
    with pytest.raises(ConfigError, match=r"train_loader is 40 samples \(.*\) on rank 0, another on rank 1"):
        Run(config, World(size=2))


def test_ranks_ask_rank_0_for_the_rows_of_a_step_whether_they_have_a_limit_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for available in (None, 10**12):
        shared: list[object] = []
        world: Any = SimpleNamespace(rank=1, device=CPU, share=lambda value, to=shared: to.append(value) or 3)
        run: Any = SimpleNamespace(
            config=small.config(Path("rows"), Path("run")),
            world=world,
            model=SimpleNamespace(),
            report=SimpleNamespace(memory=SimpleNamespace(predicted=None)),
        )
        assert parts.gradients_of(run, available).size == 3
        assert shared == [None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("optimizer.lr=0.3", "optimizer.lr is 0.003 on rank 0, 0.3 on rank 1"),
        ("train_loader.dataset.local=other", "the data set of train_loader is 40 samples (index"),
    ],
)
def test_two_processes_that_differ_end_before_the_first_step(
    changes: str, message: str, data: Path, tmp_path: Path
) -> None:
    small.write_rows(tmp_path / "other", 40, seed=9)
    (tmp_path / "run.yaml").write_text(json.dumps(small.mapping(data, tmp_path / "run")))
    running = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        words = ["run.yaml", "--parent", str(os.getpid()), "--store", str(tmp_path / "store")]
        command = [sys.executable, "-m", "roofline.train", *words, *([f"--set={changes}"] if rank else [])]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(command, env=os.environ | place, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
        )
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [1, 1]
    (line,) = [line for line in said[0][1].splitlines() if "has no hashes" not in line]
    assert line.startswith("roofline: the processes of this run differ: ")
    assert message in line
    assert said[1][1] == ""
    assert not (tmp_path / "run" / "log.jsonl").exists()
