"""Programs whose layers keep keys of several shapes, or read those of another layer."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the reference is written in torch")

from roofline.common.errors import CapacityError, ConfigError  # noqa: E402
from roofline.models import registry  # noqa: E402
from roofline.models.config import KvShape  # noqa: E402
from roofline.program.compile import stages  # noqa: E402
from roofline.program.ir import KvGroup, Program, Share  # noqa: E402
from roofline.program.summary import summarize  # noqa: E402
from roofline.program.target import CPU  # noqa: E402
from roofline.program.text import parse_program, print_program  # noqa: E402
from roofline.program.trace import trace_shape  # noqa: E402
from roofline.program.verify import verify  # noqa: E402
from roofline.weights.random_weights import random_checkpoint  # noqa: E402
from tests.backends.shaped_models import BASE, SHARING  # noqa: E402


def traced(config: dict[str, Any]) -> Program:
    return trace_shape(*registry.configure(config))


def at(config: dict[str, Any], name: str, share: Share = Share()) -> Program:
    source = random_checkpoint(config, seed=1, form="F32")
    family, cfg = registry.configure(config)
    return dict(stages(family, cfg, source.tensors, CPU, share=share))[name]


def test_layers_of_each_shape_have_a_group_and_numbers_of_their_own() -> None:
    program = traced(BASE)
    assert program.kv_groups == {"kv0": KvGroup(3, 2, 16, 0, "f32"), "kv1": KvGroup(2, 1, 32, 0, "f32")}
    writes = [(i.output.name, i.attr("layer")) for i in program.body if i.op == "kv_write"]
    assert writes == [("kv0.1", 0), ("kv1.1", 0), ("kv0.2", 1), ("kv0.3", 2), ("kv1.2", 1)]
    assert program.outputs[1:] == ("kv0.3", "kv1.2")
    assert {instr.attr("heads") for instr in program.body if instr.op == "rope"} == {4, 2, 1}


def test_a_layer_that_reads_another_ones_keys_writes_none() -> None:
    program = traced(SHARING)
    groups = {"kv0": KvGroup(2, 2, 16, 9, "f32"), "kv1": KvGroup(1, 1, 32, 0, "f32")}
    assert program.kv_groups == groups
    reads = [(i.inputs[1], i.attr("layer")) for i in program.body if i.op == "attend"]
    assert reads == [("kv0.1", 0), ("kv1.1", 0), ("kv0.2", 1), ("kv0.2", 1), ("kv1.1", 0), ("kv0.2", 1)]
    assert not any(f"layers.3.attn.{name}.weight" in program.weights for name in ("k", "v", "k_norm"))


def test_bytes_of_a_token_count_every_group_and_no_layer_that_only_reads() -> None:
    source = random_checkpoint(SHARING, seed=1, form="F32")
    summary = summarize(traced(SHARING), source.tensors)
    assert summary.kv_bytes("bf16") == 2 * 2 * (2 * 2 * 16 + 1 * 32)


def test_layers_differ_that_differ_in_a_size_alone() -> None:
    cfg = registry.config_of({**BASE, "wide_ffn": 96, "wide_heads": 4, "wide_rotary": 16, "wide_kv_heads": 2})
    assert [cfg.alike(layer) for layer in range(5)] == [0, 1, 0, 0, 1]
    assert [cfg.kv_group(layer) for layer in range(5)] == [0, 1, 0, 0, 1]
    assert cfg.first(1).kv_shapes == (KvShape(2, 16),)


def test_the_text_form_has_every_group_and_the_dimensions_of_values_where_they_differ() -> None:
    program = traced(SHARING)
    latent = replace(program, kv_groups={**program.kv_groups, "kv1": KvGroup(1, 1, 32, 0, "f32", 24)})
    assert parse_program(print_program(program)) == program
    assert parse_program(print_program(latent)) == latent
    assert "value_dim" not in print_program(program)
    assert latent.kv_groups["kv1"].token_bytes * 2 == program.kv_groups["kv1"].token_bytes


def test_a_write_to_the_cache_of_another_shape_is_refused() -> None:
    program = traced(BASE)
    types = program.types()
    wrong = [replace(i, inputs=("kv1.0", *i.inputs[1:])) if i.output.name == "kv0.1" else i for i in program.body]
    assert types["kv1.0"].trailing == (1, 32)
    with pytest.raises(ConfigError, match="kv_write"):
        verify(replace(program, body=tuple(wrong)))


def test_queries_over_anothers_keys_are_prepared_in_one_instruction() -> None:
    program = at(SHARING, "fuse")
    before = [before.op for before, instr in zip(program.body, program.body[1:], strict=False) if instr.op == "attend"]
    assert before == ["rope_kv_write"] * 3 + ["rope_queries"] * 3
    assert not {"rope", "rms_norm"} & {i.op for i in program.body if "q_norm" in str(i.weights)}
    queries = next(i for i in program.body if i.op == "rope_queries")
    assert queries.weights == ("layers.3.attn.q_norm.weight",)
    assert queries.attrs["table"] == "rope0"
    plain = at({**SHARING, "qk_norm": False, "wide_rotary": 0}, "fuse")
    assert [i.attrs.get("table") for i in plain.body if i.op == "rope_queries"] == ["rope0", None, "rope0"]


@pytest.mark.parametrize(("number", "groups"), [(0, {"kv0": 1, "kv1": 0}), (1, {"kv0": 1, "kv1": 1})])
def test_a_stage_keeps_readers_with_what_they_read(number: int, groups: dict[str, int]) -> None:
    program = at(SHARING, "stage", Share(stage=number, stages=2))
    assert {name: group.layers for name, group in program.kv_groups.items()} == groups
    assert program.layers == (1, 5)[number]


def test_stages_are_even_where_layers_can_be_cut() -> None:
    config = {**SHARING, "layers": 8, "wide": [False] * 8, "sources": [0, 1, 2, 3, 4, 5, 5, 5], "layer_windows": []}
    sizes = [at(config, "stage", Share(stage=number, stages=3)).layers for number in range(3)]
    assert sizes == [3, 2, 3]


def test_more_stages_than_parts_are_refused() -> None:
    with pytest.raises(CapacityError, match="needs 3 parts that share no keys and values, 2 are") as refusal:
        at(SHARING, "stage", Share(stage=0, stages=3))
    assert "Lower it to at most 2" in str(refusal.value)


def test_ranks_divide_the_heads_of_each_group_by_themselves() -> None:
    program = at({**BASE, "wide_kv_heads": 4}, "shard", Share(1, 2))
    assert [group.kv_heads for group in program.kv_groups.values()] == [1, 2]
    assert [instr.attr("heads") for instr in program.body if instr.op == "attend"] == [2] * 5
