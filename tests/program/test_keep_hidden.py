"""Programs that give the rows their head reads beside their logits, and those that begin with such rows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from roofline.common.errors import UnsupportedError
from roofline.models.family import Family
from roofline.models.mtp import GuessingLayer, guessing_layer
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.ops.symbol import Type
from roofline.program.compile import compile_program
from roofline.program.ir import HIDDEN, Program
from roofline.program.target import CPU
from roofline.program.text import parse_program, print_program
from roofline.program.trace import trace_shape

SHAPE = {
    **{"family": "qwen3_5", "layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96},
    **{"vocab": 128, "max_position": 256, "norm_eps": 1e-6, "rope_theta": 1e4, "rope_style": "half"},
    **{"rope_scaling": None, "sliding_window": None, "tied": False, "qk_norm": True, "attention_bias": False},
    **{"recurrent": [True, False], "key_heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 16, "taps": 4},
}


def program_of(shape: dict[str, object], *, layer: bool = False, form: str = "BF16", keeps: bool = True) -> Program:
    """The Program of a model or of its layer that guesses, with weights in a format."""
    family: Family
    family, config = configure(shape)
    if layer:
        pair = guessing_layer(family, config)
        assert pair is not None
        family, config = pair
    params = [param for param in expand(family.spec(config), config.layers) if param.tied_to is None]
    tensors = {p.name: SimpleNamespace(format=form if len(p.shape) > 1 else "F32", shape=p.shape) for p in params}
    return compile_program(family, config, tensors, CPU, keeps_hidden=keeps)


def test_the_last_output_are_the_rows_of_all_tokens_that_the_head_reads() -> None:
    program = program_of(SHAPE)
    hidden = program.hidden
    assert hidden == program.outputs[-1]
    assert program.types()[hidden] == Type("f32", "tokens", (64,))
    *_, take, head = program.body
    assert (take.op, take.inputs) == ("take_rows", (hidden, "logit_rows"))
    assert (head.op, head.output.name) == ("linear", program.logits)
    assert program_of(SHAPE, keeps=False).hidden is None
    assert parse_program(print_program(program)) == program


def test_a_layer_gives_the_rows_that_are_wanted_and_computes_its_mlp_of_no_others() -> None:
    program = program_of(SHAPE, layer=True)
    assert program.hidden == program.body[-1].inputs[0]
    assert program.types()[program.hidden] == Type("f32", "rows", (64,))
    mlp = [instr for instr in program.body if any(".mlp." in name for name in instr.weights)]
    assert {instr.output.type.leading for instr in mlp} == {"rows"}


def test_rows_of_integers_are_made_behind_the_rows_that_are_kept() -> None:
    """Quantised heads read integers: those of the wanted rows alone."""
    shape = SHAPE | {"recurrent": [False, False]}
    program = program_of(shape, form="Q8_0")
    types = program.types()
    assert program.hidden is not None
    assert types[program.hidden] == Type("f32", "tokens", (64,))
    quantized = next(instr for instr in program.body if program.body[-1].inputs[0] == instr.output.name)
    assert (quantized.op, quantized.output.type.leading) == ("quantize_rows", "rows")


def test_a_layer_begins_with_its_rows_in_the_arena() -> None:
    program = program_of(SHAPE, layer=True)
    assert [value.name for value in program.inputs] == ["ids", "positions", "logit_rows", "kv0.0", HIDDEN]
    assert program.plan is not None
    assert program.plan.places[HIDDEN].stride == 4 * 64
    assert not program.state_groups
    assert program.kv_groups["kv0"].layers == 1
    own = {name for name in program.weights if name.startswith("layers.")}
    assert all(name.startswith("layers.2.") for name in own)
    assert set(program.weights) - own == {"embed.weight", "head.weight"}


def test_logits_that_something_is_done_to_have_no_such_rows() -> None:
    gemma = {
        **{key: value for key, value in SHAPE.items() if key not in ("recurrent", "taps")},
        **{"family": "gemma", "logit_cap": 3.0, "attention_cap": 5.0, "query_scalar": 24.0, "qk_norm": False},
    }
    gemma = {key: value for key, value in gemma.items() if not key.startswith(("key_", "value_"))}
    with pytest.raises(UnsupportedError, match="hidden rows of gemma beside its logits"):
        program_of(gemma)


def test_a_family_without_such_layers_has_none() -> None:
    llama = {key: SHAPE[key] for key in list(SHAPE)[: list(SHAPE).index("recurrent")]}
    assert guessing_layer(*configure(llama | {"family": "llama", "qk_norm": False})) is None


def test_the_layer_is_that_of_one_layer_which_attends() -> None:
    family, config = configure(SHAPE)
    pair = guessing_layer(family, config)
    assert pair is not None
    layer, one = pair
    assert layer == GuessingLayer(family, 2)
    assert one == replace(config, layers=1, recurrent=(False,))
    assert trace_shape(layer, one).kv_groups["kv0"].layers == 1


@pytest.mark.parametrize(("theta", "refused"), [(1e4, False), (5e4, True)])
def test_one_image_has_the_tables_of_both(theta: float, refused: bool) -> None:
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    from roofline.backends.cpu.layout import lay_out, with_weights_of

    model, layer = program_of(SHAPE), program_of(SHAPE | {"rope_theta": theta}, layer=True)
    if refused:
        with pytest.raises(UnsupportedError, match="it turns other frequencies than the model"):
            with_weights_of(model, layer)
        return
    together = lay_out(with_weights_of(model, layer), 256)
    alone = lay_out(model, 256)
    assert together.matrices.keys() == {*alone.matrices, *lay_out(layer, 256).matrices}
    assert all(together.matrices[name] == pieces for name, pieces in alone.matrices.items())
