"""The orders against plain arithmetic in float64, and against their own written rules on small cases."""

import math

import numpy as np
import pytest

from roofline.backends.reference import orders
from roofline.backends.reference.unpack import unpack
from roofline.ops import formats, quantize_rows
from roofline.ops.attention import alibi_slopes, log2_slopes, quantize_heads
from roofline.ops.exp2 import exp2_falling, exp2_signed

torch = pytest.importorskip("torch", reason="the reference is written in torch")


def test_exp2_is_within_two_ulp_and_exact_at_whole_numbers() -> None:
    x = torch.linspace(-126, 0, 200_001)
    close = np.exp2(x.double().numpy())
    assert np.abs(exp2_falling(x).double().numpy() / close - 1).max() < 2 * 2.0**-23
    whole = torch.arange(-126.0, 127.0)
    assert torch.equal(exp2_signed(whole), torch.from_numpy(np.exp2(whole.numpy())))
    assert exp2_falling(torch.tensor([-math.inf, -126.5])).tolist() == [0, 0]
    assert exp2_signed(torch.tensor([500.0])).item() == 2.0**126


def test_quantize_rows_follows_its_rule_by_hand() -> None:
    x = torch.zeros(2, 64)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[1, 40] = -3.0
    rows = quantize_rows(x)
    assert rows.q[0, :4].tolist() == [127, 0, 2, -2]  # halves to even
    assert rows.scale[0].tolist() == [1.0, 0.0]
    assert rows.q[1, 40].item() == -127
    assert not rows.q[1, :32].any()


@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"]
)
def test_linear_q8g32_is_the_dot_of_what_was_quantised(name: str) -> None:
    random = np.random.default_rng(0)
    shape = (24, 512)
    raw = formats.get(name).quantize(random.standard_normal(shape).astype(np.float32))
    rows = quantize_rows(torch.from_numpy(random.standard_normal((5, 512)).astype(np.float32)))
    got = orders.linear_integers(rows, unpack(raw, name, shape))
    exact = rows.dequantize().double() @ torch.from_numpy(formats.get(name).dequantize(raw, shape)).double().T
    assert (got - exact).abs().max() < 1e-4 * exact.abs().max()


def test_linear_f32_ascends() -> None:
    x, w = torch.tensor([[1e8, 1.0, -1e8]]), torch.ones(1, 3)
    assert orders.linear_f32(x, w).item() == 0.0  # the 1 is lost against 1e8 before -1e8 comes


@pytest.mark.parametrize("size", [16, 24, 64, 576])
def test_rms_norm_and_silu_are_close_to_torch(size: int) -> None:
    x, w = torch.randn(3, 2 * size), torch.randn(size)
    wide = x.double().view(3, 2, size)
    exact = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w).view(3, -1)
    assert (orders.rms_norm_lanes16(x, w, 1e-5, 2) - exact).abs().max() < 1e-5
    gate, up = torch.randn(3, size) * 20, torch.randn(3, size)
    silu = torch.nn.functional.silu(gate.double()) * up
    assert (orders.silu_exp2(gate) * up - silu).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("queries", "context", "options"),
    [
        (1, 1, {}),
        (5, 5, {}),
        (3, 700, {}),
        (70, 70, {"window": 9}),
        (2, 1100, {"window": 600}),
        (4, 90, {"soft_cap": 5.0}),
        (4, 90, {"alibi": True}),
        (4, 90, {"sinks": True}),
        (2, 1100, {"window": 600, "sinks": True}),
        (70, 70, {"both_ways": True}),
        (600, 600, {"both_ways": True, "soft_cap": 5.0}),
    ],
)
def test_attend_pages64_is_close_to_softmax(queries: int, context: int, options: dict) -> None:
    torch.manual_seed(0)
    heads, dim, first = 4, 32, context - queries
    q = torch.randn(queries, heads, dim)
    k, v = (torch.randn(context, heads, dim).bfloat16().float() for _ in range(2))
    options = {"window": 0, "soft_cap": 0.0} | options
    both_ways = options.pop("both_ways", False)
    if options.pop("alibi", False):
        options["slopes"] = log2_slopes(heads)
    if options.pop("sinks", False):
        options["sinks"] = torch.tensor([4.0, -1.0, -math.inf, 40.0])
    got = orders.attend_pages64(q, orders.SegmentContext(k, v), None if both_ways else first, dim**-0.5, **options)
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double()) * dim**-0.5
    at, keys = torch.arange(first, context)[:, None], torch.arange(context)[None]
    if options["soft_cap"]:
        scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
    if "slopes" in options:
        scores = scores + torch.tensor(alibi_slopes(heads))[None, :, None] * (keys - at)[:, None]
    hidden = (keys > at) | ((keys <= at - options["window"]) if options["window"] else keys < 0)
    scores = scores if both_ways else scores.masked_fill(hidden[:, None], -math.inf)
    if "sinks" in options:
        scores = torch.cat([scores, options["sinks"].double()[None, :, None].expand(queries, heads, 1)], -1)
    p = torch.softmax(scores, -1)[..., :context]
    exact = torch.einsum("qhk,khd->qhd", p, v.double())
    assert (got - exact).abs().max() < 0.02  # bf16 q and p
    # Each query alone gives the same bits as in its chunk.
    last = orders.attend_pages64(q[-1:], orders.SegmentContext(k, v), context - 1, dim**-0.5, **options)
    assert torch.equal(last[0], got[-1])


