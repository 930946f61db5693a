"""Experts by the ops and by a loop over tokens."""

import pytest

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.cost import Affine
from roofline.ops.symbol import Type, WeightType

torch = pytest.importorskip("torch", reason="ops' references are written in torch")


def test_products_have_the_dtype_that_autocast_gives_them() -> None:
    """As those of `linear` have: training in bf16 computes both so."""
    x, w = torch.randn(3, 8), torch.randn(4 * 6, 8)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        rows = ops.expert_linear(x, ids, w, 4)
        assert rows.dtype == ops.linear(x, w).dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), ops.expert_linear(x, ids, w, 4), atol=0.1, rtol=0.02)


def test_route_takes_the_largest_and_of_equals_the_lowest():
    weights, ids = ops.route(torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 3)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert ids.dtype == torch.int32
    assert torch.allclose(weights.sum(1), torch.ones(2))
    assert weights[0, 0] == weights[0, 1]
    shares, same = ops.route(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3, renormalise=False)
    assert torch.equal(same, ids[:1])
    assert torch.allclose(shares, torch.softmax(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 1)[:, [1, 2, 3]])


def _theirs(kind: str, bias: "torch.Tensor | None", logits: "torch.Tensor", **fields: object):
    """Weights and ids of transformers' router of a model type, of logits; its matrix is the identity."""
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    experts = logits.shape[1]
    if kind == "ernie4_5_moe":
        config = transformers.AutoConfig.for_model(kind, hidden_size=experts, moe_num_experts=experts, **fields)
        router = ernie.Ernie4_5_MoeTopKRouter(config)
        router.moe_statics.e_score_correction_bias.data = bias[None]
    else:
        fields = {"n_routed_experts": experts, "hidden_size": experts, **fields}
        router = deepseek.DeepseekV3TopkRouter(transformers.AutoConfig.for_model("deepseek_v3", **fields))
        router.e_score_correction_bias.data = bias
    router.weight.data = torch.eye(experts)
    results = router(logits)
    weights, ids = (next(t for t in results if t.shape[-1] != experts and t.dtype.is_floating_point == real)
                    for real in (True, False))  # fmt: skip
    return weights, ids


@pytest.mark.parametrize(
    ("kind", "fields", "ours"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
         {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
         {"score": "sigmoid", "renormalise": False}),
        ("ernie4_5_moe", {}, {}),
    ],
)  # fmt: skip
def test_scores_choose_what_transformers_chooses(kind, fields, ours):
    pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(5)
    logits, bias = torch.randn(50, 16, generator=generator), torch.randn(16, generator=generator) * 0.2
    chosen = {"moe_k": 3} if kind == "ernie4_5_moe" else {"num_experts_per_tok": 3}
    weights, ids = ops.route(logits, 3, bias=bias, **ours)
    want_weights, want_ids = _theirs(kind, bias, logits, **fields, **chosen)
    order = ids.long().argsort(1)
    want_order = want_ids.argsort(1)
    assert torch.equal(ids.long().gather(1, order), want_ids.gather(1, want_order))
    assert torch.allclose(weights.gather(1, order), want_weights.float().gather(1, want_order), atol=1e-6)


def test_groups_are_scored_by_their_best_or_their_best_two_and_ties_go_to_the_lowest():
    logits = torch.tensor([[2.0, -9.0, 1.0, 1.0, 0.0, 0.0]]).log_softmax(1)
    two = {"groups": 3, "scale": 2.0, "renormalise": False}
    scores = torch.softmax(logits, 1)
    for group_score, ids in (("best_two", [0, 1]), ("best", [0, 1])):
        weights, chosen = ops.route(logits, 2, group_score=group_score, **two)
        assert chosen.tolist() == [ids]
        assert torch.allclose(weights, 2.0 * scores[:, ids])
    middle = torch.tensor([[1.0, -9.0, 0.9, 0.9, 0.0, 0.0]])
    assert ops.route(middle, 2, group_score="best", **two)[1].tolist() == [[0, 1]]
    assert ops.route(middle, 2, **two)[1].tolist() == [[2, 3]]
    assert ops.route(torch.zeros(1, 6), 3, kept_groups=2, **two)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"top": 2, "groups": 3}, "1 of 3 groups of 8 experts"),
        ({"top": 2, "groups": 2, "kept_groups": 3}, "3 of 2 groups"),
        ({"top": 5, "groups": 2}, "5 experts of 1 groups of 4"),
        ({"top": 1, "groups": 8}, "groups of 1 have no best two"),
        ({"top": 1, "score": "tanh"}, "no score 'tanh' of experts"),
    ],
)
def test_routes_that_cannot_be_are_refused(attributes, message):
    with pytest.raises(ConfigError, match=message):
        registry.get("route").results([Type("f32", "tokens", (8,))], [], attributes)
    with pytest.raises(ConfigError, match="bias of shape"):
        registry.get("route").results([Type("f32", "tokens", (8,))], [WeightType((7,), ("F32",), 28)], {"top": 2})


@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 1, 1), (6, 4, 2), (5, 3, 3)])
def test_a_layer_of_experts_equals_a_loop(tokens, experts, top):
    width, ffn = 12, 10
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    gate, up, down = (torch.randn(experts * n, k, dtype=torch.float64) for n, k in ((ffn, 12), (ffn, 12), (width, 10)))
    weights, ids = ops.route(torch.randn(tokens, experts), top)
    mid = ops.silu_mul(ops.expert_linear(x, ids, gate, experts), ops.expert_linear(x, ids, up, experts))
    out = ops.combine(ops.expert_linear(mid, ids, down, experts), weights.double())
    for token in range(tokens):
        want = torch.zeros(width, dtype=torch.float64)
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            rows, wide = slice(expert * ffn, (expert + 1) * ffn), slice(expert * width, (expert + 1) * width)
            want += weight * (down[wide] @ (torch.nn.functional.silu(gate[rows] @ x[token]) * (up[rows] @ x[token])))
        assert torch.allclose(out[token], want)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().min() > 0


