"""Routing, products of sorted slots and their combination, against the ops' references."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import ops
from roofline.hardware.chips import chips

torch = pytest.importorskip("torch")


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_route(experts, top, renormalise, ties, seed):
    from roofline.backends.gpu.kernels.route import route

    top = min(top, experts)
    logits = torch.randn(5, experts + 3, generator=torch.Generator().manual_seed(seed))[:, :experts]
    logits = logits.round() if ties else logits
    weights, ids = torch.full((5, top), float("nan")), torch.full((5, top), -1, dtype=torch.int32)
    route(chips.get("sm_90"), logits, renormalise=renormalise, weights=weights, ids=ids)
    want_weights, want_ids = ops.route(logits, top, renormalise)
    assert torch.equal(ids, want_ids)
    assert (weights - want_weights).abs().max() < 1e-6


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]), st.integers(2, 5), st.tuples(*[st.booleans()] * 5),
       st.integers(0, 1000))  # fmt: skip
def test_route_by_scores(groups, size, switches, seed):
    from roofline.backends.gpu.kernels.route import RouterScores, route_scores

    sigmoid, by_best, renormalise, has_bias, ties = switches
    (count, kept), random = groups, torch.Generator().manual_seed(seed)
    experts, top = count * size, min(3, kept * size)
    logits, bias = (torch.randn(n, experts, generator=random) for n in (5, 1))
    logits, bias = (logits.round(), 0 * bias) if ties else (logits, bias * 0.3)
    weights, ids = torch.full((5, top), float("nan")), torch.full((5, top), -1, dtype=torch.int32)
    scores = RouterScores(sigmoid=sigmoid, groups=count, kept_groups=kept, by_best=by_best, scale=2.5)
    choice_bias = bias[0] if has_bias else None
    chip = chips.get("sm_90")
    route_scores(chip, logits, choice_bias, scores, renormalise=renormalise, weights=weights, ids=ids)
    want_weights, want_ids = ops.route(
        logits, top, renormalise, choice_bias, score="sigmoid" if sigmoid else "softmax", groups=count,
        kept_groups=kept, group_score="best" if by_best else "best_two", scale=2.5,
    )  # fmt: skip
    assert torch.equal(ids, want_ids)
    assert (weights - want_weights).abs().max() < 1e-5


def test_a_token_with_nan_is_routed_somewhere_with_weights_of_nan():
    from roofline.backends.gpu.kernels.route import route

    logits = torch.randn(3, 6)
    logits[1, 4] = float("nan")
    weights, ids = torch.zeros(3, 2), torch.full((3, 2), -1, dtype=torch.int32)
    for renormalise in (False, True):
        route(chips.get("gfx942"), logits, renormalise=renormalise, weights=weights, ids=ids)
        assert weights.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
        assert ((ids >= 0) & (ids < 6)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 1000), st.booleans())
def test_schedule_visits_every_slot_once_and_keeps_their_order(experts, top, seed, exact):
    from roofline.backends.gpu.kernels.experts import schedule

    random = torch.Generator().manual_seed(seed)
    tokens = int(torch.randint(1, 70, (1,), generator=random))
    ids = torch.randint(0, experts, (tokens, top), generator=random).int()
    plan = schedule(chips.get("sm_90"), ids, experts, torch.bfloat16, exact=exact)
    rows = 32 if exact else 16 if tokens * top <= 16 * experts else 128
    visited = []
    for expert, start in zip(plan.tile_expert.tolist(), plan.tile_start.tolist(), strict=True):
        if expert < experts:
            slots = plan.order[start : min(start + rows, int(plan.starts[expert + 1]))].tolist()
            assert slots
            assert slots == sorted(slots)
            assert all(ids.flatten()[slot] == expert for slot in slots)
            visited += slots
    assert sorted(visited) == list(range(tokens * top))


# tokens, experts, top, width, ffn, dtype, exact
CASES = [
    (1, 4, 2, 64, 48, "bfloat16", False),
    (7, 3, 1, 40, 33, "float32", False),
    (33, 2, 2, 72, 70, "float16", False),  # the tile of prefill
    (19, 5, 3, 130, 20, "bfloat16", True),
]
STEPS = {"float32": 2**-20, "bfloat16": 2**-6, "float16": 2**-9}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chip", ["sm_90", "gfx1100"])
def test_a_layer_of_experts(case, chip):
    from roofline.backends.gpu.kernels.experts import expert_linear, schedule
    from roofline.backends.gpu.kernels.gated import gated
    from roofline.backends.gpu.kernels.route import combine, route

    tokens, experts, top, width, ffn, name, exact = case
    chip, dtype = chips.get(chip), getattr(torch, name)
    x = torch.randn(tokens, width + 8).to(dtype)[:, :width]
    up, down = torch.randn(experts, 2 * ffn, width) / width**0.5, torch.randn(experts, width, ffn) / ffn**0.5
    up, down, logits = up.to(dtype), down.to(dtype), torch.randn(tokens, experts)
    nan = float("nan")
    weights, ids = torch.full((tokens, top), nan), torch.full((tokens, top), -1, dtype=torch.int32)
    both, mid = torch.full((tokens * top, 2 * ffn), nan), torch.full((tokens * top, ffn), nan, dtype=dtype)
    each, out = torch.full((tokens * top, width), nan), torch.full((tokens, width), nan)
    route(chip, logits, renormalise=True, weights=weights, ids=ids)
    plan = schedule(chip, ids, experts, dtype, exact=exact)
    expert_linear(chip, x, up, plan, out=both)
    gated(chip, "silu", both, out=mid)
    expert_linear(chip, mid, down, plan, out=each)
    combine(chip, each, weights, out=out)

    want_weights, want_ids = ops.route(logits, top)
    want = ops.expert_linear(x.double(), want_ids, up.double().flatten(0, 1), experts)
    want = ops.silu_mul(want.view(tokens * top, 2 * ffn)).view(tokens, top * ffn)
    want = ops.expert_linear(want, want_ids, down.double().flatten(0, 1), experts)
    want = ops.combine(want, want_weights.double())
    assert (out - want).abs().max() < STEPS[name] * want.abs().max()


def test_a_slot_is_the_same_alone_and_in_company():
    """The exact schedule: another number of slots, the same bits; and the others' NaN stays theirs."""
    from roofline.backends.gpu.kernels.experts import expert_linear, schedule

    chip, x, w = chips.get("sm_90"), torch.randn(40, 96).bfloat16(), torch.randn(3, 50, 96).bfloat16()
    x[5] = float("nan")
    ids = torch.randint(0, 3, (40, 2), dtype=torch.int32)

    def run(tokens):
        out = torch.full((2 * len(tokens), 50), float("nan"))
        expert_linear(chip, x[tokens], w, schedule(chip, ids[tokens], 3, x.dtype, exact=True), out=out)
        return out.view(len(tokens), 2, 50)

    together = run(list(range(40)))
    assert together.isnan().any(2).any(1).nonzero().flatten().tolist() == [5]
    assert torch.equal(run([17])[0], together[17])
    assert torch.equal(run([3, 39])[1], together[39])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_combine_adds_in_the_order_of_ranks(dtype):
    from roofline.backends.gpu.kernels.route import combine

    x, wide = torch.randn(6, 1030).to(getattr(torch, dtype)), torch.rand(2, 8)
    for weights in (wide[:, :3].contiguous(), wide.bfloat16()[:, 4:7]):  # rows of a router; columns of a product
        out = torch.full((2, 1030), float("nan"))
        combine(chips.get("sm_90"), x, weights, out=out)
        parts = weights[:, :, None].float() * x.float().view(2, 3, 1030)
        assert torch.equal(out, (parts[:, 0] + parts[:, 1]) + parts[:, 2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_biases_are_those_of_each_slot_s_expert(dtype):
    """In the place of what they are added to, as the op says; rows that lie apart."""
    from roofline.backends.gpu.kernels.route import expert_bias

    x = torch.randn(6, 1040).to(getattr(torch, dtype))
    bias, ids = torch.randn(5, 1030), torch.tensor([[4, 0], [2, 2], [1, 3]], dtype=torch.int32)
    want = ops.expert_bias(x[:, :1030].float().reshape(3, 2060), ids, bias.flatten(), 5).view(6, 1030).to(x.dtype)
    beyond = x[:, 1030:].clone()
    expert_bias(chips.get("sm_90"), x[:, :1030], ids, bias, out=x[:, :1030])
    assert torch.equal(x[:, :1030], want)
    assert torch.equal(x[:, 1030:], beyond)
