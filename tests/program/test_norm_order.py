"""Norms of q and k stay on their side of rope, and where nothing is turned they go with the write."""

from dataclasses import replace

import program_builders as builders
import pytest

from roofline.program.compile import stages
from roofline.program.ir import Instr, Program
from roofline.program.passes.fuse import fuse
from roofline.program.target import CPU, GPU, Target

NORMED = builders.BASE | {"qk_norm": True, "layers": 1}
LAST = NORMED | {"family": "hunyuan"}
FIRST = NORMED | {"family": "qwen"}
UNTURNED = NORMED | {"family": "exaone4", "turning": [False]}


def writes(program: Program, target: Target = CPU) -> list[Instr]:
    return [instr for instr in fuse(program, target.fusions).body if instr.writes_cache]


def merged(config: dict[str, object], target: Target = CPU) -> Program:
    model = builders.build(config)
    return dict(stages(model.family, model.cfg, model.tensors, target))["merge"]


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda target: target.name)
def test_what_is_written_is_normed_where_the_text_norms_it(target: Target) -> None:
    for config, op, norm_last in ((LAST, "rope_kv_write", True), (FIRST, "rope_kv_write", False)):
        (write,) = writes(merged(config, target), target)
        assert (write.op, write.attr("norm_last"), len(write.weights)) == (op, norm_last, 2)
    (write,) = writes(merged(UNTURNED, target), target)
    assert (write.op, len(write.weights), write.attr("eps")) == ("qkv_write", 2, 1e-5)


def test_q_and_k_that_are_normed_on_two_sides_are_left_apart() -> None:
    """As no family has them: k's norm moved before its rope."""
    program = merged(LAST)
    ropes = [instr for instr in program.body if instr.op == "rope"]
    norms = [instr for instr in program.body if instr.op == "rms_norm" and instr.inputs[0] == ropes[1].output.name]
    (norm,), rope = norms, ropes[1]
    first = replace(norm, inputs=rope.inputs[:1], outputs=rope.outputs)
    second = replace(rope, inputs=(rope.output.name, *rope.inputs[1:]), outputs=norm.outputs)
    body = tuple({id(rope): first, id(norm): second}.get(id(instr), instr) for instr in program.body)
    (write,) = writes(replace(program, body=body))
    assert write.op == "kv_write"
