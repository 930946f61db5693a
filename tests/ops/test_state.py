"""causal_conv and delta_rule beside transformers' and torch's own; chunks, companions and gradients."""

import itertools

import pytest

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.state import COLUMNS, MATRIX, state_values
from roofline.ops.state_rows import StateRows
from roofline.ops.symbol import Type, WeightType
from tests.models.eager import LastStates

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

CHANNELS, TAPS = 11, 4
KEY_HEADS, KEY_DIM, VALUE_DIM = 3, 10, 6


def shape_of(value_heads):
    return {"key_heads": KEY_HEADS, "value_heads": value_heads, "key_dim": KEY_DIM}


def inputs_of(value_heads, tokens, seed=0):
    """qkv, a, b, a_log, dt_bias of random numbers, their decays from none to most of the state."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    width = 2 * KEY_HEADS * KEY_DIM + value_heads * VALUE_DIM
    values = [numbers(tokens, width), numbers(tokens, value_heads), numbers(tokens, value_heads)]
    return [*values, torch.linspace(-4, 1, value_heads), numbers(value_heads)]


def states_of(value_heads):
    return LastStates({COLUMNS: (TAPS - 1, CHANNELS), MATRIX: (value_heads, KEY_DIM, VALUE_DIM)})


def delta(values, state, value_heads, **changes):
    *rows, a_log, dt_bias = values
    return ops.delta_rule(*rows, state, a_log, dt_bias, layer=0, **shape_of(value_heads), **changes)


def of_transformers(values, value_heads, recurrent):
    """The same with transformers' function: one token after another, or in chunks of 64."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    qkv, a, b, a_log, dt_bias = values
    width = KEY_HEADS * KEY_DIM
    q, k, v = (t.unflatten(1, (heads, -1))[None] for t, heads in
               zip(qkv.split([width, width, value_heads * VALUE_DIM], 1), (KEY_HEADS, KEY_HEADS, value_heads),
                   strict=True))  # fmt: skip
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    rule = module.torch_recurrent_gated_delta_rule if recurrent else module.torch_chunk_gated_delta_rule
    options = {"g": g[None], "beta": b.sigmoid()[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, state = rule(q, k, v, **options)
    return out[0].flatten(1), state[0]


@pytest.mark.parametrize("value_heads", [3, 6])
@pytest.mark.parametrize("recurrent", [True, False])
def test_the_delta_rule_is_that_of_transformers(value_heads, recurrent):
    values = inputs_of(value_heads, 150)
    expected, matrix = of_transformers(values, value_heads, recurrent)
    out, state = delta(values, states_of(value_heads).step([(0, 150)], ["s"]), value_heads)
    assert expected.std() > 0.05
    assert (out - expected).abs().max() < 2e-6
    assert (state.tensors[0, MATRIX, "s"] - matrix).abs().max() < 2e-6


def test_tiled_value_heads_are_the_same_in_another_order():
    values, order = inputs_of(6, 20), [0, 2, 4, 1, 3, 5]  # of key heads 0, 1, 2, and again
    expected, _ = delta(values, states_of(6).step([(0, 20)], ["s"]), 6)
    qkv, *heads = values
    v = qkv[:, 2 * KEY_HEADS * KEY_DIM :].unflatten(1, (6, VALUE_DIM))[:, order].flatten(1)
    moved = [torch.cat([qkv[:, : 2 * KEY_HEADS * KEY_DIM], v], 1), *(value[..., order] for value in heads)]
    out, _ = delta(moved, states_of(6).step([(0, 20)], ["s"]), 6, tiled=True)
    assert torch.equal(out.unflatten(1, (6, VALUE_DIM)), expected.unflatten(1, (6, VALUE_DIM))[:, order])


@pytest.mark.parametrize("silu", [False, True])
def test_the_convolution_is_that_of_torch_behind_zeros(silu):
    x, w, bias = torch.randn(20, CHANNELS), torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
    expected = torch.nn.functional.conv1d(x.T[None], w[:, None], bias, padding=TAPS - 1, groups=CHANNELS)[0, :, :20].T
    expected = torch.nn.functional.silu(expected) if silu else expected
    out, state = ops.causal_conv(x, states_of(3).step([(0, 20)], ["s"]), w, bias, layer=0, silu=silu)
    assert (out - expected).abs().max() < 2e-6
    assert torch.equal(state.tensors[0, COLUMNS, "s"], x[-3:])
    plain, _ = ops.causal_conv(x[:2], states_of(3).step([(0, 2)], ["s"]), w, layer=0)
    assert torch.allclose(plain[1], w[:, 3] * x[1] + w[:, 2] * x[0])


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 16, 17], [33, 7]])
def test_chunks_and_companions_change_no_bit(sizes):
    value_heads = 3
    values = inputs_of(value_heads, 40)
    x, w = torch.randn(40, CHANNELS), torch.randn(CHANNELS, TAPS)
    whole_delta, full = delta(values, states_of(value_heads).step([(0, 40)], ["s"]), value_heads)
    whole_conv, _ = ops.causal_conv(x, states_of(3).step([(0, 40)], ["s"]), w, layer=0, silu=True)
    other, other_x = inputs_of(value_heads, 5, seed=1), torch.randn(5, CHANNELS)
    state, conv_state, at = states_of(value_heads), states_of(3), 0
    for size in sizes:  # another sequence begins in every step before this one goes on
        rows = [torch.cat([o, v[at : at + size]]) for o, v in zip(other[:3], values[:3], strict=True)]
        stretches, keys = [(0, 5), (5, 5 + size)], [f"other{at}", "s"]
        out, state = delta([*rows, *values[3:]], state.step(stretches, keys), value_heads)
        conv_rows = torch.cat([other_x, x[at : at + size]])
        conv, conv_state = ops.causal_conv(conv_rows, conv_state.step(stretches, keys), w, layer=0, silu=True)
        assert torch.equal(out[5:], whole_delta[at : at + size])
        assert torch.equal(conv[5:], whole_conv[at : at + size])
        at += size
    assert torch.equal(state.tensors[0, MATRIX, "s"], full.tensors[0, MATRIX, "s"])


