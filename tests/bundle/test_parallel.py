"""load(..., tensor_parallel, pipeline_parallel): processes started, followed, lost and ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the reference is written in torch")

from roofline.backends.backend import LoadRequest  # noqa: E402
from roofline.backends.capacity import Capacity  # noqa: E402
from roofline.backends.options import LoadOptions  # noqa: E402
from roofline.backends.parallel import launch  # noqa: E402
from roofline.backends.parallel.ranks import RankError  # noqa: E402
from roofline.bundle import load, ranks  # noqa: E402
from roofline.bundle.ranks import RankTask, start_ranks  # noqa: E402
from roofline.common import processes  # noqa: E402
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError  # noqa: E402
from roofline.engine.local import LocalEngine  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.models.config import ModelConfig  # noqa: E402
from roofline.ops.batch import BatchLimits, Segment  # noqa: E402
from roofline.weights.checkpoint import read_config  # noqa: E402
from roofline.weights.random_weights import random_checkpoint  # noqa: E402

LOADING: dict[str, Any] = {
    "backend": "reference",
    "weights": "random:7",
    "cache_tokens": 64,
    "max_running": 2,
    "max_batch_tokens": 8,
    "text": False,
    "threads": 4,
}
PROMPT = [5, 17, 42, 3, 9, 60, 61, 2, 8, 1]  # more than one step


@pytest.fixture(autouse=True)
def left_group() -> Iterator[None]:
    """A test that fails leaves its process group; every later run of training in this process would join it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: dict[str, Any]) -> str:
    """A configuration; its weights are random."""
    place = tmp_path_factory.mktemp("tiny")
    (place / "config.json").write_text(json.dumps(tiny_llama))
    return str(place)


def answer(engine: LocalEngine) -> tuple[list[int], str | None]:
    """Ids, and the error that ended them."""
    engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    events = []
    while engine.has_work:
        events += engine.step()
    return [token for event in events for token in event.ids], events[-1].error


def request(folder: str) -> LoadRequest:
    """A model for two ranks."""
    checkpoint = random_checkpoint(read_config(Path(folder)), 7)
    options = LoadOptions(backend="reference", weights="random:7", arithmetic="plain", threads=2, tensor_parallel=2)
    capacity = Capacity(BatchLimits(8, 2, 8, 8), max_context=64, num_pages=4)
    return LoadRequest(checkpoint, ModelConfig.of(checkpoint.config), options, capacity)


def step(executable: Any) -> None:
    executable.batch.fill([Segment([1, 2], 0, [0])], [1])
    executable.forward()


def pids(executable: Any) -> dict[int, int]:
    return {rank: process.pid for rank, process in executable._watch._processes.items()}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ranks_and_stages_answer_as_one_process_does(folder: str) -> None:
    one = load(folder, **LOADING)
    alone, error = answer(LocalEngine(one.executable))
    assert error is None
    prints = {one.executable.fingerprint}
    for grid in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        loaded = load(folder, **LOADING, **grid)
        assert loaded.notes["ranks"].startswith("2: ")
        assert loaded.executable.vocab_size == 96
        others = pids(loaded.executable)
        engine = LocalEngine(loaded.executable)
        assert answer(engine) == (alone, None)  # with these weights; elsewhere rounding may choose another id
        assert engine.stats().steps == len(alone) + 1
        prints.add(loaded.executable.fingerprint)
        engine.close()
        assert not any(alive(pid) for pid in others.values())
    assert len(prints) == 3


