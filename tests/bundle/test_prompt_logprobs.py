"""Log-probabilities of a prompt are those of the model, as the slow reference in torch computes it at once."""

import pytest
from bundle_models import write_model

from roofline import LLM, SamplingParams
from roofline.bundle import load
from roofline.ops.batch import Segment

pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="the reference runs in torch")


def test_a_prompt_is_told_as_the_reference_has_it_whatever_the_chunks(tmp_path):
    folder = write_model(tmp_path / "model")
    prompt = [(37 * i) % 255 for i in range(150)]
    reference = load(str(folder), backend="reference", max_batch_tokens=150, max_running=150, cache_tokens=160)
    reference.executable.batch.fill([Segment(prompt, 0, range(10))], range(150))
    reference.executable.forward()
    expected = torch.log_softmax(torch.tensor(reference.executable.logits()), -1)  # [150, 300]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=4)
    loaded = load(str(folder), backend="cpu", threads=1, cache_tokens=2048, max_batch_tokens=256, max_running=256)
    told = []
    for tokens in (256, 23):
        llm = LLM(loaded, max_batch_tokens=tokens)
        llm.generate(prompt, SamplingParams(max_tokens=1))  # its pages are in the prefix cache
        (output,) = llm.generate(prompt, params)
        told.append(output.prompt_logprobs)
    llm.close()
    assert told[0] == told[1], "small chunks give the bits of a single one"
    assert told[0][0] is None
    assert [entry.id for entry in told[0][1:]] == prompt[1:]
    for row, entry in zip(expected, told[0][1:], strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.id]), abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
