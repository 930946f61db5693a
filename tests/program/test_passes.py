"""Every pass against its golden text, and the shapes of Programs that the passes must produce."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import program_builders as builders
import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import registry
from roofline.ops.symbol import Type
from roofline.program.compile import STAGES, compile_program, stages
from roofline.program.ir import Instr, Program, Recipe, Value, WeightPiece
from roofline.program.passes.fuse import fuse
from roofline.program.passes.legalize import legalize, recast_cache
from roofline.program.passes.merge import _joined
from roofline.program.passes.narrow import narrow
from roofline.program.target import CPU, GPU, gpu, with_cache
from roofline.program.text import parse_program, print_program
from roofline.program.trace import NamingRecorder
from roofline.program.verify import verify

GOLDEN = Path(__file__).parent / "golden"
MODELS = {
    "qwen3_5": lambda: builders.build(builders.HYBRID, "Q8_0"),
    "llama": lambda: builders.build(builders.BASE, embed="Q8_0"),
    "qwen3": lambda: builders.build(builders.QWEN3),
    "qwen2_bf16": lambda: builders.build(builders.QWEN2, "BF16"),
    "mpt": lambda: builders.build(builders.MPT, positions="F16"),
    "mpt_alibi_bf16": lambda: builders.build(builders.MPT_ALIBI, "BF16"),
}


def programs(name: str) -> dict[str, Program]:
    model = MODELS[name]()
    return dict(stages(model.family, model.cfg, model.tensors, CPU))


@pytest.mark.parametrize("name", MODELS)
def test_each_pass_gives_its_golden_text(name: str, request: pytest.FixtureRequest) -> None:
    for stage, program in programs(name).items():
        path = GOLDEN / f"{name}.{stage}.txt"
        assert path.exists(), f"write {path.name} with `python tests/program/write_goldens.py`"
        assert print_program(program) == path.read_text(), f"{path.name}: `python tests/program/write_goldens.py` shows"


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_recast_is_one_legalised_so(name: str) -> None:
    model, target = MODELS[name](), with_cache(CPU, "int8")
    wanted = dict(stages(model.family, model.cfg, model.tensors, target))
    for stage, program in programs(name).items():
        if program.target:
            assert print_program(recast_cache(program, target)) == print_program(wanted[stage]), stage
            assert recast_cache(wanted[stage], CPU) == program, stage
    with pytest.raises(ConfigError, match="int4"):
        with_cache(CPU, "int4")


@pytest.mark.parametrize("name", MODELS)
def test_text_of_each_stage_parses_back(name: str) -> None:
    for stage, program in programs(name).items():
        assert parse_program(print_program(program)) == program, stage


def ops_of(program: Program) -> Counter[str]:
    return Counter(instr.op for instr in program.body)


def test_quantised_llama_becomes_nine_instructions_a_layer() -> None:
    ops = ops_of(programs("llama")["fuse"])
    assert ops == {
        "embed": 1,
        "norm_quantize": 5,
        "linear": 3,
        "rope_kv_write": 2,
        "attend": 2,
        "quantize_rows": 4,
        "linear_add": 4,
        "linear_silu_mul": 2,
        "take_rows": 2,
    }


def test_quantised_mpt_becomes_eight_instructions_a_layer() -> None:
    ops = ops_of(programs("mpt")["fuse"])
    assert ops == {
        "embed": 2,
        "add": 1,
        "layer_norm_quantize": 5,
        "linear": 5,
        "qkv_write": 2,
        "attend": 2,
        "quantize_rows": 2,
        "linear_add": 4,
        "gelu_quantize": 2,
        "take_rows": 2,
    }


def test_a_write_without_rope_is_fused_only_where_q_goes_straight_to_attention() -> None:
    """Where it does not, it is put beside k and v again."""
    program = programs("mpt_alibi_bf16")["merge"]
    attend = next(i for i in program.body if i.op == "attend")
    scaled = Value("scaled", program.types()[attend.inputs[0]])
    body = []
    for instr in program.body:
        if instr is attend:
            body.append(Instr("scale", attend.inputs[:1], (), {"factor": 2.0}, (scaled,)))
            instr = replace(instr, inputs=("scaled", *instr.inputs[1:]))
        body.append(instr)
    scaling = replace(program, body=tuple(body))
    ops = ops_of(fuse(scaling, [name for name in CPU.fusions if name != "rope_kv_write"]))
    assert (ops["qkv_write"], ops["kv_write"]) == (1, 1)
    ops = ops_of(fuse(scaling))
    assert (ops["qkv_write"], ops["join_heads"]) == (2, 2)


@pytest.mark.parametrize("name", MODELS)
def test_after_the_last_attention_or_state_only_wanted_rows_are_computed(name: str) -> None:
    program = programs(name)["fuse"]
    body = program.body
    last = max(at for at, instr in enumerate(body) if instr.op == "attend" or instr.writes_cache)
    assert all(instr.output.type.leading == "rows" for instr in body[last + 1 :])
    assert all(instr.output.type.leading == "tokens" for instr in body[: last + 1])


def test_rows_that_are_read_elsewhere_are_not_narrowed() -> None:
    program = programs("llama")["trace"]
    take = next(i for i in program.body if i.op == "take_rows")
    escaping = replace(program, outputs=(*program.outputs, take.inputs[0]))
    assert narrow(escaping) == escaping


def test_rows_are_narrowed_up_to_what_looks_up_ids() -> None:
    """Without attention no row matters to another, but backends have ids of all tokens alone."""
    program = parse_program(
        """
