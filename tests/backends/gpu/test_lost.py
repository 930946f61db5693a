"""A device that is gone is told from a step that failed, and from one without room."""

from types import SimpleNamespace

import pytest

from roofline.backends.base import LostError
from roofline.common.errors import CapacityError
from roofline.ops.batch import Segment

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dead", [False, True])
def test_an_error_of_a_dead_device_is_a_lost_one(monkeypatch, dead):
    from roofline.backends.gpu.runtime import device_errors as lost

    def synchronize(device):
        assert device == "cuda:1"
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    expected = LostError if dead else ValueError
    with pytest.raises(expected, match="what it was") as raised, lost.told_if_lost("cuda:1"):
        raise ValueError("what it was\nmore of it")
    if dead:
        assert "cuda:1 computes nothing any more" in str(raised.value)
        assert "more of it" not in str(raised.value)
    with pytest.raises(ValueError, match="on the host"), lost.told_if_lost("cpu"):
        raise ValueError("on the host")


def test_either_call_of_a_step_notices(monkeypatch):
    """Whether the step fails at once or its ids never come."""
    import gpu_models

    from roofline.backends.gpu.kernels import sample as module
    from roofline.backends.gpu.runtime import device_errors as lost
    from roofline.backends.sampling import SampleRows
    from tests.backends.gpu.test_hosted import SMALL, executable_of

    monkeypatch.setattr(lost, "answers", lambda _: False)
    gpu = executable_of(SMALL, "BF16", ())
    gpu_models.logits(gpu, [Segment([1, 2], 0, [0])])
    waiting = gpu.queue_sample(SampleRows.greedy(1))
    monkeypatch.setattr(module, "sample", lambda *_, **__: SimpleNamespace(fetch=lambda: 1 / 0))
    assert len(waiting().ids) == 1
    waiting = gpu.queue_sample(SampleRows.greedy(1))
    with pytest.raises(LostError, match="ZeroDivisionError"):
        waiting()
    monkeypatch.setattr(gpu._fields, "upload", lambda: 1 / 0)
    with pytest.raises(LostError, match="ZeroDivisionError"):
        gpu.forward()


def test_memory_that_is_gone_after_all_is_a_capacity_error(monkeypatch):
    from roofline.backends.gpu.runtime.device_errors import what_is_lacking

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    found = SimpleNamespace(torch_name="cuda:0", free=1 << 29, device=SimpleNamespace(title="nvidia:0 H200"))
    said = r"536,870,912 .*1,048,576 .*512.0 MiB were free"
    with pytest.raises(CapacityError, match=said) as raised, what_is_lacking(found, 1 << 29):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