@pytest.mark.slow
def test_ranks_of_the_cpu_backend_answer_as_the_reference_s_ranks_do(folder: str) -> None:
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    found = []
    for backend in ("cpu", "reference"):
        loaded = load(folder, **LOADING | {"backend": backend}, tensor_parallel=2)
        engine = LocalEngine(loaded.executable)
        assert loaded.executable.exact
        found.append(answer(engine))
        loaded.executable.batch.fill([Segment(PROMPT[:8], 0, [0])], [6, 7])
        loaded.executable.forward()
        found[-1] = *found[-1], loaded.executable.logits().tolist()
        engine.close()
    assert found[0] == found[1]
    assert found[0][1] is None


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_step_with_its_name(folder: str) -> None:
    loaded = load(folder, **LOADING, tensor_parallel=2, pipeline_parallel=2)
    engine, others = LocalEngine(loaded.executable), pids(loaded.executable)
    answered, error = answer(engine)
    assert len(answered) == 6
    assert error is None
    os.kill(others[2], signal.SIGKILL)
    start = time.monotonic()
    for _ in range(2):  # the second request finds it so at once
        answered, error = answer(engine)
        assert answered == []
        assert (
            error
            == "RankError: rank 2 of 4 ended (SIGKILL: the system may have run out of memory); load the model again"
        )
    assert time.monotonic() - start < 20
    assert not any(alive(pid) for pid in others.values())
    engine.close()


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_not_waited_for(folder: str) -> None:
    executable, _ = start_ranks(folder, request(folder), patience=3.0)
    step(executable)
    (other,) = pids(executable).values()
    os.kill(other, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2: another rank has not answered in time; load the model again"):
        step(executable)
    assert time.monotonic() - start < 30
    assert not alive(other)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_a_rank_that_is_stopped_and_not_continued_is_ended(
    folder: str, grid: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LOOK", 0.1)
    loaded = load(folder, **LOADING, **grid)
    engine, (other,) = LocalEngine(loaded.executable), pids(loaded.executable).values()
    assert answer(engine)[1] is None
    os.kill(other, signal.SIGSTOP)
    start = time.monotonic()
    reason = r"RankError: rank 1 of 2 ended (it was stopped by a signal and not continued); load the model again"
    assert answer(engine) == ([], reason)
    assert time.monotonic() - start < 100, "a rank that is only slow has three times as long"
    assert not alive(other)
    engine.close()


def test_looks_at_stopped_ranks_count_in_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOPPED_LOOKS", 3)
    monkeypatch.setattr(launch, "_LOOK", 1000.0)  # of the thread that looks by itself
    launched = launch.Launched(1, "unused", {})
    with subprocess.Popen(["sleep", "60"]) as process:
        launched._processes[1] = process
        try:
            for states in ([True, True, False, True, True], [False], [True, True]):
                for is_stopped in states:
                    monkeypatch.setattr(launch, "is_stopped", lambda pid, now=is_stopped: now)
                    launched._end_stopped()
            assert process.poll() is None
            launched._end_stopped()
            monkeypatch.setattr(launch, "is_stopped", lambda pid: False)  # as of a process that ends
            with monkeypatch.context() as unreaped:
                unreaped.setattr(process, "poll", lambda: None)
                launched._end_stopped()
            process.wait()
            assert launched.lost() == "rank 1 of 1 ended (it was stopped by a signal and not continued)"
        finally:
            launched.close(0.0)


LOADED_ELSEWHERE = """
import json, sys, threading, time
from roofline.bundle import load

loaded = []
thread = threading.Thread(target=lambda: loaded.append(load(sys.argv[1], **json.loads(sys.argv[2]))))
thread.start()
thread.join()
(rank,) = loaded[0].executable._watch._processes.values()
time.sleep(1)
print(rank.pid, rank.poll(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_with_the_process_that_loaded_the_model(folder: str) -> None:
    """That process only: not with the thread that loaded it."""
    options = json.dumps(LOADING | {"tensor_parallel": 2})
    command = [sys.executable, "-c", LOADED_ELSEWHERE, folder, options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid, status = process.stdout.readline().split()
            assert status == "None"
            os.kill(int(pid), signal.SIGSTOP)
        finally:
            process.kill()
    end = time.monotonic() + 60
    while alive(int(pid)):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_asks_to_end_with_the_process_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(launch, "die_with_parent", calls.append)
    monkeypatch.setattr(launch, "store_of", lambda file: torch.distributed.HashStore())
    assert launch.run_rank(1, 5, 4711, lambda store, tell: calls.append(tell("here"))) == 0
    assert calls == [4711, None]


@pytest.mark.parametrize("status", [0, launch.LOST])
def test_a_rank_that_lost_another_ends_without_a_report_of_what_it_still_holds(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(launch, "run_rank", lambda *place: status)
    monkeypatch.setattr(processes, "end_now", ends.append)
    task = RankTask("model", LoadOptions(), Capacity(BatchLimits(8, 2, 8, 8), max_context=64, num_pages=4))
    assert ranks.main(json.dumps({**task.to_values(), "rank": 1, "file": 5, "parent": 7})) == status
    assert ends == ([status] if status else [])


def test_a_rank_that_cannot_load_says_why(folder: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: ConfigError: .*gone"):
        start_ranks(str(tmp_path / "gone"), request(folder), patience=3.0)
    assert not torch.distributed.is_initialized()


def test_what_cannot_be_divided_is_refused_before_anything_starts(folder: str) -> None:
    with pytest.raises(CapacityError, match=r"tensor_parallel=8 needs 8 parts of 1 query heads, 4 are available"):
        load(folder, **LOADING, tensor_parallel=8)
    with pytest.raises(CapacityError, match=r"pipeline_parallel=3 needs 3 layers, 2 are available"):
        load(folder, **LOADING, pipeline_parallel=3)
    for backend in ("cpu", "reference"):
        with pytest.raises(CapacityError, match=r"a model on 2 ranks needs 2 threads, 1 are available. Lower"):
            load(folder, **LOADING | {"backend": backend, "threads": 1}, tensor_parallel=2)
    with pytest.raises(ConfigError, match="tensor_parallel=0"):
        load(folder, **LOADING, tensor_parallel=0)
    with pytest.raises(UnsupportedError, match="isa='avx2' with backend 'reference'"):
        load(folder, **LOADING, tensor_parallel=2, isa="avx2")
    with pytest.raises(UnsupportedError, match=r"pipeline_parallel=2 with backend 'cpu'.*tensor_parallel"):
        load(folder, **LOADING | {"backend": "cpu"}, pipeline_parallel=2)
    checkpoint = random_checkpoint(read_config(Path(folder)), 7)
    with pytest.raises(UnsupportedError, match="a checkpoint in memory on several ranks"):
        load(checkpoint, backend="reference", tensor_parallel=2)