program tiny target=''

input ids: i32[tokens]
input logit_rows: i32[rows]
output x3

weight embed.weight: file[96, 64] = embed.weight[0:96] F32

x0: f32[tokens, 64] = embed(ids; embed.weight)
x1: f32[tokens, 64] = linear(x0; embed.weight)
x2: f32[rows, 64] = take_rows(x1, logit_rows)
x3: f32[rows, 96] = linear(x2; embed.weight)
"""
    )
    narrowed = narrow(program).body
    assert [instr.op for instr in narrowed] == ["embed", "take_rows", "linear", "linear"]
    assert narrowed[0].inputs == ("ids",)


def test_a_gpu_rounds_what_linears_read_and_write_but_not_the_logits() -> None:
    model = MODELS["qwen3"]()
    program = dict(stages(model.family, model.cfg, model.tensors, GPU))["legalize"]
    types = program.types()
    linears = [instr for instr in program.body if instr.op == "linear"]
    assert [instr.attr("out") for instr in linears] == ["bf16"] * (len(linears) - 1) + [""]
    assert {types[instr.inputs[0]].dtype for instr in linears} == {"bf16"}
    assert types[program.logits].dtype == "f32"
    # The residual stream stays float32; norms of q and k, which a rope reads, are not rounded on their way.
    assert {types[i.output.name].dtype for i in program.body if i.op == "add"} == {"f32"}
    assert {i.attr("out") for i in program.body if i.op == "rms_norm" and i.attr("heads") != 1} == {""}


def test_float_weights_keep_plain_norms() -> None:
    program = programs("qwen2_bf16")["fuse"]
    ops = ops_of(program)
    assert ops["rms_norm"] == 5
    assert ops["linear_silu_mul"] == 2
    assert ops["quantize_rows"] == ops["split"] == 0
    assert all(i.attr("order") == "f32" for i in program.body if i.op.startswith("linear"))
    qkv = next(i for i in program.body if i.op == "linear")
    assert qkv.weights == ("layers.0.attn.q+k+v.weight", "layers.0.attn.q+k+v.bias")


def test_merge_keeps_each_piece_in_its_own_format() -> None:
    model = builders.build(builders.WIDE, "Q4_K", v="Q6_K")
    program = compile_program(model.family, model.cfg, model.tensors, CPU)
    pieces = program.weights["layers.1.attn.q+k+v.weight"].pieces
    assert [p.format for p in pieces] == ["Q4_K", "Q4_K", "Q6_K"]
    assert program.weights["layers.1.attn.q+k+v.weight"].shape == (256 + 2 * 128, 256)


def test_merge_leaves_linears_of_different_inputs_apart() -> None:
    model = builders.build(builders.BASE, v="F16")  # q and k read 8-bit rows, v reads floats
    ops = ops_of(compile_program(model.family, model.cfg, model.tensors, CPU))
    assert ops["linear"] == 2 * 2 + 1  # q and k, v; the head
    assert (ops["join_heads"], ops["rope_kv_write"]) == (4, 2)  # as the cpu backend takes them


def test_tied_head_is_one_weight_with_two_readers() -> None:
    program = programs("llama")["plan"]
    readers = [i.op for i in program.body if "embed.weight" in i.weights]
    assert readers == ["embed", "linear"]
    assert "head.weight" not in program.weights


def test_tensors_that_do_not_fit_are_named() -> None:
    model = builders.build(builders.BASE)
    short = {k: v for k, v in model.tensors.items() if k != "layers.1.mlp.up.weight"}
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up\.weight"):
        compile_program(model.family, model.cfg, short, CPU)
    spare = model.tensors | {"head.weight": builders.Info("F32", (96, 64))}
    with pytest.raises(ConfigError, match=r"head\.weight"):
        compile_program(model.family, model.cfg, spare, CPU)
    wrong = model.tensors | {"final_norm.weight": builders.Info("F32", (65,))}
    with pytest.raises(ConfigError, match=r"final_norm.*\[65\].*\[64\]"):
        compile_program(model.family, model.cfg, wrong, CPU)


def test_stages_are_the_listed_ones() -> None:
    assert tuple(programs("llama")) == STAGES


def test_an_operand_that_is_missing_is_named() -> None:
    recorder = NamingRecorder()
    x = recorder.input("x", Type("f32", "tokens", (64,)))
    with pytest.raises(ConfigError, match="add: x is missing"):
        recorder.record(registry.get("add"), {"x": None, "y": x})


def test_a_weight_of_floats_and_blocks_is_refused() -> None:
    program = programs("llama")["trace"]
    name = "layers.0.attn.o.weight"
    mixed = tuple(WeightPiece(name, at, at + 32, form) for at, form in ((0, "Q4_1"), (32, "F16")))
    weights = {**program.weights, name: Recipe((64, 64), mixed)}
    with pytest.raises(
        UnsupportedError, match=r"attn\.o\.weight in Q4_1 and F16 .* are in Q4_1, .* in F16\. Use instead"
    ):
        legalize(replace(program, weights=weights), CPU)
    for form in ("F32", "F16", "BF16"):
        floats = tuple(WeightPiece(name, at, at + 32, kind) for at, kind in ((0, form), (32, "F32")))
        legal = legalize(replace(program, weights={**program.weights, name: Recipe((64, 64), floats)}), CPU)
        assert next(i for i in legal.body if name in i.weights).attr("order") == "f32"


def test_rows_are_8_bit_floats_where_the_weights_are() -> None:
    model = builders.build(builders.BASE | {"width": 128, "head_dim": 32}, "E4M3", o="BF16")
    program = dict(stages(model.family, model.cfg, model.tensors, gpu(rows8="e4m3fn")))["legalize"]
    dtypes = {i.weights[0].split(".", 2)[-1]: i.attr("x_dtype") for i in program.body if i.op == "linear"}
    assert dtypes["attn.o.weight"] == "f32"
    assert {dtype for name, dtype in dtypes.items() if name != "attn.o.weight"} == {"e4m3fn"}


def test_rows_that_linears_read_as_they_are_are_cast_once() -> None:
    program = parse_program(
        """
