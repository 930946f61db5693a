"""The real model: ids and log-probabilities with drafts are those without, whoever drafts, and the server tells."""

from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")

from e2e_serving import serving

from roofline import LLM, SamplingParams
from roofline.bundle import LoadedModel, load
from roofline.common.errors import ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LINE = "The gate counts the bytes of each request, and the gate closes before the bytes run out. "
PROMPTS = [
    [{"role": "user", "content": f"Write this text three times:\n\n{LINE}"}],
    [{"role": "user", "content": f"Replace gate by door.\n\n{LINE * 26}"}],  # up to position 512 and over
    [{"role": "user", "content": "List the numbers from one to thirty."}],
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "n": 2},
    {"temperature": 0.7, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.2},
    {"temperature": 0.4, "seed": 5, "top_k": 40, "min_tokens": 30, "logit_bias": {30: 2.0}},
]


ALL = [(i, j) for i in range(len(PROMPTS)) for j in range(len(SETTINGS))]


def part(answers: dict, chosen: list[tuple[int, int]]) -> dict:
    """The answers to some of the requests."""
    names = {f"{i}.{j}" for i, j in chosen}
    return {key: answer for key, answer in answers.items() if key[0] in names}


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> LoadedModel:
    return load(str(smollm2_path), cache_tokens=8192, max_model_len=1024, max_running=32, draft_tokens=6)


def small(path: Path, **options: Any) -> LoadedModel:
    return load(str(path), cache_tokens=8192, max_running=32, max_batch_tokens=128, **options)


def run(model: LoadedModel, draft: Any = None, chosen: Any = ALL, **config: Any) -> tuple[dict, Any]:
    """(ids, log-probabilities) of every answer, all requests at once, and the engine's statistics."""
    engine = LocalEngine(model.executable, EngineConfig(speculate_tokens=6, **config), draft)
    assert model.tokenizer is not None
    assert model.chat_template is not None
    answers: dict[tuple[str, int], tuple[list, list]] = {}
    for i, j in chosen:
        ids = model.chat_template.encode_chat(model.tokenizer, PROMPTS[i])
        params = SamplingParams(max_tokens=48, logprobs=5, **SETTINGS[j])
        engine.submit(ids, params, eos_ids=model.tokenizer.eos_ids, request_id=f"{i}.{j}")
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            answer = answers.setdefault((event.request_id, event.index), ([], []))
            answer[0].extend(event.ids)
            answer[1].extend(event.logprobs)
    return answers, engine.stats()


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> dict:
    return run(loaded)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{}, pytest.param({"max_batch_tokens": 64, "prefix_cache": False, "max_running": 4}, marks=pytest.mark.soak)],
)
def test_ngram(loaded: LoadedModel, plain: dict, config: dict) -> None:
    answers, stats = run(loaded, speculate="ngram", speculate_always=True, **config)
    assert answers == plain
    assert stats.accepted_tokens > 100


@pytest.mark.slow
def test_ngram_that_decides_by_itself(loaded: LoadedModel, plain: dict) -> None:
    answers, stats = run(loaded, speculate="ngram", max_running=2)
    assert answers == plain
    assert stats.drafts + stats.drafts_held > 0


@pytest.mark.slow
def test_the_model_as_its_own_draft(loaded: LoadedModel, plain: dict, smollm2_path: Path) -> None:
    draft = small(smollm2_path, text=False)
    answers, stats = run(loaded, draft.executable, speculate="draft", speculate_always=True)
    assert answers == plain
    assert stats.acceptance > 0.9, "what is drafted after the end of an answer is in vain"


@pytest.mark.slow
@pytest.mark.soak
def test_a_draft_of_random_weights(loaded: LoadedModel, plain: dict, smollm2_path: Path) -> None:
    draft = small(smollm2_path, text=False, weights="random:1")
    some = [(2, 0), (2, 1)]
    answers, stats = run(loaded, draft.executable, some, speculate="draft", speculate_always=True)
    assert answers == part(plain, some)
    assert stats.acceptance < 0.2


@pytest.mark.slow
def test_the_8_bit_cache(smollm2_path: Path, plain: dict) -> None:
    some = [(0, 0), (0, 2), (1, 0), (2, 1)]
    model = small(smollm2_path, kv_cache_dtype="int8", max_model_len=1024, draft_tokens=6)
    wanted = run(model, chosen=some)[0]
    assert wanted != part(plain, some)
    for draft, name in ((None, "ngram"), (small(smollm2_path, kv_cache_dtype="int8", text=False).executable, "draft")):
        answers, stats = run(model, draft, some, speculate=name, speculate_always=True)
        assert answers == wanted
        assert stats.accepted_tokens > 30


@pytest.mark.slow
def test_pre_emption_amid_drafts(smollm2_path: Path, plain: dict) -> None:
    tight = load(str(smollm2_path), cache_tokens=256, max_model_len=160, max_running=32, draft_tokens=6)
    short = [(i, j) for i, j in ALL if i != 1]
    answers, stats = run(tight, None, short, speculate="ngram", speculate_always=True, prefix_cache=False)
    assert answers == part(plain, short)
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 50


@pytest.mark.slow
def test_in_python(loaded: LoadedModel, smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    ids = LLM(loaded).chat(PROMPTS[0], params).ids
    with LLM(str(smollm2_path), draft=str(smollm2_path), speculate="draft", speculate_always=True) as llm:
        assert llm.chat(PROMPTS[0], params).ids == ids
        assert llm.stats().acceptance > 0.9


def test_another_vocabulary_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    from dataclasses import replace

    from roofline.bundle import check_draft
    from roofline.text.tokenizers.tokenizer import Tokenizer

    assert loaded.tokenizer is not None
    vocabulary = loaded.tokenizer.vocabulary
    tokens = list(vocabulary.tokens)
    tokens[300], tokens[301] = tokens[301], tokens[300]
    other = replace(loaded, name="other", path=Path("other"), tokenizer=Tokenizer(replace(vocabulary, tokens=tokens)))
    with pytest.raises(ConfigError, match=r"other cannot draft for .*: id 300 is b"):
        check_draft(loaded, other)
    check_draft(loaded, replace(loaded, path=Path("a copy")))


@pytest.mark.slow
def test_served(environment: dict[str, str], model: Path, loaded: LoadedModel) -> None:
    body = {"model": "small", "messages": PROMPTS[0], "temperature": 0, "max_tokens": 100}
    texts = []
    for options in (("--speculate", "ngram", "--speculate-tokens", "6"), ()):
        with serving(environment, model, "--cache-tokens", "4096", *options) as served:
            answers = [
                httpx.post(f"{served.address}/v1/chat/completions", json=body, timeout=60).json() for _ in range(2)
            ]
            stats, metrics = served.stats(), served.get("/metrics").text
            texts += [(a["choices"][0]["message"]["content"], a["usage"], a["system_fingerprint"]) for a in answers]
        if options:
            assert stats["drafts"] + stats["drafts_held"] > 0
            assert (stats["acceptance"] is None) == (stats["drafts"] == 0)
            count = f'vllm:spec_decode_num_accepted_tokens_total{{model_name="small"}} {stats["accepted_tokens"]:.1f}'
            assert count in metrics
        else:
            assert stats["acceptance"] is None
            assert 'vllm:spec_decode_num_draft_tokens_total{model_name="small"} 0.0' in metrics
    assert [t[0] for t in texts] == [texts[0][0]] * 4
    assert len({fingerprint for *_, fingerprint in texts}) == 1
    assert len({usage["completion_tokens"] for _, usage, _ in texts}) == 1
