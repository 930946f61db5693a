"""Every pass against its golden text, and the shapes of Programs that the passes must produce."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import program_builders as builders
import pytest

from roofline.common.errors import ConfigError
from roofline.program.compile import STAGES, compile_program, stages
from roofline.program.ir import Instr, Program, Value
from roofline.program.passes.fuse import fuse
from roofline.program.passes.legalize import recast_cache
from roofline.program.passes.narrow import narrow
from roofline.program.target import CPU, with_cache
from roofline.program.text import parse_program, print_program

GOLDEN = Path(__file__).parent / "golden"
MODELS = {
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
    program = programs("mpt_alibi_bf16")["merge"]
    attend = next(i for i in program.body if i.op == "attend")
    scaled = Value("scaled", program.types()[attend.inputs[0]])
    body = []
    for instr in program.body:
        if instr is attend:
            body.append(Instr("scale", attend.inputs[:1], (), {"factor": 2.0}, (scaled,)))
            instr = replace(instr, inputs=("scaled", *instr.inputs[1:]))
        body.append(instr)
    ops = ops_of(fuse(replace(program, body=tuple(body))))
    assert (ops["qkv_write"], ops["kv_write"]) == (1, 1)


@pytest.mark.parametrize("name", MODELS)
def test_after_the_last_attention_only_wanted_rows_are_computed(name: str) -> None:
    body = programs(name)["fuse"].body
    last = max(at for at, instr in enumerate(body) if instr.op == "attend")
    assert all(instr.output.type.leading == "rows" for instr in body[last + 1 :])
    assert all(instr.output.type.leading == "tokens" for instr in body[: last + 1])


def test_rows_that_are_read_elsewhere_are_not_narrowed() -> None:
    program = programs("llama")["trace"]
    take = next(i for i in program.body if i.op == "take_rows")
    escaping = replace(program, outputs=(*program.outputs, take.inputs[0]))
    assert narrow(escaping) == escaping


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
    assert ops["rope_kv_write"] == 0
    assert ops["kv_write"] == 2


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