@pytest.mark.parametrize("window", [0, 90])
def test_attend_over_an_int8_cache_is_close_to_softmax_over_its_values(window: int) -> None:
    torch.manual_seed(0)
    heads, dim, context, queries = 2, 32, 600, 3
    q, k, v = torch.randn(queries, heads, dim), *(torch.randn(context, heads, dim) * 3 for _ in range(2))
    (k_q, k_scale), (v_q, v_scale) = quantize_heads(k), quantize_heads(v)
    first = context - queries
    stored = orders.SegmentContext(k_q, v_q, k_scale, v_scale)
    got = orders.attend_pages64(q, stored, first, dim**-0.5, window)
    wide = k_q * k_scale[..., None], v_q * v_scale[..., None]
    assert max((wide[0] - k).abs().max(), (wide[1] - v).abs().max()) < 0.501 * max(k_scale.max(), v_scale.max())
    plain = orders.attend_pages64(q, orders.SegmentContext(*wide), first, dim**-0.5, window)
    assert (got - plain).abs().max() < 0.02
    assert not torch.equal(got, plain)
    if window:
        k_scale[: first - window], v_scale[: first - window] = math.nan, math.nan  # seen by nobody
    seen = orders.attend_pages64(q, stored, first, dim**-0.5, window)
    assert torch.equal(seen, got)
    v_scale[-1] = math.nan  # seen by the last query alone
    last = orders.attend_pages64(q, stored, first, dim**-0.5, window)
    assert torch.equal(last[:-1], got[:-1])
    assert last[-1].isnan().all()


def test_heads_are_quantised_by_their_rule_and_nan_stays() -> None:
    x = torch.zeros(5, 16)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[2, 3], x[3, 0], x[4, 1] = math.nan, math.inf, 1e-40
    q, scale = quantize_heads(x)
    assert q[0, :4].tolist() == [127, 0, 2, -2]  # halves to even
    assert scale[:2].tolist() == [1.0, 0.0]
    assert scale[2:4].isnan().all()
    assert not q[1:4].any()


def test_attend_never_multiplies_a_hidden_value() -> None:
    """A block no query sees may hold anything; here it lies before the window."""
    q, k, v = (torch.randn(n, 1, 16).bfloat16().float() for n in (1, 130, 130))
    clean = orders.attend_pages64(q, orders.SegmentContext(k, v), 129, 0.25, 4)
    k[:64] = math.nan
    assert torch.equal(orders.attend_pages64(q, orders.SegmentContext(k, v), 129, 0.25, 4), clean)


def test_divisions_and_roots_are_rounded_once() -> None:
    """torch's 127 / x and sqrt are not the nearest float32; the orders promise the nearest."""
    x = torch.randn(500, 32).mul_(torch.rand(500, 1) * 10)
    amax = x.abs().amax(1).numpy()
    inverse = np.float32(127) / amax
    assert np.array_equal(quantize_rows(x).q.numpy(), np.rint(x.numpy() * inverse[:, None]).clip(-127, 127))
    ones = x[:, :1].abs() + 0.5  # one element a row: the norm is x / sqrt(x * x + eps)
    squares = (ones.numpy() * ones.numpy()).astype(np.float32)
    root = np.sqrt((squares + np.float32(1e-5)).astype(np.float32))
    got = orders.rms_norm_lanes16(ones, torch.ones(1), 1e-5, 1).numpy()
    assert np.array_equal(got, ones.numpy() * (np.float32(1) / root))
