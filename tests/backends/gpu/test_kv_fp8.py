"""A cache of 8-bit floats: whole models in the interpreter beside the reference, in the flavour of the chip."""

import numpy as np
import pytest
from gpu_models import LIMITS, LLAMA, distance, exact_whole, logits, steps

from roofline.backends.gpu.memory.requirements import cheaper, needs_of
from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.models.config import ModelConfig
from roofline.ops import formats
from roofline.ops.attention import round_to
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.random_weights import random_checkpoint

torch = pytest.importorskip("torch")
FLAVOURS = {"sm_90": ("e4m3fn", 448.0), "gfx942": ("e4m3fnuz", 240.0)}
CHIPS = [pytest.param("sm_90", marks=pytest.mark.slow), "gfx942"]


def louder(source, factor):
    """The checkpoint with all values of V multiplied."""

    def read(name):
        info = source.tensors[name]
        raw = source.read(name)
        if not name.endswith("attn.v.weight"):
            return raw
        form = formats.get(info.format)
        return form.quantize(factor * form.dequantize(raw, info.shape))

    return Checkpoint(source.path, source.kind, source.tensors, source.metadata, source.config, read)


def executables(chip, kv_dtype, factor=1.0, exact=False):
    """(gpu executable, reference executable) of one Program."""
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.reference.executable import ReferenceExecutable

    source = louder(random_checkpoint(LLAMA, seed=3), factor)
    chip = chips.get(chip)
    program = compile_for_gpu(
        source, ModelConfig.of(source.config), LoadOptions(backend="gpu", kv_cache_dtype=kv_dtype, exact=exact), chip
    )
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 128, "weights_hash": "7e57"}
    gpu = GpuExecutable(program, source.read, Runtime(chip, "cpu", exact), **shape)
    return gpu, ReferenceExecutable(program, source.read, **shape)


@pytest.mark.parametrize("chip", CHIPS)
def test_steps_equal_the_reference_with_the_same_cache(chip):
    gpu, reference = executables(chip, "fp8")
    _, wide = executables(chip, "auto")
    assert {group.format for group in gpu.program.kv_groups.values()} == {FLAVOURS[chip][0]}
    assert 2 * gpu.page_bytes == wide.page_bytes
    assert gpu._caches["kv0"][0].element_size() == 1
    for step in steps():
        got, want, sixteen = (logits(one, step) for one in (gpu, reference, wide))
        assert distance(got, want) < 0.02
        assert 0.02 < distance(sixteen, want) < 0.2  # the cache's rounding is more than what we allow ourselves


@pytest.mark.parametrize("chip", CHIPS)
def test_values_beyond_the_largest_become_it(chip):
    gpu, reference = executables(chip, "fp8", factor=400.0)
    largest = FLAVOURS[chip][1]
    step = steps()[0]
    got, want = logits(gpu, step), logits(reference, step)
    _, v = gpu._caches["kv0"]
    held = v[:, [3, 7]].float().transpose(2, 3).flatten(1, 2)[:, :21]  # [layers, tokens, ...]
    assert torch.isfinite(held).all()
    assert 0.01 < (held.abs() == largest).float().mean() < 0.9
    assert distance(got, want) < 0.02


@pytest.mark.slow
def test_exact_steps_do_not_depend_on_chunks():
    gpu, _ = executables("sm_90", "fp8", exact=True)
    exact_whole(gpu)


def test_rounding_of_every_16_bit_value():
    """To nearest even by the definition of the format, whatever torch makes of it."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for name, bias, codes in (("e4m3fn", 7, 0x7F), ("e4m3fnuz", 8, 0x80)):
        code = np.arange(codes)
        exponent, mantissa = code >> 3, code & 7
        values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - bias - 3), mantissa * 2.0 ** (-bias - 2))
        got = round_to(every, name)
        assert torch.equal(got.isnan(), every.isnan())
        finite = every[~every.isnan()].double().numpy()
        size = np.minimum(np.abs(finite), values[-1])
        upper = np.searchsorted(values, size)
        lower = np.maximum(upper - 1, 0)
        up, down = values[upper] - size, size - values[lower]
        chosen = np.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, lower)
        assert np.array_equal(np.abs(got[~every.isnan()].double().numpy()), values[chosen])


@pytest.mark.parametrize("chip", ["gfx90a", "sm_80", "gfx1100"])
def test_chips_without_it_refuse_and_name_what_they_have(chip):
    source = random_checkpoint(LLAMA, seed=3)
    config = ModelConfig.of(source.config)
    with pytest.raises(UnsupportedError, match=rf"fp8 KV cache on {chip}.*kv_cache_dtype=bf16"):
        compile_for_gpu(source, config, LoadOptions(backend="gpu", kv_cache_dtype="fp8"), chips.get(chip))


def test_it_is_offered_where_memory_is_short():
    source = random_checkpoint(LLAMA, seed=3)
    config = ModelConfig.of(source.config)
    wide, narrow = (
        compile_for_gpu(source, config, LoadOptions(backend="gpu", kv_cache_dtype=kv), chips.get("sm_90"))
        for kv in ("auto", "fp8")
    )
    offered = cheaper(wide, LIMITS, caches={"fp8": "e4m3fn"})
    assert offered["kv_cache_dtype=fp8"].token == needs_of(narrow, LIMITS).token == needs_of(wide, LIMITS).token // 2
    assert "kv_cache_dtype=fp8" not in cheaper(narrow, LIMITS, caches={"fp8": "e4m3fn"})
