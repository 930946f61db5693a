"""Ranks as processes over gloo: the same logits as one process, as ranks in threads, and as themselves once more."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders, thread_ranks
sys.path.insert(0, str(Path(__file__).parent))  # shard_cases

from shard_cases import CHUNKS, LIMITS, build
from thread_ranks import Member, Threads

from roofline.backends.parallel.executable import STOP, ParallelExecutable
from roofline.backends.parallel.launch import Launched
from roofline.backends.parallel.ranks import RankError, RankGrid, Ranks
from roofline.backends.reference.executable import ReferenceExecutable
from roofline.common.errors import ConfigError
from roofline.ops.batch import Batch
from roofline.program.compile import compile_program
from roofline.program.ir import Share
from roofline.program.target import CPU, PLAIN, Target
from tests.open_sockets import open_sockets, outward_interface

torch = pytest.importorskip("torch", reason="the reference is written in torch")

# The tests of what `runs` holds are slow: test_reference_shard.py has the same ranks in threads, and
# tests/bundle/test_parallel.py starts ranks as processes.
ROUNDING = 3e-6  # of the largest logit; 1.2e-6 was the most in test_reference_shard.py


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the logits of every rank of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parent / "rank_runs.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder


def logits(runs: Path, name: str, rank: int = 0) -> np.ndarray:
    found: np.ndarray = np.load(runs / f"{name}.{rank}.npy")
    return found


def steps(name: str, form: str, target: Target, share: Share = Share(), group: Member | None = None) -> np.ndarray:
    model = build(name, form)
    program = compile_program(model.family, model.cfg, model.tensors, target, share=share)
    executable = ReferenceExecutable(program, model.read, LIMITS, 16, 256, group=group)
    out = []
    for segments, rows in CHUNKS:
        executable.batch.fill(segments, rows)
        executable.forward()
        out.append(executable.logits().copy())
    return np.concatenate(out)


@pytest.mark.parametrize(
    ("case", "model", "form", "ranks"),
    [
        ("plain2", "llama", "F32", 2),
        ("plain3", "groups of three", "Q8_0", 3),
        ("plain4", "llama", "F32", 4),
        ("fast4", "llama", "F32", 4),
    ],
)
@pytest.mark.slow
def test_logits_are_those_of_one_process_within_rounding(
    runs: Path, case: str, model: str, form: str, ranks: int
) -> None:
    alone, found = steps(model, form, PLAIN), logits(runs, case)
    assert found.shape == alone.shape
    assert np.abs(found - alone).max() < ROUNDING * np.abs(alone).max()
    for rank in range(1, ranks):
        assert np.array_equal(logits(runs, case, rank), found)


@pytest.mark.slow
def test_in_rank_order_runs_ranks_and_transports_give_the_same_bits(runs: Path) -> None:
    found = [logits(runs, case, rank) for case in ("cpu3", "cpu3 again") for rank in range(3)]
    threads = Threads(3).run(lambda m: steps("groups of three", "Q8_0", CPU, Share(m.rank, 3), m))
    assert all(np.array_equal(other, threads[0]) for other in (*found, *threads))


@pytest.mark.slow
def test_stages_give_the_bits_of_one_process(runs: Path) -> None:
    assert np.array_equal(logits(runs, "stages2"), steps("mpt", "Q8_0", CPU))


@pytest.mark.slow
def test_stages_of_ranks_give_the_bits_of_these_ranks_alone(runs: Path) -> None:
    ranks = Threads(2).run(lambda m: steps("llama", "Q8_0", CPU, Share(m.rank, 2), m))
    assert np.array_equal(logits(runs, "both"), ranks[0])


@pytest.mark.slow
def test_ranks_end_with_the_reason_when_rank_0_is_gone(runs: Path) -> None:
    assert (runs / "rank 0 dies.txt").read_text() == "rank 1 of 2: another rank is gone"


@pytest.mark.slow
def test_rank_0_does_not_wait_for_a_rank_that_is_deaf(runs: Path) -> None:
    told = (runs / "rank 1 is deaf.txt").read_text()
    assert told == "rank 0 of 2: another rank has not answered in time"


def test_a_grid_says_who_has_what() -> None:
    grid = RankGrid(2, 3)
    assert grid.size == 6
    assert [grid.share(r) for r in (0, 1, 2, 5)] == [
        Share(0, 2, 0, 3), Share(1, 2, 0, 3), Share(0, 2, 1, 3), Share(1, 2, 2, 3),
    ]  # fmt: skip
    for bad in (0, -1, True, 1.5, "2"):
        with pytest.raises(ConfigError, match="tensor_parallel="):
            RankGrid(bad)  # type: ignore[arg-type]


class Fakes:
    """Rank 0 of two without a second one: what it tells, and who ends it."""

    def __init__(self, error: Exception | None, known: str | None) -> None:
        self.error, self.known, self.ended, self.told = error, known, [], []
        grid, batch = RankGrid(2), Batch(LIMITS)
        self.ranks = SimpleNamespace(
            rank=0, grid=grid, share=grid.share(0), share_batch=self.share_batch, close=lambda: None
        )
        program = SimpleNamespace(carried=())
        sizes = {
            "limits": LIMITS,
            "num_pages": 4,
            "max_context": 64,
            "page_bytes": 1,
            "clock": None,
            "exact": True,
        }
        self.inner = SimpleNamespace(
            program=program, batch=batch, fingerprint="x", run=self.run, close=lambda: None, **sizes
        )

    def share_batch(self, buffer: np.ndarray) -> None:
        self.told.append(int(buffer[0]))

    def run(self, carried: Any) -> Any:
        if self.error is not None:
            raise self.error
        return torch.zeros(1, 5)

    def reason(self) -> str | None:
        return self.known

    def close(self, wait: float) -> None:
        self.ended.append(wait)

    def executable(self) -> ParallelExecutable:
        return ParallelExecutable(self.inner, self.ranks, vocab_size=5, watch=self)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "known", "first", "later"),
    [
        (
            RankError("another rank is gone"),
            "rank 1 of 2 ended (signal 9)",
            "signal 9.*load the model again",
            "signal 9",
        ),
        (RankError("another rank is gone"), None, "another rank is gone; load the model again", "another rank is gone"),
        (ValueError("a bug"), None, "^a bug$", r"a step failed on rank 0: ValueError\('a bug'\); load the model again"),
    ],
)
def test_after_an_error_no_step_is_tried_and_nobody_is_left(
    error: Exception, known: str | None, first: str, later: str
) -> None:
    fakes = Fakes(error, known)
    executable = fakes.executable()
    with pytest.raises(type(error), match=first):
        executable.forward()
    assert fakes.ended == [0.0]
    with pytest.raises(RankError, match=later):
        executable.forward()
    executable.close()
    assert fakes.ended == [0.0]
    assert fakes.told == [0]


def test_closing_tells_the_others_to_stop_once() -> None:
    fakes = Fakes(None, None)
    executable = fakes.executable()
    executable.forward()
    assert executable.logits().shape == (1, 5)
    executable.close()
    executable.close()
    assert fakes.told == [0, STOP]
    assert fakes.ended == [5.0]
    with pytest.raises(RankError, match="was closed"):
        executable.forward()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")
def test_a_rank_that_leaves_ends_the_threads_of_its_groups() -> None:
    """One of them that releases a tensor while the interpreter ends would abort the process."""

    def communicating() -> int:
        return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

    def eventually(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.01)

    before = communicating()
    ranks = Ranks(0, RankGrid(), torch.distributed.HashStore())
    try:
        eventually(lambda: communicating() > before)  # each thread names itself once it runs
    finally:
        ranks.close()
    eventually(lambda: communicating() == before)  # one that was joined is listed for a moment more


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no /proc here")
def test_ranks_are_reached_from_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever interface the environment names: the ranks of a model are on one machine."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface := outward_interface())
    before = set(open_sockets(os.getpid()))
    launched = Launched(1, "unused", {})
    ranks = Ranks(0, RankGrid(), launched.store)
    try:
        opened = set(open_sockets(os.getpid())) - before
    finally:
        ranks.close()
        launched.close(0.0)
    assert opened, "gloo listens, or this test sees nothing"
    assert all(each.local for each in opened), opened
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface


class PendingWork:
    """What gloo hands out for an exchange that it does not end, whatever happens to the other rank."""

    waits: list[float]

    def __init__(self) -> None:
        self.waits = []

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("exchange", "call"),
    [
        ("broadcast", lambda ranks: ranks.share_batch(np.zeros(4, dtype=np.int32))),
        ("all_gather", lambda ranks: ranks.gather(torch.zeros(1, 1), [1])),
        ("all_reduce", lambda ranks: ranks.sum(torch.zeros(1, 1), "")),
    ],
)
def test_a_rank_that_has_ended_is_noticed_where_gloo_does_not(
    exchange: str, call: Callable[[Ranks], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, reasons = PendingWork(), iter([None, "rank 1 of 2 ended (SIGKILL)"])
    monkeypatch.setattr(torch.distributed, exchange, lambda *args, **kwargs: work)
    ranks = Ranks(0, RankGrid(), torch.distributed.HashStore(), lost=lambda: next(reasons))
    try:
        with pytest.raises(RankError, match=r"^rank 1 of 2 ended \(SIGKILL\)$"):
            call(ranks)
    finally:
        ranks.close()
    assert work.waits == [0.5, 0.5]


def test_a_rank_that_is_late_is_waited_for_as_long_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    work = PendingWork()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **kwargs: work)
    ranks = Ranks(0, RankGrid(), torch.distributed.HashStore(), patience=0.3)
    try:
        with pytest.raises(RankError, match="rank 0 of 1: another rank has not answered in time"):
            ranks.share_batch(np.zeros(4, dtype=np.int32))
    finally:
        ranks.close()
    (wait,) = work.waits
    assert 0.2 < wait <= 0.3
