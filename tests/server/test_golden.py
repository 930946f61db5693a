"""The check on golden prompts catches planted faults that loading does not notice, falls back, and is shown."""

import asyncio
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roofline.backends.options import LoadOptions
from roofline.bundle import golden as reference
from roofline.bundle import load
from roofline.engine.golden import GoldenComparison, GoldenPrompt
from roofline.engine.local import LocalEngine
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.thread import engine_in_thread
from roofline.server import golden as module
from roofline.server.golden import SAFE, GoldenCheck, GoldenState
from tests.server.golden_faults import WEIGHTS, wrong_kernel, wrong_scale

LOAD = LoadOptions(weights=WEIGHTS, threads=1)
TEXT: Any = SimpleNamespace(
    tokenizer=SimpleNamespace(encode=lambda text, *, add_special: [ord(letter) % 96 for letter in text])
)


COMPUTED = reference._computed  # in a process of its own


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model without weights of its own. The reference is computed in this process, as another would import torch."""

    async def computed(task: reference.GoldenTask) -> bytes:
        file = io.BytesIO()
        np.save(file, reference.logits_of(task))
        return file.getvalue()

    monkeypatch.setattr(reference, "_computed", computed)
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_llama))
    return tmp_path / "model"


def outcome(source: Path, engine: RemoteEngine, options: LoadOptions = LOAD) -> GoldenState:
    """What the check of an engine comes to, which is started and closed around it."""
    state = GoldenState()

    async def run() -> None:
        await engine.start()
        try:
            check = GoldenCheck(state, engine, str(source), options)
            assert state.status == "pending"
            await check.run(TEXT)
        finally:
            await engine.close()

    asyncio.run(run())
    return state


def in_thread(source: Any) -> RemoteEngine:
    options = {} if not isinstance(source, str) else {"weights": WEIGHTS}
    return engine_in_thread(
        "tiny", LocalEngine(load(source, text=False, threads=1, cache_tokens=256, **options).executable)
    )


def test_a_right_model_passes(folder: Path) -> None:
    state = outcome(folder, in_thread(str(folder)))
    assert (state.status, state.problem, state.fallback) == ("passed", None, "")
    assert state.comparison is not None
    assert state.comparison.positions == 32
    assert 0 < state.comparison.kl < 0.005, "8-bit activations are not the reference's, and no fault either"


@pytest.mark.parametrize("tensor", ["layers.0.mlp.down.weight", "layers.1.attn.v.weight"])
def test_a_planted_wrong_scale_is_caught(folder: Path, tensor: str) -> None:
    state = outcome(folder, in_thread(wrong_scale(folder, tensor, 4)))
    assert state.status == "failed"
    assert state.comparison is not None
    assert not state.comparison.within
    assert str(state.comparison) in str(state.problem)


def test_a_planted_kernel_bug_is_caught(folder: Path) -> None:
    with wrong_kernel():
        engine = in_thread(str(folder))
    state = outcome(folder, engine)
    assert state.status == "failed"
    assert "cannot be loaded with portable kernels" in state.detail, "an engine of this process has no other"
    assert "The model does not compute what its file says: KL " in str(state.problem)
    assert "roofline compile" in str(state.problem)


def process(folder: Path) -> RemoteEngine:
    options = {"weights": WEIGHTS, "threads": 1, "text": False, "cache_tokens": 256}
    factory = "tests.server.golden_faults:load_with_wrong_kernel"
    return RemoteEngine(EngineSpec(source=str(folder), options=options, factory=factory), backoff=0.0)


@pytest.mark.slow
def test_a_wrong_kernel_is_replaced_by_the_portable_ones(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = outcome(folder, process(folder))
    assert (state.status, state.problem) == ("passed", None)
    assert state.comparison is not None
    assert state.comparison.within
    assert state.fallback.startswith("portable kernels and weights packed anew (slower), because: KL ")
    messages = [record.getMessage() for record in caplog.records if record.name == "roofline.server"]
    assert "the model is loaded again with portable kernels" in messages[0]
    assert "The engine runs with portable kernels" in messages[1]
    (error,) = [record.getMessage() for record in caplog.records if record.name == "roofline.engine"]
    assert error == "the model is loaded with other options, restart 1, 0 requests wait"


@pytest.mark.slow
def test_where_the_fall_back_is_wrong_too_the_check_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAFE", {**SAFE, "isa": None})
    state = outcome(folder, process(folder))
    assert state.status == "failed"
    assert "with portable kernels and weights packed anew" in state.detail


def test_logits_that_are_no_numbers_are_wrong(folder: Path) -> None:
    loaded = load(str(folder), text=False, threads=1, weights=WEIGHTS, cache_tokens=256)
    right = loaded.executable.logits
    loaded.executable.logits = lambda: np.full_like(right(), np.nan)  # type: ignore[method-assign]
    state = outcome(folder, engine_in_thread("tiny", LocalEngine(loaded.executable)))
    assert (state.status, state.comparison) == ("failed", None)
    assert "the engine gave no logits: no vector could be made" in state.detail


def test_without_a_reference_it_is_skipped_with_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MOST_WEIGHTS", 1000)
    state = outcome(folder, in_thread(str(folder)))
    assert (state.status, state.problem, state.comparison) == ("skipped", None, None)
    assert re.fullmatch(r"it has 0\.0 billion weights, and the reference is bounded to 0\.0", state.detail)


def test_without_torch_one_line_says_what_brings_the_reference_and_warns_of_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "roofline.server")
    monkeypatch.setattr(reference, "find_spec", lambda name: None)
    monkeypatch.setattr(reference, "_computed", COMPUTED)
    monkeypatch.setattr(reference, "_read", lambda *_: None)
    state = outcome(folder, in_thread(str(folder)))
    assert state.detail == "torch, which computes the reference, is not installed (pip install torch)"
    lines = [line for line in caplog.records if "golden" in line.getMessage()]
    assert [(line.levelname, line.getMessage()) for line in lines] == [
        ("INFO", f"golden prompts were not checked: {state.detail}")
    ]


def test_a_fault_of_the_check_itself_does_not_take_the_server_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "compare_row", lambda *_: 1 / 0)
    state = outcome(folder, in_thread(str(folder)))
    assert (state.status, state.problem) == ("skipped", None)
    assert "ZeroDivisionError" in state.detail


def test_it_computes_while_no_request_is_open_and_no_longer_waits_than_it_may() -> None:
    engine: Any = SimpleNamespace(outstanding=3)
    check = GoldenCheck(GoldenState(), engine, "tiny", LOAD)
    check._looks = 5

    async def looks() -> int:
        await check._idle()
        return check._looks

    module_seconds, module.LOOK_SECONDS = module.LOOK_SECONDS, 0.0
    try:
        assert asyncio.run(looks()) == 0
        engine.outstanding, check._looks = 0, 5
        assert asyncio.run(looks()) == 5
    finally:
        module.LOOK_SECONDS = module_seconds


def test_patience_is_of_the_whole_check() -> None:
    """The numbers that the documents tell."""
    assert (module.DELAY, module.LOOK_SECONDS, module.PATIENCE) == (20.0, 0.5, 600.0)
    assert GoldenCheck(GoldenState(), SimpleNamespace(), "tiny", LOAD)._looks == 1200  # type: ignore[arg-type]


def test_the_first_look_is_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    monkeypatch.setattr(module, "return_freed_memory", lambda: slept.append(-1.0))
    engine: Any = SimpleNamespace(description=SimpleNamespace(encoder=True))
    state = GoldenState()
    asyncio.run(GoldenCheck(state, engine, "tiny", LOAD).run(TEXT))
    assert slept == [20.0, -1.0]
    assert (state.status, "it has no logits to compare" in state.detail) == ("skipped", True)


def test_a_simulated_model_is_not_compared_and_stays_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        del seconds

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    engine: Any = SimpleNamespace(description=SimpleNamespace(encoder=False, max_model_len=64), outstanding=0)
    state = GoldenState()
    asyncio.run(GoldenCheck(state, engine, "tiny", LoadOptions(backend="simulated")).run(TEXT))
    assert (state.status, state.problem) == ("skipped", None)
    assert state.detail == "nothing is computed, so nothing can differ"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("worse", [4.0, float("nan")])
def test_of_several_engines_the_worst_is_told(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], worse: float
) -> None:
    """Engine 1 is right, engine 2 is not. A divergence that is no number is worse than any."""

    async def logits(engine: int, ids: Any) -> np.ndarray:
        return np.array([0.0, 1.0 if engine == 1 else worse], np.float32)

    monkeypatch.setattr(module, "_engines", lambda _: order)
    monkeypatch.setattr(module, "_logits", logits)
    state = GoldenState()
    check = GoldenCheck(state, SimpleNamespace(outstanding=0), "tiny", LOAD)  # type: ignore[arg-type]
    prompts = [GoldenPrompt((5, 6, 7), (0, 2))]
    problem = asyncio.run(check._compare(prompts, np.tile(np.float32([0.0, 1.0]), (2, 1))))
    assert state.comparison is not None
    assert problem == str(state.comparison)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (np.array([0.0, 1.0]), np.array([0.0, worse])))
    divergence = float((p * np.log(p / q)).sum())
    assert state.comparison.kl == pytest.approx(math.inf if math.isnan(divergence) else divergence)


def test_of_engines_that_are_equally_wrong_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position is computed while no request is open."""
    looks: list[int] = []

    async def logits(engine: int, ids: Any) -> int:
        return engine

    async def idle() -> None:
        looks.append(1)

    monkeypatch.setattr(module, "_engines", lambda _: (1, 2))
    monkeypatch.setattr(module, "_logits", logits)
    monkeypatch.setattr(module, "compare_row", lambda _, engine: (0.01, engine == 1))
    state = GoldenState()
    check = GoldenCheck(state, SimpleNamespace(), "tiny", LOAD)  # type: ignore[arg-type]
    check._idle = idle  # type: ignore[method-assign]
    prompts = [GoldenPrompt((5, 6, 7), (0, 2)), GoldenPrompt((5,), (0,))]
    problem = asyncio.run(check._compare(prompts, np.zeros((3, 2), np.float32)))
    assert state.comparison == GoldenComparison(pytest.approx(0.01), 1.0, 3)  # type: ignore[arg-type]
    assert "at 0% of 3 positions" in str(problem)
    assert len(looks) == 2 * 3


