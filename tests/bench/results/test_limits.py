"""Limits: no engine can be faster, and what claims to be is refused with the arithmetic."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.backends.cpu import roofs as cpu_roofs
from roofline.bench.results.limits import (
    Demand,
    ModelLimits,
    impossible,
    limit_of,
    limits_here,
    limits_of_product,
)
from roofline.bench.results.point import Device
from roofline.bundle.shape import open_shape
from roofline.hardware.roofs import RoofCheck, Roofs
from roofline.models.registry import configure
from roofline.program.compile import compile_program
from roofline.program.rates import ProgramSpeeds
from roofline.program.target import CPU

ROOFS = Roofs(int8_ops=4e12, bf16_flops=1e12, f32_flops=5e11, reads=((1 << 20, 100e9), (1 << 30, 50e9)), chip="test")


@pytest.fixture(scope="module")
def program():
    shape = open_shape("preset:smollm2-135m")
    return compile_program(*configure(shape.config), shape.tensors, CPU)


@pytest.fixture
def limits(program):
    return ModelLimits("smollm2-135m", program, ROOFS, "test", lambda before: before, Device(name="c", vendor="v"))


@given(st.integers(1, 64), st.integers(1, 600), st.integers(1, 100))
@settings(max_examples=25, deadline=None)
def test_it_is_no_more_than_steps_one_after_the_other_take(program, sequences, prompt, answer):
    speeds = ProgramSpeeds(program, ROOFS)
    rate = speeds.requests(sequences, prompt, answer)
    longest = prompt + answer
    apart = sequences * speeds.prefill(prompt).seconds + (answer - 1) * speeds.decode(sequences, longest).seconds
    assert rate.seconds <= apart * 1.001
    assert rate.tokens_per_s == pytest.approx(sequences * answer / rate.seconds)
    assert rate.weight_bytes == pytest.approx(answer * speeds.decode(sequences, longest).weight_bytes, rel=1e-3)


def test_roofs_are_measured_again_before_a_run(monkeypatch):
    checks = [RoofCheck("bf16", "op", 1e12, 0.9e12), RoofCheck("f32", "op", 5e11, 6e11), RoofCheck("int8", "op", 1, 1)]
    monkeypatch.setattr(cpu_roofs, "recheck_roofs", lambda: (ROOFS, checks))
    limits = limits_here("preset:smollm2-135m")
    assert limits.roofs == ROOFS
    assert limits.below == ("bf16",)
    # The roofs that bound this model, as a chart draws them: of its weights' products, of reads at its size.
    assert limits.device.measured_bytes_per_s == ROOFS.read_bytes_per_s(limits.weight_bytes)
    assert limits.device.measured_flops == ROOFS.f32_flops  # weights of 16 bits are widened by this CPU
    assert limits_here("preset:smollm2-135m", dtype="q8_0").device.measured_flops == ROOFS.int8_ops


def test_single_decoding_is_bound_by_reading_the_weights(limits):
    limit = limit_of(limits, Demand(prompt=1, answer=512, sequences=1), tokens_per_s=100.0)
    weights = limits.weight_bytes
    assert limit.bound == "memory"
    assert limit.weight_bytes == pytest.approx(512 * weights, rel=0.01)  # tied: the embedding is the head
    assert limit.tokens_per_s == pytest.approx(ROOFS.read_bytes_per_s(weights) / weights, rel=0.1)
    assert limit.share_of_measured == pytest.approx(100 / limit.tokens_per_s)
    assert limit.share_of_sheet is None


def test_long_prompts_are_bound_by_arithmetic(limits):
    assert limit_of(limits, Demand(2000, 1, 16), 0.1).bound == "compute"


def test_more_at_a_time_is_never_less(limits):
    rates = [limit_of(limits, Demand(200, 30, n), 1.0).tokens_per_s for n in (1, 2, 3, 4, 7, 8, 64)]
    assert rates == sorted(rates)


def test_more_than_the_limit_cannot_be_as_the_arithmetic_says(limits):
    demand = Demand(prompt=1, answer=512, sequences=1)
    most = limit_of(limits, demand, 1.0).tokens_per_s
    beyond = limit_of(limits, demand, most * 3)
    assert beyond.share_of_measured == pytest.approx(3)
    message = impossible(limits, beyond, demand, most * 3)
    assert message.startswith("300% of the limit cannot be.")
    assert f"{most * 3:.1f} tokens/s were measured" in message
    assert f"at most {most:.1f} tokens/s" in message
    assert "--model-here" in message
    near = limit_of(limits, demand, most * 1.01)
    assert near.share_of_measured == pytest.approx(1.01)
    assert impossible(limits, near, demand, most * 1.01) == ""


def test_roofs_that_were_measured_too_low_are_measured_again(limits):
    doubled = replace(ROOFS, int8_ops=8e12, bf16_flops=2e12, f32_flops=1e12, reads=((1 << 20, 200e9), (1 << 30, 100e9)))
    demand = Demand(prompt=1, answer=512, sequences=1)
    most = limit_of(limits, demand, 1.0).tokens_per_s
    limit = limit_of(replace(limits, again=lambda before: doubled), demand, most * 1.5)
    assert limit.share_of_measured == pytest.approx(0.75)


def test_speculation_raises_the_limit_as_it_is_declared(limits):
    plain, guessing = Demand(1, 512, 1), Demand(1, 512, 1, tokens_per_step=2.0)
    most = limit_of(limits, plain, 1.0).tokens_per_s
    limit = limit_of(limits, guessing, most * 1.5)
    assert limit.tokens_per_s == pytest.approx(2 * most, rel=0.03)
    assert any("2 tokens a step" in sentence for sentence in limit.assumptions)


def test_limits_by_a_data_sheet():
    """The known figure of the MI210: every weight of Llama-2-7B in 16 bits once, in 8.07 ms."""
    limits = limits_of_product("llama-2-7b", "MI210")
    assert (limits.parameters, limits.formats) == (6738415616, "BF16")
    assert (limits.device.name, limits.device.vendor) == ("MI210", "amd")
    limit = limit_of(limits, Demand(prompt=1, answer=2, sequences=1), 50.0)
    assert limit.tokens_per_s == pytest.approx(1 / 8.07e-3, rel=0.01)
    assert limit.share_of_sheet == pytest.approx(50 / limit.tokens_per_s)
    assert limit.share_of_measured is None
    shared = limits_of_product("llama-2-7b", "MI210", 4)
    assert limit_of(shared, Demand(1, 2, 1), 50.0).tokens_per_s == pytest.approx(4 * limit.tokens_per_s, rel=0.01)
    assert shared.device.count == 4


def test_a_published_figure_that_cannot_be_is_known():
    """314 tokens/s were published of Llama-2-70B in 16 bits on a single MI300X."""
    limits = limits_of_product("llama-2-70b", "MI300X")
    demand = Demand(prompt=1, answer=256, sequences=1)
    reason = impossible(limits, limit_of(limits, demand, 314.0), demand, 314.0)
    assert re.search(r"at most 3[0-9]\.[0-9] tokens/s", reason)


@pytest.mark.parametrize(
    ("model", "chip", "published"),
    [
        pytest.param("llama-3.1-70b", "H200", {128: 3803, 2048: 442}, marks=pytest.mark.slow),
        ("llama-3.1-8b", "H100 SXM", {128: 28312, 2048: 3450}),
    ],
)
def test_published_figures_of_fp8_are_possible(model, chip, published):
    """TensorRT-LLM 1.0's table of FP8, answers of 128 tokens: above what products of 16 bits would allow. published:
    tokens of the prompt -> tokens a second."""
    limits, sixteen_bits = limits_of_product(model, chip, dtype="fp8"), limits_of_product(model, chip)
    assert limits.formats.startswith("E4M3")
    assert limits.device.sheet_flops == 1979e12
    for prompt, rate in published.items():
        demand = Demand(prompt=prompt, answer=128, sequences=1024)
        assert 0.4 < limit_of(limits, demand, rate).share_of_sheet < 0.8
        assert limit_of(sixteen_bits, demand, rate).share_of_sheet > 1


@pytest.mark.parametrize(
    ("model", "chip", "dtype", "demand", "published"),
    [
        # TensorRT-LLM 0.20, NVFP4, answers of 128: more than products of 16 bits allow, and three quarters of fp8.
        pytest.param(
            "llama-3.1-70b",
            "B200",
            "mxfp4",
            Demand(prompt=128, answer=128, sequences=1024),
            10994.48,
            marks=pytest.mark.slow,
        ),
        # llama.cpp, pull request 7676: prompts of 512 tokens, which end with one of an answer.
        ("llama-3-8b", "RTX 4090", "q4_0", Demand(prompt=512, answer=1, sequences=1), 10358.75 / 512),
    ],
)
def test_published_figures_of_narrow_weights_are_possible(model, chip, dtype, demand, published):
    limits = limits_of_product(model, chip, dtype=dtype)
    assert 0.2 < limit_of(limits, demand, published).share_of_sheet < 0.5
    rates = dict.fromkeys(("f8_flops", "f4_flops", "int8_ops"))
    wide = replace(limits, roofs=replace(limits.roofs, **rates))
    assert limit_of(wide, demand, published).share_of_sheet > 0.85


def test_narrow_weights_are_multiplied_at_their_own_rates():
    rates = {
        (chip, dtype): limits_of_product("llama-3.2-1b", chip, dtype=dtype).device.sheet_flops / 1e12
        for chip in ("MI355X", "MI300X", "A100 80GB", "V100S")
        for dtype in ("mxfp4", "int8", "bf16")
    }
    assert rates == {
        ("MI355X", "mxfp4"): 10066.3,
        ("MI355X", "int8"): 5033.2,
        ("MI355X", "bf16"): 2516.6,
        ("MI300X", "mxfp4"): 2614.9,
        ("MI300X", "int8"): 2614.9,
        ("MI300X", "bf16"): 1307.4,
        ("A100 80GB", "mxfp4"): 624,
        ("A100 80GB", "int8"): 624,
        ("A100 80GB", "bf16"): 312,
        ("V100S", "mxfp4"): 130,
        ("V100S", "int8"): 130,
        ("V100S", "bf16"): 130,
    }


def test_a_file_in_f16_is_limited_by_products_of_f16():
    """An MI100 multiplies 184.6 TFLOP/s of f16 and half as many of bf16."""
    rates = {dtype: limits_of_product("llama-2-13b", "MI100", dtype=dtype).device for dtype in ("f16", "bf16")}
    assert {dtype: device.sheet_flops for dtype, device in rates.items()} == {"f16": 184.6e12, "bf16": 92.3e12}


def test_a_limit_reads_weights_as_their_file_has_them():
    """Of INT4 with a scale for 128: 4.125 to 4.2 bits a weight, whatever our own kernels hold them in."""
    limits = limits_of_product("llama-3.1-70b", "MI300X", dtype="int4")
    assert 35e9 < limits.weight_bytes < 47e9
    assert limits.formats.startswith("INT4")