program tiny target=''

input ids: i32[tokens]
output x3

weight embed: file[96, 64] = a[0:96] BF16
weight b: file[64, 64] = b[0:64] BF16
weight c: file[64, 64] = c[0:64] BF16

x0: f32[tokens, 64] = embed(ids; embed)
x1: f32[tokens, 64] = linear(x0; b)
x2: f32[tokens, 64] = linear(x0; c)
x3: f32[tokens, 64] = add(x1, x2)
"""
    )
    body = verify(legalize(program, GPU)).body
    assert [(i.op, i.inputs, i.output.type.dtype) for i in body] == [
        ("embed", ("ids",), "f32"),
        ("cast", ("x0",), "bf16"),
        ("linear", ("x0.bf16",), "bf16"),
        ("linear", ("x0.bf16",), "bf16"),
        ("add", ("x1", "x2"), "bf16"),
    ]


def test_values_that_go_side_by_side_are_as_wide_as_the_widest() -> None:
    """A sum that is not rounded beside rows of a linear, as the streams of Gemma 3n; the sum of all stays wide."""
    program = parse_program(
        """
program tiny target=''

input ids: i32[tokens]
output x4

weight embed: file[96, 64] = a[0:96] BF16
weight b: file[64, 64] = b[0:64] BF16
weight c: file[128] = c[0:128] F32
weight d: file[64, 128] = d[0:64] BF16

