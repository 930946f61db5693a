"""Ranks of the cpu backend, as threads: beside the reference's ranks, one process, and each other."""

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
pytest.importorskip("torch", reason="ranks add with torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders, thread_ranks
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import checkpoint  # noqa: E402
from thread_ranks import Member, Threads  # noqa: E402

from roofline.backends.capacity import Capacity  # noqa: E402
from roofline.backends.cpu.executable import CpuExecutable  # noqa: E402
from roofline.backends.reference.executable import ReferenceExecutable  # noqa: E402
from roofline.common.errors import UnsupportedError  # noqa: E402
from roofline.models import registry  # noqa: E402
from roofline.ops.batch import BatchLimits, Segment  # noqa: E402
from roofline.program import target  # noqa: E402
from roofline.program.compile import compile_program  # noqa: E402
from roofline.program.ir import WHOLE, Share  # noqa: E402

LIMITS = BatchLimits(tokens=64, segments=4, rows=64, pages=64)
IDS = np.random.default_rng(0).integers(0, 300, 40).tolist()
CHUNKS = [
    ([Segment(IDS[:21], 0, [3, 7])], list(range(21))),
    ([Segment(IDS[:9], 0, [2])], []),
    ([Segment(IDS[21:22], 21, [3, 7]), Segment(IDS[:17], 0, [1, 5])], [0, 17]),
    ([Segment(IDS[22:23], 22, [3, 7])], [0]),
]


def executable(kind: str, model: str, form: str, share: Share = WHOLE, group: Member | None = None) -> Any:
    source = checkpoint(model, form)
    family, config = registry.configure(source.config)
    program = compile_program(family, config, source.tensors, target.CPU, share=share)
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 256, "group": group}
    if kind == "reference":
        return ReferenceExecutable(program, source.read, **shape)
    identity: Future[str] = Future()
    identity.set_result("7e57")
    capacity = Capacity(LIMITS, max_context=256, num_pages=16)
    isa = native.isas()[0]
    threads = 1 if share.ranks > 2 else 2  # more of them would only wait for each other on few cores
    return CpuExecutable.from_program(
        program, source, capacity, weights_hash=identity, isa=isa, threads=threads, group=group
    )


def steps(made: Any, chunks: Any = CHUNKS) -> np.ndarray:
    out = []
    for segments, rows in chunks:
        made.batch.fill(segments, rows)
        made.forward()
        out.append(np.array(made.logits()))
    return np.concatenate(out)


def together(kind: str, model: str, form: str, ranks: int, chunks: Any = CHUNKS) -> list[np.ndarray]:
    """Each rank's logits."""
    return Threads(ranks).run(
        lambda member: steps(executable(kind, model, form, Share(member.rank, ranks), member), chunks)
    )


@pytest.mark.parametrize(
    ("model", "form", "ranks"),
    [
        ("llama", "Q4_1", 4),
        ("qwen3", "BF16", 3),
        ("mpt-alibi", "F16", 3),
        ("gpt-oss", "Q8_0", 2),
        ("glm4", "Q4_1", 2),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in (
                ("qwen2", "Q8_0", 2),
                ("qwen2-moe", "Q4_1", 2),
                ("llama", "F32", 2),
                ("mixtral", "Q4_0", 3),
                ("gpt-oss", "BF16", 3),
                ("mistral", "Q4_0", 2),
                ("mpt", "Q8_0", 2),
            )
        ),
    ],
)
def test_ranks_equal_the_reference_s_ranks(model: str, form: str, ranks: int) -> None:
    found, wanted = together("cpu", model, form, ranks), together("reference", model, form, ranks)
    assert all(np.array_equal(other, found[0]) for other in found)
    assert np.array_equal(found[0], wanted[0])
    whole = steps(executable("cpu", model, form))
    assert np.abs(found[0] - whole).max() < 1e-3 * np.abs(whole).max()  # 1.6e-4 was the most


def test_chunks_and_neighbours_change_no_bit() -> None:
    alone = [([Segment(IDS[:23], 0, [4, 9])], list(range(23)))]
    whole, chunked = together("cpu", "llama", "Q8_0", 2, alone)[0], together("cpu", "llama", "Q8_0", 2)[0]
    assert np.array_equal(whole[:22], chunked[:22])
    assert np.array_equal(whole[22], chunked[23])


def test_exchanges_take_time_and_no_variant() -> None:
    def work(member: Member) -> Any:
        made = executable("cpu", "llama", "Q8_0", Share(member.rank, 2), member)
        segments, rows = CHUNKS[0]
        made.batch.fill(segments, rows)
        made.clocks(True)
        made.forward()
        timed = list(zip((instr.op for instr in made.program.body), made.op_seconds(), strict=True))
        with pytest.raises(ValueError, match="no variants"):
            made.choose([next(i for i, (op, _) in enumerate(timed) if op == "all_reduce")], 0, "default")
        return timed

    timed, _ = Threads(2).run(work)
    assert sum(op == "all_reduce" for op, _ in timed) == 5  # the embedding's, two a layer
    assert all(seconds > 0 for op, seconds in timed if op in ("all_reduce", "all_gather", "linear"))
    assert all(seconds >= 0 for _, seconds in timed)


def test_a_part_alone_and_a_stage_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a Program for 2 ranks is not supported: there are 1 here"):
        executable("cpu", "llama", "Q8_0", Share(0, 2))
    with pytest.raises(UnsupportedError, match=r"a stage of a pipeline.*tensor_parallel"):
        executable("cpu", "llama", "Q8_0", Share(0, 1, 1, 2))
