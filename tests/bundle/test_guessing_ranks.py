"""The layer that guesses on two ranks, each with its share of it: answers have the bits that they have without guesses,
and what is guessed is what transformers' layer makes of the whole text. Ranks are threads; a slow test has processes.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model, and is the judge")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.backends.options import LoadOptions
from roofline.backends.parallel.executable import ParallelExecutable
from roofline.backends.parallel.guesser import ParallelGuesser
from roofline.backends.parallel.ranks import RankError
from roofline.bundle import load
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from tests.bundle.test_guessing import (
    ASKED,
    ATTENDING,
    GREEDY,
    MIXED,
    MTP,
    PROMPTS,
    Answer,
    answers,
    check_guesses,
    watch_drafts,
)
from tests.bundle.test_recurrent_ranks import RANKS, ranked
from tests.models.guessing_models import GuessingModel, guessing_model
from tests.models.parity_cases import CASES

SIZES: dict[str, Any] = {"cache_tokens": 2048, "max_model_len": 256, "threads": 2}
MODELS = {"attending": ATTENDING, "mixed": MIXED, "experts": CASES["glm4_moe"].config | {"ffn": 64, "shared_ffn": 64}}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": ({"speculate_tokens": 3}, {}),
    "in chunks of 7": ({"speculate_tokens": 1}, {"max_batch_tokens": 7, "max_running": 4}),
    "with few pages": ({}, {"cache_tokens": 272, "max_running": 6}),
}


@pytest.fixture(scope="module", params=["attending", "mixed", pytest.param("experts", marks=pytest.mark.slow)])
def judge(request: pytest.FixtureRequest) -> GuessingModel:
    return guessing_model(MODELS[request.param])


@pytest.fixture(scope="module")
def folder(judge: GuessingModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge.save(tmp_path_factory.mktemp("guessing") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[str, list[list[Answer]]]:
    """The fingerprint of the ranks without guesses, and their answers each time."""
    with ranked(folder, EngineConfig(), **SIZES) as engine:
        return engine.executable.fingerprint, [answers(engine, PROMPTS, params) for params in ASKED]


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_answers_on_ranks_do_not_depend_on_guesses(
    folder: Path, plain: tuple[str, list[list[Answer]]], way: str
) -> None:
    config, options = WAYS[way]
    fingerprint, expected = plain
    with ranked(folder, EngineConfig(**(MTP | config)), **(SIZES | options)) as guessing:
        assert guessing.executable.fingerprint == fingerprint
        left = _watch_batch(guessing)
        for params, texts in zip(ASKED, expected, strict=True):
            assert answers(guessing, PROMPTS, params) == texts
        stats = guessing.stats()
        assert stats.drafts > 0
        assert stats.preemptions > 0 or way != "with few pages"
        assert guessing.state.cache.used == 0
        assert min(left) > 0  # a guess leaves the model's batch as it was


def _watch_batch(engine: LocalEngine) -> list[int]:
    """Of each step of the layer from now on: how many tokens the model's batch has behind it."""
    assert isinstance(engine.executable, ParallelExecutable)
    layer, left = engine.executable.guesser, list[int]()
    assert layer is not None
    forward = layer.forward

    def watched() -> None:
        forward()
        left.append(engine.executable.batch.tokens)

    layer.forward = watched  # type: ignore[method-assign]
    return left


def test_what_ranks_guess_is_what_the_layer_makes_of_the_whole_text(judge: GuessingModel, folder: Path) -> None:
    """In float32, of prompts in chunks, with prefixes that were found and pages taken away."""
    sizes = {"cache_tokens": 208, "max_batch_tokens": 40, "max_model_len": 192, "max_running": 6, "threads": 2}
    config = EngineConfig(**(MTP | {"speculate_tokens": 2}))
    with ranked(folder, config, backend="reference", arithmetic="plain", **sizes) as engine:
        made = watch_drafts(engine)
        two = SamplingParams(temperature=0, max_tokens=20, n=2, ignore_eos=True)
        for _ in range(2):
            answers(engine, PROMPTS[1:], two)
        assert engine.state.prefix_hits > 0
    assert len(made) > 8
    check_guesses(judge, made)


def test_after_an_error_in_a_guess_no_rank_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks would not be in step any more: the engine drafts no more, and its next step fails."""
    with ranked(folder, EngineConfig(**MTP), **SIZES) as engine:

        def fails(self: ParallelGuesser) -> None:
            raise RankError("rank 1 of 2 is gone")

        monkeypatch.setattr(ParallelGuesser, "_run", fails)
        engine.submit(PROMPTS[3], GREEDY)
        errors = []
        while engine.has_work:
            errors += [event.error for event in engine.step() if event.error]
        assert errors == ["RankError: rank 1 of 2 is gone; load the model again"]


@pytest.mark.slow
def test_processes_guess_as_ranks_in_threads(folder: Path) -> None:
    config = EngineConfig(**MTP)
    with ranked(folder, config, **SIZES) as engine:
        expected, drafted = answers(engine, PROMPTS, GREEDY), engine.stats().draft_tokens
    options = config.prepare_load(LoadOptions(**SIZES, tensor_parallel=RANKS))
    engine = LocalEngine(load(str(folder), options, text=False).executable, config)
    assert answers(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().draft_tokens == drafted > 0
    engine.close()
