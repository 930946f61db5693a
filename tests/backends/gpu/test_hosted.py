"""Layers on the host: the same bits as with everything on the device, in the interpreter."""

import numpy as np
import pytest
from gpu_loading import pretend
from gpu_models import time_ops

from roofline.backends.gpu.backend import scratch_bytes
from roofline.bundle import load
from roofline.common.errors import CapacityError, ConfigError
from roofline.hardware.chips import chips
from roofline.models import registry
from roofline.models.config import ModelConfig
from roofline.models.presets import preset
from roofline.ops.batch import BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.weights.random_weights import random_checkpoint

torch = pytest.importorskip("torch")
SMALL = {
    **preset("smollm2-135m"), "layers": 4, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96,
    "vocab": 100,
}  # fmt: skip
QWEN3 = {**SMALL, "family": "qwen", "qk_norm": True, "layers": 3}
IDS = np.random.default_rng(0).integers(0, 100, 8).tolist()
STEPS = [[Segment(IDS[:6], 0, [1])], [Segment(IDS[6:7], 6, [1]), Segment(IDS[:2], 0, [2])]]


def executable_of(config, form, hosted):
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime

    source = random_checkpoint(config, seed=2, form=form)
    made = ModelConfig.of(source.config)
    program = compile_program(registry.get(made.family), made, source.tensors, target.gpu())
    return GpuExecutable(
        program, source.read, Runtime(chips.get("sm_90"), "cpu", hosted=hosted),
        limits=BatchLimits(tokens=16, segments=2, rows=2, pages=8), num_pages=4, max_context=32, weights_hash="7e57",
    )  # fmt: skip


def logits(executable):
    found = []
    for step in STEPS:
        executable.batch.fill(step, (np.cumsum([len(segment.ids) for segment in step]) - 1).tolist())
        executable.forward()
        found.append(np.array(executable.logits()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "form", "ways"),
    [(SMALL, "BF16", [(1,), (0, 1, 2, 3)]), (QWEN3, "Q4_1", [(0, 1, 2)])],
)
def test_logits_are_those_with_everything_on_the_device(config, form, ways):
    resident = executable_of(config, form, ())
    wanted = logits(resident)
    for hosted in ways:
        ours = executable_of(config, form, hosted)
        assert ours.fingerprint == resident.fingerprint
        assert ours.weight_bytes == resident.weight_bytes
        assert 0 < ours.weights.hosted_bytes < ours.weight_bytes
        assert all(np.array_equal(a, b) for a, b in zip(logits(ours), wanted, strict=True)), hosted
        assert not any(name.startswith(f"layers.{hosted[0]}.") for name in ours.weights.matrices), "it is elsewhere now"


@pytest.mark.slow
def test_a_launch_that_fails_gives_its_layer_s_buffer_back():
    ours = executable_of(SMALL, "BF16", (0, 1, 2, 3))
    wanted = logits(ours)
    layer, launches = ours._sections[2]
    assert layer == 1

    def fail(step):
        raise RuntimeError("a kernel that fails")

    ours._sections[2] = (layer, [(launches[0][0], fail)])
    with pytest.raises(RuntimeError, match="fails"):
        ours.forward()
    ours._sections[2] = (layer, launches)
    assert all(np.array_equal(a, b) for a, b in zip(logits(ours), wanted, strict=True))


@pytest.mark.slow
def test_ops_are_timed_with_hosted_layers_too():
    ours = executable_of(SMALL, "BF16", (1, 2))
    logits(ours)
    assert all(seconds > 0 for op, seconds in time_ops(ours) if op != "split")


def test_the_scratch_that_is_planned_is_what_is_allocated(monkeypatch):
    """Attention's partial results are more than any product of a small model wants."""
    from roofline.backends.gpu.kernels import attend_launches

    pretend(monkeypatch)
    source = random_checkpoint(SMALL, seed=2, form="Q4_1")
    executable = load(source, text=False, backend="gpu", max_batch_tokens=16, tuned=False).executable
    allocated = executable._scratch.numel()
    assert allocated == 4 * attend_launches.workspace_limit(SMALL["head_dim"])
    assert scratch_bytes(executable.program, executable.limits) == allocated


@pytest.mark.slow
def test_what_does_not_fit_stays_on_the_host_when_asked(monkeypatch):
    from roofline.backends.gpu import partials

    source = random_checkpoint({**SMALL, "layers": 8}, seed=2, form="BF16")
    common = {"backend": "gpu", "max_running": 2, "max_batch_tokens": 16, "max_model_len": 32, "tuned": False}
    pretend(monkeypatch)
    whole = load(source, text=False, **common)
    assert "offload" not in whole.notes
    monkeypatch.setattr(partials, "workspace_limit", lambda *_: 1 << 10)  # else it is more than all weights
    assert whole.executable.runtime.roofs is not None
    weights = whole.executable.weight_bytes
    scarce = None
    for memory in range(weights // 2, 4 * weights, weights // 16):  # the least that holds it with layers on the host
        pretend(monkeypatch, memory)
        try:
            scarce = load(source, text=False, offload="auto", **common)
            break
        except CapacityError:
            continue
    assert scarce is not None
    assert "of 8 layers" in scarce.notes["offload"]
    assert "no graphs" in scarce.notes["offload"]
    with pytest.raises(CapacityError, match=r"offload of . of 8 layers to the host"):
        load(source, text=False, **common)
    with pytest.raises(ConfigError, match="the model has 8 layers"):
        load(source, text=False, offload=9, **common)
    assert all(np.array_equal(a, b) for a, b in zip(logits(scarce.executable), logits(whole.executable), strict=True))
