"""Lowering: which operands must outlast their last reader because no barrier follows it."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "program"))

import program_builders as builders

from roofline.backends.cpu.layout import lay_out
from roofline.backends.cpu.lower import keep_operands, lower
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.program.compile import compile_program
from roofline.program.ir import Instr, Program, Share
from roofline.program.target import CPU
from tests.backends import hybrid_models


def extent(program: Program, name: str) -> tuple[int, int, int]:
    """(bytes a token, bytes a row, bytes taken a unit) of a value's place."""
    assert program.plan is not None
    place, kind = program.plan.places[name], program.types()[name]
    return place.offset.tokens, place.offset.rows, -(-kind.row_bytes // 64) * 64


def overlap(program: Program, one: str, other: str) -> bool:
    types = program.types()
    if types[one].leading != types[other].leading:
        return False
    at = 0 if types[one].leading == "tokens" else 1
    (a, size_a), (b, size_b) = ((extent(program, n)[at], extent(program, n)[2]) for n in (one, other))
    return a < b + size_b and b < a + size_a


def test_both_operands_of_rows_quantised_without_a_barrier_outlast_the_next_instruction() -> None:
    program = keep_operands(hybrid_models.compiled(hybrid_models.checkpoint("plain", "Q8_0")))
    pairs = list(itertools.pairwise(program.body))
    checked = [(one, other) for one, other in pairs if one.makes_integers and len(one.inputs) == 2]
    assert len(checked) == 4  # a gate in each layer
    for one, other in checked:
        assert not any(overlap(program, other.output.name, name) for name in one.inputs), (one, other)


def test_what_works_on_narrowed_rows_comes_behind_what_works_on_tokens() -> None:
    """The last layer keeps state: its gate works on rows, its other products, of the same input, on tokens."""
    program = hybrid_models.compiled(hybrid_models.checkpoint("plain", "Q8_0"))
    leading = [instr.output.type.leading for instr in program.body]
    assert leading == sorted(leading, key=lambda symbol: symbol == "rows")
    assert [i.op for i in program.body if i.weights == ("layers.3.linear.z.weight",)] == ["linear"]


def test_a_gate_beside_attention_does_not_keep_q_k_and_v_apart() -> None:
    program = hybrid_models.compiled(hybrid_models.checkpoint("plain"))
    assert [i.op for i in program.body if "cache" in {v.type.dtype for v in i.outputs}] == ["rope_kv_write"]
    assert "cut_heads" not in {instr.op for instr in program.body}


def test_taps_are_vectors_and_too_many_are_refused() -> None:
    source = hybrid_models.checkpoint("plain", "BF16")
    program = keep_operands(hybrid_models.compiled(source))
    layout, name = lay_out(program, 64), "layers.0.linear.conv.weight"
    assert program.weights[name].layout == "f32"
    assert name in layout.vectors
    assert name not in layout.matrices
    weight = replace(program.weights[name], shape=(160, 17))
    many = replace(program, weights={**program.weights, name: weight})
    with pytest.raises(UnsupportedError, match="causal_conv over 17 tokens"):
        lower(many, layout)


@pytest.mark.parametrize("config", [builders.BASE, builders.QWEN3, builders.MPT])
def test_operands_of_rows_quantised_without_a_barrier_are_not_overwritten_by_the_next_instruction(config) -> None:
    model = builders.build(config, embed="Q8_0")
    program = keep_operands(compile_program(model.family, model.cfg, model.tensors, CPU))
    followed: list[Instr] = []
    checked = 0
    for instr in program.body:
        for quantising in followed:
            for name in quantising.inputs:
                checked += 1
                assert not overlap(program, instr.output.name, name), (instr, quantising)
        followed = [*followed, instr] if instr.makes_integers else []
    assert checked >= 4 * config["layers"]


def test_no_more_positions_than_were_learned_are_served() -> None:
    model = builders.build(builders.MPT)
    program = keep_operands(compile_program(model.family, model.cfg, model.tensors, CPU))
    assert lower(program, lay_out(program, 1024)).table == -1
    with pytest.raises(ConfigError, match=r"1,025 positions cannot be served: positions.weight has 1,024"):
        lower(program, lay_out(program, 1025))


def test_slopes_lie_behind_the_vectors_and_a_table_behind_them_only_where_something_is_rotated() -> None:
    model = builders.build(builders.MPT_ALIBI)
    program = compile_program(model.family, model.cfg, model.tensors, CPU)
    layout = lay_out(program, 1024)
    assert layout.slopes > max(layout.vectors.values()) > layout.matrix_bytes
    assert layout.nbytes == layout.slopes + 4 * 4
    assert lay_out(keep_operands(program), 4).nbytes == layout.nbytes


def test_what_attention_and_lookups_cannot_do_is_named() -> None:
    model = builders.build(builders.MPT)
    program = keep_operands(compile_program(model.family, model.cfg, model.tensors, CPU))
    for op, change, said in (
        ("attend", {"attrs": {"soft_cap": 5.0, "alibi": True}}, "attend with soft_cap and alibi"),
        ("embed", {"inputs": ("logit_rows",)}, "embed of logit_rows"),
        ("qkv_write", {"op": "cast"}, "op 'cast'"),
    ):
        body = list(program.body)
        at = next(i for i, instr in enumerate(body) if instr.op == op)
        change = {"attrs": {**body[at].attrs, **change.pop("attrs", {})}, **change}
        body[at] = replace(body[at], **change)
        with pytest.raises(UnsupportedError, match=said):
            lower(replace(program, body=tuple(body)), lay_out(program, 64))


@pytest.mark.parametrize("dim", [6, 578])
def test_heads_that_attention_does_not_take_are_refused(dim: int) -> None:
    model = builders.build(builders.MPT_ALIBI | {"head_dim": dim}, "BF16")
    program = keep_operands(compile_program(model.family, model.cfg, model.tensors, CPU))
    with pytest.raises(UnsupportedError, match=rf"head_dim {dim} is not supported.*heads of 8 to 576.*reference"):
        lower(program, lay_out(program, 64))


def test_a_stage_is_refused() -> None:
    model = builders.build(builders.MPT | {"head_dim": 32}, embed="Q8_0")
    program = keep_operands(compile_program(model.family, model.cfg, model.tensors, CPU, share=Share(0, 1, 1, 2)))
    with pytest.raises(UnsupportedError, match=r"a stage of a pipeline.*tensor_parallel"):
        lower(program, lay_out(program, 64))
