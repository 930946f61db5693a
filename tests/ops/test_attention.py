"""Positions, roundings and attention of training's rows against formulas that are written out here."""

import math

import numpy as np
import pytest

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.ops import registry
from roofline.ops.attention import log2_slopes, quantize_heads, round_to, slopes_of
from roofline.ops.cost import Affine
from roofline.ops.exp2 import exp2_falling, exp2_signed
from roofline.ops.normal_tail import normal_tail
from roofline.ops.rope_tables import RopeTable, cos_sin, frequencies
from roofline.ops.rows import Rows, TurnedPositions
from roofline.ops.symbol import Type, WeightType
from tests.models.eager import ContiguousCache

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope_turns_pairs_and_leaves_what_is_beyond_its_dimensions(style: str) -> None:
    table, positions = RopeTable(6, 50.0, style), [0, 3, 9]
    x = torch.randn(3, 2 * 8)
    turned = ops.rope(x, torch.tensor(positions), table, 2)
    for row, position in enumerate(positions):
        for head in (0, 1):
            want = x[row, 8 * head : 8 * head + 8].tolist()
            for pair in range(3):
                a, b = (pair, pair + 3) if style == "half" else (2 * pair, 2 * pair + 1)
                angle = position * 50.0 ** (-2 * pair / 6)
                x_a, x_b = want[a], want[b]
                want[a] = x_a * math.cos(angle) - x_b * math.sin(angle)
                want[b] = x_b * math.cos(angle) + x_a * math.sin(angle)
            assert turned[row, 8 * head : 8 * head + 8].tolist() == pytest.approx(want, abs=1e-5)
    assert ops.rope(x.bfloat16(), torch.tensor(positions), table, 2).dtype == torch.bfloat16


def test_angles_are_those_of_the_table_or_computed_before() -> None:
    table = RopeTable.of(16, 1e4, "half", YARN | {"original_max_position_embeddings": 64})
    x, positions = torch.randn(2, 16), np.array([7, 40])
    cos, sin = (torch.from_numpy(part) for part in cos_sin(table, positions))
    want = ops.rope(x, torch.from_numpy(positions), table, 1)
    assert torch.allclose(
        ops.rope(x, TurnedPositions(torch.from_numpy(positions), cos, sin), table, 1), want, atol=1e-6
    )
    assert want.norm() > 1.1 * x.norm()  # yarn makes what it turns longer


def test_llama3_divides_what_turns_rarely_and_blends_between() -> None:
    fields = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    table = RopeTable.of(64, 1e4, "half", {"rope_type": "llama3", "factor": 8.0, **fields})
    got, factor = frequencies(table)
    kinds = set()
    for pair, rate in enumerate(got):
        plain = 1e4 ** (-2 * pair / 64)
        turns = 512 * plain / (2 * math.pi)
        if turns >= 4:
            want, kind = plain, "kept"
        elif turns <= 1:
            want, kind = plain / 8, "divided"
        else:
            share = (turns - 1) / (4 - 1)
            want, kind = share * plain + (1 - share) * plain / 8, "between"
        assert rate == pytest.approx(want)
        kinds.add(kind)
    assert kinds == {"kept", "divided", "between"}
    assert factor == 1.0


# (dimensions, theta, original length, options, first dimension that is blended, last one)
YARNS = {
    "in the middle": (64, 1e4, 4096, {}, 10, 23),
    "as fractions": (64, 1e4, 4096, {"truncate": False}, 10.47224, 22.51344),
    "other turns": (64, 1e4, 4096, {"beta_fast": 16.0, "beta_slow": 2.0}, 12, 21),
    "from the first": (64, 1e4, 16, {}, 0, 4),
    "up to the last": (8, 7.2, 421, {}, 1, 7),
    "at once": (8, 1e4, 2, {}, 0, 1e-6),
}


