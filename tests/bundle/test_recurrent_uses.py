"""Models with recurrent state on the cpu backend under what else an engine does: beam searches, a file that keeps the
prefix cache over a restart, receipts and recordings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline import LLM, BeamSearchParams
from roofline.cli.run import prepare
from roofline.engine.cache.page_file import LEAD
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from tests.bundle.receipt_server import ask_server
from tests.bundle.recurrent_models import write_recurrent
from tests.bundle.test_recurrent_answers import answers, engine_of
from tests.command_line import CommandResult, call_roofline

SIZES: dict[str, Any] = {"cache_tokens": 2048, "max_model_len": 512, "threads": 1}
PROMPT = np.random.default_rng(11).integers(0, 255, 200).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, digests=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("recurrent") / "model")


def test_beams_do_not_depend_on_what_is_found_nor_on_slots(model: Path) -> None:
    """Beams begin with the same snapshot, and each goes on from a state of its own."""
    params = BeamSearchParams(beam_width=3, max_tokens=8, logprobs=1, ignore_eos=True)
    prompts = [PROMPT[:70], PROMPT[:129]]
    found = []
    for options in ({"prefix_cache": False}, {}, {"max_running": 3, "state_slots": 4}):
        with LLM(model, **SIZES, **options) as llm:
            found.append(llm.beam_search(prompts, params))
            hits = llm.engine.state.snapshot_hits
            assert hits == 0 if "prefix_cache" in options else hits > 20
            assert llm.engine.state.slots is not None
            assert llm.engine.state.slots.used == 0
    assert found[0] == found[1] == found[2]
    assert len({tuple(answer.ids) for answer in found[0][0].answers}) == 3


@pytest.mark.slow
def test_beams_are_those_of_transformers(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain, prompt = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), PROMPT[:75]
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "do_sample": False}
    ids = torch.tensor([prompt])
    theirs = plain.generate(
        ids, attention_mask=torch.ones_like(ids), eos_token_id=299, pad_token_id=299, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    with LLM(model, backend="reference", arithmetic="plain", **SIZES) as llm:
        params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True, stop_token_ids=(299,))
        (found,) = llm.beam_search(prompt, params)
    assert [answer.score for answer in found.answers] == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-5)
    assert [answer.ids for answer in found.answers] == theirs.sequences[:, len(prompt) :].tolist()


def test_a_restart_finds_pages_and_states_in_the_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pages"
    alone = engine_of(model, EngineConfig(prefix_cache=False), **SIZES)
    (wanted,) = answers(alone, [PROMPT[:150]], GREEDY)
    further = [*PROMPT[:150], *wanted[0], 7]
    (wanted_further,) = answers(alone, [further], GREEDY)

    def life(prompt: list[int], **options: Any) -> tuple[Any, int]:
        """What one engine with the file answers, and how many of the prompt's tokens it found."""
        engine = engine_of(model, EngineConfig(cache_file=str(file)), **{**SIZES, **options})
        (answer,) = answers(engine, [prompt], GREEDY)
        found = engine.state.prefix_hits
        assert engine.state.snapshot_hits == (found > 0)
        engine.close()
        return answer, found

    assert life(PROMPT[:150]) == (wanted, 0)
    assert life(PROMPT[:150]) == (wanted, 128)  # the last multiple of 64 in the prompt: pages reach further
    assert life(further) == (wanted_further, 192)  # that of the answer
    assert life(PROMPT[:150], state_slots=2, max_running=2)[0] == wanted
    data = bytearray(file.read_bytes())
    data[-40] ^= 1  # within the last snapshot, which was used least recently
    file.write_bytes(data)
    assert life(PROMPT[:150])[0] == wanted
    assert LEAD.unpack(data[: LEAD.size])[1] == 2


BODY = {
    "model": "small", "prompt": ["a quick brown fox, " * 8, "b"], "n": 2, "seed": 4, "max_tokens": 12, "receipt": True,
}  # fmt: skip


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_receipts_are_computed_again_to_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculate: str
) -> None:
    """What a server computed in small chunks with guesses, in other chunks with and without them."""
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs
    same = verified(model, tmp_path, ask_server(model, BODY)[0], "--threads", 1, "--speculate", speculate)
    assert (same.exit_code, same.stdout[:41]) == (0, "The same bits: 4 answers, 48 steps. The t"), same.output


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_receipts_of_ranks_are_computed_again_by_as_many(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculate: str
) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)
    (answer,) = ask_server(model, BODY, ranks=2)
    same = verified(model, tmp_path, answer, "--threads", 2, "--speculate", speculate, "--tensor-parallel", 2)
    assert (same.exit_code, same.stdout[:41]) == (0, "The same bits: 4 answers, 48 steps. The t"), same.output
    other = verified(model, tmp_path, answer, "--threads", 1)  # sums of one process are in another order
    assert other.exit_code == 3
    assert "or number of ranks are not" in other.stdout, other.output


def verified(model: Path, folder: Path, answer: dict[str, Any], *options: object) -> CommandResult:
    """What `roofline verify` says of an answer to BODY."""
    for name, content in (("answer", answer), ("body", BODY)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    fixed = ["--request", folder / "body.json", "-m", model, "--cache-tokens", 512]
    return call_roofline(["verify", folder / "answer.json", *fixed, *options])


@pytest.mark.parametrize("guessing", [{}, {"speculate": "ngram", "speculate_always": True}], ids=["off", "ngram"])
def test_recordings_are_replayed_to_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guessing: dict[str, Any]
) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: None)  # measures roofs
    params = SamplingParams(max_tokens=30, seed=1, n=2)
    with LLM(model, record=str(tmp_path / "steps"), record_ids=True, **SIZES, **guessing) as llm:
        for _ in range(2):
            llm.generate(["a quick brown fox, " * 8, "a quick brown fox, " * 7 + "b"], params)
        assert llm.engine.state.snapshot_hits > 2
    same = call_roofline(["replay", tmp_path / "steps", "-m", model, "--threads", 1])
    assert (same.exit_code, "The same bits in" in same.stdout) == (0, True), same.output
