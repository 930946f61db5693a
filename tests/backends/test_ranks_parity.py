"""Ranks, as threads, beside the models of transformers: those whose division differs from Llama's.

Quick siblings without transformers are in test_reference_shard.py and test_cpu_ranks.py.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="what the logits are compared with runs in torch")
pytest.importorskip("transformers", reason="it is what the logits are compared with")
native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
for folder in ("program", "weights"):  # thread_ranks, gguf_families
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from thread_ranks import Member, Threads  # noqa: E402

from roofline.backends.capacity import Capacity  # noqa: E402
from roofline.backends.reference.executable import ReferenceExecutable  # noqa: E402
from roofline.models.registry import configure  # noqa: E402
from roofline.ops.batch import BatchLimits, Segment  # noqa: E402
from roofline.program.compile import compile_program  # noqa: E402
from roofline.program.ir import WHOLE, Share  # noqa: E402
from roofline.program.target import CPU, PLAIN  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.weights.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from tests.backends.cpu_models import packed  # noqa: E402
from tests.models.parity_cases import CASES, theirs  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT, ANSWER = 24, 12
IDS = np.random.default_rng(4).integers(0, 96, PROMPT).tolist()
LIMITS = BatchLimits(PROMPT, 1, PROMPT, 16)
SCANS = ["mamba_untied", "falcon_mamba", "mamba2", "mamba2_groups", "granitemoehybrid_turned", "nemotron_h_moe"]
SCANS += ["nemotron_h_latent", "falcon_h1_multipliers", "falcon_h1_biases", "lfm2_biases", "lfm2_moe"]


def limits_of(source: Checkpoint) -> BatchLimits:
    """A step's limits; models with recurrent state have a slot for the sequence."""
    return replace(LIMITS, state_slots=1 if configure(source.config)[1].state_parts else 0)


def of_reference(source: Checkpoint, share: Share, group: Member | None) -> Any:
    family, config = configure(source.config)
    program = compile_program(family, config, source.tensors, PLAIN, share=share)
    return ReferenceExecutable(program, source.read, limits_of(source), 16, 256, group=group)


def of_cpu(source: Checkpoint, share: Share, group: Member | None) -> Any:
    family, config = configure(source.config)
    program = compile_program(family, config, source.tensors, CPU, share=share)
    capacity, isa = Capacity(limits_of(source), 256, 16), native.isas()[0]
    return packed(program, source, capacity, isa=isa, threads=1, group=group)


MakeExecutable = Callable[[Checkpoint, Share, Member | None], Any]
BACKENDS: dict[str, tuple[MakeExecutable, float]] = {"reference": (of_reference, 2e-5), "cpu": (of_cpu, 0.05)}


def answered(make: MakeExecutable, source: Checkpoint, share: Share = WHOLE, group: Member | None = None) -> np.ndarray:
    """The logits of the prompt and of each likeliest token after it."""
    model, ids, at, rows = make(source, share, group), IDS, 0, []
    for _ in range(ANSWER):
        model.batch.fill([Segment(ids, at, range(16))], range(len(ids)))
        model.forward()
        rows.append(np.array(model.logits()))
        at, ids = at + len(ids), [int(rows[-1][-1].argmax())]
    return np.concatenate(rows)


def compare(source: Checkpoint, model: Any, make: MakeExecutable, tolerance: float, ranks: int) -> None:
    """The ranks' logits are transformers', for the prompt and for the tokens that the ranks choose."""
    rows = Threads(ranks).run(lambda member: answered(make, source, Share(member.rank, ranks), member))
    assert all(np.array_equal(other, rows[0]) for other in rows)
    chosen = rows[0][PROMPT - 1 : -1].argmax(-1).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([IDS + chosen])).logits[0].numpy()
    assert expected.std() > 0.1
    assert np.abs(rows[0] - expected).max() < tolerance
    if make is of_reference:
        assert expected[PROMPT - 1 : -1].argmax(-1).tolist() == chosen


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["phi3", "phi4_mini", "glm4", "one kv head"])
def test_ranks_have_the_logits_of_transformers(name: str, backend: str, ranks: int) -> None:
    one_kv_head = CASES["gemma3"].config | {"kv_heads": 1}
    model = theirs(one_kv_head if name == "one kv head" else CASES[name].config)
    make, tolerance = BACKENDS[backend]
    compare(checkpoint_of(model), model, make, tolerance, ranks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCANS)
def test_ranks_of_scans_and_convolutions_have_the_logits_of_transformers(name: str, backend: str) -> None:
    config = CASES[name].config
    model = theirs(config | ({"ffn": 64} if "experts" in config else {}))  # each rank has 32 columns of an expert
    make, tolerance = BACKENDS[backend]
    compare(checkpoint_of(model), model, make, tolerance, 2)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1"])
def test_ranks_of_scans_in_gguf_files_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="it writes the files")
    from gguf_families import GGUF_CASES, write

    model = theirs(GGUF_CASES[name].config)
    compare(open_checkpoint(write(tmp_path / "model.gguf", model, GGUF_CASES[name])), model, of_reference, 2e-5, 2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["phi3", "glm4"])
def test_ranks_of_a_quantised_gguf_file_have_the_logits_of_its_weights(name: str, ranks: int, tmp_path: Path) -> None:
    """transformers has the weights that the file's blocks stand for, as the gguf package reads them."""
    gguf = pytest.importorskip("gguf", reason="it writes the files")
    from gguf_families import GGUF_CASES, write

    form = gguf.GGMLQuantizationType.Q8_0
    heads = {"heads": 6, "kv_heads": 3, "width": 96}  # two heads of 16 columns are a block
    case = replace(GGUF_CASES[name], config=GGUF_CASES[name].config | heads)
    model = theirs(case.config)
    source = open_checkpoint(write(tmp_path / "model.gguf", model, case, form))
    assert {tensor.format for tensor in source.tensors.values()} == {"Q8_0", "F32"}
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 2:
                blocks = gguf.quants.quantize(value.numpy(), form)
                value.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, form)))
    compare(source, model, of_reference, 2e-5, ranks)
    compare(source, model, of_cpu, 0.2, ranks)  # rows are rounded to 8 bits before these matrices
