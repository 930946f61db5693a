"""Formats of quantised checkpoints for which others stand in on a GPU: equal values, whole models, what is refused."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from gpu_models import LIMITS, distance, logits, steps

from roofline.backends.fit import ModelSplit, held_in, split_on_product
from roofline.backends.gpu.memory.requirements import needs_of
from roofline.backends.gpu.pack import LAYOUTS, STAND_INS, stand_in
from roofline.bench.plan.plan import shape_of
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.hardware.chips.products import SheetRoofs, titled
from roofline.models import registry
from roofline.models.config import ModelConfig
from roofline.ops import formats
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.program.passes.price import in_file
from roofline.program.rates import ProgramSpeeds
from roofline.weights.checkpoint import open_checkpoint
from tests.weights import quantised_models

torch = pytest.importorskip("torch")
ROOFS = SheetRoofs(bf16_flops=1e15, bytes_per_s=1e12, sources=())


def raw_of(name: str, exact: bool) -> np.ndarray:
    """Bytes of [16, 64] with scales of 16 bits, or more where not `exact`."""
    form, rng = formats.get(name), np.random.default_rng(3)
    raw = form.quantize(rng.standard_normal((16, 64)).astype(np.float32)).reshape(-1, form.block_bytes)
    if exact:
        halves = np.ascontiguousarray(raw[:, :4]).view("<f4").astype(np.float16).astype("<f4")
        raw[:, :4] = halves.view(np.uint8).reshape(-1, 4)
    return raw.reshape(-1)


@pytest.mark.parametrize("name", ["INT4", "Q5_0", "IQ4_NL", "MXFP4"])
def test_memory_and_speed_count_the_format_that_is_read(name: str) -> None:
    """A plan's bytes of weights are those that its step reads: of the format that stands in for the file's own."""
    model = shape_of("llama-3.2-1b", name)
    ours, other = (
        split_on_product(*each, titled("MI300X"), 1).parts[0] for each in (model, shape_of("llama-3.2-1b", "q8_0"))
    )
    assert ours.needs.weights == other.needs.weights
    read = [ProgramSpeeds(part.program, ROOFS).decode(1, 64).weight_bytes for part in (ours, other)]
    assert read[0] == read[1]
    assert held_in(ModelSplit(1, (ours,))) == {name: "Q8_0"}
    assert held_in(ModelSplit(1, (other,))) == {}
    # What any other program might do is read the file's own bytes.
    file_bytes = ProgramSpeeds(in_file(ours.program), ROOFS).decode(1, 64).weight_bytes
    assert file_bytes < read[0]


@pytest.mark.parametrize("name", ["INT4", "INT8"])
def test_what_stands_in_has_the_same_values(name: str) -> None:
    assert STAND_INS[name] in LAYOUTS
    raw = raw_of(name, exact=True)
    other = formats.get(STAND_INS[name]).dequantize(stand_in(raw, name), (16, 64))
    assert other.tobytes() == formats.get(name).dequantize(raw, (16, 64)).tobytes()
    assert stand_in(raw, "Q4_K") is raw
    with pytest.raises(UnsupportedError, match=f"format {name} on a GPU.*float16"):
        stand_in(raw_of(name, exact=False), name)


@pytest.mark.parametrize("kind", ["awq 32", "pack-quantized"])
def test_a_checkpoint_equals_the_reference(kind: str, tmp_path: Path) -> None:
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.reference.executable import ReferenceExecutable

    source = open_checkpoint(quantised_models.written(tmp_path, kind))
    cfg = ModelConfig.of(source.config)
    program = compile_program(registry.get(cfg.family), cfg, source.tensors, target.gpu("bf16", False))
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 64, "weights_hash": "7e57"}
    gpu = GpuExecutable(program, source.read, Runtime(chips.get("sm_90"), "cpu", False), **shape)
    reference = ReferenceExecutable(program, source.read, **shape)
    for step in steps()[:2]:
        known = [replace(segment, ids=[i % quantised_models.VOCAB for i in segment.ids]) for segment in step]
        assert distance(logits(gpu, known), logits(reference, known)) < 0.02
    matrices = [parts for name, parts in gpu.weights.matrices.items() if "attn" in name]
    assert all(part.weight.layout == LAYOUTS["Q8_0"] for parts in matrices for part in parts)
    layers = chain.from_iterable(parts for name, parts in gpu.weights.matrices.items() if name.startswith("layers"))
    vectors = [vector for name, vector in gpu.weights.vectors.items() if name.startswith("layers")]
    there = sum(part.weight.nbytes for part in layers) + sum(vector.nbytes for vector in vectors)
    assert sum(needs_of(program, LIMITS).layers) == there  # what is asked of the device is what lies on it


def test_formats_with_a_stand_in_are_compiled_for_and_nf4_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded."""
    from roofline.backends.gpu.program import _check_formats

    _check_formats({"INT4", "INT8", "Q4_0", "E4M3", "BF16"})
    for name in ("NF4", "Q2_K"):
        with pytest.raises(UnsupportedError, match=f"weights of {name} on a GPU"):
            _check_formats({name, "INT4"})