x0: f32[tokens, 64] = embed(ids; embed)
x1: f32[tokens, 64] = linear(x0; b)
x2: f32[tokens, 128] = join_heads(x0, x1; ; heads=1)
x3: f32[tokens, 128] = scale_columns(x2; c)
x4: f32[tokens, 64] = linear(x3; d)
"""
    )
    body = verify(legalize(program, GPU)).body
    assert [(i.op, i.inputs, i.output.type.dtype) for i in body[2:]] == [
        ("linear", ("x0.bf16",), "bf16"),
        ("cast", ("x1",), "f32"),
        ("join_heads", ("x0", "x1.f32"), "f32"),
        ("scale_columns", ("x2",), "f32"),
        ("cast", ("x3",), "bf16"),
        ("linear", ("x3.bf16",), "f32"),
    ]


def test_logits_are_not_rounded_before_they_are_scaled_and_capped() -> None:
    program = parse_program(
        """
program tiny target=''

input ids: i32[tokens]
output x4

weight embed: file[96, 64] = a[0:96] BF16
weight b: file[64, 64] = b[0:64] BF16

x0: f32[tokens, 64] = embed(ids; embed)
x1: f32[tokens, 64] = linear(x0; b)
x2: f32[tokens, 64] = linear(x1; b)
x3: f32[tokens, 64] = scale(x2; ; factor=0.5)
x4: f32[tokens, 64] = soft_cap(x3; ; cap=3.0)
"""
    )
    types = verify(legalize(program, GPU)).types()
    assert [types[name].dtype for name in ("x1", "x2", "x3", "x4")] == ["bf16", "f32", "f32", "f32"]


def test_rows_that_experts_read_as_they_are_are_cast_and_their_choice_is_not() -> None:
    program = parse_program(
        """
program tiny target=''

input ids: i32[tokens]
input chosen: i32[tokens, 2]
output x1

weight embed: file[96, 64] = a[0:96] BF16
weight b: file[256, 64] = b[0:256] BF16

x0: f32[tokens, 64] = embed(ids; embed)
x1: f32[tokens, 64] = expert_linear(x0, chosen; b; experts=8)
"""
    )
    _, cast, product = legalize(program, GPU).body
    assert (cast.op, cast.inputs) == ("cast", ("x0",))
    assert (product.op, product.inputs) == ("expert_linear", ("x0.bf16", "chosen"))


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (("layers.0.attn.q.weight", "layers.0.attn.k.weight", "layers.0.attn.v.weight"), "layers.0.attn.q+k+v.weight"),
        (("layers.0.q.weight", "layers.1.k.weight"), "layers.0.q+1.k.weight"),
        (("a.q", "a.k.w"), "a.q+k.w"),
        (("q", "k"), "q+k"),
    ],
)
def test_stacked_weights_are_named_after_all(names: tuple[str, ...], joined: str) -> None:
    assert _joined(names) == joined


def test_what_a_program_says_of_its_parts() -> None:
    program = programs("qwen3")["plan"]
    group = program.kv_groups["kv0"]
    assert group.token_bytes == 2 * 2 * (2 * 16) * 2  # K and V, layers, kv heads of 16, bf16
    assert replace(group, format="int8").token_bytes == 2 * 2 * 2 * (16 + 4)
    embed, head = program.body[0], program.body[-1]
    attend = next(i for i in program.body if i.op == "attend")
    assert program.matrix(embed) == program.weights["embed.weight"]
    assert program.matrix(head) == program.weights["head.weight"]
    assert program.matrix(attend) is None
    assert program.carried == ()
    assert (embed.layer, attend.layer, head.layer) == (None, None, None)  # its weights say the layer; attend has none
    assert {i.layer for i in program.body if i.op == "linear_add"} == {0, 1}
    assert [i.makes_integers for i in program.body[:3]] == [False, True, False]
    assert [i.op for i in program.body if i.writes_cache] == ["rope_kv_write"] * 2
    assert not any(i.exchanges for i in program.body)
    assert programs("qwen2_bf16")["plan"].rows_dtype() == "f32"
    vector = Recipe((64,), (WeightPiece("a", 0, 64, "F32"),))
    assert (vector.columns, vector.nbytes) == (1, 256)
    matrix = Recipe((4, 64), (WeightPiece("a", 3, 5, "Q4_1"), WeightPiece("b", 0, 2, "Q8_0")))
    assert (matrix.columns, matrix.nbytes) == (64, 2 * 2 * 20 + 2 * 2 * 34)
