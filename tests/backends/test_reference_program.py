"""The reference runs a Program after any pass, and agrees with itself, the model's own text, and the file's blocks."""

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders

import program_builders as builders

from roofline.backends.reference.executable import ReferenceExecutable
from roofline.backends.reference.unpack import unpack
from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.batch import BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program, stages
from roofline.program.ir import Program
from roofline.program.target import CPU
from tests.backends.oracle import oracle_logits

torch = pytest.importorskip("torch", reason="the reference is written in torch")

LIMITS = BatchLimits(tokens=64, segments=8, rows=64, pages=64)
MODELS = {
    "llama_q4_1": lambda: builders.build(builders.BASE, embed="Q8_0"),
    "llama_k": lambda: builders.build(builders.WIDE, "Q4_K", v="Q6_K", down="Q5_K"),
    "mistral_q4_0": lambda: builders.build(builders.MISTRAL, "Q4_0"),
    "qwen3_q8_0": lambda: builders.build(builders.QWEN3, "Q8_0"),
    "qwen2_bf16": lambda: builders.build(builders.QWEN2, "BF16"),
    "mpt_q4_1": lambda: builders.build(builders.MPT),
    "mpt_alibi_q8_0": lambda: builders.build(builders.MPT_ALIBI, "Q8_0"),
}
IDS = [int(i) for i in np.random.default_rng(3).integers(0, 96, 40)]


def run(program: Program, model: builders.Model, steps: list[tuple[list[Segment], list[int]]]) -> list[np.ndarray]:
    executable = ReferenceExecutable(program, model.read, LIMITS, num_pages=16, max_context=256)
    out = []
    for segments, rows in steps:
        executable.batch.fill(segments, rows)
        executable.forward()
        out.append(executable.logits().copy())
    return out


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_after_legalize_changes_no_bit(name: str) -> None:
    model = MODELS[name]()
    programs = dict(stages(model.family, model.cfg, model.tensors, CPU))
    step = [([Segment(IDS, 0, [5, 2, 9])], list(range(len(IDS))))]
    legal = run(programs["legalize"], model, step)[0]
    for stage in ("merge", "fuse", "plan"):
        assert np.array_equal(run(programs[stage], model, step)[0], legal), stage
    oracle = oracle_logits(model.family, model.cfg, model, IDS)
    plain = run(programs["trace"], model, step)[0]
    assert np.abs(plain - oracle).max() < 1e-4
    assert cosines(legal, oracle).mean() > 0.998  # so narrow a model averages 8-bit noise less than a real one


@pytest.mark.parametrize("name", ["llama_q4_1", "mistral_q4_0", "qwen2_bf16"])
def test_chunks_pages_and_neighbours_change_no_bit(name: str) -> None:
    model = MODELS[name]()
    *_, (_, program) = stages(model.family, model.cfg, model.tensors, CPU)
    whole = run(program, model, [([Segment(IDS, 0, [0, 1, 2])], list(range(40)))])[0]
    other = Segment(IDS[:7], 0, [8])
    chunked = run(
        program,
        model,
        [
            ([Segment(IDS[:17], 0, [4, 11])], list(range(17))),
            ([other, Segment(IDS[17:39], 17, [4, 11, 6])], list(range(7, 29))),
            ([Segment(IDS[39:], 39, [4, 11, 6]), Segment([3], 7, [8])], [0]),
        ],
    )
    assert np.array_equal(np.concatenate(chunked), whole)


@pytest.mark.parametrize("stage", ["narrow", "plan"])
@pytest.mark.parametrize("name", ["llama_q4_1", "qwen3_q8_0", "qwen2_bf16", "mpt_q4_1"])
def test_a_step_may_want_no_logits(name: str, stage: str) -> None:
    model = MODELS[name]()
    program = dict(stages(model.family, model.cfg, model.tensors, CPU))[stage]
    whole = run(program, model, [([Segment(IDS, 0, [0, 1, 2])], [39])])[0]
    first = ([Segment(IDS[:20], 0, [0, 1])], [])
    none, rest = run(program, model, [first, ([Segment(IDS[20:], 20, [0, 1, 2])], [19])])
    assert none.shape == (0, 96)
    assert np.array_equal(rest, whole)


