"""A model and its draft on one GPU of made-up memory: both fit, with as many tokens in both caches."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the gpu backend's programs are planned with it")

from roofline import bundle  # noqa: E402
from roofline.backends.gpu import backend as gpu  # noqa: E402
from roofline.bundle import load_with_draft, loader  # noqa: E402
from roofline.bundle import sources as bundle_sources  # noqa: E402
from roofline.hardware.chips import chips  # noqa: E402
from roofline.hardware.gpus.device import Device  # noqa: E402
from roofline.ops.batch import BatchLimits  # noqa: E402

LOADING = {"backend": "gpu", "max_running": 2, "max_batch_tokens": 32, "tuned": False}


class Taken:
    """A device whose memory holds what executables would allocate; nothing is allocated."""

    def __init__(self, room):
        self.room, self.made = room, []

    @property
    def free(self):
        return self.room - sum(made.bytes for made in self.made)

    def find(self, wanted, rank=0, ranks=1):
        device = Device("nvidia", 0, "H100", "sm_90", memory=self.room, torch=0)
        return SimpleNamespace(device=device, chip=chips.get("sm_90"), free=self.free, number=0, torch_name="cpu")

    def executable(self, program, read, runtime, *, limits, num_pages, **_):
        from roofline.backends.gpu.memory.requirements import needs_of

        needs = needs_of(program, limits, extra=gpu.scratch_bytes(program, limits))
        token = needs.token
        made = SimpleNamespace(
            bytes=needs.total(16 * num_pages), num_pages=num_pages, page_bytes=16 * token, weight_bytes=needs.weights,
            weights=SimpleNamespace(hosted_bytes=0), vocab_size=96, program=program,
        )  # fmt: skip
        assert made.bytes <= self.free, "what was planned does not fit"
        self.made.append(made)
        return made


@pytest.fixture
def device(monkeypatch):
    from roofline.backends.gpu import devices, partials
    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.backends.gpu.measure import roofs
    from roofline.backends.gpu.runtime import executable

    def make(room):
        taken = Taken(room)
        monkeypatch.setattr(devices, "find", taken.find)
        monkeypatch.setattr(executable, "GpuExecutable", taken.executable)
        return taken

    monkeypatch.setattr(kernel_cache, "use", lambda: None)
    monkeypatch.setattr(partials, "workspace_limit", lambda *_: 1 << 10)  # else it is most of this little memory
    monkeypatch.setattr(roofs, "ensure_op_roofs", lambda *_: None)
    monkeypatch.setattr(loader, "load_text", lambda _: (None, None))
    monkeypatch.setattr(loader, "_text_beside", lambda *_: (None, None))
    monkeypatch.setattr("roofline.bundle.draft_pair.check_draft", lambda *_: None)
    return make


@pytest.fixture
def sources(tmp_path, tiny_llama):
    found = []
    for name, layers in (("large", 4), ("small", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**tiny_llama, "num_hidden_layers": layers}))
        found.append(str(tmp_path / name))
    return found


def pair(sources, **options):
    large, small = sources
    ours = {**LOADING, "weights": "random:1:BF16", **options}
    return load_with_draft(large, ours, small, {**LOADING, **options})


@pytest.mark.parametrize("options", [{}, {"cache_tokens": 512}, {"kv_cache_dtype": "fp8"}])
def test_both_caches_hold_as_many_tokens_and_fill_the_device(device, sources, monkeypatch, options):
    taken = device(8 << 20)
    monkeypatch.setattr(gpu, "RESERVED", 0.0)
    opened = loader.open_source

    def random_too(source, options, *rest, **keywords):
        """A draft has no option `weights`."""
        return opened(source, replace(options, weights=options.weights or "random:2:BF16"), *rest, **keywords)

    for module in (loader, bundle_sources):
        monkeypatch.setattr(module, "open_source", random_too)
    pair(sources, **options)
    ours, guesser = taken.made
    assert ours.num_pages == guesser.num_pages
    if "cache_tokens" in options:
        assert ours.num_pages == 32
    else:
        assert ours.num_pages > 64
        assert taken.free < ours.page_bytes + guesser.page_bytes, "nothing is left but what is smaller than two pages"


def test_without_a_draft_the_model_takes_it_all(device, sources, monkeypatch):
    monkeypatch.setattr(gpu, "RESERVED", 0.0)
    taken = device(8 << 20)
    bundle.load(sources[0], weights="random:1:BF16", text=False, **LOADING)
    (alone,) = taken.made
    assert taken.free < alone.page_bytes


def test_room_is_left_for_two_more_traces(device, sources, monkeypatch):
    """As roofline.torch makes them: for rows of logits, and for hidden states, each with a cache of its own."""
    monkeypatch.setattr(gpu, "RESERVED", 0.0)
    taken = device(8 << 20)
    traces = BatchLimits(16, 1, 16, 4)
    bundle.load(sources[0], weights="random:1:BF16", text=False, traces=traces, **LOADING)
    (served,) = taken.made
    assert 2 * 4 * served.page_bytes < taken.free < 3 * 4 * served.page_bytes + (1 << 19)
