"""Vectors of a model from memory: against transformers, and the same bits in any company."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are transformers'")

import torch_models as models  # noqa: E402

from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.engine.pooling import Pooling, embedding, vector_numbers  # noqa: E402
from roofline.torch import from_model  # noqa: E402

KINDS = ("last", "mean")


def vectors(engine, prompts, kind):
    params = SamplingParams(temperature=0, pooling=Pooling(kind, (3, 250) if kind == "logits" else ()))
    names, found = [engine.submit(ids, params) for ids in prompts], {}
    while engine.has_work:
        found |= {event.request_id: event.vector for event in engine.step() if event.vector is not None}
    return [found[name] for name in names]


@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_vectors_equal_those_of_transformers(name):
    model, input_ids = models.build(name), models.ids(40)
    with torch.no_grad():
        out = model(input_ids[None], output_hidden_states=True)
    hidden = out.hidden_states[-1][0].double().numpy()  # [tokens, width], after the final norm
    expected = {"last": hidden[-1], "mean": hidden.mean(0)}
    for options, tolerance in (({"backend": "reference", "arithmetic": "plain"}, 1e-5), ({"threads": 1}, 2e-2)):
        with from_model(model, cache_tokens=512, **options) as ours:
            for kind in KINDS:
                (vector,) = vectors(ours.engine, [input_ids.tolist()], kind)
                length_one = expected[kind] / np.linalg.norm(expected[kind])
                np.testing.assert_allclose(embedding(vector), length_one, atol=tolerance)
            (logits,) = vectors(ours.engine, [input_ids.tolist()], "logits")
            theirs = out.logits[0, -1, [3, 250]].numpy()
            np.testing.assert_allclose(vector_numbers(logits), theirs, atol=20 * tolerance)


def test_chunks_company_and_shared_pages_change_no_bit():
    model, shared = models.build("llama"), models.ids(32, seed=7).tolist()
    prompts = [shared + models.ids(count, seed=count).tolist() for count in (1, 3, 90, 40)]
    with from_model(model, cache_tokens=1024, threads=1, prefix_cache=False) as ours:
        alone = {kind: [vectors(ours.engine, [ids], kind)[0] for ids in prompts] for kind in (*KINDS, "logits")}
    with from_model(model, cache_tokens=1024, threads=1, max_batch_tokens=24, max_running=6) as ours:
        for kind in (*KINDS, "logits"):
            ours.engine.submit(models.ids(5).tolist(), SamplingParams(temperature=0, max_tokens=60))
            assert vectors(ours.engine, prompts, kind) == alone[kind]
