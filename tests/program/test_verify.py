"""The verifier refuses each way a pass could break a Program."""

from collections.abc import Callable
from dataclasses import replace

import program_builders as builders
import pytest

from roofline.common.errors import ConfigError
from roofline.ops.symbol import Type
from roofline.program.compile import compile_program
from roofline.program.ir import Program, Recipe, Share, Value
from roofline.program.target import CPU
from roofline.program.text import parse_program
from roofline.program.verify import verify

MODEL = builders.build(builders.BASE)
GOOD = compile_program(MODEL.family, MODEL.cfg, MODEL.tensors, CPU)


def swapped(program: Program, at: int, **changes: object) -> Program:
    body = list(program.body)
    body[at] = replace(body[at], **changes)
    return replace(program, body=tuple(body))


def index(op: str) -> int:
    return next(i for i, instr in enumerate(GOOD.body) if instr.op == op)


def weights(program: Program, **changes: object) -> Program:
    """With the recipe of layer 0's o changed."""
    name = "layers.0.attn.o.weight"
    return replace(program, weights=dict(program.weights) | {name: replace(program.weights[name], **changes)})


def doubled_piece(program: Program) -> Program:
    other = program.weights["layers.1.attn.o.weight"]
    return weights(program, pieces=other.pieces)


BROKEN: dict[str, tuple[Callable[[], Program], str]] = {
    "used before assigned": (lambda: replace(GOOD, body=GOOD.body[1:]), "before it is assigned"),
    "assigned twice": (lambda: replace(GOOD, body=(*GOOD.body, GOOD.body[-1])), "twice"),
    "stale cache": (
        lambda: swapped(GOOD, max(i for i, x in enumerate(GOOD.body) if x.op == "attend"), inputs=("x20", "kv0.1")),
        "after it was written",
    ),
    "wrong type": (
        lambda: swapped(GOOD, 0, outputs=(Value("x0", Type("f32", "tokens", (63,))),)),
        "should be of types",
    ),
    "unknown weight": (lambda: swapped(GOOD, index("linear"), weights=("nothing",)), "unknown weight"),
    "unknown attribute": (lambda: swapped(GOOD, 0, attrs={"colour": "red"}), "colour"),
    "unknown op": (lambda: swapped(GOOD, 0, op="embd"), "did you mean 'embed'"),
    "unknown table": (lambda: replace(GOOD, tables={}), "unknown table"),
    "rows used twice": (lambda: doubled_piece(GOOD), "used twice"),
    "rows missing": (lambda: weights(GOOD, pieces=()), "do not add up"),
    "unused weight": (
        lambda: replace(GOOD, weights=dict(GOOD.weights) | {"spare": GOOD.weights["final_norm.weight"]}),
        "no instruction uses",
    ),
    "cache of no group": (lambda: replace(GOOD, kv_groups={}), "kv0.1 belongs to no group"),
    "no name": (lambda: replace(GOOD, name="a b"), "'a b' cannot stand in a Program's text"),
    "input twice": (
        lambda: replace(GOOD, inputs=(*GOOD.inputs, GOOD.inputs[0])),
        "assigned twice, the second time by input",
    ),
    "no output": (lambda: replace(GOOD, outputs=("x999",)), "never assigned"),
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (doubled_piece, "used twice"),
        (lambda program: weights(program, pieces=()), "do not add up"),
    ],
)
def test_what_a_pass_changed_of_weights_is_looked_at(changed: Callable[[Program], Program], message: str) -> None:
    """What it left alone is not, even where it has another layout."""
    with pytest.raises(ConfigError, match=message):
        verify(changed(GOOD), MODEL.tensors, before=GOOD)
    broken = doubled_piece(GOOD)
    assert verify(weights(broken, layout="f32"), before=broken).weights != broken.weights


@pytest.mark.parametrize("case", BROKEN)
def test_broken_programs_are_refused(case: str) -> None:
    make, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        verify(make(), MODEL.tensors)


def test_a_tensor_left_out_is_refused() -> None:
    verify(GOOD, MODEL.tensors)
    with pytest.raises(ConfigError, match="no weight is made of: extra"):
        verify(GOOD, MODEL.tensors | {"extra": builders.Info("F32", (4,))})


