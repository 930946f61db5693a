"""Each condition of each fused instruction: a Program that breaks it alone keeps its parts."""

from collections.abc import Sequence
from pathlib import Path

import program_builders as builders
import pytest

from roofline.program.compile import stages
from roofline.program.ir import Program
from roofline.program.passes.fuse import fuse
from roofline.program.target import CPU, GPU
from roofline.program.text import parse_program, print_program
from roofline.program.verify import verify

GOLDEN = Path(__file__).parent / "golden"
OLMO2 = builders.build(builders.BASE | {"family": "olmo2"})
Edits = Sequence[tuple[str, str]]
OUTPUT = "output kv0.2\n"
TABLE = "table rope0 = dim=16, theta=10000.0, style='half', kind='none', scaling=()\n"
INPUT = "input positions: i32[tokens]\n"
INPUT_IDS = "input ids: i32[tokens]\n"


def program(model: str, *edits: tuple[str, str]) -> Program:
    """A model after merge, whose text was edited; each edit is of the first layer, which stands first."""
    text = (GOLDEN / f"{model}.merge.txt").read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return parse_program(text)


def also_read(*names: str) -> tuple[tuple[str, str], ...]:
    """Edits after which these values are read once more: as outputs."""
    return ((OUTPUT, OUTPUT + "".join(f"output {name}\n" for name in names)),)


# Without what joins q, k and v that are made apart, so that each fusion's own conditions are seen.
ROPE_ALONE = [name for name in CPU.fusions if name != "qkv_write"]
QKV_ALONE = [name for name in CPU.fusions if name != "rope_kv_write"]


def count(edited: Program, op: str, fusions: Sequence[str] = CPU.fusions) -> int:
    return sum(instr.op == op for instr in fuse(edited, fusions).body)


