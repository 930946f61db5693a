"""The verifier refuses each way a pass could break a Program."""

from collections.abc import Callable
from dataclasses import replace

import program_builders as builders
import pytest

from roofline.common.errors import ConfigError
from roofline.ops.symbol import Type
from roofline.program.compile import compile_program
from roofline.program.ir import Program, Value
from roofline.program.target import CPU
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
    "no output": (lambda: replace(GOOD, outputs=("x999",)), "never assigned"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_programs_are_refused(case: str) -> None:
    make, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        verify(make(), MODEL.tensors)


def test_a_tensor_left_out_is_refused() -> None:
    verify(GOOD, MODEL.tensors)
    with pytest.raises(ConfigError, match="no weight is made of: extra"):
        verify(GOOD, MODEL.tensors | {"extra": builders.Info("F32", (4,))})
