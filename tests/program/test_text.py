"""The text form: any Program comes back equal; text that is none is refused with its line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Type
from roofline.program.ir import (
    ArenaPlace,
    ArenaPlan,
    Columns,
    Instr,
    KvGroup,
    Program,
    Recipe,
    Share,
    Value,
    WeightPiece,
)
from roofline.program.text import parse_program, print_program

names = st.text("abcxyz019_.+-/é", min_size=1, max_size=12).filter(lambda n: n not in ("tokens", "rows"))
sizes = st.integers(1, 10**7)
types = st.builds(
    Type,
    st.sampled_from(["f32", "bf16", "i32", "q8g32", "cache"]),
    st.sampled_from(["tokens", "rows", None]),
    st.lists(sizes, max_size=2).map(tuple),
)
values = st.builds(Value, names, types)
columns = st.none() | st.builds(Columns, sizes, sizes, sizes)
pieces = st.builds(WeightPiece, names, sizes, sizes, st.sampled_from(["F32", "Q4_1", "Q6_K"]), columns)
recipes = st.builds(
    Recipe,
    st.lists(sizes, min_size=1, max_size=2).map(tuple),
    st.lists(pieces, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["file", "f32", "packed"]),
)
finite = st.floats(allow_nan=False, allow_infinity=False)
plain = st.one_of(st.booleans(), st.integers(), finite, st.text(max_size=20))
attrs = st.dictionaries(st.sampled_from(["eps", "heads", "order", "mode", "scale"]), plain | st.tuples(plain, plain))
instrs = st.builds(
    Instr,
    st.sampled_from(["linear", "attend", "my_op"]),
    st.lists(names, max_size=3).map(tuple),
    st.lists(names, max_size=2).map(tuple),
    attrs,
    st.lists(values, min_size=1, max_size=2).map(tuple),
)
affines = st.builds(Affine, *[st.integers(0, 10**9)] * 5)
plans = st.builds(ArenaPlan, st.dictionaries(names, st.builds(ArenaPlace, affines, sizes), max_size=3), affines)
tables = st.builds(
    RopeTable,
    sizes.map(lambda n: 2 * n),
    st.floats(1, 1e9),
    st.sampled_from(["half", "interleaved"]),
    st.just("linear"),
    st.floats(1, 100).map(lambda f: (("factor", f),)),
)
groups = st.builds(KvGroup, sizes, sizes, sizes, st.integers(0, 4096), st.sampled_from(["f32", "bf16"]))
programs = st.builds(
    Program,
    name=names,
    inputs=st.lists(values, max_size=3).map(tuple),
    outputs=st.lists(names, max_size=2).map(tuple),
    weights=st.dictionaries(names, recipes, max_size=3),
    body=st.lists(instrs, max_size=4).map(tuple),
    kv_groups=st.dictionaries(names, groups, max_size=2),
    tables=st.dictionaries(names, tables, max_size=2),
    target=st.sampled_from(["", "cpu"]),
    plan=st.none() | plans,
    share=st.builds(Share, *[st.integers(0, 4)] * 4),
)


@settings(max_examples=200, deadline=None)
@given(programs)
def test_any_program_comes_back_equal(program: Program) -> None:
    text = print_program(program)
    back = parse_program(text)
    assert back == program
    assert print_program(back) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_program(text)
    except ConfigError:
        return


BAD = (
    "x0: f32[tokens] = linear(",
    "weight w: f32[3] = nothing",
    "weight w: f32[3, 4] = t[0:3][0:4] F32",
    "cache kv0 = layers=1",
    "share rank=1, of=2",
    "input x: f64[tokens]",
    "input x: f32[tokens] and more",
    "input x: f32[tokens, wide]",
    "place x = 0 stride",
    "weight w: f32[3] = t[0:3] F32, t[3:] F32",
)


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        parse_program(f"program p target=''\n{line}")


def test_a_line_that_cannot_be_read_is_counted_from_one() -> None:
    with pytest.raises(ConfigError, match=r"line 4: 'nonsense' cannot be read \(expected"):
        parse_program("program p target=''\n\n   \n  nonsense\n")


def test_attributes_may_hold_any_text() -> None:
    text = """program p target='a; b'

input x: f32[tokens, 2]

y: f32[2] = my_op(x; w, v; mode='a; b, c: (d)', order='')
z: f32[2] = my_op(; ; eps=1e-05)
u: f32[2], t: f32[2] = my_op(x)
"""
    first, second, third = parse_program(text).body
    assert (first.inputs, first.weights, first.attrs) == (("x",), ("w", "v"), {"mode": "a; b, c: (d)", "order": ""})
    assert (second.inputs, second.weights, second.attrs) == ((), (), {"eps": 1e-5})
    assert [value.name for value in third.outputs] == ["u", "t"]
    assert parse_program(text).plan is None
