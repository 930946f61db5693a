"""Lowering: which operands must outlast their last reader because no barrier follows it."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "program"))

import program_builders as builders

from roofline.backends.cpu.lower import QUANTISING, keep_operands
from roofline.program.compile import compile_program
from roofline.program.ir import Instr, Program
from roofline.program.target import CPU


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


@pytest.mark.parametrize("config", [builders.BASE, builders.QWEN3])
def test_operands_of_rows_quantised_without_a_barrier_are_not_overwritten_by_the_next_instruction(config) -> None:
    model = builders.build(config, embed="Q8_0")
    program = keep_operands(compile_program(model.family, model.cfg, model.tensors, CPU))
    followed: list[Instr] = []
    checked = 0
    for instr in program.body:
        for quantising in followed:
            checked += 1
            assert not overlap(program, instr.output.name, quantising.inputs[0]), (instr, quantising)
        followed = [*followed, instr] if instr.op in QUANTISING else []
    assert checked >= 4 * config["layers"]
