"""Whole models with LoRA adapters on the gpu backend, in Triton's interpreter, beside the reference and alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
from gpu_models import LIMITS, LLAMA, distance, logits

from roofline.backends.adapters import AdapterSlots
from roofline.backends.options import LoadOptions
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.models import registry
from roofline.models.config import ModelConfig
from roofline.ops.adapters import AdapterMatrix
from roofline.ops.batch import Segment
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.program.passes.adapt import adapt, sites
from roofline.weights.random_weights import random_checkpoint

torch = pytest.importorskip("torch")
RANK = 8
IDS = np.random.default_rng(0).integers(0, 300, 24).tolist()


def adapter(program, seed, rank=RANK, only=""):
    """Matrices for every site, or for those whose name holds `only`."""
    generator = np.random.default_rng(seed)

    def matrix(name, site):
        shapes = (rank, site.inputs), (rank, site.outputs)
        a, b = (generator.standard_normal(shape).astype(np.float32) / shape[1] ** 0.5 for shape in shapes)
        return AdapterMatrix(name, a, b, 1.0 + seed)

    return [matrix(name, site) for name, site in sites(program).items() if only in name]


def executables(form="BF16", exact=False, slots=3, **changes):
    """(adapted on gpu, the same on the reference, the model without places for adapters on gpu)."""
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.reference.executable import ReferenceExecutable

    source = random_checkpoint({**LLAMA, **changes}, seed=3, form=form)
    cfg = ModelConfig.of(source.config)
    rows = "f16" if form == "F16" else "bf16"
    program = compile_program(registry.get(cfg.family), cfg, source.tensors, target.gpu(rows, exact))
    adapted = adapt(program, RANK)
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 128, "weights_hash": "7e57"}
    runtime = Runtime(chips.get("sm_90"), "cpu", exact, adapter_slots=slots)
    gpu = GpuExecutable(adapted, source.read, runtime, **shape)
    return (
        gpu,
        ReferenceExecutable(adapted, source.read, **shape),
        GpuExecutable(program, source.read, runtime, **shape),
    )


def mixed(first=0):
    """Two answers with adapters and one without, of which `first` positions are computed."""
    return [
        Segment(IDS[first:21], first, [3, 7], 2),
        Segment(IDS[first:17], first, [1, 5]),
        Segment(IDS[first:9], first, [9], 1),
    ]


@pytest.mark.parametrize(
    ("form", "changes"),
    [("BF16", {"layers": 1}), pytest.param("Q4_1", {"family": "qwen", "attention_bias": True}, marks=pytest.mark.slow)],
)
def test_steps_equal_the_reference(form, changes):
    gpu, reference, plain = executables(form, **changes)
    for each in (gpu, reference):
        each.adapters.set(1, adapter(each.program, 1, rank=3))
        each.adapters.set(2, adapter(each.program, 2))
    got, want, without = logits(gpu, mixed()), logits(reference, mixed()), logits(plain, mixed())
    assert distance(got, want) < 0.02, distance(got, want)
    assert distance(got[1], without[1]) < 0.02
    assert min(distance(got[row], without[row]) for row in (0, 2)) > 0.2
    decode = [Segment([7], 21, [3, 7], 2), Segment([8], 17, [1, 5]), Segment([9], 9, [9], 1)]
    got, want = logits(gpu, decode), logits(reference, decode)
    assert distance(got, want) < 0.02, distance(got, want)


@pytest.mark.slow
def test_an_answer_is_the_same_alone_in_company_and_in_chunks():
    gpu, _, _ = executables(exact=True)
    for slot in (1, 2):
        gpu.adapters.set(slot, adapter(gpu.program, slot))
    company = logits(gpu, mixed())
    alone = logits(gpu, [Segment(IDS[:21], 0, [10, 11], 2)])
    assert np.array_equal(alone[0], company[0])
    free = logits(gpu, [Segment(IDS[:17], 0, [12, 13])])  # a step without adapters launches nothing for them
    assert np.array_equal(free[0], company[1])
    logits(gpu, [Segment(IDS[:10], 0, [12, 13], 2)])
    rest = logits(gpu, [Segment(IDS[10:21], 10, [12, 13], 2), Segment(IDS[:5], 0, [14], 1)])
    assert np.array_equal(rest[0], company[0])


@pytest.mark.slow
def test_a_slot_that_is_freed_has_nothing_of_its_adapter():
    gpu, _, _ = executables()
    step = [Segment(IDS, 0, [3, 7], 1)]
    gpu.adapters.set(1, adapter(gpu.program, 1, only="mlp.down"))
    first = logits(gpu, step)
    gpu.adapters.free(1)
    gpu.adapters.set(1, adapter(gpu.program, 2))
    assert not np.array_equal(logits(gpu, step), first)
    gpu.adapters.free(1)
    gpu.adapters.set(1, adapter(gpu.program, 1, only="mlp.down"))
    assert np.array_equal(logits(gpu, step), first)


def test_padded_rows_and_steps_without_adapters():
    """A graph's step is larger than the batch: what the rows behind it had before is no adapter of theirs."""
    from roofline.backends.gpu.runtime.graphs import padded

    gpu, _, _ = executables()
    gpu.batch.fill(mixed(), [20, 37, 46])
    assert gpu._fields.sizes().adapted
    gpu.batch.fill([Segment([7], 21, [3, 7], 2), Segment([8], 17, [1, 5]), Segment([9], 9, [9])], [0, 1, 2])
    sizes = padded(gpu._fields.sizes(), LIMITS, 128)
    assert (sizes.tokens, sizes.adapted) == (4, True)
    gpu._fields.pad(sizes)
    gpu._fields.upload()
    assert gpu.step_of(sizes).fields["adapters"].tolist() == [2, 0, 0, 0]
    gpu.batch.fill([Segment([7], 21, [3, 7])], [0])
    assert not gpu._fields.sizes().adapted


