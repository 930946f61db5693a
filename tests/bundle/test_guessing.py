"""Answers with `speculate="mtp"`: their bits are those of answers without, and what is guessed on the way is what the
layer makes of the whole text, whatever was in the cache, in chunks, taken away or shared before."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model, and is the judge")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

import torch

from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.engine.config import EngineConfig
from roofline.engine.constraint import Constraint
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling
from roofline.engine.schedule.sequence import Sequence
from roofline.engine.speculation.layer import LayerDrafter
from roofline.ops.batch import PAGE_TOKENS
from tests.engine.engine_fakes import SpellingTokenizer
from tests.models.guessing_models import GuessingModel, guessing_model
from tests.models.parity_cases import HYBRID

VOCAB, TOKENS = 96, 20
SMALL = HYBRID | {"layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64}
ATTENDING, MIXED = SMALL | {"recurrent": [False, False]}, SMALL | {"recurrent": [True, False]}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, digests=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=TOKENS, digests=True, stop_token_ids=(7, 11))
Answer = tuple[tuple[int, ...], tuple[bytes, ...]]


def prompts() -> list[list[int]]:
    """Texts with beginnings in common that end around ends of pages and of snapshots."""
    random = np.random.default_rng(7)
    common = random.integers(0, VOCAB, 140).tolist()
    texts = [common[:length] for length in (1, 16, 17, 64, 65, 129)]
    return [*texts, common[:70] + random.integers(0, VOCAB, 40).tolist()]


PROMPTS = prompts()


@pytest.fixture(scope="module", params=["attending", "mixed"])
def judge(request: pytest.FixtureRequest) -> GuessingModel:
    return guessing_model(ATTENDING if request.param == "attending" else MIXED)


@pytest.fixture(scope="module")
def folder(judge: GuessingModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge.save(tmp_path_factory.mktemp("guessing") / "model")


def engine_of(model: Path, config: dict[str, Any], **options: Any) -> LocalEngine:
    settings = EngineConfig(**config)
    sizes = {"cache_tokens": 2048, "max_model_len": 256, "threads": 1, **options}
    loaded = load(str(model), settings.prepare_load(LoadOptions(**sizes)), text=False)
    return LocalEngine(loaded.executable, settings)


def answers(engine: LocalEngine, texts: list[list[int]], params: SamplingParams) -> list[Answer]:
    """What an engine answers to prompts that come together: ids, and the digest of each id's logits."""
    order = [engine.submit(text, params) for text in texts]
    ids: dict[tuple[str, int], list[int]] = {}
    digests: dict[tuple[str, int], list[bytes]] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            place = event.request_id, event.index
            ids.setdefault(place, []).extend(event.ids)
            digests.setdefault(place, []).extend(event.digests or [])
    return [(tuple(ids[name, i]), tuple(digests[name, i])) for name in order for i in range(params.n)]


MTP = {"speculate": "mtp", "speculate_always": True}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": ({"speculate_tokens": 3}, {}),
    "in chunks of 7": ({"speculate_tokens": 1}, {"max_batch_tokens": 7, "max_running": 4}),
    "with few pages": ({}, {"cache_tokens": 272, "max_running": 6}),
    "no prefix cache": ({"prefix_cache": False}, {"threads": 2}),
    "where it pays": ({"speculate_always": False}, {}),
}


SLOW = ("no prefix cache", "where it pays")
ASKED = (GREEDY, SAMPLED, GREEDY)  # the last time, pages of the answers can be found too


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[str, list[list[Answer]]]:
    """The fingerprint of the model without guesses, and its answers each time."""
    engine = engine_of(folder, {})
    return engine.executable.fingerprint, [answers(engine, PROMPTS, params) for params in ASKED]


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW else way for way in WAYS])
def test_the_bits_of_answers_do_not_depend_on_guesses(
    folder: Path, plain: tuple[str, list[list[Answer]]], way: str
) -> None:
    config, options = WAYS[way]
    fingerprint, expected = plain
    guessing = engine_of(folder, MTP | config, **options)
    assert guessing.executable.fingerprint == fingerprint
    for params, texts in zip(ASKED, expected, strict=True):
        assert answers(guessing, PROMPTS, params) == texts
    stats = guessing.stats()
    assert stats.drafts > 0 or way == "where it pays"
    assert stats.preemptions > 0 or way != "with few pages"
    assert guessing.state.cache.used == 0


def test_an_answer_with_a_form_beside_others_has_its_bits(tmp_path: Path) -> None:
    """It is not guessed for, but its pages are, and others find them."""
    folder = guessing_model(MIXED | {"vocab": 300}).save(tmp_path / "model")
    tokenizer = SpellingTokenizer()
    form = SamplingParams(temperature=0, max_tokens=20, constraint=Constraint.of_regex("[ab]{18}"))
    texts = []
    for config in ({}, MTP):
        engine = engine_of(folder, config)
        engine._tokenizer = lambda: tokenizer
        order = [engine.submit(PROMPTS[3], form), engine.submit(PROMPTS[3], GREEDY)]
        ids: dict[str, list[int]] = {name: [] for name in order}
        while engine.has_work:
            for event in engine.step():
                ids[event.request_id] += event.ids
        texts.append(([ids[name] for name in order], answers(engine, [PROMPTS[3] + ids[order[0]]], GREEDY)))
        assert bool(engine.stats().drafts) == bool(config)
    assert texts[0] == texts[1]
    assert len(texts[0][0][0]) > 8


