"""Recurrent state: whatever is shared, cut, pre-empted, guessed or repeated, each step goes on from the right slot."""

import random
from dataclasses import replace
from functools import cache

import pytest
from state_fakes import HybridFake, QueueingHybrid, StateWatched

from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from tests.engine.test_speculation import Planted, plant

NAIVE = EngineConfig(scheduler="naive", cache="naive")
LONGEST = 300
SIZES = {"max_context": 512, "segments": 8, "rows": 48}


def text(length, family=0, shared=0):
    """Ids of a family; the first `shared` of them are the same in all families."""
    return [(5 * i + i // 7 + (family * (i + 1) if i >= shared else 0)) % 50 for i in range(length)]


class Sometimes(Planted):
    """A drafter whose guesses are right with a probability, and that guesses in some steps only."""

    def __init__(self, answers, right, held_back, seed):
        super().__init__(answers, right, seed)
        self.held_back = held_back

    def draft(self, sequences, counts):
        super().draft(sequences, [0 if self.random.random() < self.held_back else count for count in counts])


@cache
def answer(prompt, params, index):
    """One answer, computed with nothing beside it, nothing shared and in as few steps as there can be."""
    watched = StateWatched(NAIVE, state_slots=1, tokens=512, **SIZES)
    alone = replace(params, n=index + 1)
    watched.submit(list(prompt), alone, request_id="a")
    return watched.run()["a", index]


class Life:
    """A random engine and its random requests."""

    def __init__(self, seed):
        self.random = draw = random.Random(seed)
        toy = draw.choice([HybridFake, QueueingHybrid])
        config = EngineConfig(
            max_batch_tokens=draw.choice([1, 7, 16, 33, 64, 512, 512]),
            max_running=draw.choice([1, 2, 4, 6]),
            long_prompt_tokens=draw.choice([0, None]),
            prefix_cache=draw.random() < 0.9,
            max_model_len=LONGEST,
            cache="paged" if draw.random() < 0.95 else "naive",
            scheduler="continuous" if draw.random() < 0.8 else "naive",
            overlap=draw.random() < 0.8,
        )
        slots, pages = draw.choice([1, 2, 3, 4, 6, 10, 24]), draw.choice([20, 24, 40, 90])
        self.watched = StateWatched(config, toy, num_pages=pages, state_slots=slots, tokens=512, **SIZES)
        self.requests = [self._request() for _ in range(draw.randint(6, 12))]
        self.requests += draw.choices(self.requests, k=4)
        self.expected = {
            (str(i), k): answer(tuple(ids), params, k)
            for i, (ids, params, _) in enumerate(self.requests)
            for k in range(params.n)
        }
        if draw.random() < 0.6:
            right, held_back = draw.choice([0.0, 0.5, 0.9, 1.0]), draw.choice([0.0, 0.3])
            drafter = Sometimes(self.expected, right, held_back, seed)
            plant(self.watched.engine, drafter, draw.choice([1, 4, 15]))
        toy = self.watched.executable
        if draw.random() < 0.4:
            toy.fail_at = {draw.randrange(1, 80) for _ in range(2)}
            toy.fail_late = {draw.randrange(1, 80) for _ in range(2)}
        self.aborts = draw.random() < 0.3
        self.begun = {}

    def _request(self):
        """Ids, parameters, and how many ids of the answer another engine has computed."""
        draw = self.random
        length = draw.choice([draw.randint(1, 200), 64 * draw.randint(1, 3) + draw.randint(-1, 1)])
        ids = text(length, draw.randrange(3), draw.choice([0, 63, 64, 65, 128, 130, 180]))
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.8]),
            seed=draw.randrange(3),
            n=draw.choice([1, 1, 1, 2, 3]),
            max_tokens=draw.choice([1, 2, draw.randint(3, 20), 70, 99]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
            stop_token_ids=draw.choice([(), (), (3, 4, 5)]),
            prompt_logprobs=draw.choice([None, None, None, None, 0]),
        )
        return ids, params, draw.choice([0, 0, 0, draw.randint(1, 98)])

    def run(self):
        """Compute them all, and compare with one by one."""
        draw, watched = self.random, self.watched
        for number, (ids, params, begun) in enumerate(self.requests):
            if begun and params.n == 1 and begun < len(self.expected[str(number), 0]):
                self.begun[str(number), 0] = begun
                watched.resume(str(number), ids, params, {0: self.expected[str(number), 0][:begun]})
            else:
                watched.submit(ids, params, request_id=str(number), priority=draw.choice([0, 0, -1, 2]))
            for _ in range(draw.choice([0, 0, 1, 30])):
                watched.step()
            if self.aborts and draw.random() < 0.3:
                watched.engine.abort(str(draw.randrange(number + 1)), draw.choice([None, 0, 1]))
        outputs = watched.run()
        whole = not (self.aborts or watched.executable.fail_at)
        for key, last in watched.ended.items():
            expected = self.expected[key][self.begun.get(key, 0) :]
            assert outputs[key] == expected[: len(outputs[key])]
            assert last.finish_reason in ("error", "abort") or outputs[key] == expected
            assert not whole or last.finish_reason not in ("error", "abort")
        assert set(watched.ended) == set(self.expected)


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_that_are_computed_one_by_one(seed):
    Life(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("hundred", [1, *(pytest.param(more, marks=pytest.mark.soak) for more in range(2, 5))])
def test_answers_of_many_lives_are_those_that_are_computed_one_by_one(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        Life(seed).run()
