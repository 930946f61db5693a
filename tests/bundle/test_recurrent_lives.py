"""Random engines over models with recurrent state on the cpu backend, on one process and on two ranks: whatever is cut,
found, guessed, pre-empted, copied, aborted or kept in a file, each answer has the bits that it has alone."""

import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model")
pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # engine_fakes, state_fakes

from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from tests.bundle.test_recurrent_answers import Answer, answers, engine_of
from tests.bundle.test_recurrent_ranks import parallel
from tests.engine.test_speculation import plant
from tests.engine.test_state import Sometimes
from tests.models.parity_cases import CASES, theirs

VOCAB = 96
TEXTS = [np.random.default_rng(seed).integers(0, VOCAB, 200).tolist() for seed in range(3)]
Request = tuple[tuple[int, ...], SamplingParams]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lives") / "model"
    theirs(CASES["qwen3_5_groups"].config | {"layers": 3, "recurrent": [True, False, True]}).save_pretrained(folder)
    return folder


def new_engine(model: Path, ranks: int, config: EngineConfig, **options: Any) -> LocalEngine:
    sizes = {"max_model_len": 320, "threads": ranks, **options}
    if ranks == 1:
        return engine_of(model, config, **sizes)
    return LocalEngine(parallel(model, config, **sizes), config)


class Alone:
    """The answers to requests, each computed by itself, with nothing to find and nothing guessed."""

    def __init__(self, model: Path, ranks: int) -> None:
        self.engine = new_engine(model, ranks, EngineConfig(prefix_cache=False), cache_tokens=1024)
        self._answers: dict[Request, list[Answer]] = {}

    def answers(self, request: Request) -> list[Answer]:
        ids, params = request
        if request not in self._answers:
            self._answers[request] = answers(self.engine, [list(ids)], params)
        return self._answers[request]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two ranks"])
def alone(model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Alone, int]]:
    made = Alone(model, request.param)
    with closing(made.engine):
        yield made, request.param


class CpuLife:
    """A random engine and its random requests."""

    def __init__(self, seed: int, model: Path, alone: Alone, ranks: int, folder: Path) -> None:
        self.draw, self.seed, self.alone = random.Random(seed), seed, alone
        draw = self.draw
        self.file = str(folder / "pages") if ranks == 1 and draw.random() < 0.4 else None
        self.config = EngineConfig(cache_file=self.file, long_prompt_tokens=draw.choice([0, None]))
        running = draw.choice([1, 2, 4, 6])
        self.options: dict[str, Any] = {
            "cache_tokens": draw.choice([320, 400, 640, 1024]),
            "state_slots": running + draw.choice([0, 1, 2, 4, 16]),
            "max_running": running,
            "max_batch_tokens": draw.choice([max(running, 5), 16, 33, 64, 256]),
            "draft_tokens": 4,
        }
        self.make = lambda: new_engine(model, ranks, self.config, **self.options)
        self.requests = [self._request() for _ in range(7)]
        self.requests += draw.choices(self.requests, k=2)
        self.guesses = draw.choice([None, 0.0, 0.6, 1.0, 1.0])
        self.aborts = draw.random() < 0.2

    def _request(self) -> Request:
        """What begins alike up to, between and behind multiples of 64, and ends at, before and behind them."""
        draw = self.draw
        shared = draw.choice([0, 63, 64, 65, 100, 128, 130])
        length = draw.choice([draw.randint(1, 200), 64 * draw.randint(1, 3) + draw.randint(-1, 1)])
        ids = (*TEXTS[0][:shared], *draw.choice(TEXTS)[shared:])[:length]
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(2),
            n=draw.choice([1, 1, 1, 2, 3]),
            max_tokens=draw.choice([1, 2, 9, 30, 70]),
            ignore_eos=True,
            digests=True,
        )
        return ids, params

    def run(self) -> None:
        """Compute them all, in one life of the engine or in two with the same file, and compare."""
        wanted = [self.alone.answers(request) for request in self.requests]
        for half in range(2):
            engine = self.make()
            with closing(engine):
                if self.guesses is not None:
                    known = {(str(i), k): ids for i, each in enumerate(wanted) for k, (ids, _) in enumerate(each)}
                    right, held_back = self.guesses, self.draw.choice([0.0, 0.3])
                    plant(engine, Sometimes(known, right, held_back, self.seed), self.draw.choice([1, 4]))
                self._compare(engine, wanted)
            if self.file is None or half:
                break

    def _compare(self, engine: LocalEngine, wanted: list[list[Answer]]) -> None:
        ids: dict[tuple[str, int], list[int]] = {}
        digests: dict[tuple[str, int], list[bytes]] = {}
        ended: dict[tuple[str, int], str] = {}
        pending = list(enumerate(self.requests))
        while pending or engine.has_work:
            if pending and (not engine.has_work or self.draw.random() < 0.3):
                number, (prompt, params) = pending.pop(0)
                engine.submit(list(prompt), params, request_id=str(number), priority=self.draw.choice([0, 0, -1]))
                if self.aborts and self.draw.random() < 0.3:
                    engine.abort(str(self.draw.randrange(number + 1)))
            for event in engine.step():
                assert event.error is None, event.error
                place = event.request_id, event.index
                ids.setdefault(place, []).extend(event.ids)
                digests.setdefault(place, []).extend(event.digests or [])
                if event.finish_reason is not None:
                    ended[place] = event.finish_reason
        for place, reason in ended.items():
            expected_ids, expected_digests = wanted[int(place[0])][place[1]]
            count = len(ids[place])
            assert tuple(ids[place]) == expected_ids[:count], place
            assert tuple(digests[place]) == expected_digests[:count], place
            assert reason == "abort" or count == len(expected_ids)
        assert self.aborts or len(ended) == sum(params.n for _, params in self.requests)
        assert engine.state.cache.used == 0
        assert engine.state.slots is not None
        assert engine.state.slots.used == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_a_random_engine_have_the_bits_that_they_have_alone(
    model: Path, alone: tuple[Alone, int], tmp_path: Path, seed: int
) -> None:
    CpuLife(seed, model, *alone, tmp_path).run()


@pytest.mark.slow
def test_answers_of_many_random_engines_have_the_bits_that_they_have_alone(
    model: Path, alone: tuple[Alone, int], tmp_path: Path
) -> None:
    for seed in range(100, 130):
        (tmp_path / str(seed)).mkdir()
        CpuLife(seed, model, *alone, tmp_path / str(seed)).run()
