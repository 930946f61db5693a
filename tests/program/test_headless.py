"""The variant without a head: what is left out, and what stays as it was."""

from dataclasses import replace

import program_builders as builders
import pytest

from roofline.common.errors import UnsupportedError
from roofline.ops.symbol import Type
from roofline.program.compile import stages
from roofline.program.ir import Instr, Value
from roofline.program.passes.headless import headless
from roofline.program.target import CPU

MODELS = {
    "tied": builders.BASE,
    "own_head": builders.QWEN3,
    "layer_norm": builders.MPT,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_stay_and_the_head_goes(name):
    model = builders.build(MODELS[name])
    whole = dict(stages(model.family, model.cfg, model.tensors, CPU))
    hidden = dict(stages(model.family, model.cfg, model.tensors, CPU, hidden=True))
    assert hidden["trace"].types()[hidden["trace"].logits] == Type("f32", "rows", (model.cfg.width,))
    assert hidden["trace"].body == whole["trace"].body[:-1]
    assert hidden["trace"].outputs[1:] == whole["trace"].outputs[1:] == ("kv0.2",)
    assert set(whole["plan"].weights) - set(hidden["plan"].weights) <= {"head.weight"}
    assert hidden["plan"].body[-1].op in ("rms_norm", "layer_norm")
    assert hidden["plan"].kv_groups == whole["plan"].kv_groups


def test_what_scales_or_caps_the_logits_goes_with_the_head():
    model = builders.build(builders.BASE)
    program = dict(stages(model.family, model.cfg, model.tensors, CPU))["trace"]
    kind = program.types()[program.logits]
    cap = Instr("soft_cap", (program.logits,), (), {"cap": 30.0}, (Value("capped", kind),))
    scale = Instr("scale", ("capped",), (), {"factor": 0.125}, (Value("scaled", kind),))
    changed = replace(program, body=(*program.body, cap, scale), outputs=("scaled", *program.outputs[1:]))
    assert headless(changed) == headless(program)


def test_logits_that_are_no_product_are_refused():
    model = builders.build(builders.BASE)
    program = dict(stages(model.family, model.cfg, model.tensors, CPU))["trace"]
    total = Value("total", program.types()[program.logits])
    body = (*program.body, Instr("add", (program.logits, program.logits), (), {}, (total,)))
    with pytest.raises(UnsupportedError, match="made by add"):
        headless(replace(program, body=body, outputs=("total", *program.outputs[1:])))
