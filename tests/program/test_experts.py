"""Programs with experts: what merges and fuses, what a step of them costs, what ranks do with them."""

from types import SimpleNamespace

import pytest
from program_builders import BASE

from roofline.common.errors import UnsupportedError
from roofline.models.registry import configure
from roofline.models.spec import expand
from roofline.ops.traits import Trait
from roofline.program.compile import compile_program
from roofline.program.ir import Piece, Program
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
    assert weights[name].pieces == tuple(Piece(f"layers.1.mlp.experts.{n}.up.weight", 0, ffn, "BF16") for n in range(8))
    other = name.replace("up", "gate")
    assert weights[other].pieces == tuple(Piece(other, n * ffn, (n + 1) * ffn, "BF16") for n in range(8))


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


def test_ranks_refuse_experts():
    family, cfg = configure(MIXTURE)
    program = trace_shape(family, cfg)
    with pytest.raises(UnsupportedError, match="experts under tensor_parallel"):
        shard(program, expand(family.spec(cfg), cfg.layers), 0, 2)
