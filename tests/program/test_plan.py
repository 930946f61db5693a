"""The arena: no two live values overlap, whatever the step's size."""

import program_builders as builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.program.compile import compile_program, stages
from roofline.program.ir import Program
from roofline.program.passes.plan import plan
from roofline.program.target import CPU


def compiled(config: dict, default: str) -> Program:
    model = builders.build(config, default)
    return compile_program(model.family, model.cfg, model.tensors, CPU)


PROGRAMS = [compiled(builders.BASE, "Q4_1"), compiled(builders.QWEN3, "F16")]
# Every earlier stage can be planned too; those have views.
model = builders.build(builders.QWEN2, "Q8_0")
PROGRAMS += [plan(p) for name, p in stages(model.family, model.cfg, model.tensors, CPU) if name != "plan"]


def occupied(program: Program, name: str, sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes [start, stop) of a value that is no view."""
    kind = program.types()[name]
    start = program.plan.places[name].offset.at(**sizes)
    return start, start + kind.row_bytes * sizes[kind.leading]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.sampled_from(range(len(PROGRAMS))))
def test_live_values_never_overlap(tokens: int, rows: int, which: int) -> None:
    program, sizes = PROGRAMS[which], {"tokens": tokens, "rows": rows}
    held: dict[str, tuple[int, int]] = {}
    viewed = {i.output.name: i.inputs[0] for i in program.body if i.op == "split"}
    for at, instr in enumerate(program.body):
        still_read = {n for later in program.body[at + 1 :] for n in later.inputs} | set(program.outputs)
        still_read |= {viewed[n] for n in still_read if n in viewed}
        new = [v.name for v in instr.outputs if v.type.dtype != "cache" and v.name not in viewed]
        for name in new:
            start, stop = occupied(program, name, sizes)
            assert start % 64 == 0
            assert stop <= program.plan.arena.at(**sizes)
            for other, (a, b) in held.items():
                taken_over = instr.op in ("add", "linear_add") and other in instr.inputs and (a, b) == (start, stop)
                assert taken_over or stop <= a or b <= start, f"{name} overlaps {other}"
            held[name] = start, stop
        held = {name: span for name, span in held.items() if name in still_read}


def test_views_lie_inside_what_they_view() -> None:
    program = next(p for p in PROGRAMS if any(i.op == "split" for i in p.body))
    places = program.plan.places
    for instr in program.body:
        if instr.op == "split":
            base, view = places[instr.inputs[0]], places[instr.output.name]
            assert view.stride == base.stride
            assert view.offset.at(tokens=7) - base.offset.at(tokens=7) == 4 * instr.attr("start")


def test_residual_stream_stays_in_one_place() -> None:
    program = PROGRAMS[0]
    for leading in ("tokens", "rows"):
        stream = [i.output for i in program.body if i.op in ("embed", "linear_add")]
        assert len({program.plan.places[v.name].offset for v in stream if v.type.leading == leading}) == 1


@pytest.mark.parametrize("tokens", [1, 512])
def test_arena_is_a_few_rows_wide(tokens: int) -> None:
    cfg = builders.BASE
    widest = 4 * (2 * cfg["ffn"] + 3 * cfg["width"] + cfg["ffn"])
    assert PROGRAMS[0].plan.arena.at(tokens=tokens) <= tokens * widest
