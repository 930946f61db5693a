"""Types, prices and small references of ops against formulas that are written out here."""

import math

import numpy as np
import pytest

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import registry
from roofline.ops.collectives import exchange, require_ranks
from roofline.ops.cost import Affine, InstructionCost
from roofline.ops.rope_tables import RopeTable, cos_sin, frequencies
from roofline.ops.rows import alibi_slopes, score_bias
from roofline.ops.symbol import Type, WeightType, kv_head_bytes

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

X = Type("f32", "tokens", (64,))
IDS = Type("i32", "tokens", ())


def result_of(name: str, values: list[Type], weights: list[WeightType], **attributes: object) -> Type:
    op = registry.get(name)
    (kind,) = op.results(values, weights, attributes)
    return kind


def matrix(*shape: int) -> WeightType:
    return WeightType(shape, ("F32",), 4 * math.prod(shape))


def test_embed_gives_rows_of_the_tables_width() -> None:
    assert result_of("embed", [IDS], [matrix(96, 40)]) == Type("f32", "tokens", (40,))
    op = registry.get("embed")
    assert op.price(op.call([IDS], [matrix(96, 40)], {})).weight_bytes == Affine(tokens=40 * 4)


def test_linear_has_a_bias_of_its_outputs_or_none() -> None:
    want = Type("f32", "tokens", (32,))
    assert result_of("linear", [X], [matrix(32, 64)]) == want
    assert result_of("linear", [X], [matrix(32, 64), matrix(32)]) == want
    with pytest.raises(ConfigError, match=r"bias of shape \(64,\) for 32 outputs"):
        result_of("linear", [X], [matrix(32, 64), matrix(64)])
    op = registry.get("linear")
    assert op.price(op.call([X], [matrix(32, 64)], {})).flops == Affine(tokens=2 * 32 * 64)


