"""Models with recurrent state on two ranks of the cpu backend under the engine: the same request has the same bits,
however its prompt was cut, found, guessed or pre-empted. Ranks are threads here; a slow test has them as processes."""

import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model")
pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # thread_ranks
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))  # rank_forks

from rank_forks import Unwatched
from thread_ranks import Member, Threads

from roofline.backends import table
from roofline.backends.backend import LoadRequest, Neighbours
from roofline.backends.options import LoadOptions
from roofline.backends.parallel.executable import ParallelExecutable, follow
from roofline.backends.parallel.ranks import RankGrid
from roofline.bundle import load
from roofline.bundle.sources import open_checkpoint
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.recording.entries import files_of
from roofline.engine.recording.replay import replay
from roofline.models.registry import config_of
from tests.bundle.test_recurrent_answers import Answer, answers
from tests.models.parity_cases import CASES, theirs

RANKS, VOCAB = 2, 96
SIZES: dict[str, Any] = {"cache_tokens": 4096, "max_model_len": 256, "threads": 2}
COMMON = np.random.default_rng(5).integers(0, VOCAB, 140).tolist()
PROMPTS = [COMMON[:64], COMMON[:129], COMMON[:140], [5, 6, 7, 8] * 25]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, digests=True)
MODELS = {
    "groups": CASES["qwen3_5_groups"].config,
    "experts": CASES["qwen3_5_moe"].config | {"ffn": 64, "layers": 2, "recurrent": [True, False]},
    "scans": CASES["mamba"].config | {"layers": 1, "recurrent": [True]},
    "scans and attention": CASES["falcon_h1"].config
    | {"layers": 1, "recurrent": [True], "scan_norm": "behind", "groups": 1},
    "convolutions": CASES["lfm2"].config | {"layers": 2, "recurrent": [False, True]},
}


class ThreadRanks(Member):
    """What `backends.parallel.ranks.Ranks` is to its executables, for ranks that are threads of this process."""

    def __init__(self, threads: Threads, rank: int, batches: "Sequence[queue.Queue[np.ndarray]]") -> None:
        super().__init__(threads, rank)
        self.grid = RankGrid(threads.size)
        self.share, self.batches = self.grid.share(rank), batches

    def share_batch(self, buffer: np.ndarray) -> None:
        if self.rank:
            buffer[:] = self.batches[self.rank].get()
            return
        for other in self.batches[1:]:
            other.put(buffer.copy())

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def ranked(model: Path, config: EngineConfig, **options: Any) -> Iterator[LocalEngine]:
    """An engine over rank 0, which the others follow as threads that end with it."""
    engine = LocalEngine(parallel(model, config, **options), config)
    try:
        yield engine
    finally:
        engine.close()


def parallel(model: Path, config: EngineConfig, **options: Any) -> ParallelExecutable:
    """Rank 0, with the others behind it as threads that end with it."""
    import torch

    loaded = config.prepare_load(LoadOptions(**{**SIZES, **options}, tensor_parallel=RANKS))
    backend = table.get(loaded.backend)
    loaded = backend.resolve(loaded, Neighbours(0, 1))
    checkpoint = open_checkpoint(str(model), loaded)
    capacity = backend.capacity(loaded, checkpoint.config, 1)
    request = LoadRequest(checkpoint, config_of(checkpoint.config), loaded, capacity)
    threads, batches = Threads(RANKS), [queue.Queue[np.ndarray]() for _ in range(RANKS)]
    ranks: list[Any] = [ThreadRanks(threads, rank, batches) for rank in range(RANKS)]
    torch_threads = torch.get_num_threads()
    shares = [backend.make_share(request, member)[0] for member in ranks]  # type: ignore[attr-defined]
    torch.set_num_threads(torch_threads)  # of the other tests of this process
    for share, member in zip(shares[1:], ranks[1:], strict=True):
        threading.Thread(target=follow, args=(share, member), daemon=True).start()
    return ParallelExecutable(shares[0], ranks[0], vocab_size=VOCAB, watch=Unwatched())


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked") / request.param
    theirs(MODELS[request.param]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[Answer]]:
    """Each prompt by itself on the same ranks, with nothing to find and nothing guessed."""
    config = EngineConfig(prefix_cache=False)
    with ranked(model, config) as engine:
        yield [answers(engine, [text], GREEDY)[0] for text in PROMPTS]


GUESSING = {"speculate": "ngram", "speculate_always": True}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together, in chunks": ({}, {"max_batch_tokens": 23}),
    "guessing": (GUESSING, {}),
    "pre-empted": (GUESSING, {"state_slots": 5, "max_running": 3, "cache_tokens": 288}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_an_answer_do_not_depend_on_how_it_is_computed(model: Path, alone: list[Answer], way: str) -> None:
    config, options = WAYS[way]
    with ranked(model, EngineConfig(**config), **options) as engine:
        for _ in range(2):  # the second time what is there may be found
            assert answers(engine, PROMPTS, GREEDY) == alone
        stats = engine.stats()
        assert stats.snapshot_hits > 0
        assert stats.state_slot_bytes == engine.executable.slot_bytes > 0
        assert (stats.preemptions > 0) == (way == "pre-empted")
        assert engine.state.cache.used == engine.state.slots.used == 0


@pytest.mark.parametrize("guessing", [{}, GUESSING], ids=["off", "ngram"])
def test_steps_of_ranks_are_replayed_to_the_same_bits(model: Path, tmp_path: Path, guessing: dict[str, Any]) -> None:
    config = EngineConfig(record=str(tmp_path), record_ids=True, **guessing)
    with ranked(model, config) as engine:
        for _ in range(2):
            answers(engine, PROMPTS[1:], GREEDY)
        assert engine.stats().snapshot_hits > 0
    (path,) = files_of(tmp_path)
    executable = parallel(model, EngineConfig(**guessing))
    outcomes = list(replay(path, executable))
    executable.close()
    assert len(outcomes) > 10
    assert all(outcome.recorded is not None and outcome.first_row is None for outcome in outcomes)


@pytest.mark.slow
def test_processes_have_the_bits_of_ranks_in_threads(model: Path, alone: list[Answer]) -> None:
    loaded = load(str(model), LoadOptions(**SIZES, tensor_parallel=RANKS), text=False)
    engine = LocalEngine(loaded.executable, EngineConfig())
    for _ in range(2):
        assert answers(engine, PROMPTS, GREEDY) == alone
    assert engine.stats().snapshot_hits > 0
    engine.close()
