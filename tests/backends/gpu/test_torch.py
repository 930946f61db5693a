"""roofline.torch on the gpu backend, in the interpreter: a model of transformers from memory, against transformers."""

import sys
from pathlib import Path

import pytest
from gpu_loading import pretend

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are transformers'")
sys.path.insert(0, str(Path(__file__).parents[2] / "torch"))  # torch_models

import torch_models as models  # noqa: E402

from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.torch import from_model  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
SIZES = {"max_running": 2, "max_batch_tokens": 32, "max_model_len": 64, "tuned": False}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("qwen3_tied", torch.float16)])
def test_logits_hidden_states_and_ids(monkeypatch, name, dtype):
    """All rows are 16 bits wide here, transformers computes in float32 on the same weights."""
    pretend(monkeypatch)
    model, input_ids = models.build(name, dtype, head_dim=32), models.ids(2, 9)
    wide = models.build(name, head_dim=32)  # model.float() would keep rotary frequencies that were rounded
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        out = wide(input_ids, output_hidden_states=True)
    with from_model(model, backend="gpu", **SIZES) as ours:
        served = ours.loaded.executable
        assert served.program.kv_groups["kv0"].format == ("bf16" if dtype == torch.bfloat16 else "f16")
        logits, hidden = ours.logits(input_ids), ours.hidden_states(input_ids)
        for got, wanted in ((logits, out.logits), (hidden, out.hidden_states[-1])):
            assert got.dtype == torch.float32
            assert got.shape == wanted.shape
            assert torch.linalg.norm(got - wanted) < 0.02 * torch.linalg.norm(wanted)
        answers = ours.generate_ids(input_ids, GREEDY)
        assert [int(ids[0]) for ids in answers] == logits[:, -1].argmax(-1).tolist()
        assert served.weights.matrices, "what a trace closes is its own"


def test_a_trace_that_finds_no_room_is_refused(monkeypatch):
    from roofline.backends.gpu.runtime.executable import GpuExecutable
    from roofline.common.errors import CapacityError

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    pretend(monkeypatch)
    with from_model(models.build("llama", torch.bfloat16, head_dim=32), backend="gpu", **SIZES) as ours:
        monkeypatch.setattr(GpuExecutable, "_allocate", full)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
        with pytest.raises(CapacityError, match="smaller cache_tokens") as caught:
            ours.logits(models.ids(1, 9))
        assert caught.value.needed > caught.value.available == 100


def test_a_variant_has_its_own_cache_and_shares_the_weights(monkeypatch):
    from roofline.ops.batch import BatchLimits

    pretend(monkeypatch)
    with from_model(models.build("llama", torch.bfloat16, head_dim=32), backend="gpu", exact=False, **SIZES) as ours:
        served = ours.loaded.executable
        variant = served.variant(served.program, BatchLimits(8, 1, 8, 2), 2)
        assert variant.weights is served.weights
        assert variant.fingerprint == served.fingerprint
        assert (variant.limits.tokens, variant.num_pages, variant.max_context) == (8, 2, served.max_context)
        assert variant._caches["kv0"][0].data_ptr() != served._caches["kv0"][0].data_ptr()
        variant.close()
        assert served.weights.matrices
