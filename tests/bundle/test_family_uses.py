"""Models without attention, and of attention over compressed rows, under what an engine does beside answering: a file
that keeps the prefix cache over a restart, receipts and recordings."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the models come from transformers")
pytest.importorskip("transformers", reason="it makes the models")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline import LLM
from roofline.cli.run import prepare
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from tests.bundle.receipt_server import ask_server
from tests.bundle.recurrent_models import write_words
from tests.bundle.test_recurrent_answers import answers, engine_of
from tests.bundle.test_recurrent_uses import BODY, GREEDY, PROMPT, SIZES, verified
from tests.command_line import call_roofline
from tests.models.parity_cases import CASES, theirs

FOUND = {"mamba": 128, "deepseek_v3": 144}  # of 150 tokens: whole snapshots, of 64 tokens, and whole pages, of 16


@pytest.fixture(scope="module", params=FOUND)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(name) / "model"
    made = theirs(CASES[name].config | {"vocab": 300})
    made.config.bos_token_id, made.config.eos_token_id = 256, 257
    made.save_pretrained(folder)
    return write_words(folder)


def test_a_restart_finds_in_the_file_what_was_computed(model: Path, name: str, tmp_path: Path) -> None:
    alone = engine_of(model, EngineConfig(prefix_cache=False), **SIZES)
    (wanted,) = answers(alone, [PROMPT[:150]], GREEDY)
    for found in (0, FOUND[name]):
        engine = engine_of(model, EngineConfig(cache_file=str(tmp_path / "pages")), **SIZES)
        assert answers(engine, [PROMPT[:150]], GREEDY) == [wanted]
        assert engine.state.prefix_hits == found
        engine.close()


def test_receipts_are_computed_again_to_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs
    (answer,) = ask_server(model, BODY)
    same = verified(model, tmp_path, answer, "--threads", 1)
    assert (same.exit_code, same.stdout[:41]) == (0, "The same bits: 4 answers, 48 steps. The t"), same.output
    text = answer["choices"][0]["text"]
    answer["choices"][0]["text"] = text[:-1] + ("x" if text[-1] != "x" else "y")
    assert verified(model, tmp_path, answer, "--threads", 1).exit_code


def test_recordings_are_replayed_to_the_same_bits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)
    guessing: dict[str, Any] = {"speculate": "ngram", "speculate_always": True}
    with LLM(model, record=str(tmp_path / "steps"), record_ids=True, **SIZES, **guessing) as llm:
        for _ in range(2):
            llm.generate(
                ["a quick brown fox, " * 8, "a quick brown fox, " * 7 + "b"], SamplingParams(max_tokens=20, n=2)
            )
        assert llm.engine.state.prefix_hits > 0
    same = call_roofline(["replay", tmp_path / "steps", "-m", model, "--threads", 1])
    assert (same.exit_code, "The same bits in" in same.stdout) == (0, True), same.output
