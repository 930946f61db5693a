"""Programs with experts: what merges and fuses, what a step of them costs, what ranks do with them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from program_builders import BASE

from roofline.common.errors import UnsupportedError
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.ops.traits import Trait
from roofline.program.compile import compile_program
from roofline.program.ir import Columns, Instr, Program, Value, WeightPiece
from roofline.program.passes.price import Mixture, Work, amount, mixture, price, with_experts
from roofline.program.passes.shard import shard
from roofline.program.target import CPU, GPU
from roofline.program.trace import trace, trace_shape

MIXTURE = BASE | {"family": "mixtral", "experts": 8, "experts_per_token": 2}
SHARED = BASE | {"family": "qwen_moe", "experts": 6, "experts_per_token": 3, "shared_ffn": 64, "attention_bias": True}


def compiled(config, form="Q4_0", target=CPU) -> Program:
    family, cfg = configure(config)
    tensors = {}
    for param in expand(family.spec(cfg), cfg.layers):
        if param.tied_to is None:
            kind = form if len(param.shape) == 2 and "router" not in param.name and "scale" not in param.name else "F32"
            tensors[param.name] = SimpleNamespace(format=kind, shape=param.shape)
    return compile_program(family, cfg, tensors, target)


@pytest.mark.parametrize(("config", "form"), [(MIXTURE, "Q4_0"), (SHARED, "Q4_0"), (MIXTURE, "BF16"), (SHARED, "F32")])
def test_gate_and_up_of_experts_and_of_the_shared_one_become_one_product(config, form):
    program = compiled(config, form)
    count = [instr.op for instr in program.body].count
    assert count("expert_linear_silu_mul") == count("expert_linear") == count("combine") == config["layers"]
    assert count("linear_silu_mul") == (config["layers"] if config is SHARED else 0)
    assert count("split") == 0
    recipe = program.weights["layers.0.mlp.experts.gate+up.weight"]
    names = [(piece.tensor.split(".")[4], piece.start) for piece in recipe.pieces[:4]]
    ffn = config["ffn"]
    assert names == [("gate", 0), ("up", 0), ("gate", ffn), ("up", ffn)]


def test_experts_of_a_tensor_each_are_read_from_their_own():
    family, cfg = configure(MIXTURE)
    name, ffn = "layers.1.mlp.experts.up.weight", MIXTURE["ffn"]
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    shapes = {param.name: param.shape for param in table if param.name != name}
    shapes |= {f"layers.1.mlp.experts.{n}.up.weight": (ffn, MIXTURE["width"]) for n in range(8)}
    tensors = {each: SimpleNamespace(format="BF16", shape=shape) for each, shape in shapes.items()}
    weights = trace(family, cfg, tensors).weights
    assert weights[name].pieces == tuple(
        WeightPiece(f"layers.1.mlp.experts.{n}.up.weight", 0, ffn, "BF16") for n in range(8)
    )
    other = name.replace("up", "gate")
    assert weights[other].pieces == tuple(WeightPiece(other, n * ffn, (n + 1) * ffn, "BF16") for n in range(8))


def test_on_a_gpu_gate_and_up_of_experts_stay_apart():
    ops = [instr.op for instr in compiled(MIXTURE, "BF16", GPU).body]
    assert (ops.count("expert_linear"), ops.count("silu_mul")) == (6, 2)


def test_one_token_reads_the_experts_it_goes_to_and_many_all_of_them():
    program = compiled(MIXTURE)
    experts = mixture(program)
    assert experts == Mixture(8, 2)
    assert (experts.hit(1), experts.hit(0)) == (2.0, 0.0)
    assert experts.hit(2) == pytest.approx(2 + 2 * 6 / 8)
    assert 7.99 < experts.hit(64) < 8
    names = {name for instr in program.body if instr.has(Trait.EXPERTS) for name in instr.weights}
    all_experts = sum(program.weights[name].nbytes for name in names)
    rest = sum(recipe.nbytes for name, recipe in program.weights.items() if name not in names)
    total, embedded = price(program).total, program.weights["head.weight" if not BASE["tied"] else "embed.weight"]
    row = embedded.nbytes // embedded.shape[0]
    spent = amount(total, with_experts(Work(1, 1, 100, 100), experts))
    assert spent.weight_bytes == rest + row + all_experts * 2 // 8
    spent = amount(total, with_experts(Work(500, 500, 500, 500), experts))
    assert spent.weight_bytes == pytest.approx(rest + 500 * row + all_experts, rel=1e-6)
    with pytest.raises(AssertionError, match="which experts"):
        amount(total, Work(1, 1, 100, 100))


def test_a_dense_model_has_no_mixture():
    assert mixture(compiled(BASE)) is None
    assert with_experts(Work(1, 2, 3, 4), None) == Work(1, 2, 3, 4)


def rank_of(config, rank, ranks, form="Q4_0") -> Program:
    family, cfg = configure(config)
    return shard(trace_shape(family, cfg, form), expand(family.spec(cfg), cfg.layers), rank, ranks)


def test_ranks_have_some_columns_of_every_expert():
    """Three units of 32 columns: two for the first rank, one for the other."""
    config = MIXTURE | {"ffn": 96}
    for rank, (first, last) in enumerate([(0, 64), (64, 96)]):
        program = rank_of(config, rank, 2)
        width, experts = config["width"], config["experts"]
        for name in ("gate", "up"):
            recipe = program.weights[f"layers.0.mlp.experts.{name}.weight"]
            assert recipe.shape == (experts * (last - first), width)
            assert [(piece.start % 96, piece.stop - piece.start) for piece in recipe.pieces] == [
                (first, last - first)
            ] * experts
        down = program.weights["layers.0.mlp.experts.down.weight"]
        assert down.shape == (experts * width, last - first)
        assert {piece.columns for piece in down.pieces} == {Columns(first, last, 96)}
        types = program.types()
        products = [i for i in program.body if i.op == "expert_linear"]
        assert [types[i.output.name].width for i in products[:3]] == [2 * (last - first)] * 2 + [2 * width]


def test_ranks_add_up_what_a_token_s_experts_give_together():
    """One sum for each combination, of rows of the model's width, before anything else reads them."""
    program = rank_of(SHARED | {"ffn": 64}, 0, 2)
    types, sums = program.types(), [i.inputs[0] for i in program.body if i.op == "all_reduce"]
    combined = [i.output.name for i in program.body if i.op == "combine"]
    assert len(combined) == SHARED["layers"]
    assert set(combined) <= set(sums)
    assert {types[name].width for name in combined} == {SHARED["width"]}
    assert len(sums) == 1 + 3 * SHARED["layers"]  # the embedding; attention, experts and the shared expert of a layer
    shared = program.weights["layers.0.mlp.shared.up.weight"]
    assert shared.shape == (SHARED["shared_ffn"] // 2, SHARED["width"])


def test_the_first_rank_adds_the_biases_of_experts():
    config = {**MIXTURE, "family": "gpt_oss", "attention_bias": True, "output_bias": True, "ffn": 64}
    for rank in (0, 1):
        program = rank_of(config, rank, 2, "BF16")
        assert program.weights["layers.0.mlp.experts.up.bias"].shape == (8 * 32,)
        assert ("layers.0.mlp.experts.down.bias" in program.weights) == (rank == 0)
        assert program.weights["layers.0.attn.sinks.weight"].shape == (config["heads"] // 2,)
        assert [i.op for i in program.body].count("expert_bias") == (3 - rank) * config["layers"]


def test_other_readers_of_what_experts_give_are_refused_among_ranks():
    family, cfg = configure(MIXTURE | {"ffn": 64})
    program = trace_shape(family, cfg, "Q4_0")
    body = list(program.body)
    at = next(number for number, instr in enumerate(body) if instr.op == "combine")
    given = body[at].inputs[0]
    scaled = Instr("scale", (given,), (), {"factor": 2.0}, (Value("scaled", program.types()[given]),))
    body[at : at + 1] = [scaled, replace(body[at], inputs=("scaled", body[at].inputs[1]))]
    with pytest.raises(UnsupportedError, match=r"scale under tensor_parallel.*before the ranks"):
        shard(replace(program, body=tuple(body)), expand(family.spec(cfg), cfg.layers), 0, 2)
