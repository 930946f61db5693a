"""The registry, the references against plain torch, rope tables, and the rule that fused ops equal their parts."""

import math

import numpy as np
import pytest

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import registry
from roofline.ops.cost import Affine
from roofline.ops.registry import op
from roofline.ops.rope_tables import RopeTable, cos_sin, frequencies
from roofline.ops.symbol import Type, WeightType
from tests.models.eager import ContiguousCache

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

TABLE = RopeTable(16, 1e4)


def test_names_are_taken_once_and_nearest_ones_suggested() -> None:
    with pytest.raises(ConfigError, match="already registered"):
        registry.register(registry.get("linear"))
    with pytest.raises(ConfigError, match="did you mean 'rms_norm'"):
        registry.get("rmsnorm")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ops.nothing


def test_ops_are_imported_when_the_first_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = ops.silu
    monkeypatch.delitem(vars(ops), "silu")
    assert ops.silu is silu


def test_ops_from_outside_compute_trace_and_price() -> None:
    @op(values=("x",), infer=lambda c: c.x, flops=lambda c: Affine.per(c.x.leading, 2 * c.x.width))
    def test_ops_cube(x, times: int = 3):  # type: ignore[no-untyped-def]
        return x**times

    assert test_ops_cube(torch.tensor([2.0])).item() == 8
    declared = registry.get("test_ops_cube")
    assert declared.price(declared.call([Type("f32", "tokens", (5,))], [], {})).flops == Affine(tokens=10)
    assert declared.price(declared.call([Type("f32", "tokens", (5,))], [], {})).act_bytes == Affine(tokens=40)


def test_types_that_do_not_fit_are_refused() -> None:
    x, w = Type("f32", "tokens", (64,)), WeightType((32, 65), ("F32",), 0)
    with pytest.raises(ConfigError, match=r"width 64.*65 columns"):
        registry.get("linear").types(registry.get("linear").call([x], [w], {}))
    quantize = registry.get("quantize_rows")
    with pytest.raises(ConfigError, match="width 48"):
        quantize.types(quantize.call([Type("f32", "tokens", (48,))], [], {}))
    with pytest.raises(ConfigError, match="no attribute colour"):
        quantize.call([x], [], {"colour": 1})
    for values, weights in (([x, x], []), ([x], [w])):
        with pytest.raises(ConfigError, match=r"quantize_rows takes values \('x',\) and weights \(\)"):
            quantize.call(values, weights, {})
    for attributes in ({"bits": 9}, {"group": 16}):
        with pytest.raises(ConfigError, match=r"quantize_rows: (9 bits; 8, 15 are known|width 64 in groups of 16)"):
            quantize.types(quantize.call([x], [], attributes))


@pytest.mark.parametrize("kwargs", [{}, {"window": 5}, {"soft_cap": 3.0}, {"alibi": True}])
def test_attend_equals_sdpa(kwargs: dict) -> None:
    heads, kv_heads, dim, tokens, past = 4, 2, 16, 9, 6
    q, k, v = (
        torch.randn(n, h * dim) for n, h in ((tokens, heads), (past + tokens, kv_heads), (past + tokens, kv_heads))
    )
    cache = ContiguousCache(kv_heads).step([(0, past, 0)], ["s"])
    cache = ops.kv_write(cache, k[:past], v[:past], 0).step([(0, tokens, past)], ["s"])
    got = ops.attend(q, ops.kv_write(cache, k[past:], v[past:], 0), 0, heads, dim**-0.5, **kwargs)
    fold = [t.view(t.shape[0], -1, dim).transpose(0, 1) for t in (q, k, v)]
    at, keys = torch.arange(past, past + tokens)[:, None], torch.arange(past + tokens)[None]
    seen = (keys <= at) & (keys > at - kwargs.get("window", 10**6))
    if kwargs.get("soft_cap"):  # SDPA has none: written out
        scores = fold[0] @ fold[1].repeat_interleave(2, 0).mT * dim**-0.5
        p = torch.softmax((3 * torch.tanh(scores / 3)).masked_fill(~seen, -math.inf), -1)
        expected = p @ fold[2].repeat_interleave(2, 0)
    else:
        bias = torch.zeros(heads, tokens, past + tokens)
        if kwargs.get("alibi"):
            bias = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(heads)])[:, None, None] * (keys - at)
        bias = bias.masked_fill(~seen, -math.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(t[None] for t in fold), attn_mask=bias[None], enable_gqa=True
        )[0]
    assert (got - expected.transpose(0, 1).reshape(tokens, -1)).abs().max() < 1e-5