def test_long_contexts_cross_blocks_and_splits() -> None:
    model = builders.build(builders.BASE | {"layers": 1})
    programs = dict(stages(model.family, model.cfg, model.tensors, CPU))
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 96, 560)]
    oracle = oracle_logits(model.family, model.cfg, model, ids)
    limits = BatchLimits(600, 1, 600, 64)
    executable = ReferenceExecutable(programs["plan"], model.read, limits, num_pages=40, max_context=1024)
    executable.batch.fill([Segment(ids, 0, range(35))], range(560))
    executable.forward()
    legal = executable.logits()
    assert cosines(legal, oracle).mean() > 0.999
    executable.batch.fill([Segment(ids[559:], 559, range(35))], [0])
    executable.forward()
    assert np.array_equal(executable.logits()[0], legal[559])


@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"]
)
def test_integer_groups_are_the_format_s_values(name: str) -> None:
    shape = (6, 512)
    row = formats.get(name)
    random = np.random.default_rng(1)
    raw = row.quantize(random.standard_normal(shape).astype(np.float32))
    groups = unpack(raw, name, shape)
    wide = np.repeat(groups.scale, groups.group, axis=1) * groups.q
    if groups.minimum is not None:
        wide = wide + np.repeat(groups.minimum, groups.group, axis=1)
    np.testing.assert_array_equal(wide.astype(np.float32), row.dequantize(raw, shape))


def test_formats_without_groups_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="BF16"):
        unpack(np.zeros(8, np.uint8), "BF16", (1, 4))


def test_an_order_nobody_knows_is_refused() -> None:
    model = builders.build(builders.BASE | {"layers": 1})
    program = dict(stages(model.family, model.cfg, model.tensors, CPU))["trace"]
    from dataclasses import replace

    body = tuple(replace(i, attrs={**i.attrs, "order": "new"}) if i.op == "add" else i for i in program.body)
    with pytest.raises(UnsupportedError, match="'new'"):
        run(replace(program, body=body), model, [([Segment([1], 0, [0])], [0])])


def test_executable_prices_its_step_and_knows_its_pages() -> None:
    model = MODELS["llama_q4_1"]()
    *_, (_, program) = stages(model.family, model.cfg, model.tensors, CPU)
    executable = ReferenceExecutable(program, model.read, LIMITS, num_pages=4, max_context=64)
    assert executable.vocab_size == 96
    assert executable.page_bytes == 16 * 2 * 2 * 2 * 16 * 2
    executable.batch.fill([Segment([1, 2], 0, [0])], [1])
    cost = executable.step_cost()
    assert cost.limit_seconds is None
    assert cost.weight_bytes > sum(raw.size for raw in model.raw.values())


def test_fingerprint_knows_program_and_weights() -> None:
    models = [builders.build(builders.BASE), builders.build(builders.BASE), builders.build(builders.BASE, seed=1)]
    models.append(builders.build(builders.BASE | {"norm_eps": 1e-6}))
    made = []
    for model in models:
        program = compile_program(model.family, model.cfg, model.tensors, CPU)
        weights = sha256(b"".join(model.raw[name].tobytes() for name in sorted(model.raw))).hexdigest()
        made.append(ReferenceExecutable(program, model.read, LIMITS, 4, 64, weights).fingerprint)
    assert made[0] == made[1]
    assert len(set(made)) == 3


def test_exact_is_what_adds_in_an_order_of_its_own() -> None:
    for chosen, exact in ((target.CPU, True), (target.PLAIN, False), (target.gpu(), False)):
        model = builders.build(builders.BASE)
        program = compile_program(model.family, model.cfg, model.tensors, chosen)
        assert ReferenceExecutable(program, model.read, LIMITS, num_pages=4, max_context=64).exact == exact
