"""Weights of models from memory: those of the moment, of every family, and none of a model that is no plain one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are transformers'")

import torch_models as models  # noqa: E402

from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.torch import from_model  # noqa: E402
from tests.adapter_files import matrices, shapes, write_adapter  # noqa: E402

PLAIN = {"backend": "reference", "arithmetic": "plain"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def trained(model) -> None:
    """A step of training in place, as optimizers take it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{"threads": 1}, PLAIN, {"backend": "reference"}], ids=str)
def test_the_weights_are_those_of_the_moment_whatever_becomes_of_the_model(options):
    model, input_ids = models.build("llama3_tied"), models.ids(9)
    with from_model(model, **options) as first, from_model(model, **options) as second:
        logits, hidden = first.logits(input_ids), first.hidden_states(input_ids)
        answers = first.generate_ids(input_ids, GREEDY)
        trained(model)
        for ours in (first, second):  # the second has computed nothing before
            assert torch.equal(ours.generate_ids(input_ids, GREEDY)[0], answers[0])
            assert torch.equal(ours.hidden_states(input_ids), hidden)
            assert torch.equal(ours.logits(input_ids), logits)
    with from_model(model, **options) as again:
        assert not torch.allclose(again.logits(input_ids), logits, atol=0.1)


def test_lengths_of_rows_for_adapters_are_those_of_the_moment(tmp_path):
    """DoRA's sums read the model's own weights when an adapter is loaded."""
    config = models.BASE
    tensors = matrices(config, 5)
    for name, (outputs, _) in shapes(config).items():
        tensors[f"base_model.model.{name}.lora_magnitude_vector"] = np.full(outputs, 0.5, np.float32)
    folder = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    model, options = models.build("llama"), {"threads": 1, "max_adapters": 1, "max_adapter_rank": 4}
    prompt, told = models.ids(9).tolist(), SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)

    def logprobs(ours):
        (output,) = ours.llm.generate(prompt, told, adapter=ours.llm.load_adapter(folder))
        return output.logprobs

    with (
        from_model(model, models.tokenizer(), **options) as first,
        from_model(model, models.tokenizer(), **options) as second,
    ):
        before = logprobs(first)
        trained(model)
        assert logprobs(second) == before
