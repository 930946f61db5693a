"""The arena: no two live values overlap, whatever the step's size."""

import program_builders as builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.program.compile import compile_program, stages
from roofline.program.ir import Program
from roofline.program.passes.plan import plan
from roofline.program.target import CPU
from roofline.program.text import parse_program


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


REUSE = """
program tiny target=''

input ids: i32[tokens]
input logit_rows: i32[rows]
output x4

weight embed: file[96, 40] = a[0:96] F32

x0: f32[tokens, 40] = embed(ids; embed)
x1: f32[tokens, 40] = scale(x0; ; factor=2.0)
x2: f32[tokens, 40] = add(x1, x1)
x3: f32[rows, 40] = take_rows(x2, logit_rows)
x4: f32[rows, 96] = linear(x3; embed)
"""


def places(*edits: tuple[str, str]) -> dict[str, str]:
    text = REUSE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    planned = plan(parse_program(text)).plan
    return {name: str(place.offset) for name, place in planned.places.items()} | {"arena": str(planned.arena)}


def test_a_dying_operand_is_taken_over_unless_it_is_read_twice() -> None:
    """Rows of 160 bytes take 192, whole lines."""
    assert places() == {
        "x0": "0",
        "x1": "0",  # where x0 was
        "x2": "192*tokens",  # reads x1 twice
        "x3": "384*tokens",
        "x4": "384*tokens + 192*rows",
        "arena": "384*tokens + 576*rows",
    }
    assert places(("output x4", "output x4\noutput x0"))["x1"] == "192*tokens"
    assert places(("add(x1, x1)", "add(x1, x0)"))["x1"] == "192*tokens"
    assert places(("add(x1, x1)", "add(x1, x0)"))["x2"] == "192*tokens"
    assert places(("add(x1, x1)", "add(x0, x1)"))["x2"] == "0"


def test_what_is_viewed_or_a_view_is_not_taken_over() -> None:
    view = "x2: f32[tokens, 40] = split(x1; ; start=0, stop=40)"
    add = "x2: f32[tokens, 40] = add(x1, x1)"
    half = "x5: f32[tokens, 20] = split(x0; ; start=20, stop=40)\nx6: f32[tokens, 20] = scale(x5; ; factor=2.0)\n"
    viewed = places((add, view + "\nx7: f32[tokens, 40] = scale(x1; ; factor=2.0)"), ("rows(x2", "rows(x7"))
    assert viewed["x7"] == "192*tokens"
    viewed = places((add, half + add))
    assert viewed["x5"] == "80"
    assert viewed["x6"] not in (viewed["x5"], "0")
