"""selective_scan beside transformers' scans; chunks, companions, gradients and the form of training."""

import itertools
import math

import pytest

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.scan import scan_state
from roofline.ops.state import MATRIX, state_values
from roofline.ops.state_rows import StateRows
from roofline.ops.symbol import Type, WeightType
from tests.models.eager import LastStates

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

# Of both: width, heads, states, groups.
SHAPES = {"by head": (30, 6, 7, 2), "by state": (12, 12, 7, 1)}


def inputs_of(name, tokens, seed=0):
    """xbc, dt, a_log, dt_bias, d of random numbers."""
    width, heads, states, groups = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    a_log = numbers(heads, states) if name == "by state" else torch.linspace(-4, 1, heads)
    return [numbers(tokens, width + 2 * groups * states), numbers(tokens, heads), a_log, numbers(heads), numbers(heads)]


def stretches_of(name, *stretches):
    width, heads, states, _ = SHAPES[name]
    parts = {MATRIX: scan_state(width, heads, states, name == "by state")}
    return LastStates(parts).step(stretches, range(len(stretches)))


def scan(name, values, state, **limits):
    xbc, dt, *weights = values
    _, _, states, groups = SHAPES[name]
    return ops.selective_scan(xbc, dt, state, *weights, layer=0, states=states, groups=groups, **limits)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.4, 0.9)])
def test_with_a_rate_a_head_it_is_mamba_2(limits):
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    values = xbc, dt, a_log, dt_bias, d = inputs_of("by head", 150)
    width, heads, states, groups = SHAPES["by head"]
    x, b, c = xbc.split([width, groups * states, groups * states], 1)
    x, b, c = (t.unflatten(1, (n, -1))[None] for t, n in ((x, heads), (b, groups), (c, groups)))
    options = {"D": d, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": limits, "return_final_states": True}
    expected, last = module.mamba2_chunk_scan(x, dt[None], -a_log.exp(), b, c, 64, **options)
    out, state = scan("by head", values, stretches_of("by head", (0, 150)), least=limits[0], most=limits[1])
    assert (out - expected[0].flatten(1)).abs().max() < 1e-5 * expected.abs().max()
    assert (state.tensors[0, MATRIX, 0].mT - last[0]).abs().max() < 1e-5 * last.abs().max()


def test_with_a_rate_a_state_it_is_mamba():
    """The sum that Mamba's paper has, written out for each channel and state."""
    values = xbc, dt, a_log, dt_bias, d = (t.double() for t in inputs_of("by state", 40))
    x, b, c = xbc.split([12, 7, 7], 1)
    steps = torch.nn.functional.softplus(dt + dt_bias)
    h, rows = torch.zeros(12, 7, dtype=torch.float64), []
    for t in range(40):
        h = torch.exp(-a_log.exp() * steps[t, :, None]) * h + steps[t, :, None] * b[t] * x[t, :, None]
        rows.append(h @ c[t] + d * x[t])
    values = [value.float() for value in (xbc, dt, a_log, dt_bias, d)]
    out, state = scan("by state", values, stretches_of("by state", (0, 40)))
    assert (out - torch.stack(rows)).abs().max() < 1e-5
    assert (state.tensors[0, MATRIX, 0].T - h).abs().max() < 1e-5


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sizes", [[1] * 40, [33, 7]])
def test_chunks_and_companions_change_no_bit(name, sizes):
    values, other = inputs_of(name, 40), inputs_of(name, 5, seed=1)
    expected, full = scan(name, values, stretches_of(name, (0, 40)))
    state, at = stretches_of(name), 0
    for size in sizes:  # another sequence begins in every step before this one goes on
        rows = [torch.cat([o, v[at : at + size]]) for o, v in zip(other[:2], values[:2], strict=True)]
        out, state = scan(name, [*rows, *values[2:]], state.step([(0, 5), (5, 5 + size)], [f"other{at}", 0]))
        assert torch.equal(out[5:], expected[at : at + size])
        at += size
    assert torch.equal(state.tensors[0, MATRIX, 0], full.tensors[0, MATRIX, 0])


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_finite_differences(name):
    values = [value.double().requires_grad_() for value in inputs_of(name, 4)]
    scale = torch.randn(4, SHAPES[name][0])

    def loss(*values):
        return (scan(name, values, stretches_of(name, (0, 4)))[0] * scale).sum().double()

    # The references compute in float32 inside: differences are taken wide.
    options = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2, "nondet_tol": 1e-5, "fast_mode": True}
    assert torch.autograd.gradcheck(loss, values, **options)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_the_form_of_training_gives_the_values_and_gradients_of_the_reference(name, packed):
    count, length = 2, 100
    begins = torch.zeros(count, length, dtype=torch.bool)
    begins[:, 0] = True
    if packed:  # documents of one token and of several chunks, beginning within chunks, at their edges and at none
        begins[0, [3, 4, 64]] = True
        begins[1, [30, 63]] = True
    at = torch.arange(length).expand(count, length)
    places = at - torch.where(begins, at, 0).cummax(1).values
    edges = [*torch.where(begins.flatten())[0].tolist(), count * length]
    values, scale = inputs_of(name, count * length), torch.randn(count * length, SHAPES[name][0])
    results = []
    for store in (stretches_of(name, *itertools.pairwise(edges)), StateRows(count, length, places if packed else None)):
        leaves = [value.clone().requires_grad_() for value in values]
        out, _ = scan(name, leaves, store)
        (out * scale).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max())


def test_what_does_not_fit_is_refused():
    scan_op, x = registry.get("selective_scan"), Type("f32", "tokens", (12,))
    state = Type("state", None, (state_values(((MATRIX, (2, 2, 4)),)),))

    def weight(*shape):
        return WeightType(shape, ("F32",), 0)

    def types(weights, heads=2, room=state, **changes):
        operands = [x, Type("f32", "tokens", (heads,)), room]
        return scan_op.results(operands, weights, {"layer": 0, "states": 2, **changes})

    three = [weight(2)] * 3
    assert types(three)[0].width == 8
    assert types([weight(8, 2), weight(8), weight(8)], heads=8)[0].width == 8
    for weights, changes, complaint in (
        (three, {"states": 6}, "rows of width 12"),
        (three, {"groups": 3}, "rows of width 12"),
        ([weight(3), *three[1:]], {}, "a_log of shape"),
        ([weight(2, 2), *three[1:]], {}, "heads of one channel"),
        ([*three[:2], weight(1)], {}, "dt_bias and d"),
        (three, {"least": 1.0, "most": 0.5}, "steps between"),
        (three, {"room": Type("state", None, (15,))}, "does not hold"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            types(weights, **changes)
