"""The real model: ids and logits do not depend on company, chunks, cached prefixes, pre-emption or threads."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.backends.sampling import Sampled, SampleRows
from roofline.bundle import LoadedModel, load
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams

pytestmark = pytest.mark.e2e


@dataclass
class Asked:
    """A request: its seed tells its rows apart."""

    ids: list[int]
    params: SamplingParams


def requests() -> list[Asked]:
    """64 of mixed lengths, half of them behind one of two shared prefixes; greedy and sampled in turn."""
    rng = np.random.default_rng(20)
    prefixes = [rng.integers(20, 40000, n).tolist() for n in (50, 130)]
    made = []
    for i in range(64):
        own = rng.integers(20, 40000, int(rng.integers(1, 200))).tolist()
        ids = own if i % 2 else prefixes[i % 4 // 2] + own[:40]
        settings: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 50, "repetition_penalty": 1.1},
            {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.3},
        ]
        params = SamplingParams(seed=1000 + i, max_tokens=4 + i * 7 % 40, ignore_eos=True, **settings[i % 4])
        made.append(Asked(ids, params))
    return made


class Recorder:
    """An executable that keeps a digest of each logit row by (seed, position)."""

    def __init__(self, executable: Any) -> None:
        self.inner, self.digests = executable, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(self, rows: SampleRows) -> Sampled:
        for row, key in zip(
            self.inner.logits(), zip(rows.seed.tolist(), rows.position.tolist(), strict=True), strict=True
        ):
            digest = hashlib.sha256(row.tobytes()).digest()
            assert self.digests.setdefault(key, digest) == digest, f"the logits of {key} changed within one run"
        return self.inner.sample(rows)


def run(model: LoadedModel, asked: list[Asked], at_once: bool, **config: Any) -> tuple[dict[str, list[int]], dict, Any]:
    recorder = Recorder(model.executable)
    engine = LocalEngine(recorder, EngineConfig(**config))
    ids: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    for i, request in enumerate(asked):
        engine.submit(request.ids, request.params, request_id=str(i))
        while engine.has_work and not at_once:
            collect(engine, ids)
    while engine.has_work:
        collect(engine, ids)
    return ids, recorder.digests, engine.stats()


def collect(engine: LocalEngine, ids: dict[str, list[int]]) -> None:
    for event in engine.step():
        assert event.error is None
        ids[event.request_id] += event.ids


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    """With one thread, which the soak run compares with two (`test_forced_preemption`)."""
    return load(str(smollm2_path), text=False, cache_tokens=24000, max_model_len=1024, threads=1)


# By default the first 8 requests, which have all prefixes and settings, and at most 9 tokens of their answers: some end
# within a page, some in a next one. The soak run has all.
@pytest.fixture(
    scope="module",
    params=[8, pytest.param(64, marks=[pytest.mark.slow, pytest.mark.soak])],
)
def asked(request: pytest.FixtureRequest) -> list[Asked]:
    some = requests()[: request.param]
    if request.param == 8:
        for each in some:
            each.params = replace(each.params, max_tokens=min(each.params.max_tokens, 9))
    return some


@pytest.fixture(scope="module")
def alone(model: LoadedModel, asked: list[Asked]) -> tuple[dict[str, list[int]], dict]:
    ids, digests, _ = run(model, asked, at_once=False, prefix_cache=False)
    assert all(len(ids[str(i)]) == r.params.max_tokens for i, r in enumerate(asked))
    return ids, digests


@pytest.mark.parametrize(
    ("chunk", "prefix_cache"),
    [
        (16, True),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in ((64, False), (64, True), (512, False), (512, True))),
        pytest.param(16, False, marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_all_at_once(model: LoadedModel, asked: list[Asked], alone: tuple, chunk: int, prefix_cache: bool) -> None:
    ids, digests, _ = run(model, asked, True, max_batch_tokens=chunk, prefix_cache=prefix_cache)
    assert ids == alone[0]
    assert digests == alone[1]


@pytest.mark.slow
def test_prefix_hits(model: LoadedModel, asked: list[Asked], alone: tuple) -> None:
    count, twice = len(asked), asked + asked
    recorder = Recorder(model.executable)
    engine = LocalEngine(recorder, EngineConfig(prefix_cache=True))
    ids: dict[str, list[int]] = {str(i): [] for i in range(len(twice))}
    for i, request in enumerate(twice):
        engine.submit(request.ids, request.params, request_id=str(i))
        while engine.has_work:
            collect(engine, ids)
    assert engine.stats().prefix_hits > 3000 * count // 64
    assert [ids[str(i)] for i in range(count)] == [ids[str(i + count)] for i in range(count)]
    assert {str(i): ids[str(i)] for i in range(count)} == alone[0]
    assert recorder.digests == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_forced_preemption(smollm2_path: Path, asked: list[Asked], alone: tuple, threads: int) -> None:
    if len(asked) < 24:
        pytest.skip("so few requests fit the smallest cache")
    small = load(str(smollm2_path), text=False, cache_tokens=420, max_model_len=400, threads=threads)
    ids, digests, stats = run(small, asked, True, max_batch_tokens=64, prefix_cache=False)
    assert stats.preemptions > 0
    assert ids == alone[0]
    assert digests == alone[1]


@pytest.mark.slow
def test_lower_instruction_set(smollm2_path: Path, asked: list[Asked], alone: tuple) -> None:
    from roofline import _native

    if "avx2" not in _native.isas():
        pytest.skip("this chip has no AVX2")
    lower = load(str(smollm2_path), text=False, cache_tokens=8000, max_model_len=512, isa="avx2")
    ids, digests, _ = run(lower, asked, True)
    assert ids == alone[0]
    assert digests == alone[1]


@pytest.mark.slow
def test_the_8_bit_cache(smollm2_path: Path, alone: tuple) -> None:
    options: dict[str, Any] = {"text": False, "kv_cache_dtype": "int8", "max_model_len": 400}
    some = [requests()[i] for i in (0, 2, 3, 4, 9, 16, 20, 28)]
    roomy, small = (load(str(smollm2_path), cache_tokens=tokens, **options) for tokens in (8000, 420))
    ids, digests, _ = run(roomy, some, at_once=False, prefix_cache=False)
    assert not set(digests.values()) & set(alone[1].values())
    for model, config in (
        (roomy, {"prefix_cache": True}),
        (roomy, {"max_batch_tokens": 16, "prefix_cache": False}),
        (small, {"max_batch_tokens": 512, "prefix_cache": True}),
    ):
        got, rows, stats = run(model, some + some, True, **config)
        assert [got[str(i)] for i in range(2 * len(some))] == 2 * list(ids.values())
        assert rows == digests
        assert (stats.prefix_hits > 0) == config["prefix_cache"]
        assert (stats.preemptions > 0) == (model is small)
