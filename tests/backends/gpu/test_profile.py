"""Op times on a GPU and their figures: from the interpreter, with limits that are made up or measured on this CPU."""

import time

import numpy as np
import pytest

from roofline.bench.profile.profile import ProfiledStep, Timing, fill, run, summarise
from roofline.hardware.chips import chips
from roofline.hardware.roofs import Roofs
from roofline.models import registry
from roofline.models.config import ModelConfig
from roofline.models.presets import preset
from roofline.ops.batch import BatchLimits
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.program.passes.price import arithmetic, price
from roofline.weights.random_weights import random_checkpoint

torch = pytest.importorskip("torch")
SMALL = {**preset("smollm2-135m"), "layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96}
ROOFS = Roofs(None, 1e12, 1e11, ((1 << 20, 1e12), (1 << 30, 1e11)), threads=0, chip="a GPU")


def program_of(exact=False, vocab=100):
    source = random_checkpoint({**SMALL, "vocab": vocab}, seed=1, form="BF16")
    config = ModelConfig.of(source.config)
    family = registry.get(config.family)
    return source, compile_program(family, config, source.tensors, target.gpu("bf16", exact))


@pytest.fixture(scope="module")
def executable():
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime

    source, program = program_of()
    made = GpuExecutable(
        program, source.read, Runtime(chips.get("sm_90"), "cpu", roofs=ROOFS),
        limits=BatchLimits(tokens=32, segments=2, rows=2, pages=16), num_pages=8, max_context=64, weights_hash="7e57",
    )  # fmt: skip
    yield made
    made.close()


@pytest.mark.parametrize("exact", [False, True])
def test_products_and_attention_are_priced_at_the_16_bit_roof(exact):
    roofs = {instr.op: arithmetic(instr) for instr in program_of(exact)[1].body}
    assert roofs["linear"] == roofs["linear_silu_mul"] == roofs["attend"] == ("bf16_flops", 1)
    assert roofs["add_norm"] == roofs["rms_norm"] == roofs["rope_kv_write"] == ("f32_flops", 1)


@pytest.mark.slow
def test_a_step_with_clocks_has_a_time_for_every_op(executable):
    step = ProfiledStep(1, 20, batch=2)
    fill(executable, step)
    timing = run(executable, step, clocks=True)
    views = [instr.op == "split" for instr in executable.program.body]
    assert [seconds == 0 for seconds in timing.ops] == views
    assert timing.total == pytest.approx(sum(timing.ops) + timing.sample)
    clocked = executable.logits()
    assert run(executable, step, clocks=False).ops == ()
    assert np.array_equal(executable.logits(), clocked)


def test_figures_of_a_step_on_a_device():
    program = program_of()[1]
    each = [1e-5] * len(price(program).instrs)
    timing = Timing(each, 2e-6, sum(each) + 2e-6)
    profile = summarise(program, ProfiledStep(1, 8), [timing], [3 * timing.total], ROOFS)
    assert profile.on_device
    assert profile.step_seconds == profile.timed_seconds == pytest.approx(3 * timing.total), "the host's time counts"
    assert profile.explained == pytest.approx(1 / 3)
    assert "rope_kv_write" in {op.op for op in profile.ops}, "a kernel of its own, in decoding too"


def test_the_limit_of_a_step_is_the_sum_of_its_ops(executable):
    fill(executable, ProfiledStep(8))
    cost = executable.step_cost()
    assert cost.limit_seconds == pytest.approx(executable.limit_seconds([cost.work], ROOFS, executable.weight_bytes))
    halved = Roofs(None, 5e11, 5e10, tuple((size, rate / 2) for size, rate in ROOFS.reads))
    slower = executable.limit_seconds([cost.work] * 3, halved, executable.weight_bytes)
    assert slower == pytest.approx(6 * cost.limit_seconds)


@pytest.mark.slow
def test_roofs_of_ops_are_measured_through_torch():
    from roofline.backends.gpu.measure.roofs import measure_op_roofs

    torch.set_float32_matmul_precision("high")
    try:
        began = time.perf_counter()
        found = measure_op_roofs("cpu", reads=[1 << 20, 1 << 25, 1 << 26], sides=(64, 128), seconds=0.001)
        spent = time.perf_counter() - began
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [size for size, _ in found.reads] == [1 << 25, 1 << 26], "no launch over less is timed"
    assert all(rate > (1 << 25) / spent for _, rate in found.reads)
    assert [name for name, _ in found.computes] == ["bf16", "f32"]


def test_roofs_are_kept_by_the_device_s_name(monkeypatch, tmp_path):
    from roofline.backends.gpu.measure import roofs
    from roofline.common.errors import CapacityError

    asked = []
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    monkeypatch.setattr(roofs, "measure_op_roofs", lambda device, **_options: asked.append(device) or ROOFS)
    assert [roofs.ensure_op_roofs("cpu", name) for name in ("A (GPU)", "A (GPU)", "B")] == [ROOFS] * 3
    assert len(asked) == 2
    assert sorted(path.name for path in (tmp_path / "roofs").iterdir()) == ["gpu-A-GPU--0.json", "gpu-B--0.json"]

    def scarce(device, **_options):
        raise CapacityError("measuring", 2, 1, "bytes", "Free some.")

    monkeypatch.setattr(roofs, "measure_op_roofs", scarce)
    assert roofs.ensure_op_roofs("cpu", "C") is None


def test_kept_roofs_are_measured_again_and_raised(monkeypatch, tmp_path):
    from dataclasses import replace

    from roofline.backends.gpu.measure import roofs
    from roofline.common.errors import CapacityError

    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    monkeypatch.setattr(roofs, "measure_op_roofs", lambda device, **_options: ROOFS)
    assert roofs.ensure_op_roofs("cpu", "A") == ROOFS
    faster = replace(ROOFS, bf16_flops=2 * ROOFS.bf16_flops)
    monkeypatch.setattr(roofs, "measure_op_roofs", lambda device, **_options: faster)
    raised, checks = roofs.recheck_op_roofs("cpu", "A")
    assert raised.bf16_flops == roofs.ensure_op_roofs("cpu", "A").bf16_flops == faster.bf16_flops
    assert [check.name for check in checks if not check.agrees] == ["bf16"]

    def scarce(device, **_options):
        raise CapacityError("measuring", 2, 1, "bytes", "Free some.")

    monkeypatch.setattr(roofs, "measure_op_roofs", scarce)
    assert roofs.recheck_op_roofs("cpu", "A") is None
    assert roofs.recheck_op_roofs("cpu", "B") is None