def test_fused_references_are_their_parts() -> None:
    x, w, residual = torch.randn(3, 64), torch.randn(64), torch.randn(3, 8)
    a, b = ops.norm_quantize(x, w, 1e-5), ops.quantize_rows(ops.rms_norm(x, w, 1e-5))
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.scale, b.scale)
    a, b = ops.silu_mul_quantize(x), ops.quantize_rows(ops.silu_mul(x[:, :32], x[:, 32:]))
    assert torch.equal(a.q, b.q)
    m, bias = torch.randn(8, 64), torch.randn(8)
    assert torch.equal(ops.linear_add(x, residual, m, bias), residual + ops.linear(x, m, bias))
    qkv, at, norm = torch.randn(3, 64), torch.arange(3), torch.randn(16)
    y = torch.randn(3, 64)
    assert all(torch.equal(a, b) for a, b in zip(ops.add_norm(x, y, w, eps=1e-5),
                                                 (x + y, ops.rms_norm(x + y, w, 1e-5)), strict=True))  # fmt: skip
    assert torch.equal(ops.add_norm(x, y, w, -w, eps=1e-5, layer=True)[1], ops.layer_norm(x + y, w, -w, eps=1e-5))
    gated = registry.get("linear_silu_mul").reference(x, torch.cat([m, -m]), x_dtype="e4m3fn")
    assert torch.equal(gated, ops.silu_mul(ops.linear(x, torch.cat([m, -m]), x_dtype="e4m3fn")))
    cache = ContiguousCache(1).step([(0, 3, 0)], [0])
    q, new = ops.qkv_write(qkv, cache, heads=2, layer=0)
    assert torch.equal(torch.cat([q, *(part[:, 0] for part in new.read(0, 0))], dim=1), qkv)
    q, new = ops.rope_kv_write(qkv, at, cache, table=TABLE, heads=2, layer=0)
    assert torch.equal(q, ops.rope(qkv[:, :32], at, TABLE, 2))
    assert torch.equal(new.read(0, 0)[0][:, 0], ops.rope(qkv[:, 32:48], at, TABLE, 1))
    factors = {"beta": 0.5, "context": 1, "offset": 1}
    q, _ = ops.rope_kv_write(qkv, at, cache, table=TABLE, heads=2, layer=0, **factors)
    assert torch.equal(q, ops.scale_by_position(ops.rope(qkv[:, :32], at, TABLE, 2), at, **factors))
    q, _ = ops.qkv_write(qkv, cache, heads=2, layer=0, positions=at, **factors)
    assert torch.equal(q, ops.scale_by_position(qkv[:, :32], at, **factors))
    q, new = ops.rope_kv_write(qkv, at, cache, norm, norm, table=TABLE, heads=2, layer=0, eps=1e-6)
    assert torch.equal(q, ops.rope(ops.rms_norm(qkv[:, :32], norm, 1e-6, 2), at, TABLE, 2))
    k, v = new.read(0, 0)
    assert torch.equal(k[:, 0], ops.rope(ops.rms_norm(qkv[:, 32:48], norm, 1e-6), at, TABLE, 1))
    assert torch.equal(v[:, 0], qkv[:, 48:])