@pytest.mark.parametrize("helps", [True, False])
def test_the_fall_back_loads_all_engines_with_the_plainest_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, helps: bool
) -> None:
    reloaded: list[object] = []

    class Engine:
        async def reload(self, source: str, changes: dict[str, object]) -> None:
            reloaded.append((source, dict(changes)))

    async def compare(*_: Any) -> str | None:
        return None if helps else "KL 9"

    monkeypatch.setattr(module, "_engines", lambda _: (Engine(), Engine()))
    monkeypatch.setattr(reference, "forget_packed", reloaded.append)
    state = GoldenState()
    check = GoldenCheck(state, SimpleNamespace(), "tiny", LOAD)  # type: ignore[arg-type]
    check._compare = compare  # type: ignore[method-assign, assignment]
    task: Any = SimpleNamespace(source="the file")
    problem = asyncio.run(check._fall_back(task, [], np.zeros(0), "KL 7"))
    plainest = ("the file", {"isa": "portable", "tuned": False})
    assert reloaded == ["the file", plainest, plainest]
    assert state.fallback == "portable kernels and weights packed anew (slower), because: KL 7"
    assert problem == (None if helps else "KL 9, with portable kernels and weights packed anew")
    assert "golden prompts: KL 7; the model is loaded again with portable kernels" in caplog.text