SECOND_TABLE = (TABLE, TABLE + TABLE.replace("rope0", "rope1"))
SECOND_POSITIONS = (INPUT, INPUT + INPUT.replace("positions", "others"))
ROPE_KV_WRITE: dict[str, tuple[str, Edits]] = {
    "k is read elsewhere": ("llama", also_read("x6")),
    "v is read elsewhere": ("llama", also_read("x4")),
    "q before its rope is read elsewhere": ("llama", also_read("x2")),
    "k before its rope is read elsewhere": ("llama", also_read("x3")),
    "the norm of q is read elsewhere": ("qwen3", also_read("x5")),
    "the norm of k is read elsewhere": ("qwen3", also_read("x6")),
    "two tables": (
        "llama",
        [SECOND_TABLE, ("rope(x3, positions; ; table='rope0'", "rope(x3, positions; ; table='rope1'")],
    ),
    "two kinds of positions": ("llama", [SECOND_POSITIONS, ("rope(x3, positions", "rope(x3, others")]),
    "k and v change places": (
        "llama",
        [
            ("split(x2+x3+x4; ; start=64, stop=96)", "split(x2+x3+x4; ; start=97, stop=98)"),
            ("split(x2+x3+x4; ; start=96, stop=128)", "split(x2+x3+x4; ; start=64, stop=96)"),
            ("start=97, stop=98", "start=96, stop=128"),
        ],
    ),
    "q does not begin the row": ("llama", [("start=0, stop=64", "start=32, stop=64")]),
    "v does not end the row": ("llama", [("x2+x3+x4: f32[tokens, 128]", "x2+x3+x4: f32[tokens, 160]")]),
    "a gap before k": ("llama", [("start=64, stop=96", "start=80, stop=96")]),
    "k of another value": ("llama", [("x3: f32[tokens, 32] = split(x2+x3+x4", "x3: f32[tokens, 32] = split(x0")]),
    "v of another value": ("llama", [("x4: f32[tokens, 32] = split(x2+x3+x4", "x4: f32[tokens, 32] = split(x0")]),
    "v is no split": ("llama", [("x4: f32[tokens, 32] = split(x2+x3+x4; ; start=96, stop=128)",
                                 "x4: f32[tokens, 32] = cast(x2+x3+x4; ; dtype='f32')")]),
    "a norm of q alone": ("qwen3", [("rope(x6, positions", "rope(x3, positions")]),
    "another eps": ("qwen3", [("k_norm.weight; eps=1e-05", "k_norm.weight; eps=1e-06")]),
    "another order of sums": (
        "qwen3",
        [("k_norm.weight; eps=1e-05, heads=2, order='lanes16'", "k_norm.weight; eps=1e-05, heads=2, order='lanes8'")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPE_KV_WRITE)
def test_rope_kv_write_needs_all_its_conditions(case: str) -> None:
    model, edits = ROPE_KV_WRITE[case]
    assert count(program(model), "rope_kv_write") == 2
    edited = program(model, *edits)
    assert count(edited, "rope_kv_write", ROPE_ALONE) == 1
    assert count(edited, "kv_write", ROPE_ALONE) == 1


def test_a_turned_q_may_have_other_readers() -> None:
    """It keeps its name."""
    assert count(program("llama", *also_read("x5")), "rope_kv_write") == 2


MINISTRAL3 = builders.build(builders.BASE | {"family": "ministral3", "query_beta": 0.4, "query_context": 16})
SCALED = {"beta": 0.4, "context": 16}


def scaled(*edits: tuple[str, str]) -> Program:
    """A model whose queries are multiplied by position, after merge, edited; what is first there is layer 0."""
    text = print_program(dict(stages(MINISTRAL3.family, MINISTRAL3.cfg, MINISTRAL3.tensors, CPU))["merge"])
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return parse_program(text)


@pytest.mark.parametrize("fusions", [CPU.fusions, GPU.fusions])
def test_a_scale_behind_the_rope_of_q_goes_into_the_write(fusions: Sequence[str]) -> None:
    fused = fuse(scaled(), fusions)
    writes = [instr for instr in fused.body if instr.op == "rope_kv_write"]
    assert [{name: instr.attrs[name] for name in SCALED} for instr in writes] == [SCALED] * 2
    assert [instr.outputs[0].name for instr in writes] == [i.inputs[0] for i in fused.body if i.op == "attend"]
    assert not any(instr.op in ("rope", "scale_by_position", "split") for instr in fused.body)
    assert all("beta" not in instr.attrs for instr in fuse(program("llama"), fusions).body)
    verify(fused)


# Nothing of the first layer's write is fused then: its q would be what the scale reads, and not what attention reads.
SCALE_APART: dict[str, Edits] = {
    "other positions": [SECOND_POSITIONS, ("scale_by_position(x5, positions", "scale_by_position(x5, others")],
    "what is turned is read elsewhere": also_read("x5"),
}


@pytest.mark.parametrize("case", SCALE_APART)
def test_a_scale_that_cannot_go_into_the_write_leaves_it_in_parts(case: str) -> None:
    edited = scaled(*SCALE_APART[case])
    assert count(edited, "rope_kv_write", ROPE_ALONE) == 1
    assert count(edited, "scale_by_position", ROPE_ALONE) == 1
    verify(fuse(edited, ROPE_ALONE))


def test_a_scale_of_a_q_that_is_not_turned_goes_into_the_write() -> None:
    text = "x5: f32[tokens, 64] = split(x2; ; start=0, stop=64)"
    factor = "x5s: f32[tokens, 64] = scale_by_position(x5, positions; ; beta=0.5, context=8, offset=1)"
    edited = program(
        "mpt_alibi_bf16", (INPUT_IDS, INPUT_IDS + INPUT), (text, f"{text}\n{factor}"), ("attend(x5", "attend(x5s")
    )
    (first, second) = (instr for instr in fuse(edited, QKV_ALONE).body if instr.op == "qkv_write")
    assert (first.inputs[1:], first.outputs[0].name) == (("kv0.0", "positions"), "x5s")
    assert {name: first.attrs[name] for name in ("beta", "context", "offset")} == {
        "beta": 0.5,
        "context": 8,
        "offset": 1,
    }
    assert (len(second.inputs), "beta" in second.attrs) == (2, False)


QKV_WRITE: dict[str, Edits] = {
    "q is read elsewhere": also_read("x5"),
    "k is read elsewhere": also_read("x3"),
    "v is read elsewhere": also_read("x4"),
    "q is not what attention reads": [("attend(x5", "attend(x0")],
    "q does not begin the row": [("start=0, stop=64", "start=32, stop=64")],
    "v does not end the row": [("x2: f32[tokens, 192]", "x2: f32[tokens, 256]")],
    "k begins late": [("start=64, stop=128", "start=65, stop=128")],
    "k of another value": [("x3: f32[tokens, 64] = split(x2", "x3: f32[tokens, 64] = split(x0")],
    "v of another value": [("x4: f32[tokens, 64] = split(x2", "x4: f32[tokens, 64] = split(x0")],
    "q of another value": [("x5: f32[tokens, 64] = split(x2", "x5: f32[tokens, 64] = split(x0")],
}


@pytest.mark.parametrize("case", QKV_WRITE)
def test_qkv_write_needs_all_its_conditions(case: str) -> None:
    assert count(program("mpt_alibi_bf16"), "qkv_write") == 2
    edited = program("mpt_alibi_bf16", *QKV_WRITE[case])
    assert count(edited, "qkv_write", QKV_ALONE) == 1
    assert count(edited, "kv_write", QKV_ALONE) == 1


GATE_UP = "layers.0.mlp.gate.weight[0:128] Q4_1, layers.0.mlp.up.weight[0:128] Q4_1"
SILU_MUL: dict[str, Edits] = {
    "the product is read elsewhere": also_read("x11+x12"),
    "two formats": [(GATE_UP, GATE_UP[:-4] + "Q8_0")],
    "two sizes": [(GATE_UP, GATE_UP.replace("up.weight[0:128]", "up.weight[0:127]"))],
    "three pieces": [(GATE_UP, GATE_UP + ", layers.0.mlp.more.weight[0:128] Q4_1")],
    "a bias": [
        ("x11+x12: f32[tokens, 256] = linear(x10.q8; layers.0.mlp.gate+up.weight;",
         "x11+x12: f32[tokens, 256] = linear(x10.q8; layers.0.mlp.gate+up.weight, final_norm.weight;"),
    ],
    "gate and up apart": [("silu_mul(x11+x12;", "silu_mul(x11+x12, x11+x12;")],
    "no linear": [("silu_mul(x11+x12;", "silu_mul(x2+x3+x4;"), *also_read("x11+x12")],
}  # fmt: skip


@pytest.mark.parametrize("case", SILU_MUL)
def test_linear_silu_mul_needs_all_its_conditions(case: str) -> None:
    assert count(program("llama"), "linear_silu_mul") == 2
    assert count(program("llama", *SILU_MUL[case]), "linear_silu_mul") == 1


def test_a_piece_of_other_rows_is_of_one_size_still() -> None:
    assert count(program("llama", (GATE_UP, GATE_UP.replace("up.weight[0:128]", "up.weight[8:136]"))),
                 "linear_silu_mul") == 2  # fmt: skip


LINEAR_ADD: dict[str, tuple[Edits, int]] = {
    "either side": ([("add(x0, x8)", "add(x8, x0)")], 4),
    "the product is read elsewhere": (also_read("x8"), 3),
    "a product and itself": ([("add(x0, x8)", "add(x8, x8)")], 3),
    "no product": ([("add(x0, x8)", "add(x0, x7)")], 3),
}


@pytest.mark.parametrize("case", LINEAR_ADD)
def test_linear_add_needs_all_its_conditions(case: str) -> None:
    edits, fused = LINEAR_ADD[case]
    assert count(program("llama"), "linear_add") == 4
    assert count(program("llama", *edits), "linear_add") == fused


def test_linear_add_has_the_product_and_the_other() -> None:
    for text in ("add(x0, x8)", "add(x8, x0)"):
        edited = fuse(program("llama", ("add(x0, x8)", text)))
        first = next(instr for instr in edited.body if instr.op == "linear_add")
        assert first.inputs == ("x7.q8", "x0")


@pytest.mark.parametrize(("edits", "fused"), [((), 5), (also_read("x1"), 4), (also_read("x1.q8"), 5)])
def test_quantize_is_fused_where_only_it_reads_the_rows(edits: Edits, fused: int) -> None:
    assert count(program("llama", *edits), "norm_quantize") == fused


ADD_NORM: dict[str, tuple[str, Edits, int]] = {
    "sums of both layers": ("llama", (), 4),
    "the sum is read elsewhere": ("llama", also_read("x9"), 4),
    "of each head": ("llama", [("layers.0.mlp_norm.weight; eps=1e-05", "layers.0.mlp_norm.weight; eps=1e-05, heads=2")],
                     3),
    "no sum": ("llama", [("x10: f32[tokens, 64] = rms_norm(x9", "x10: f32[tokens, 64] = rms_norm(x8")], 3),
    "layer norms": ("mpt_alibi_bf16", (), 4),
    "two norms of one sum": ("llama", [
        ("x10.q8: ", "y: f32[tokens, 64] = rms_norm(x9; layers.0.mlp_norm.weight; eps=1e-06)\nx10.q8: "),
        *also_read("y"),
    ], 4),
    "read before its norm": ("llama", [
        ("x10: ", "y: f32[tokens, 64] = scale(x9; ; factor=2.0)\nx10: "), *also_read("y"),
    ], 3),
}  # fmt: skip


@pytest.mark.parametrize("case", ADD_NORM)
def test_add_norm_needs_all_its_conditions(case: str) -> None:
    model, edits, fused = ADD_NORM[case]
    edited = verify(fuse(program(model, *edits), GPU.fusions))
    norms = [instr for instr in edited.body if instr.op == "add_norm"]
    assert len(norms) == fused
    assert {bool(instr.attr("layer")) for instr in norms} == {model != "llama"}


def test_norms_of_whole_q_and_k_become_one_where_the_target_has_it() -> None:
    merged = dict(stages(OLMO2.family, OLMO2.cfg, OLMO2.tensors, CPU))["merge"]
    assert (count(merged, "qk_norm", ("qk_norm",)), count(merged, "qk_norm", ("linear_add",))) == (2, 0)


def test_nothing_is_fused_that_is_not_asked_for() -> None:
    unfused = program("llama")
    assert fuse(unfused, ()) is unfused
    for name in ("linear_add", "linear_silu_mul", "rope_kv_write"):
        edited = fuse(unfused, (name,))
        assert {instr.op for instr in edited.body} - {instr.op for instr in unfused.body} == {name}