@pytest.mark.parametrize("case", YARNS)
def test_yarn_blends_between_two_dimensions(case: str) -> None:
    dim, theta, original, options, low, high = YARNS[case]
    scaling = YARN | {"original_max_position_embeddings": original} | options
    got, _ = frequencies(RopeTable.of(dim, theta, "half", scaling))
    for pair in range(dim // 2):
        plain, share = theta ** (-2 * pair / dim), min(max((pair - low) / (high - low), 0.0), 1.0)
        assert got[pair] == pytest.approx((1 - share) * plain + share * plain / 4, rel=1e-4), pair


def test_yarns_factor_is_said_or_made_of_the_scale() -> None:
    def factor(**options: float) -> float:
        scaling = YARN | {"original_max_position_embeddings": 64} | options
        return frequencies(RopeTable.of(16, 1e4, "half", scaling))[1]

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(attention_factor=1.5, mscale=1.0, mscale_all_dim=2.0) == 1.5
    assert factor(mscale=2.0, mscale_all_dim=0.5) == pytest.approx((0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert factor(mscale=2.0) == factor(mscale_all_dim=2.0) == factor(mscale=0.0, mscale_all_dim=2.0) == factor()
    assert factor(factor=1.0) == factor(factor=0.5) == 1.0
    assert factor(factor=1.5) == pytest.approx(0.1 * math.log(1.5) + 1)


def test_tables_that_nothing_is_known_of_are_refused() -> None:
    for dim in (0, -2, 7):
        with pytest.raises(ConfigError, match=f"even number of dimensions, got {dim}"):
            RopeTable(dim, 1e4)
    with pytest.raises(ConfigError, match="'sideways' is not one of half, interleaved"):
        RopeTable(2, 1e4, "sideways")
    with pytest.raises(ConfigError, match=r"missing \['factor'\], unknown \[\]"):
        RopeTable(2, 1e4, kind="linear")
    with pytest.raises(ConfigError, match=r"missing \[\], unknown \['beta'\]"):
        RopeTable(2, 1e4, kind="linear", scaling=(("beta", 1.0), ("factor", 2.0)))
    plain = RopeTable(2, 1e4)
    for scaling in (None, {}, {"rope_type": "default", "rope_theta": 3.0}, {"type": "default", "factor": 2.0}):
        assert RopeTable.of(2, 1e4, "half", scaling) == plain
    some = RopeTable.of(2, 1e4, "half", {"rope_type": "linear", "factor": 2, "rope_theta": 1.0, "attention": None})
    assert some.scaling == (("factor", 2.0),)


def test_numbers_are_rounded_to_what_a_cache_holds() -> None:
    x = torch.tensor([1.0 + 2**-9, -3.0, 1e5, -500.0, 245.0])
    assert round_to(x, "f32") is x
    assert torch.equal(round_to(x, "bf16"), x.bfloat16().float())
    assert torch.equal(round_to(x, "f16"), x.half().float())
    assert round_to(x, "e4m3fn").tolist() == [1.0, -3.0, 448.0, -448.0, 240.0]
    assert round_to(x, "e4m3fnuz").tolist() == [1.0, -3.0, 240.0, -240.0, 240.0]
    heads = torch.tensor([[127.0, 1.3], [-2.54, 0.0]])
    assert torch.allclose(round_to(heads, "int8"), torch.tensor([[127.0, 1.0], [-2.54, 0.0]]))
    for dtype in ("f16", "bf16", "e4m3fn", "int8"):
        assert round_to(heads.bfloat16(), dtype).dtype == torch.bfloat16


@pytest.mark.parametrize(("bits", "top"), [(8, 127.0), (15, 127.0 * 128)])
def test_scales_that_cores_flush_to_zero_take_no_integers(bits: int, top: float) -> None:
    """Their inverse may be infinite, and its product with 0 is no number."""
    smallest = 2.0**-126
    x = torch.zeros(3, 32)
    x[:, 3], x[:, 4] = torch.tensor([smallest, -smallest * (top - 1), smallest * (top + 1)]), smallest / 8
    rows = ops.quantize_rows(x, bits=bits)
    assert rows.scale.ravel().tolist() == [0.0, 0.0, pytest.approx(smallest * (top + 1) / top)]
    assert rows.q.abs().amax(dim=1).tolist() == [0, 0, top]
    if bits == 8:
        q, scale = quantize_heads(x)
        assert torch.equal(q, rows.q.float())
        assert torch.equal(scale, rows.scale.ravel())


def test_rows_of_floats_are_rounded_with_a_scale_each() -> None:
    from roofline.ops.matmul import round_rows

    x = torch.tensor([[448.0, -224.0, 1.03], [2.0**-100, 0.0, 0.0], [2.0**-101, 0.0, 0.0]])
    assert round_rows(x, "f32") is x
    assert round_rows(x, "e4m3fn").tolist() == [[448.0, -224.0, 1.0], [2.0**-100, 0.0, 0.0], [0.0] * 3]
    scaled = round_rows(x[:1] * 3, "e4m3fnuz")
    assert scaled.tolist() == [[1344.0, -672.0, pytest.approx(0.5625 * 1344 / 240)]]
    w = torch.eye(3)
    assert torch.equal(ops.linear(x, w, x_dtype="e4m3fn"), round_rows(x, "e4m3fn"))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_rows_of_training_attend_as_segments_do(kv_heads: int) -> None:
    count, length, heads, dim = 3, 5, 4, 8
    q = torch.randn(count * length, heads * dim)
    k, v = torch.randn(2, count * length, kv_heads * dim)
    rows = ops.kv_write(Rows(count, length, kv_heads), k, v, 0)
    segments = [(at * length, (at + 1) * length, 0) for at in range(count)]
    cache = ops.kv_write(ContiguousCache(kv_heads).step(segments, range(count)), k, v, 0)
    want = ops.attend(q, cache, 0, heads, 0.3)
    assert torch.allclose(ops.attend(q, rows, 0, heads, 0.3), want, atol=1e-6)
    assert rows.k.shape == rows.v.shape == (count, kv_heads, length, dim)
    bias = torch.full((length, length), -math.inf).triu(1)[None, None]
    biased = ops.kv_write(Rows(count, length, kv_heads, bias), k, v, 0)
    assert torch.allclose(ops.attend(q, biased, 0, heads, 0.3), want, atol=1e-6)
    assert ops.attend(q.bfloat16(), ops.kv_write(Rows(count, length, kv_heads, bias), k.bfloat16(), v.bfloat16(), 0),
                      0, heads, 0.3).dtype == torch.bfloat16  # fmt: skip
    seen = []
    mine = Rows(count, length, kv_heads, bias, attend=lambda *given: seen.append(given) or given[0])
    assert torch.equal(ops.attend(q, ops.kv_write(mine, k, v, 0), 0, heads, 0.3), q)
    assert seen[0][0].shape == seen[0][1].shape == (count, heads, length, dim)
    assert seen[0][3:] == (bias, 0.3)
    capped = ops.attend(q, cache, 0, heads, 0.3, soft_cap=0.5)
    assert not torch.allclose(capped, want, atol=1e-2)
    for each in (rows, biased):
        assert torch.allclose(ops.attend(q, each, 0, heads, 0.3, soft_cap=0.5), capped, atol=1e-6)
    sinks = torch.randn(heads)
    drained = ops.attend(q, cache, 0, heads, 0.3, sinks=sinks)
    assert not torch.allclose(drained, want, atol=1e-2)
    for each in (rows, biased):
        assert torch.allclose(ops.attend(q, each, 0, heads, 0.3, sinks=sinks), drained, atol=1e-6)


def test_a_sink_is_a_key_whose_value_is_zero() -> None:
    heads, dim, sinks = 4, 8, torch.tensor([0.5, -2.0, 3.0, -torch.inf])
    q, k, v = torch.randn(3, 6, heads * dim)
    cache = ops.kv_write(ContiguousCache(heads).step([(0, 6, 0)], ["s"]), k, v, 0)
    got = ops.attend(q, cache, 0, heads, 0.3, window=3, sinks=sinks).view(6, heads, dim)
    plain = ops.attend(q, cache, 0, heads, 0.3, window=3).view(6, heads, dim)
    for at in range(6):
        seen = slice(max(0, at - 2), at + 1)
        scores = torch.einsum("hd,khd->hk", q[at].view(heads, dim), k[seen].view(-1, heads, dim)) * 0.3
        powers = scores.exp()
        kept = powers.sum(1) / (powers.sum(1) + sinks.exp())
        assert torch.allclose(got[at], plain[at] * kept[:, None], atol=1e-6)
    assert torch.allclose(got[:, 3], plain[:, 3])
    declared, types = registry.get("attend"), [Type("f32", "tokens", (32,)), Type("cache", None, (4, 8))]
    with pytest.raises(ConfigError, match=r"sinks of shape \(3,\) for 4 heads"):
        declared.results(types, [WeightType((3,), ("F32",), 12)], {"layer": 0, "heads": 4, "scale": 1.0})


def test_heads_of_a_part_have_the_slopes_of_the_whole() -> None:
    assert slopes_of(2) == [2**-4, 2**-8]
    assert slopes_of(2, 1, 4) == [2**-4, 2**-6]
    assert log2_slopes(1, 3, 4) == [pytest.approx(2**-8 / math.log(2))]
    q, k, v = torch.randn(3, 3, 4 * 8)
    cache = ContiguousCache(4).step([(0, 3, 0)], ["s"])
    whole = ops.attend(q, ops.kv_write(cache, k, v, 0), 0, 4, 0.3, alibi=True)
    part = ContiguousCache(2).step([(0, 3, 0)], ["s"])
    part = ops.kv_write(part, k[:, 8:24], v[:, 8:24], 0)
    got = ops.attend(q[:, 8:24], part, 0, 2, 0.3, alibi=True, first_head=1, all_heads=4)
    assert torch.allclose(got, whole[:, 8:24], atol=1e-6)


def test_types_and_prices_of_attention() -> None:
    attend, write, rope = (registry.get(name) for name in ("attend", "kv_write", "rope"))
    cache, q, k = Type("cache", None, (2, 8)), Type("f32", "tokens", (32,)), Type("f32", "tokens", (16,))
    call = attend.call([q, cache], [], {"layer": 0, "heads": 4, "scale": 1.0})
    assert attend.types(call) == (q,)
    price = attend.price(call)
    assert (price.flops, price.kv_bytes) == (Affine(pairs=4 * 32), Affine(context=2 * 2 * 8 * 4))
    for heads, width in ((3, 24), (4, 24)):
        wrong = attend.call([Type("f32", "tokens", (width,)), cache], [], {"layer": 0, "heads": heads, "scale": 1.0})
        with pytest.raises(ConfigError, match=f"q of width {width} for {heads} heads"):
            attend.types(wrong)
    for dtype, token_bytes in (("int8", 2 * 2 * 12), ("e4m3fn", 2 * 2 * 8), ("bf16", 2 * 2 * 16)):
        call = write.call([cache, k, k], [], {"layer": 0, "kv_dtype": dtype})
        assert write.price(call).kv_bytes == Affine(tokens=token_bytes)
    for pair in ([q, q], [k, q], [k, Type("bf16", "tokens", (16,))]):
        with pytest.raises(ConfigError, match="kv_write: k"):
            write.types(write.call([cache, *pair], [], {"layer": 0}))
    ids = Type("i32", "tokens")
    assert rope.price(rope.call([q, ids], [], {"table": None, "heads": 4})).flops == Affine(tokens=3 * 32)
    with pytest.raises(ConfigError, match="width 32 is not 3 heads"):
        rope.types(rope.call([q, ids], [], {"table": None, "heads": 3}))


def test_powers_of_two_are_ours_and_clamped() -> None:
    x = torch.linspace(-126, 126, 1001)
    assert torch.allclose(exp2_signed(x).double(), torch.exp2(x.double()), rtol=3e-7)
    assert exp2_signed(torch.tensor([-200.0, 200.0])).tolist() == [2.0**-126, 2.0**126]
    falling = exp2_falling(torch.tensor([0.0, -0.5, -126.0, -126.01, -math.inf]))
    assert falling.tolist() == [1.0, pytest.approx(0.5**0.5), 2.0**-126, 0.0, 0.0]


def test_the_tail_of_a_normal_distribution() -> None:
    a = torch.linspace(0, 6, 301)
    want = torch.special.erfc(a.double() / math.sqrt(2)) / 2
    assert torch.allclose(normal_tail(a).double(), want, rtol=3.1e-6, atol=0)
    beyond = torch.tensor([6.5, 8.0])
    share = normal_tail(beyond).double() / (torch.special.erfc(beyond.double() / math.sqrt(2)) / 2)
    assert ((share > 1) & (share < 2)).all()
