"""Models whose layers keep recurrent state, on the cpu backend under the engine: the same request has the same bits,
however its prompt was cut, found, guessed, pre-empted or copied."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.stream import EventStream
from tests.models.parity_cases import CASES, theirs

VOCAB, TOKENS = 96, 40


def prompts() -> list[list[int]]:
    """Texts with beginnings in common that end around multiples of 64, some of which repeat themselves."""
    random = np.random.default_rng(7)
    common = random.integers(0, VOCAB, 150).tolist()
    lengths = (3, 63, 64, 65, 127, 128, 129, 150)
    texts = [common[:length] for length in lengths]
    texts += [common[:100] + random.integers(0, VOCAB, 70).tolist(), [5, 6, 7, 8] * 40]
    return texts


PROMPTS = prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, digests=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=TOKENS, ignore_eos=True, digests=True)
Answer = tuple[tuple[int, ...], tuple[bytes, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent") / "model"
    theirs(CASES["qwen3_5_groups"].config).save_pretrained(folder)
    return folder


def answers(
    engine: LocalEngine, texts: list[list[int]], params: SamplingParams, adapters: Sequence[str] = ()
) -> list[Answer]:
    """What an engine answers to prompts that come together: ids, and the digest of each id's logits. adapters: of each,
    by its digest."""
    names = adapters or [""] * len(texts)
    order = [engine.submit(text, params, adapter=name) for text, name in zip(texts, names, strict=True)]
    ids: dict[tuple[str, int], list[int]] = {}
    digests: dict[tuple[str, int], list[bytes]] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            place = event.request_id, event.index
            ids.setdefault(place, []).extend(event.ids)
            digests.setdefault(place, []).extend(event.digests or [])
    return [(tuple(ids[name, i]), tuple(digests[name, i])) for name in order for i in range(params.n)]


def engine_of(model: Path, config: EngineConfig, **options: Any) -> LocalEngine:
    sizes = {"cache_tokens": 4096, "max_model_len": 512, **options}
    loaded = load(str(model), config.prepare_load(LoadOptions(**sizes)), text=False)
    return LocalEngine(loaded.executable, config)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[Answer]]:
    """Each prompt by itself, with nothing to find and nothing guessed."""
    engine = engine_of(model, EngineConfig(prefix_cache=False))
    return {
        name: [answers(engine, [text], params)[0] for text in PROMPTS]
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
    }


GUESSING = {"speculate": "ngram", "speculate_always": True}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": ({}, {}),
    "in chunks of 7": ({}, {"max_batch_tokens": 7, "max_running": 4}),
    "in chunks of 48": ({}, {"max_batch_tokens": 48}),
    "with few slots": ({}, {"state_slots": 5, "max_running": 3}),
    "with few pages": ({}, {"cache_tokens": 640, "max_running": 6}),
    "guessing": (GUESSING, {}),
    "guessing, few slots and pages": (GUESSING, {"state_slots": 7, "max_running": 4, "cache_tokens": 768}),
    "no prefix cache": ({"prefix_cache": False}, {}),
    "one thread": ({}, {"threads": 1}),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "in chunks of 7" else ()) for way in WAYS]
)
def test_the_bits_of_an_answer_do_not_depend_on_how_it_is_computed(
    model: Path, alone: dict[str, list[Answer]], way: str
) -> None:
    config, options = WAYS[way]
    engine = engine_of(model, EngineConfig(**config), **options)
    for _ in range(2):  # the second time what is there may be found
        assert answers(engine, PROMPTS, GREEDY) == alone["greedy"]
    assert answers(engine, PROMPTS[::-1], SAMPLED) == alone["sampled"][::-1]
    if engine.config.prefix_cache:
        assert engine.state.snapshot_hits > 0
    assert engine.state.cache.used == 0
    assert engine.state.slots is not None
    assert engine.state.slots.used == 0


# Convolutions, Mamba and Mamba-2 in every run; others have the same layers.
@pytest.mark.parametrize(
    "name",
    [
        *("lfm2_moe", "mamba", "granitemoehybrid"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mamba2_groups", "nemotron_h_moe", "falcon_h1", "jamba", "bamba")
        ),
    ],
)
def test_layers_of_other_kinds_keep_their_bits(name: str, tmp_path: Path) -> None:
    """One short case of each: cut into chunks, found, guessed and pre-empted, beside each by itself."""
    theirs(CASES[name].config).save_pretrained(tmp_path / "model")
    plain = engine_of(tmp_path / "model", EngineConfig(prefix_cache=False))
    texts = [PROMPTS[at] for at in (0, 5, 8, 9)]
    alone = [answers(plain, [text], GREEDY)[0] for text in texts]
    options = {"max_running": 3, "cache_tokens": 768, "max_batch_tokens": 48}
    engine = engine_of(tmp_path / "model", EngineConfig(**GUESSING), **options)
    for _ in range(2):  # the second time what is there may be found
        assert answers(engine, texts, GREEDY) == alone
    assert engine.state.snapshot_hits > 0


def test_an_answer_that_comes_back_as_a_prompt_goes_on_with_its_bits(
    model: Path, alone: dict[str, list[Answer]]
) -> None:
    """In the middle of it, at each place around a snapshot of the answer."""
    engine = engine_of(model, EngineConfig())
    longer = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, digests=True)
    (ids, digests), text = answers(engine, [PROMPTS[4]], longer)[0], PROMPTS[4]
    for cut in (1, 63, 64, 65, 66, 90):
        rest = SamplingParams(temperature=0, max_tokens=100 - cut, ignore_eos=True, digests=True)
        assert answers(engine, [text + list(ids[:cut])], rest) == [(ids[cut:], digests[cut:])]
    assert engine.state.snapshot_hits >= 5


def test_answers_of_one_request_read_the_state_of_its_prompt(model: Path) -> None:
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=TOKENS, ignore_eos=True, digests=True)
    shared, apart = (engine_of(model, EngineConfig(prefix_cache=found)) for found in (True, False))
    assert answers(shared, PROMPTS, several) == answers(apart, PROMPTS, several)
    assert shared.state.snapshot_hits >= 2 * sum(len(text) > 64 for text in PROMPTS)


@pytest.mark.parametrize("config", [{}, GUESSING], ids=["plain", "guessing"])
def test_answers_go_on_with_their_bits_when_the_engine_process_is_killed(
    model: Path, alone: dict[str, list[Answer]], config: dict[str, Any]
) -> None:
    loaded = EngineConfig(**config).prepare_load(LoadOptions(cache_tokens=4096, max_model_len=512))
    options = {"cache_tokens": 4096, "max_model_len": 512, "draft_tokens": loaded.draft_tokens, "text": False}
    spec = EngineSpec(source=str(model), options=options, config=EngineConfig(**config))

    async def collect(stream: EventStream, kill: int = 0) -> Answer:
        ids: list[int] = []
        digests: list[bytes] = []
        async for event in stream:
            ids += event.ids
            digests += event.digests or []
            if kill and len(ids) > TOKENS // 2:
                os.kill(kill, signal.SIGKILL)
                kill = 0
        return tuple(ids), tuple(digests)

    async def run() -> None:
        engine = RemoteEngine(spec, backoff=0.01)
        await engine.start()
        try:
            streams = [await engine.submit(text, GREEDY) for text in PROMPTS[:6]]
            kills = [engine.pid, *[0] * 5]
            assert await asyncio.gather(*map(collect, streams, kills)) == alone["greedy"][:6]
            assert engine.restarts == 1
        finally:
            await engine.close()

    asyncio.run(run())


def test_the_next_engine_finds_state_alone_in_a_file(tmp_path: Path) -> None:
    """Of a model that keeps no pages."""
    theirs(CASES["mamba"].config).save_pretrained(tmp_path / "model")
    config = EngineConfig(cache_file=str(tmp_path / "file"))
    texts = [PROMPTS[at] for at in (5, 8)]
    lives, hits = [], []
    for _ in range(2):
        engine = engine_of(tmp_path / "model", config)
        lives.append([answers(engine, [text], GREEDY)[0] for text in texts])
        hits.append(engine.state.snapshot_hits)
        engine.close()
    assert lives[0] == lives[1]
    assert hits[1] > hits[0]
