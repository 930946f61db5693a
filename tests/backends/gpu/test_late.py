"""Events of uploads, samples and offloaded layers hold however late the device is."""

import random

import numpy as np
import pytest

from roofline.ops.batch import Batch, BatchLimits, Segment

torch = pytest.importorskip("torch")

SEEDS = range(10)


def random_segments(choose):
    """As many as fit into `LIMITS`, of any lengths."""
    segments = []
    for _ in range(choose.randint(1, 4)):
        queries, before = choose.choice([1, 1, 4]), choose.randint(0, 40)
        pages = [choose.randint(0, 999) for _ in range(-(-(before + queries) // 16))]
        segments.append(Segment([choose.randint(0, 999) for _ in range(queries)], before, pages, choose.randint(0, 3)))
    return segments


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_sees_the_batch_that_was_uploaded_for_it(monkeypatch, seed):
    """The host fills the batch anew at once, and uploads it before the device has begun the last step."""
    from gpu_late import LateDevice

    from roofline.backends.gpu.runtime.step import DeviceFields

    device, choose = LateDevice(monkeypatch, seed), random.Random(seed)
    batch = Batch(BatchLimits(16, 4, 16, 16))
    fields = DeviceFields(batch, "cuda:0")
    seen, uploaded = [], []
    for _ in range(6):
        segments = random_segments(choose)
        tokens = sum(len(segment.ids) for segment in segments)
        batch.fill(segments, sorted(choose.sample(range(tokens), choose.randint(1, tokens))))
        sizes = fields.sizes()
        names = fields.of(sizes).keys()
        uploaded.append({name: getattr(batch, name)[: fields.of(sizes)[name].numel()].tolist() for name in names})
        fields.upload()
        views = fields.of(sizes)
        device.put(lambda views=views: seen.append({name: view.tolist() for name, view in views.items()}))
    device.finish()
    for got, want in zip(seen, uploaded, strict=True):
        for name in want.keys() - {"pages"}:
            assert got[name] == want[name], name
        used = want["page_start"][-1]
        assert got["pages"][:used] == want["pages"][:used]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_fetched_is_what_was_sampled(monkeypatch, seed):
    """The next step writes its ids into the same tensor."""
    from gpu_late import LateDevice, OnDevice

    from roofline.backends.gpu.kernels.sample import QueuedSample

    device = LateDevice(monkeypatch, seed)
    ids, chosen = (torch.full((3,), -1, dtype=dtype).as_subclass(OnDevice) for dtype in (torch.int32, torch.float32))
    top = tuple(torch.full((3, 2), -1, dtype=dtype).as_subclass(OnDevice) for dtype in (torch.int32, torch.float32))

    def compute(step):
        for tensor in (ids, chosen, *top):
            device.copy_now(tensor, torch.full(tensor.shape, step, dtype=tensor.dtype))

    waiting = []
    for step in range(4):
        device.put(lambda step=step: compute(step))
        waiting.append(QueuedSample(ids, (chosen, *top) if step % 2 else None))
    for step, sample in enumerate(waiting):
        got = sample.fetch()
        assert got.ids.tolist() == [step] * 3
        assert np.isnan(got.logprob).all() if step % 2 == 0 else got.logprob.tolist() == [step] * 3
        if step % 2:
            assert (got.top_ids.tolist(), got.top_logprobs.tolist()) == ([[step] * 2] * 3, [[step] * 2] * 3)
    device.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_offloaded_layers_on_streams_of_torch(monkeypatch, seed):
    """`test_offload.py` has streams of its own; here are those that a device gets."""
    from gpu_late import LateDevice
    from test_offload import layers_of, same

    from roofline.backends.gpu.memory.offload import DeviceStreams, Offload

    device, layers = LateDevice(monkeypatch, seed), layers_of(5)
    offload = Offload(layers, "cpu", [0, 2, 3, 4], 2, DeviceStreams(torch.device("cuda:0")))
    seen, blocks = [], set()
    for layer in [*range(5)] * 3:
        with offload.using(layer) as weights:
            if layer != 1:
                blocks.add(weights["w"].data_ptr())
            device.put(lambda weights=weights, layer=layer: seen.append(same(weights, layers[layer])))
    device.finish()
    assert seen == [True] * 15
    assert set(device.recorded) == {(block, device.streams[1]) for block in blocks}


def test_padding_has_empty_segments_and_leaves_the_step_alone():
    from roofline.backends.gpu.runtime.step import DeviceFields, StepSizes

    batch = Batch(BatchLimits(8, 6, 8, 16))
    batch.buffer[:] = 77  # of an earlier step
    batch.fill([Segment([5, 6], 3, [9]), Segment([7], 20, [4, 3])], [1, 2])
    fields = DeviceFields(batch, "cpu")
    padded = StepSizes(tokens=7, rows=5, segments=5, max_query=2, max_context=32)
    fields.pad(padded)
    fields.upload()
    step = {name: view.tolist() for name, view in fields.of(padded).items()}
    assert step["ids"] == [5, 6, 7, 0, 0, 0, 0]
    assert step["positions"] == [3, 4, 20, 0, 0, 0, 0]
    assert step["seg_start"] == [0, 2, 3, 3, 3, 3]
    assert step["page_start"] == [0, 1, 3, 3, 3, 3]
    assert step["context_len"] == [5, 21, 0, 0, 0]
    assert step["logit_rows"] == [1, 2, 0, 0, 0]
    assert step["pages"][:3] == [9, 4, 3]