TINY = """
program tiny target=''

input ids: i32[tokens]
input logit_rows: i32[rows]
output x2

weight embed: file[96, 64] = a[0:32] Q4_1, a[32:96] Q4_1
weight head: file[96, 64] = b[0:96][0:64 of 128] Q4_1
weight more: file[96, 64] = b[0:96][64:128 of 128] Q4_1

x0: f32[tokens, 64] = embed(ids; embed)
x1: f32[rows, 64] = take_rows(x0, logit_rows)
x2: f32[rows, 96] = linear(x1; head)
x3: f32[rows, 96] = linear(x1; more)
"""
TENSORS = {"a": builders.Info("Q4_1", (96, 64)), "b": builders.Info("Q4_1", (96, 128))}
PLACES = {
    "one row twice": ([("a[32:96]", "a[31:95]")], r"tensor a are used twice: \[0:32\]\[0:64\], \[31:95\]\[0:64\]"),
    "a row beyond the last": ([("a[32:96]", "a[33:97]")], r"no such part of the file tensor a \[96, 64\]: .*\[33:97\]"),
    "a row left out": ([("a[0:32]", "a[1:32]"), ("embed: file[96", "embed: file[95")], r"tensor a are not used"),
    "another tensor": ([("a[0:32] Q4_1, a", "c[0:32] Q4_1, a")], r"no such part of the file tensor c \[0, 0\]"),
    "rows beside each other": ([("a[0:32]", "a[64:96]"), ("a[32:96]", "a[0:64]")], ""),
    "columns twice": ([("[64:128 of", "[32:96 of")], r"tensor b are used twice"),
    "columns the other way round": ([("[64:128 of", "[0:64 of"), ("[0:64 of", "[64:128 of")], ""),
    "columns of fewer": ([("[64:128 of 128", "[64:128 of 256")], r"no such part of the file tensor b \[96, 128\]"),
    "columns beyond the last": ([("[64:128 of", "[96:160 of")], r"more: columns 96:160 of 128 cannot be columns"),
    "one column more": ([("[64:128 of", "[32:128 of")], r"columns 32:128 of 128 cannot be columns"),
    "within a block": ([("[64:128 of", "[48:112 of")], r"columns 48:112 of 128 are cut inside a block of Q4_1"),
    "rows of columns left out": (
        [
            ("b[0:96][64", "b[0:48][64"),
            ("more: file[96", "more: file[48"),
            ("[rows, 96] = linear(x1; more", "[rows, 48] = linear(x1; more"),
        ],
        r"tensor b are not used exactly once",
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_pieces_cover_their_tensors_once(case: str) -> None:
    edits, message = PLACES[case]
    text = TINY
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    if message:
        with pytest.raises(ConfigError, match=message):
            verify(parse_program(text), TENSORS)
    else:
        assert verify(parse_program(text), TENSORS).name == "tiny"


def test_a_weight_has_columns() -> None:
    text = TINY.replace("64]", "0]").replace("[0:64 of", "[0:0 of").replace("[64:128 of", "[64:64 of")
    with pytest.raises(ConfigError, match=r"head: columns 0:0 of 128 cannot be columns of a weight of shape \[96, 0\]"):
        verify(parse_program(text))


def test_a_part_of_a_model_need_not_use_all() -> None:
    text = TINY.replace("a[0:32]", "a[1:32]").replace("embed: file[96", "embed: file[95")
    part = replace(parse_program(text), share=Share(0, 2))
    spare = TENSORS | {"spare": builders.Info("F32", (4,))}
    assert verify(part, spare) is part
    with pytest.raises(ConfigError, match="no such part"):
        verify(part, TENSORS | {"a": builders.Info("Q4_1", (95, 64))})
    assert verify(parse_program(TINY)) == parse_program(TINY)  # of no file
    outside = parse_program(TINY)
    first = outside.weights["embed"].pieces[0]
    pieces = (replace(first, start=-1, stop=31), replace(first, start=32, stop=96))
    changed = replace(outside, weights=outside.weights | {"embed": Recipe((96, 64), pieces)})
    with pytest.raises(ConfigError, match=r"no such part of the file tensor a \[96, 64\]: \[-1:31\]"):
        verify(changed, TENSORS)
