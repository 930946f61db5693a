"""A beam search finds what transformers' `generate` finds with the same weights."""

import pytest
from bundle_models import write_model

from roofline import LLM, BeamSearchParams

pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="transformers' model runs in torch")
transformers = pytest.importorskip("transformers", reason="the comparison needs transformers' search")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beams_are_those_of_transformers(tmp_path, early, penalty):
    folder = write_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [(37 * i) % 255 for i in range(40)]
    ends = list(range(0, 300, 60))  # many, so that answers end before the greatest length
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 24, "do_sample": False}
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), eos_token_id=ends, pad_token_id=299, length_penalty=penalty,
        early_stopping=early, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    with LLM(folder, backend="cpu", threads=1, cache_tokens=2048) as llm:
        params = BeamSearchParams(
            beam_width=4, max_tokens=24, length_penalty=penalty, early_stopping=early, ignore_eos=True,
            stop_token_ids=tuple(ends),
        )  # fmt: skip
        (found,) = llm.beam_search(prompt, params)
    assert [answer.score for answer in found.answers] == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-3)
    for answer, sequence in zip(found.answers, theirs.sequences.tolist(), strict=True):
        padded = sequence[len(prompt) :]
        assert answer.ids == padded[: len(answer.ids)]
        assert set(padded[len(answer.ids) :]) <= {299}