def test_vectors_and_places_for_adapters_are_there_beside_guesses(tmp_path: Path) -> None:
    folder = guessing_model(MIXED).save(tmp_path / "model")
    texts = []
    for config, places in (({}, 0), (MTP, 1)):
        engine = engine_of(folder, config | {"max_adapters": places}, max_adapters=places)
        vector = engine.submit(PROMPTS[3], SamplingParams(pooling=Pooling(kind="mean")))
        answer = engine.submit(PROMPTS[3], GREEDY)
        events = []
        while engine.has_work:
            events += engine.step()
        (values,) = [event.vector for event in events if event.request_id == vector and event.vector]
        texts.append((values, [event.ids for event in events if event.request_id == answer and event.ids]))
        assert bool(engine.stats().drafts) == bool(config)
    (first, ids), (second, guessed) = texts
    assert first == second
    assert list(itertools.chain(*ids)) == list(itertools.chain(*guessed))


def test_what_is_guessed_is_what_the_layer_makes_of_the_whole_text(judge: GuessingModel, folder: Path) -> None:
    """In float32, of prompts in chunks, with prefixes that were found, pages taken away and answers side by side."""
    options = {
        "backend": "reference",
        "arithmetic": "plain",
        "cache_tokens": 208,
        "max_batch_tokens": 40,
        "max_model_len": 192,
    }
    engine = engine_of(folder, MTP | {"speculate_tokens": 2}, max_running=6, **options)
    made = watch_drafts(engine)
    two = SamplingParams(temperature=0, max_tokens=20, n=2, ignore_eos=True)
    for _ in range(2):
        answers(engine, PROMPTS[1:], two)
    assert engine.state.preemptions > 0
    assert engine.state.prefix_hits > 0
    assert len(made) > 8
    check_guesses(judge, made)


def test_a_page_that_an_answers_last_step_fills_is_whole(tmp_path: Path) -> None:
    """Whoever goes on from the answer finds it, and guesses from it."""
    judge = guessing_model(ATTENDING)
    options = {"backend": "reference", "arithmetic": "plain"}
    engine = engine_of(judge.save(tmp_path / "model"), MTP | {"speculate_tokens": 2}, **options)
    params = SamplingParams(temperature=0, max_tokens=PAGE_TOKENS, ignore_eos=True)
    text = PROMPTS[2]
    assert len(text) == PAGE_TOKENS + 1
    ((ids, _),) = answers(engine, [text], params)
    made, found = watch_drafts(engine), engine.state.prefix_hits
    answers(engine, [[*text, *ids, 3]], params)
    assert engine.state.prefix_hits - found == 2 * PAGE_TOKENS
    assert len(made) > 8
    check_guesses(judge, made)


def check_guesses(judge: GuessingModel, made: dict[tuple[int, ...], tuple[list[int], np.ndarray]]) -> None:
    for ids, (draft, logits) in made.items():
        expected, theirs = judge.guesses(list(ids), 2)
        assert np.abs(theirs[1] - logits).max() < 1e-4, f"behind {len(ids)} ids"
        assert draft == expected


def watch_drafts(engine: LocalEngine) -> dict[tuple[int, ...], tuple[list[int], np.ndarray]]:
    """Each text that two ids are drafted for from now on: these, and the logits of the second one."""
    made: dict[tuple[int, ...], tuple[list[int], np.ndarray]] = {}
    speculator = engine._stepper.speculator
    assert speculator is not None
    drafter = speculator.drafter
    assert isinstance(drafter, LayerDrafter)
    draft: Callable[[list[Sequence], list[int]], None] = drafter.draft

    def watched(sequences: list[Sequence], counts: list[int]) -> None:
        draft(sequences, counts)
        whole = [sequence for sequence in sequences if len(sequence.draft) == 2]
        for row, sequence in enumerate(whole):
            made[tuple(sequence.ids)] = list(sequence.draft), drafter.layer.logits()[row].copy()

    drafter.draft = watched  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(("sign", "acceptance"), [(1.0, 1.0), (-1.0, 0.0)])
def test_guesses_that_are_always_right_and_never(sign: float, acceptance: float, tmp_path: Path) -> None:
    """A model whose layers add nothing: an id follows from the one before it, which the layer sees as well; or, turned
    round, it takes the id that is the least likely."""
    judge = guessing_model(MIXED)
    with torch.no_grad():
        for name, parameter in [*judge.model.named_parameters(), *judge.layer.layers.named_parameters()]:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) or "norm" in name:
                parameter.zero_()
        width = MIXED["width"]
        joined = judge.layer.layers[0].eh_proj.weight
        joined.zero_()
        joined[:, :width] = sign * torch.eye(width)
    folder = judge.save(tmp_path / "model")
    engine, plain = engine_of(folder, MTP | {"speculate_tokens": 4}), engine_of(folder, {})
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    assert answers(engine, [[5, 6], [9]], params) == answers(plain, [[5, 6], [9]], params)
    stats = engine.stats()
    assert stats.acceptance == acceptance
    assert stats.steps == (5 if acceptance else 21)  # 1 id with the prompt, then 5 a step
