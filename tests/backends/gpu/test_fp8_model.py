"""Models with weights in 8-bit floats: rows of 16 bits, or of 8 where that is asked for, beside the reference."""

from dataclasses import replace

import gpu_models
import numpy as np
import pytest
from gpu_models import distance, exact_whole, logits

from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.hardware.chips import chips
from roofline.models.config import ModelConfig
from roofline.ops.batch import BatchLimits, Segment
from roofline.program.text import program_hash
from roofline.weights.random_weights import random_checkpoint

torch = pytest.importorskip("torch")
LLAMA = {**gpu_models.LLAMA, "layers": 1, "tied": False}
FP8 = LoadOptions(backend="gpu", activations="fp8")
SHAPE = {"num_pages": 16, "max_context": 192, "weights_hash": "7e57"}


def executables(chip, activations, exact=False, tokens=64):
    """(gpu executable, reference executable) of one Program."""
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.reference.executable import ReferenceExecutable

    source, chip = random_checkpoint(LLAMA, seed=3, form="E4M3"), chips.get(chip)
    config = ModelConfig.of(source.config)
    program = compile_for_gpu(source, config, LoadOptions(backend="gpu", exact=exact, activations=activations), chip)
    shape = {**SHAPE, "limits": BatchLimits(tokens=tokens, segments=4, rows=8, pages=64)}
    gpu = GpuExecutable(program, source.read, Runtime(chip, "cpu", exact), **shape)
    return gpu, ReferenceExecutable(program, source.read, **shape)


def linears(gpu, reference):
    """(distance from the reference on the same rows, distance of those rows unrounded) of each product of the step."""
    step = gpu.step_of(gpu._fields.sizes())
    gpu._fill_slots(step)
    for instr, launch in gpu._launches:
        if not instr.op.startswith("linear"):
            launch(step)
            continue
        rows = step.value(instr.inputs[0]).float().clone()
        launch(step)
        got = step.value(instr.output.name).float().numpy()
        unrounded = replace(instr, attrs={**instr.attrs, "x_dtype": "f32"})
        want, other = (reference._interpreter.step(one, [rows])[0].numpy() for one in (instr, unrounded))
        yield distance(got, want), distance(other, want)


@pytest.mark.parametrize("chip", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_activations_of_fp8_equal_the_reference(chip):
    """Each product on the same rows: from one to the next, roundings that fall elsewhere grow to what 8 bits lose."""
    gpu, reference = executables(chip, "fp8")
    assert {i.attr("x_dtype") for i in gpu.program.body if i.op.startswith("linear")} == {chips.get(chip).fp8}
    ids = np.random.default_rng(0).integers(0, 300, 21).tolist()
    step = [Segment(ids[:4], 0, [1]), Segment(ids[4:], 0, [3, 7])]
    assert distance(logits(gpu, step), logits(reference, step)) < 0.2
    found = list(linears(gpu, reference))
    assert len(found) == 5
    assert max(ours for ours, _ in found) < 0.005  # results are rounded to 16 bits
    assert min(lost for _, lost in found[1:]) > 0.01  # the first reads embeddings, which 8 bits hold


@pytest.mark.slow
def test_many_rows_of_16_bits():
    """The matrix is widened, and multiplied by the library."""
    gpu, reference = executables("sm_90", "auto", tokens=160)
    assert program_hash(gpu.program) != program_hash(executables("sm_90", "fp8")[0].program)
    ids = np.random.default_rng(1).integers(0, 300, 150).tolist()
    step = [Segment(ids, 0, range(10))]
    assert distance(logits(gpu, step), logits(reference, step)) < 0.02


@pytest.mark.slow
def test_exact_rows_of_8_bits_do_not_depend_on_chunks():
    gpu, _ = executables("sm_90", "fp8", exact=True)
    exact_whole(gpu)


def test_what_cannot_be_is_refused():
    eight, sixteen = (random_checkpoint(LLAMA, seed=3, form=form) for form in ("E4M3", "BF16"))
    config = ModelConfig.of(eight.config)
    with pytest.raises(UnsupportedError, match=r"activations of fp8 on gfx90a.*activations=auto"):
        compile_for_gpu(eight, config, FP8, chips.get("gfx90a"))
    with pytest.raises(UnsupportedError, match=r"weights are BF16.*activations=auto"):
        compile_for_gpu(sixteen, config, FP8, chips.get("sm_90"))
    with pytest.raises(UnsupportedError, match=r"activations='fp8' with backend 'cpu'.*backend=gpu"):
        load("preset:smollm2-135m", weights="random:1", text=False, activations="fp8")
    with pytest.raises(ConfigError, match="choose one of auto, fp8"):
        load("preset:smollm2-135m", backend="gpu", weights="random:1", text=False, activations="int4")


@pytest.mark.parametrize(("activations", "said"), [("auto", "widened to bf16"), ("fp8", "rounded to e4m3fn")])
def test_the_notes_say_how_it_is_multiplied(activations, said):
    from roofline.backends.gpu.backend import float8_products

    gpu, _ = executables("sm_90", activations)
    assert said in float8_products(gpu.program, chips.get("sm_90"))