def test_memory_is_what_was_planned():
    from roofline.backends.gpu.runtime.adapters import adapter_bytes

    gpu, _, _ = executables(slots=2)
    tensors = [t for each in gpu._adapters._by_name.values() for t in (each.a, each.b, each.scales)]
    assert sum(t.numel() * t.element_size() for t in tensors) == adapter_bytes(gpu.program, 2, RANK)
    assert isinstance(gpu.adapters, AdapterSlots)
    assert gpu.adapters.rank == RANK


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"max_adapter_rank": 65}, "max_adapter_rank=64"), ({"activations": "fp8"}, "activations=auto")],
)
def test_what_the_kernel_lacks_is_refused_by_name(changes, words):
    from roofline.backends.gpu.program import compile_for_gpu

    source = random_checkpoint(LLAMA, seed=3, form="E4M3")
    options = replace(LoadOptions(backend="gpu", max_adapters=1), **changes)
    with pytest.raises(UnsupportedError, match=words):
        compile_for_gpu(source, ModelConfig.of(source.config), options, chips.get("sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("hosted", [0, 1])
def test_a_folder_of_peft_s_files_on_the_backend(monkeypatch, tmp_path, tiny_llama, hosted):
    from gpu_loading import pretend

    from roofline.bundle import load
    from roofline.engine.config import EngineConfig
    from roofline.engine.local import LocalEngine
    from roofline.engine.params import SamplingParams
    from tests.adapter_files import matrices, write_adapter

    pretend(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    folder = write_adapter(tmp_path / "adapter", matrices(tiny_llama, 1))
    options = LoadOptions(backend="gpu", weights="random:1", cache_tokens=64, max_running=2, max_batch_tokens=16)
    options = replace(options, max_adapters=1, max_adapter_rank=8, offload=hosted or 0)
    loaded = load(str(tmp_path), options, text=False)
    slots = loaded.executable.adapters
    assert (slots.rank, len(slots.sites)) == (8, 7 * tiny_llama["num_hidden_layers"])
    engine = LocalEngine(loaded.executable, EngineConfig(max_adapters=1))

    def answer(adapter=""):
        engine.submit([1, 2, 3], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), adapter=adapter)
        events = []
        while engine.has_work:
            events += engine.step()
        assert not any(event.error for event in events)
        return [token for event in events for token in event.ids]

    plain, digest = answer(), engine.adapters.load(folder).digest
    assert answer(digest) != plain
    assert answer() == plain
    engine.close()


def test_a_dora_adapter_is_refused_with_its_remedy():
    gpu, _, _ = executables()
    dora = [replace(matrix, magnitude=np.ones(matrix.b.shape[1], np.float32)) for matrix in adapter(gpu.program, 1)]
    with pytest.raises(UnsupportedError, match=r"DoRA.*roofline merge"):
        gpu.adapters.set(1, dora)
    gpu.adapters.row_scaling = lambda matrix: (matrix.magnitude, matrix.magnitude)
    with pytest.raises(UnsupportedError, match=r"DoRA adapter on a GPU.*roofline merge"):
        gpu.adapters.set(1, dora)
    assert gpu.adapters.placed == {}
