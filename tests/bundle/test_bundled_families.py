"""Families with learned positions, relu, attention beside the MLP or over compressed keys and values, from a folder
to a bundle, and with company."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
pytest.importorskip("transformers", reason="it is what the logits are compared with")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.bundle import compile_model, load  # noqa: E402
from roofline.bundle.reader import open_bundle  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.engine.local import LocalEngine  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from tests.models.parity_cases import CASES, theirs  # noqa: E402

PROMPTS = [np.random.default_rng(seed).integers(0, 96, 12 + 9 * seed).tolist() for seed in range(3)]


@pytest.mark.parametrize(
    "name",
    [
        *("gpt_neox", "gpt2", "llama_heads_of_20", "opt_350m", "deepseek_v2_lite", "ministral3", "arcee"),
        *("exaone4_windows", "hunyuan", "glm4_moe", "mimo_v2_flash", "deepseek_v3", "minicpm3"),
    ],
)
def test_answers_with_company_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = theirs(CASES[name].config)
    model.save_pretrained(tmp_path / "model")
    loaded = load(str(tmp_path / "model"), text=False, cache_tokens=1024, max_model_len=128)
    engine = LocalEngine(loaded.executable)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers: dict[str, list[int]] = {engine.submit(prompt, greedy): [] for prompt in PROMPTS}
    while engine.has_work:
        for event in engine.step():
            answers[event.request_id] += event.ids
    for prompt, answer in zip(PROMPTS, answers.values(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].numpy()[len(prompt) - 1 : -1]
        lost = logits.max(-1) - logits[np.arange(8), answer]
        assert lost.max() < 0.02  # where another id was likelier, the two were nearly equal


def test_more_positions_are_multiplied_than_a_bundle_has_factors_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs(CASES["ministral3"].config).save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(1).integers(0, 96, 80).tolist()

    def logits_of(source: Path) -> bytes:
        executable = load(str(source), text=False, cache_tokens=1024, max_model_len=128).executable
        executable.batch.fill([Segment(ids, 0, range(5))], [79])
        executable.forward()
        return np.array(executable.logits()).tobytes()

    whole = compile_model(str(tmp_path / "model"), tmp_path / "whole").path
    monkeypatch.setattr("roofline.bundle.writer.MAX_POSITIONS", 16)
    short = compile_model(str(tmp_path / "model"), tmp_path / "short").path
    assert open_bundle(short).lowered.positions == 16
    assert logits_of(short) == logits_of(whole) == logits_of(tmp_path / "model")


def test_positions_that_a_table_does_not_have_are_refused(tmp_path: Path) -> None:
    theirs(CASES["opt"].config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="max_model_len=1025 is not between 1 and the model's 1024 positions"):
        load(str(tmp_path / "model"), text=False, cache_tokens=2048, max_model_len=1025)