def test_gradients_are_those_of_finite_differences():
    value_heads = 3
    values = [value.double().requires_grad_() for value in inputs_of(value_heads, 4)]
    scale = torch.randn(4, value_heads * VALUE_DIM)

    def loss(*values):
        return (delta(values, states_of(value_heads).step([(0, 4)], ["s"]), value_heads)[0] * scale).sum().double()

    x, w = torch.randn(5, CHANNELS).double().requires_grad_(), torch.randn(CHANNELS, TAPS).double().requires_grad_()

    def conv(x, w):
        state = states_of(3).step([(0, 5)], ["s"])
        return ops.causal_conv(x, state, w, layer=0, silu=True)[0].square().sum().double()

    # The references compute in float32 inside: differences are taken wide.
    options = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2, "nondet_tol": 1e-5, "fast_mode": True}
    assert torch.autograd.gradcheck(loss, values, **options)
    assert torch.autograd.gradcheck(conv, (x, w), **options)


@pytest.mark.parametrize("length", [1, 50, 64, 150])
@pytest.mark.parametrize("packed", [False, True])
def test_the_form_of_training_gives_the_values_and_gradients_of_the_references(length, packed):
    count, value_heads = 2, 6
    tokens = count * length
    values = inputs_of(value_heads, tokens)
    x, w, bias = torch.randn(tokens, CHANNELS), torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
    scales = torch.randn(tokens, value_heads * VALUE_DIM), torch.randn(tokens, CHANNELS)
    begins = torch.zeros(count, length, dtype=torch.bool)
    begins[:, 0] = True
    if packed:  # documents of one token and of several chunks, beginning within chunks, at their edges and at none
        begins[0, [at for at in (3, 4, 64, 127) if at < length]] = True
        begins[1, [at for at in (30, 63, 140) if at < length]] = True
    at = torch.arange(length).expand(count, length)
    places = at - torch.where(begins, at, 0).cummax(1).values
    edges = [*torch.where(begins.flatten())[0].tolist(), tokens]
    stretches = list(itertools.pairwise(edges))
    results = []
    for store in (states_of(value_heads).step(stretches, range(len(stretches))),
                  StateRows(count, length, places if packed else None)):  # fmt: skip
        leaves = [value.clone().requires_grad_() for value in (*values, x, w, bias)]
        out, _ = delta(leaves[:5], store, value_heads)
        conv, _ = ops.causal_conv(leaves[5], store, *leaves[6:], layer=0, silu=True)
        ((out * scales[0]).sum() + (conv * scales[1]).sum()).backward()
        results.append([out, conv, *(leaf.grad for leaf in leaves)])
    assert results[0][0].std() > 0.02
    for ours, expected in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max())


def test_what_does_not_fit_is_refused():
    state = Type("state", None, (state_values((("columns", (3, 8)), ("matrix", (2, 4, 2)))),))
    x, heads = Type("f32", "tokens", (8,)), {"key_heads": 1, "value_heads": 2, "key_dim": 2}
    conv, rule = registry.get("causal_conv"), registry.get("delta_rule")

    def weight(*shape):
        return WeightType(shape, ("F32",), 0)

    def number(count):
        return Type("f32", "tokens", (count,))

    assert conv.results([x, state], [weight(8, 4)], {"layer": 0})[0] == x
    for weights, complaint in (
        [[weight(8, 1)], "weight"],
        [[weight(8, 4), weight(7)], "bias"],
        [[weight(8, 9)], "hold"],
    ):
        with pytest.raises(ConfigError, match=complaint):
            conv.results([x, state], weights, {"layer": 0})
    pair = [weight(2), weight(2)]
    assert rule.results([x, number(2), number(2), state], pair, {"layer": 0, **heads})[0].width == 4
    for values, weights, changes, complaint in (
        ([x, number(2), number(2)], pair, {"key_dim": 4}, "rows of width 8"),
        ([x, number(1), number(2)], pair, {}, "for 2 value heads"),
        ([x, number(2), number(2)], [weight(2), weight(3)], {}, "a_log and dt_bias"),
        ([number(200), number(2), number(2)], pair, {}, "does not hold matrices"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            rule.results([*values, state], weights, {"layer": 0, **heads, **changes})
