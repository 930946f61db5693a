"""join_qkv: q, k and v of any making become columns of one value, and what keeps them as they are."""

import program_builders as builders
import pytest

from roofline.program.compile import stages
from roofline.program.ir import Program
from roofline.program.passes.join_qkv import join_qkv
from roofline.program.target import CPU
from roofline.program.text import parse_program, print_instr, print_program

MODEL = builders.build(builders.QWEN3)
TRACED = parse_program(print_program(dict(stages(MODEL.family, MODEL.cfg, MODEL.tensors, CPU))["legalize"]))
JOINED = """\
x2+x3: f32[tokens, 96] = join_heads(x2, x3; ; heads=1)
x2+x3+x4: f32[tokens, 128] = join_heads(x2+x3, x4; ; heads=1)
x2.beside: f32[tokens, 64] = split(x2+x3+x4; ; start=0, stop=64)
x3.beside: f32[tokens, 32] = split(x2+x3+x4; ; start=64, stop=96)
x4.beside: f32[tokens, 32] = split(x2+x3+x4; ; start=96, stop=128)"""


def test_norms_and_rope_read_the_columns_and_stand_before_the_write() -> None:
    body = [print_instr(instr) for instr in join_qkv(TRACED).body]
    at = body.index(JOINED.splitlines()[0])
    assert body[at : at + 5] == JOINED.splitlines()
    names = [line.partition(" = ")[2].partition("(")[0] for line in body[at + 5 : at + 11]]
    assert names == ["rms_norm", "rope", "rms_norm", "rope", "kv_write", "attend"]
    assert "rms_norm(x2.beside;" in body[at + 5]
    assert "rms_norm(x3.beside;" in body[at + 7]
    assert ", x4.beside;" in body[at + 9]


def test_columns_of_one_value_and_values_with_other_readers_stay() -> None:
    merged = dict(stages(MODEL.family, MODEL.cfg, MODEL.tensors, CPU))["merge"]
    assert join_qkv(merged) is merged
    text = print_program(TRACED)
    write = next(line for line in text.splitlines() if "kv_write(kv0.0," in line)
    read_again = parse_program(text.replace("output kv0.2\n", "output kv0.2\noutput x4\n"))
    assert write in [print_instr(instr) for instr in join_qkv(read_again).body]


def attended(program: Program) -> list[tuple[str, ...]]:
    return [instr.inputs for instr in program.body if instr.op == "attend"]


def test_attention_reads_the_same_q_and_cache() -> None:
    assert attended(join_qkv(TRACED)) == attended(TRACED)
    in_part = parse_program(print_program(TRACED).replace("output kv0.2\n", "output kv0.2\noutput x4\n"))
    joined = join_qkv(in_part)
    assert sum(instr.op == "join_heads" for instr in joined.body) == 2 * (MODEL.cfg.layers - 1)
    assert attended(joined) == attended(TRACED)


def test_a_scale_by_position_stays_behind_the_rope_of_q() -> None:
    model = builders.build(builders.BASE | {"family": "ministral3", "query_beta": 0.4, "query_context": 16})
    traced = dict(stages(model.family, model.cfg, model.tensors, CPU))["legalize"]
    joined = join_qkv(traced)
    assert attended(joined) == attended(traced)
    names = [instr.op for instr in joined.body]
    at = names.index("scale_by_position")
    assert names[at - 4 : at + 4] == [*["split"] * 3, "rope", "scale_by_position", "rope", "kv_write", "attend"]


def test_a_q_that_goes_straight_to_attention_is_read_as_columns() -> None:
    model = builders.build(builders.MPT | {"family": "opt", "activation": "relu"})
    traced = dict(stages(model.family, model.cfg, model.tensors, CPU))["legalize"]
    expected = [(f"{q}.beside", cache) for q, cache in attended(traced)]
    assert attended(join_qkv(traced)) == expected


@pytest.mark.parametrize("name", ["rope_kv_write", "attend"])
def test_what_is_joined_is_fused_as_if_it_had_been_made_so(name: str) -> None:
    from roofline.program.passes.fuse import fuse

    fused = fuse(TRACED)
    assert sum(instr.op == name for instr in fused.body) == MODEL.cfg.layers
    assert not any(instr.op in ("kv_write", "rope", "split") for instr in fused.body)