@pytest.mark.parametrize(
    ("status", "fallback", "level", "words"),
    [
        ("passed", "", "INFO", "golden prompts: KL 0.01 nats"),
        ("passed", "plain kernels", "WARNING", "positions (at least 80%). The engine runs with plain kernels"),
        ("skipped", "", "WARNING", "golden prompts were not checked: too many"),
        ("failed", "", "ERROR", "The model does not compute what its file says: too many."),
        ("failed", "plain kernels", "ERROR", "The model does not compute what its file says: too many."),
    ],
)
def test_the_log_says_what_came_of_it(
    caplog: pytest.LogCaptureFixture, status: module.Status, fallback: str, level: str, words: str
) -> None:
    caplog.set_level("INFO", "roofline.server")
    state = GoldenState(comparison=GoldenComparison(0.01, 1.0, 32), fallback=fallback)
    check = GoldenCheck(state, SimpleNamespace(), "tiny", LOAD)  # type: ignore[arg-type]
    check._end(status, "too many")
    (line,) = caplog.records
    assert (line.levelname, state.status, state.detail) == (level, status, "too many")
    assert words in line.getMessage()


def golden_samples(text: str) -> dict[str, float]:
    lines = [
        line.split("{")[0::1] + line.rsplit(" ", 1)[1:]
        for line in text.splitlines()
        if line.startswith("roofline:golden")
    ]
    return {line[0]: float(line[-1]) for line in lines}


def test_ready_and_metrics_show_it(call: Callable[..., Any], make_context: Callable[..., Any]) -> None:
    state = GoldenState()
    context = make_context(golden=state)
    shown = call("GET", "/ready", context=context).json()["golden"]
    assert (shown["status"], shown["kl"], shown["positions"]) == ("off", None, 0)
    assert shown["thresholds"] == {"kl": 0.05, "top1_agreement": 0.8}
    assert golden_samples(call("GET", "/metrics", context=context).text) == {}
    state.status, state.comparison = "passed", GoldenComparison(0.01, 0.9375, 32)
    shown = call("GET", "/ready", context=context).json()["golden"]
    assert (shown["status"], shown["kl"], shown["top1_agreement"], shown["positions"]) == ("passed", 0.01, 0.9375, 32)
    samples = golden_samples(call("GET", "/metrics", context=context).text)
    assert list(samples.values()) == [0.01, 0.9375, 1.0, 0.0]
    state.fallback = "portable kernels"
    assert call("GET", "/ready", context=context).json()["golden"]["fallback"] == "portable kernels"
    assert golden_samples(call("GET", "/metrics", context=context).text)["roofline:golden_fallback"] == 1.0


def test_ready_is_503_beyond_the_thresholds(call: Callable[..., Any], make_context: Callable[..., Any]) -> None:
    state = GoldenState("failed", GoldenComparison(0.7, 0.03, 32), "KL 0.7 nats")
    context = make_context(golden=state)
    answer = call("GET", "/ready", context=context)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "golden_check_failed")
    assert answer.json()["error"]["message"].startswith("The model does not compute what its file says: KL 0.7 nats. ")
    assert golden_samples(call("GET", "/metrics", context=context).text)["roofline:golden_within_thresholds"] == 0.0
