"""Variants of an op: all bit-equal, only those that exist."""

import sys
from pathlib import Path

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import checkpoint, executable  # noqa: E402

from roofline.backends.cpu.select import REGIMES  # noqa: E402
from roofline.backends.cpu.tuning import variants  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from roofline.ops.traits import Trait  # noqa: E402
from tests.backends.test_cpu_kernels import CASES, QUANTISED, Matrix, activations  # noqa: E402

ISAS = native.isas()


def linear_names(isa: str, digits: int) -> list[str]:
    """Every block there is code for, every prefetch, and mixtures."""
    most = native.kernels.block_tokens(isa)[digits - 1]
    blocks = [f"{tiles}x{tokens}" for tiles in (1, 2) for tokens in range(1, most[tiles - 1] + 1)]
    fetches = ["fetch=off", "fetch=next", "fetch=64", "fetch=16384"]
    return [*blocks, *fetches, "greedy", f"{blocks[0]} greedy fetch=next", f"greedy fetch=256 {blocks[-1]}"]


@pytest.mark.parametrize(("name", "digits"), [(name, digits) for name, digits in CASES if name in QUANTISED])
def test_all_variants_of_a_linear_are_bit_equal(name: str, digits: int) -> None:
    matrix, x = Matrix(name, 56, 256), activations(163, 256)  # half a tile at the end; more tokens than a panel holds
    wanted = matrix.times(ISAS[0], x, digits)
    for isa in ISAS:
        for variant in linear_names(isa, digits):
            for count in (1, 2, 3, 7, 8, 11) if variant != "greedy" and isa != "portable" else (1, 8, 163):
                y = np.full((count, matrix.rows), np.nan, np.float32)
                native.kernels.linear(
                    isa, matrix.number, matrix.memory.address, 56, 256, x[:count], y, digits, variant=variant
                )
                assert y.tobytes() == wanted[:count].tobytes(), (isa, variant, count)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("llama", "Q6_K"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("mistral", "Q4_1"), ("llama", "Q4_1"), ("qwen3", "BF16"))
        ),
    ],
)
def test_whole_steps_are_bit_equal_whatever_is_chosen(model: str, form: str) -> None:
    source, rng = checkpoint(model, form), np.random.default_rng(4)
    for isa, threads in ((ISAS[0], 2), (ISAS[0], 3), (ISAS[-1], 2)):
        run = executable(source, isa=isa, threads=threads)
        wanted = [logits.tobytes() for logits in steps(run)]
        for _ in range(3):
            for group in variants.groups(run.program):
                for regime in range(len(REGIMES)):
                    names = variants.candidates(group, regime, isa, threads)
                    some = [str(n) for n in rng.permutation(names)[: rng.integers(0, 4)]]
                    run.choose(group.ops, regime, variants.combined(some))
            assert [logits.tobytes() for logits in steps(run)] == wanted


def steps(run) -> list[np.ndarray]:
    """Logits of a chunk of 70 tokens, 9 sequences decoding, 3 rows, and one row alone."""
    ids = np.random.default_rng(1).integers(0, 300, 80).tolist()
    found = []
    for segments in (
        [Segment(ids[:70], 0, range(5))],
        [Segment(ids[70:71], 70, range(5))] + [Segment(ids[i : i + 1], 0, [10 + i]) for i in range(8)],
        [Segment(ids[71:74], 71, range(5))],
        [Segment(ids[74:75], 74, range(5))],
    ):
        run.batch.fill(segments, range(sum(len(s.ids) for s in segments)))
        run.forward()
        found.append(run.logits().copy())
    return found


def test_a_variant_that_an_op_has_not_is_refused() -> None:
    run = executable(checkpoint("llama", "Q4_1"), isa=ISAS[0])
    by_kind = {group.kind: group for group in variants.groups(run.program)}
    for kind, names in {
        "linear": ["3x1", "1x99", "2x", "x2", "fetch=", "fetch=3x", "claim=0", "queries=8", "nonsense", "", " "],
        "rows": ["private=9", "private=-1", "1x1", "greedy"],
        "attend": ["queries=0", "claim=20"],
    }.items():
        for name in names:
            with pytest.raises(ValueError, match="variant"):
                run.choose(by_kind[kind].ops, 0, name)
    with pytest.raises(ValueError, match="no such op or regime"):
        run.choose([0], 3, "default")
    with pytest.raises(ValueError, match="this op has no variants"):
        run.choose([0], 0, "default")  # the embedding


def test_float_weights_have_no_blocks() -> None:
    run = executable(checkpoint("llama", "BF16"), isa=ISAS[0])
    (group, *_) = [g for g in variants.groups(run.program) if g.kind == "float_linear"]
    run.choose(group.ops, 0, "claim=5")
    with pytest.raises(ValueError, match="no such variant"):
        run.choose(group.ops, 0, "1x1")


def test_groups_share_shapes_and_cover_every_linear() -> None:
    run = executable(checkpoint("llama", "Q4_1"), isa=ISAS[0])
    found = variants.groups(run.program)
    linears = sorted(i for g in found if "linear" in g.kind for i in g.ops)
    assert linears == [i for i, instr in enumerate(run.program.body) if instr.has(Trait.PRODUCT)]
    assert len({(g.kind, g.shape) for g in found}) == len(found)
    assert max(len(g.ops) for g in found) == 2 * 2  # norm_quantize, twice a layer


def test_words_are_joined_by_what_they_are_about() -> None:
    assert variants.combined(["2x4", "1x8", "claim=40", "default"]) == "2x4 claim=40"
    assert variants.combined([]) == "default"