@pytest.mark.parametrize("heads", [1, 4])
def test_norms_have_a_weight_of_a_head_or_a_row(heads: int) -> None:
    assert result_of("rms_norm", [X], [matrix(64 // heads)], eps=1e-5, heads=heads) == X
    for wrong in (64 // heads + 1, 64 // heads - 1):
        with pytest.raises(ConfigError, match="norm: weight of shape"):
            result_of("rms_norm", [X], [matrix(wrong)], eps=1e-5, heads=heads)
    with pytest.raises(ConfigError, match="3 heads in 64"):
        result_of("rms_norm", [X], [matrix(21)], eps=1e-5, heads=3)


def test_a_norm_without_a_weight_multiplies_nothing() -> None:
    assert result_of("rms_norm", [X], [], eps=1e-5, heads=4) == X
    with pytest.raises(ConfigError, match="no weight for 3 heads in 64"):
        result_of("rms_norm", [X], [], eps=1e-5, heads=3)
    x = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    assert torch.equal(ops.rms_norm(x, None, 1e-5, 4), ops.rms_norm(x, torch.ones(16), 1e-5, 4))
    assert torch.autograd.gradcheck(lambda t: ops.rms_norm(t.float(), None, 1e-2, 4), x, eps=1e-3, atol=1e-2)


def test_a_row_is_made_as_long_as_another() -> None:
    x, y = torch.tensor([[3.0, 4.0], [0.0, 1e-4]]), torch.tensor([[6.0, 8.0], [1.0, -1.0]])
    want = [[6.0, 8.0], [0.0, 1e-4 / math.sqrt(1e-5)]]  # a mean square is taken for no less than 1e-5
    assert torch.allclose(ops.like_norm(x, y), torch.tensor(want))
    assert result_of("like_norm", [X, X], []) == X


def test_what_lies_above_the_spread_of_a_row() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])  # mean 3, standard deviation sqrt(3.5)
    assert torch.allclose(ops.above_spread(x, 0.5), torch.tensor([[0.0, 0.0, 0.0, 3 - 0.5 * math.sqrt(3.5)]]))
    assert torch.allclose(ops.above_spread(x, -1.0), (x - 3 + math.sqrt(3.5)).clamp(min=0))
    assert result_of("above_spread", [X], [], z=1.0) == X


def test_columns_and_experts_weights_are_multiplied_by_numbers_of_their_own() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert ops.scale_columns(x, torch.tensor([2.0, 10.0])).tolist() == [[2, 20], [6, 40]]
    assert ops.scale_columns(x, torch.tensor([3.0])).tolist() == [[3, 6], [9, 12]]
    with pytest.raises(ConfigError, match=r"weight of shape \(2,\) for width 64"):
        result_of("scale_columns", [X], [matrix(2)])
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    assert ops.expert_scale(x, ids, torch.tensor([1.0, 10.0, 100.0]), 3).tolist() == [[100, 2], [30, 400]]
    pair = Type("i32", "tokens", (64,))
    with pytest.raises(ConfigError, match=r"expert_scale: \(4,\) of 3 experts"):
        result_of("expert_scale", [X, pair], [matrix(4)], experts=3)


@pytest.mark.parametrize("edges", [(0, 64), (0, 1), (63, 64)])
def test_a_split_lies_within_its_value(edges: tuple[int, int]) -> None:
    start, stop = edges
    assert result_of("split", [X], [], start=start, stop=stop) == Type("f32", "tokens", (stop - start,))
    for wrong in ((-1, 3), (5, 5), (0, 65)):
        with pytest.raises(ConfigError, match=f"columns {wrong[0]}:{wrong[1]} of 64"):
            result_of("split", [X], [], start=wrong[0], stop=wrong[1])


def test_rms_norm_is_its_formula_for_each_head() -> None:
    x, w = torch.randn(3, 12).double() * 1e-3, torch.randn(4).double()
    for eps in (1e-5, 1e-7):
        want = torch.empty_like(x)
        for row in range(3):
            for head in range(3):
                part = x[row, 4 * head : 4 * head + 4]
                want[row, 4 * head : 4 * head + 4] = part / math.sqrt((part**2).mean() + eps) * w
        assert torch.allclose(ops.rms_norm(x.float(), w.float(), eps, 3).double(), want, rtol=1e-5)


def test_fused_ops_cost_what_their_parts_do() -> None:
    def flops(name: str, weights: list[WeightType], **attributes: object) -> int:
        op = registry.get(name)
        return op.price(op.call([X], weights, attributes)).flops.at(tokens=1)

    norm, quantize = [matrix(64)], flops("quantize_rows", [])
    assert flops("rms_norm", norm, eps=1e-5) == 4 * 64
    assert flops("layer_norm", norm, eps=1e-5) == 6 * 64
    assert flops("norm_quantize", norm, eps=1e-5) == flops("rms_norm", norm, eps=1e-5) + quantize
    assert flops("layer_norm_quantize", norm, eps=1e-5) == flops("layer_norm", norm, eps=1e-5) + quantize
    assert flops("gelu_quantize", []) == flops("gelu", []) + quantize
    assert flops("silu_quantize", []) == flops("silu", []) + quantize
    assert flops("scale", [], factor=2.0) == 64
    # Of gate and up side by side, 32 products; a multiplication each, and four operations to quantise them.
    for name in ("silu", "gelu"):
        assert flops(f"{name}_mul", []) == flops(name, []) // 2 + 32
        assert flops(f"{name}_mul_quantize", []) == flops(f"{name}_mul", []) + quantize // 2
    op = registry.get("add_norm")
    assert op.price(op.call([X, X], norm, {"eps": 1e-5})).flops.tokens == 64 + flops("rms_norm", norm, eps=1e-5)


@pytest.mark.parametrize("norms", [[], [matrix(16), matrix(16)]])
def test_turning_and_writing_costs_what_its_parts_do(norms: list[WeightType]) -> None:
    op, qkv, parts = registry.get("rope_kv_write"), Type("f32", "tokens", (6 * 16,)), 4 * 16 + 16
    attrs = {"table": RopeTable(16, 1e4), "heads": 4, "layer": 0}
    price = op.price(op.call([qkv, IDS, Type("cache", None, (1, 16))], norms, attrs))
    assert price.flops == Affine(tokens=parts * (3 + (4 if norms else 0)))  # v is only written
    assert price.kv_bytes == Affine(tokens=2 * 16 * 4)
    assert price.act_bytes == Affine(tokens=(6 * 16 + 4 * 16) * 4 + 4)


def test_operands_of_fused_ops_fit_each_other() -> None:
    cache = Type("cache", None, (1, 16))
    for name, values in (("qkv_write", [X, cache]), ("rope_kv_write", [X, IDS, cache])):
        attrs = {"heads": 2, "layer": 0} | ({"table": None} if name == "rope_kv_write" else {})
        op = registry.get(name)
        assert op.results(values, [], attrs) == (Type("f32", "tokens", (32,)), cache)
        assert op.results(values, [], attrs | {"out": "bf16"}) == (Type("bf16", "tokens", (32,)), cache)
        with pytest.raises(ConfigError, match="64 columns of q, k, v for 3 \\+ 2 x 1 heads of 16"):
            op.results(values, [], attrs | {"heads": 3})
    narrow, total = Type("f32", "tokens", (32,)), registry.get("linear_add")
    assert total.results([X, narrow], [matrix(32, 64)], {}) == (narrow,)
    with pytest.raises(ConfigError, match="linear_add: residual"):
        total.results([X, X], [matrix(32, 64)], {})
    norm = registry.get("add_norm")
    assert norm.results([X, X], [matrix(64)], {"eps": 1e-5, "out": "bf16"}) == (X, Type("bf16", "tokens", (64,)))
    assert norm.results([X, Type("bf16", "tokens", (64,))], [matrix(64)], {"eps": 1e-5}) == (X, X)
    with pytest.raises(ConfigError, match=r"add, mul: .* differ"):
        norm.results([X, narrow], [matrix(64)], {"eps": 1e-5})
    gated = registry.get("linear_silu_mul")
    assert gated.results([X], [matrix(64, 64)], {}) == (narrow,)
    with pytest.raises(ConfigError, match="odd width 63"):
        gated.results([X], [matrix(63, 64)], {})


def test_gate_and_up_are_of_one_type_or_side_by_side() -> None:
    assert result_of("silu_mul", [X, X], []) == X
    assert result_of("silu_mul", [X], []) == Type("f32", "tokens", (32,))
    with pytest.raises(ConfigError, match=r"gate .* and up .* differ"):
        result_of("silu_mul", [X, Type("bf16", "tokens", (64,))], [])
    assert result_of("take_rows", [X, IDS], []) == Type("f32", "rows", (64,))
    assert result_of("cast", [X], [], dtype="f16") == Type("f16", "tokens", (64,))
    with pytest.raises(ConfigError, match="unknown dtype 'q8g32'"):
        result_of("cast", [X], [], dtype="q8g32")


def test_layer_norms_have_a_weight_and_perhaps_a_bias_of_the_row() -> None:
    for weights in ([matrix(64)], [matrix(64), matrix(64)]):
        assert result_of("layer_norm", [X], weights, eps=1e-5) == X
    for wrong in ([matrix(32)], [matrix(64), matrix(32)]):
        with pytest.raises(ConfigError, match="layer_norm: weight of shape"):
            result_of("layer_norm", [X], wrong, eps=1e-5)


def test_bytes_of_rows_and_of_cached_heads() -> None:
    sizes = {"f32": 256, "bf16": 128, "f16": 128, "i32": 256, "i8": 64, "cache": 0}
    sizes |= {"q8g32": 64 + 2 * 16, "q15g32": 128 + 2 * 16}  # two groups: a scale, a sum and two half sums each
    assert {dtype: Type(dtype, "tokens", (2, 32)).row_bytes for dtype in sizes} == sizes
    heads = {"f32": 64, "bf16": 32, "f16": 32, "int8": 16 + 4, "e4m3fn": 16, "e4m3fnuz": 16}
    assert {dtype: kv_head_bytes(dtype, 16) for dtype in heads} == heads
    assert [WeightType((4,), forms, 0).quantised for forms in (("Q4_1",), ("Q4_1", "F32"), ("BF16",), ("F16",))] == [
        True,
        False,
        False,
        False,
    ]


class Ranks:
    """A group whose other ranks have what they are told to."""

    def __init__(self, *others: "torch.Tensor") -> None:
        self.others, self.size = others, 1 + len(others)

    def sum(self, x: "torch.Tensor", order: str) -> "torch.Tensor":
        assert order in ("", "rank")
        return x + sum(self.others)

    def gather(self, x: "torch.Tensor", widths: tuple[int, ...]) -> "list[torch.Tensor]":
        assert [part.shape[1] for part in (x, *self.others)] == list(widths)
        return [x, *self.others]


def test_ranks_exchange_with_as_many_as_there_are() -> None:
    x, y, wide = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 6)
    assert torch.equal(ops.all_reduce(x, 2, Ranks(y)), x + y)
    assert torch.equal(ops.all_gather(x, (4, 6), Ranks(wide)), torch.cat([x, wide], dim=1))
    assert ops.all_reduce(x, 1) is ops.all_gather(x, (4,)) is x
    for ranks, group in ((2, None), (1, Ranks(y)), (3, Ranks(y))):
        with pytest.raises(UnsupportedError, match=f"all_reduce among {ranks} ranks"):
            ops.all_reduce(x, ranks, group)
        with pytest.raises(UnsupportedError, match=f"all_gather among {ranks} ranks"):
            ops.all_gather(x, (4,) * ranks, group)
    with pytest.raises(UnsupportedError, match=r"a Program for 2 ranks.*there are 1 here"):
        require_ranks(2, None)
    out = torch.empty(2, 10)
    exchange(x, out, Ranks(wide), "", (4, 6))
    assert torch.equal(out, torch.cat([x, wide], dim=1))
    exchange(x, out[:, :4], Ranks(y), "rank", ())
    assert torch.equal(out[:, :4], x + y)


def test_what_ranks_exchange_is_typed_and_priced() -> None:
    reduce, gather = registry.get("all_reduce"), registry.get("all_gather")
    for dtype in ("f32", "bf16", "f16"):
        x = Type(dtype, "tokens", (64,))
        call = reduce.call([x], [], {"ranks": 3})
        assert reduce.types(call) == (x,)
        each = 2 * 2 * x.row_bytes
        assert reduce.price(call).link_bytes == Affine(tokens=-(-each // 3))
        assert reduce.price(call).flops == Affine(tokens=2 * 64)
        ordered = reduce.call([x], [], {"ranks": 3, "order": "rank"})
        assert reduce.price(ordered).link_bytes == Affine(tokens=2 * x.row_bytes)
    for kind, ranks in ((X, 0), (Type("i32", "tokens", (64,)), 2)):
        with pytest.raises(ConfigError, match=f"all_reduce of {kind.dtype} among {ranks} ranks"):
            reduce.types(reduce.call([kind], [], {"ranks": ranks}))
    assert reduce.types(reduce.call([X], [], {"ranks": 1})) == (X,)
    call = gather.call([X], [], {"widths": (64, 1, 32)})
    assert gather.types(call) == (Type("f32", "tokens", (97,)),)
    assert gather.price(call).link_bytes == Affine(tokens=33 * 4)
    for widths in ((63, 65), (64, 0)):
        with pytest.raises(ConfigError, match="a part of width 64 among parts of"):
            gather.types(gather.call([X], [], {"widths": widths}))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_tables_are_the_angles_cosine_and_sine(kind: str) -> None:
    scaling = {"type": kind, "factor": 4} | ({"original_max_position_embeddings": 64} if kind == "yarn" else {})
    table = RopeTable.of(16, 1e4, "half", scaling)
    inverse, factor = frequencies(table)
    assert (factor > 1) == (kind == "yarn")
    cos, sin = cos_sin(table, np.array([0, 3, 500]))
    for row, position in enumerate((0, 3, 500)):
        for at, rate in enumerate(inverse):
            assert cos[row, at] == pytest.approx(math.cos(position * rate) * factor, abs=1e-6)
            assert sin[row, at] == pytest.approx(math.sin(position * rate) * factor, abs=1e-6)


@pytest.mark.parametrize("documents", [None, [[0, 0, 1, 1, 1], [5, 6, 6, 5, 5]]])
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("heads", [0, 3])
def test_what_rows_of_training_see(documents: list[list[int]] | None, window: int, heads: int) -> None:
    table = None if documents is None else torch.tensor(documents)
    bias = score_bias(5, "cpu", table, window, heads)
    if documents is None and not window and not heads:
        assert bias is None
        return
    assert bias is not None
    for row in range(1 if documents is None else 2):
        for head in range(max(heads, 1)):
            for query in range(5):
                for key in range(5):
                    sees = key <= query and (not window or key > query - window)
                    sees = sees and (documents is None or documents[row][query] == documents[row][key])
                    slope = alibi_slopes(heads)[head] if heads else 0.0
                    want = slope * (key - query) if sees else -math.inf
                    assert bias[row, head, query, key].item() == pytest.approx(want)


def test_slopes_of_alibi() -> None:
    assert alibi_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(1) == [2**-8]


def test_costs_add_up_and_are_written_down() -> None:
    a = Affine(1, 2, 3, 4, 5)
    assert a + a == a * 2 == Affine(2, 4, 6, 8, 10)
    assert a.at(tokens=10, rows=100, context=1000, pairs=10_000) == 1 + 20 + 300 + 4000 + 50_000
    assert str(a) == "1 + 2*tokens + 3*rows + 4*context + 5*pairs"
    assert (str(Affine()), str(Affine(7)), str(Affine(rows=2))) == ("0", "7", "2*rows")
    for cost in (a, Affine(), Affine(7), Affine(rows=2)):
        assert Affine.parse(str(cost)) == cost
    assert Affine.per("rows", 3) == Affine(rows=3)
    assert Affine.per(None, 3) == Affine(3)
    assert InstructionCost(flops=a) + InstructionCost(flops=a, link_bytes=a) == InstructionCost(
        flops=a * 2, link_bytes=a
    )


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_the_largest_scale_and_minimum_of_a_block_use_the_whole_range(name: str) -> None:
    """Six bits: 63 steps of the block's two floats, which are the first four bytes."""
    from roofline.ops import formats

    values = np.random.default_rng(0).uniform(-3, 5, (1, 256)).astype(np.float32)
    raw, top = formats.get(name).quantize(values), {"Q4_K": 15, "Q5_K": 31}[name]
    d, dmin = raw[:4].view(np.float16)
    groups = values.reshape(8, 32)
    low = np.minimum(groups.min(axis=1), 0)
    assert d == np.float16(((groups.max(axis=1) - low) / top).max() / 63)
    assert dmin == np.float16((-low).max() / 63)


@pytest.mark.parametrize(("bits", "top"), [(8, 127), (15, 127 * 128)])
def test_integer_rows_are_rounded_by_groups_of_their_largest(bits: int, top: int) -> None:
    x = torch.randn(3, 96) * torch.logspace(-3, 3, 96)
    x[1, 32:64] = 0.0
    rows = ops.quantize_rows(x, bits=bits)
    assert rows.scale.shape == (3, 3)
    for row in range(3):
        for group in range(3):
            part, q = x[row, 32 * group :][:32], rows.q[row, 32 * group :][:32].float()
            assert rows.scale[row, group].item() == pytest.approx(part.abs().max().item() / top)
            assert q.abs().max() == (top if part.any() else 0)
            assert (q * rows.scale[row, group] - part).abs().max() <= 0.501 * rows.scale[row, group]
            assert torch.equal(rows.dequantize()[row, 32 * group :][:32], q * rows.scale[row, group])


def test_integers_of_a_cached_head_reach_both_ends() -> None:
    from roofline.ops.attention import quantize_heads

    x = torch.tensor([[-2.0, 1.0, 0.0, 0.5], [3.0, -3.0, 1.5, 0.0], [0.0] * 4, [1.0, math.nan, 0.0, 2.0]])
    q, scale = quantize_heads(x)
    assert q.tolist() == [[-127, 64, 0, 32], [127, -127, 64, 0], [0] * 4, [0] * 4]
    assert scale[:3].tolist() == pytest.approx([2 / 127, 3 / 127, 0.0])
    assert scale[3].isnan()


def test_norms_of_heads_that_are_turned_and_written_cover_one_head() -> None:
    op, cache = registry.get("rope_kv_write"), Type("cache", None, (1, 16))
    values = [X, IDS, cache]
    attrs = {"table": RopeTable(16, 1e4), "heads": 2, "layer": 0, "eps": 1e-5}
    assert op.results(values, [], attrs)[0] == Type("f32", "tokens", (32,))
    assert op.results(values, [matrix(16), matrix(16)], attrs)[0] == Type("f32", "tokens", (32,))
    for wrong in ([matrix(32), matrix(16)], [matrix(16), matrix(32)]):
        with pytest.raises(ConfigError, match="cover one head"):
            op.results(values, wrong, attrs)