def test_small_references_against_torch() -> None:
    x, w, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    assert torch.allclose(ops.layer_norm(x, w, bias, eps=1e-5), torch.nn.functional.layer_norm(x, (8,), w, bias))
    assert torch.allclose(ops.gelu_mul(x, tanh=False), torch.nn.functional.gelu(x[:, :4]) * x[:, 4:])
    assert torch.allclose(ops.gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))
    assert torch.equal(ops.silu(x), torch.nn.functional.silu(x))
    assert torch.equal(ops.relu(x, squared=True), torch.nn.functional.relu(x) ** 2)
    assert torch.allclose(ops.soft_cap(x * 10, 5.0), 5 * torch.tanh(x * 2))
    assert torch.equal(ops.cast(x, "bf16"), x.bfloat16())
    assert torch.equal(ops.scale(x, 2.0), x + x)
    assert torch.equal(ops.split(x, 2, 5), x[:, 2:5])
    assert torch.equal(ops.take_rows(x, torch.tensor([2, 0])), x[[2, 0]])
    assert ops.add(x.bfloat16(), x).dtype == torch.bfloat16
    assert torch.equal(ops.embed(torch.tensor([2, 0]), x), x[[2, 0]])
    # Rows 4 to 6 of a table: ids on both sides of each edge.
    part = ops.embed(torch.tensor([3, 4, 6, 7, 0, 9]), x, first=4)
    assert torch.equal(part, torch.stack([0 * w, x[0], x[2], 0 * w, 0 * w, 0 * w]))
    assert ops.layer_norm(x.bfloat16(), w.bfloat16(), eps=1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope_depends_on_distance_alone_and_keeps_lengths(style: str) -> None:
    table = RopeTable(16, 1e4, style)
    q, k = torch.randn(1, 16), torch.randn(1, 16)

    def score(a: int, b: int) -> float:
        return (ops.rope(q, torch.tensor([a]), table, 1) @ ops.rope(k, torch.tensor([b]), table, 1).T).item()

    assert score(3, 1) == pytest.approx(score(1003, 1001), abs=1e-3)
    assert ops.rope(q, torch.tensor([77]), table, 1).norm().item() == pytest.approx(q.norm().item(), rel=1e-5)
    assert torch.equal(ops.rope(q, torch.tensor([0]), table, 1), q)


def test_rope_styles_are_permutations_of_each_other() -> None:
    x, at = torch.randn(2, 16), torch.tensor([5, 9])
    pairs = torch.arange(16).view(2, 8).T.flatten()  # half's (i, i + 8) side by side
    half = ops.rope(x, at, RopeTable(16, 1e4, "half"), 1)
    other = ops.rope(x[:, pairs], at, RopeTable(16, 1e4, "interleaved"), 1)
    assert torch.equal(half[:, pairs], other)


def test_scalings_at_their_edges() -> None:
    plain, _ = frequencies(TABLE)
    linear, _ = frequencies(RopeTable.of(16, 1e4, "half", {"type": "linear", "factor": 4}))
    np.testing.assert_allclose(linear, plain / 4)
    fields = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    llama3, _ = frequencies(RopeTable.of(16, 1e4, "half", {"rope_type": "llama3", "factor": 8, **fields}))
    assert llama3[0] == plain[0]
    assert llama3[-1] == pytest.approx(plain[-1] / 8)
    yarn = RopeTable.of(16, 1e4, "half", {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64})
    assert frequencies(yarn)[1] == pytest.approx(0.1 * math.log(4) + 1)
    assert cos_sin(yarn, np.arange(3))[0].dtype == np.float32
    with pytest.raises(UnsupportedError, match="dynamic"):
        RopeTable.of(16, 1e4, "half", {"rope_type": "dynamic"})


def test_the_vocabulary_loads_without_torch() -> None:
    import subprocess
    import sys

    modules = "roofline.ops, roofline.program.compile, roofline.cli.models.show, sys"
    code = f"import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