def test_types_and_prices():
    x, w = Type("bf16", "tokens", (64,)), WeightType((8 * 32, 64), ("BF16",), 8 * 32 * 64 * 2)
    route, linear, combine = (registry.get(name) for name in ("route", "expert_linear", "combine"))
    weights, ids = route.types(route.call([Type("f32", "tokens", (8,))], [], {"top": 2}))
    assert (weights, ids) == (Type("f32", "tokens", (2,)), Type("i32", "tokens", (2,)))
    call = linear.call([x, ids], [w], {"experts": 8})
    (out,) = linear.types(call)
    assert out == Type("f32", "tokens", (64,))
    assert linear.price(call).flops == Affine(tokens=2 * 2 * 32 * 64)
    assert linear.price(call).weight_bytes == Affine(experts=w.nbytes // 8)
    assert linear.price(call).weight_bytes.at(tokens=1, experts=2.0) == 2 * w.nbytes // 8
    rows = linear.call([Type("bf16", "rows", (64,)), Type("i32", "rows", (2,))], [w], {"experts": 8})
    assert linear.price(rows).weight_bytes == Affine(row_experts=w.nbytes // 8)
    assert combine.types(combine.call([out, weights], [], {})) == (Type("f32", "tokens", (32,)),)
    two = Type("f32", "tokens", (2,))
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=f"{wrong} of 2 experts"):
            route.types(route.call([two], [], {"top": wrong}))
    for top in (1, 2):
        assert route.types(route.call([two], [], {"top": top}))[0] == Type("f32", "tokens", (top,))
    each = Type("f32", "tokens", (2 * 64,))  # another input for each of two experts
    assert linear.types(linear.call([each, ids], [w], {"experts": 8})) == (out,)
    assert route.price(route.call([two], [], {"top": 1})).flops == Affine(tokens=4 * 2)
    assert combine.price(combine.call([out, weights], [], {})).flops == Affine(tokens=2 * 64)
    with pytest.raises(ConfigError, match="width 65"):
        linear.types(linear.call([Type("f32", "tokens", (65,)), ids], [w], {"experts": 8}))
    with pytest.raises(ConfigError, match="256 rows of 7 experts"):
        linear.types(linear.call([x, ids], [w], {"experts": 7}))
    with pytest.raises(ConfigError, match="width 63"):
        combine.types(combine.call([Type("f32", "tokens", (63,)), weights], [], {}))


def test_gate_and_up_side_by_side_are_two_products_and_the_activation_between():
    x, ids = torch.randn(5, 12), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    gate, up = torch.randn(3, 10, 12), torch.randn(3, 10, 12)
    fused = registry.get("expert_linear_silu_mul").reference(x, ids, torch.cat([gate, up], dim=1).flatten(0, 1), 3)
    apart = ops.silu_mul(*(ops.expert_linear(x, ids, each.flatten(0, 1), 3) for each in (gate, up)))
    assert torch.allclose(fused, apart, atol=1e-5)


def test_sigmoid_scale_takes_one_number_a_row():
    x, gate = torch.randn(4, 6), torch.randn(4, 1)
    assert torch.allclose(ops.sigmoid_scale(x, gate), x / (1 + torch.exp(-gate)))
    with pytest.raises(ConfigError, match="a gate of width 6"):
        registry.get("sigmoid_scale").results([Type("f32", "tokens", (6,))] * 2, [], {})


def test_each_part_of_a_row_gets_the_bias_of_its_expert():
    x, ids, bias = torch.randn(3, 8), torch.tensor([[2, 0], [0, 1], [1, 2]], dtype=torch.int32), torch.randn(3, 4)
    out = ops.expert_bias(x, ids, bias.flatten(), 3).view(3, 2, 4)
    assert torch.equal(out, x.view(3, 2, 4) + bias[ids.long()])
    op, row, chosen = registry.get("expert_bias"), Type("f32", "tokens", (8,)), Type("i32", "tokens", (2,))
    call = op.call([row, chosen], [WeightType((12,), ("F32",), 48)], {"experts": 3})
    assert op.types(call) == (row,)
    assert op.price(call).weight_bytes == Affine(experts=16)
    for rows, experts in ((12, 5), (9, 3)):
        with pytest.raises(ConfigError, match=f"{rows} biases of {experts} experts"):
            op.types(op.call([row, chosen], [WeightType((rows,), ("F32",), 4 * rows)], {"experts": experts}))


def test_clamped_swiglu_cuts_gates_above_and_ups_on_both_sides():
    gate, up = torch.tensor([[9.0, -9.0, 1.0]]), torch.tensor([[0.5, 9.0, -9.0]])
    g, u = torch.tensor([2.0, -9.0, 1.0]), torch.tensor([0.5, 2.0, -2.0])
    assert torch.allclose(ops.clamped_swiglu(gate, up, 2.0)[0], g * torch.sigmoid(1.702 * g) * (u + 1))
    with pytest.raises(ConfigError, match="as two values"):
        registry.get("clamped_swiglu").results([Type("f32", "tokens", (6,))], [], {"limit": 1.0})
