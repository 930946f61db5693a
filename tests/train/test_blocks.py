"""Attention in blocks beside torch's, in float64, and its gradients; compiled and not."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradients are torch's")

from roofline.ops.rows import Rows, attend_rows, score_bias  # noqa: E402
from roofline.train.model import blocked_attention as blocks  # noqa: E402
from roofline.train.model.blocked_attention import attend_in_blocks  # noqa: E402

LENGTHS = [1, 7, 64, 65, 130, 257, 300]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}  # of the norm of the difference, in that of what is right


def drawn(rows: int, heads: int, length: int, dim: int, dtype: Any, scale: float = 1.0) -> list[Any]:
    made = torch.Generator().manual_seed(length)
    wide = (scale, scale, 1.0, 1.0)  # of q, k, v and the gradient that comes in
    return [(s * torch.randn(rows, heads, length, dim, generator=made)).to(dtype) for s in wide]


def both(bias: Any, attend: Any, q: Any, k: Any, v: Any, grad: Any) -> list[Any]:
    """The result and the gradients of q, k, v."""
    given = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*given, bias)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def right(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scale = q.shape[-1] ** -0.5
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, None if bias is None else bias.to(q.dtype), is_causal=bias is None, scale=scale)


def in_blocks(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return attend_in_blocks(q, k, v, bias, q.shape[-1] ** -0.5)


def off(found: list[Any], wanted: list[Any]) -> list[float]:
    return [float((a.double() - b).norm() / (b.norm() + 1e-9)) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("how", ["causal", "alibi", "documents", "window"])
def test_result_and_gradients(how: str, length: int, dtype: Any) -> None:
    rows, heads, dim = 2, 3, 16
    q, k, v, grad = drawn(rows, heads, length, dim, dtype)
    ends = torch.arange(length).repeat(rows, 1) // 9 * torch.tensor([[1], [0]])
    bias = score_bias(
        length,
        "cpu",
        ends if how == "documents" else None,
        window=11 if how == "window" else 0,
        alibi_heads=heads if how == "alibi" else 0,
    )
    assert (bias is None) == (how == "causal")
    wanted = both(bias, right, *(t.double() for t in (q, k, v, grad)))
    found = both(bias, in_blocks, q, k, v, grad)
    assert [t.dtype for t in found] == [dtype] * 4
    if length == 1:  # one key has all the weight: q and k change nothing
        assert all(float(t.abs().max()) < BOUND[dtype] for t in (*found[1:3], *wanted[1:3]))
        found, wanted = [found[0], found[3]], [wanted[0], wanted[3]]
    assert max(off(found, wanted)) < BOUND[dtype]


def test_large_scores_neither_overflow_nor_lose_their_row() -> None:
    q, k, v, grad = drawn(1, 2, 200, 32, torch.float32, scale=30.0)
    wanted = both(None, right, *(t.double() for t in (q, k, v, grad)))
    found = both(None, in_blocks, q, k, v, grad)
    assert all(bool(t.isfinite().all()) for t in found)
    assert max(off(found, wanted)) < 1e-4


@pytest.mark.slow
def test_compiled_it_is_the_same() -> None:
    q, k, v, grad = drawn(2, 2, 130, 16, torch.float32)
    compiled = torch.compile(in_blocks, dynamic=False)
    for a, b in zip(both(None, compiled, q, k, v, grad), both(None, in_blocks, q, k, v, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [40, 600])
def test_rows_take_it_where_it_is_faster(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(blocks, "attend_in_blocks", lambda q, *_: taken.append(q.dtype) or q)
    for dtype, attend in ((torch.float32, blocks.attend), (torch.bfloat16, blocks.attend), (torch.bfloat16, None)):
        q, k, v, _ = drawn(1, 2, length, 16, dtype)
        held = Rows(1, length, 2, k=k, v=v, attend=attend)
        out = attend_rows(q.transpose(1, 2).reshape(length, 32), held, 2, 0.25, 0.0)
        assert out.shape == (length, 32)
    assert taken == [torch.float32, torch.bfloat16][length > 512 :]


def test_a_query_sees_no_key_after_it() -> None:
    q, k, v, _ = drawn(1, 1, 200, 16, torch.float32)
    before = in_blocks(q, k, v, None)
    k[:, :, 150:], v[:, :, 150:] = math.inf, math.nan
    after = in_blocks(q, k, v, None)
    assert torch.equal(before[:, :, :100], after[:, :, :100])


def test_queries_and_keys_that_norms_left_wide_are_taken_in_the_dtype_of_the_values() -> None:
    """As autocast computes models with norms of q and k: these are float32 there, v is bfloat16."""
    q, k, v, grad = drawn(1, 2, 70, 16, torch.bfloat16)
    wide = both(None, lambda *qkv: blocks.attend(*qkv, 0.25), q.float(), k.float(), v, grad)
    narrow = both(None, lambda *qkv: blocks.attend(*qkv, 0.25), q, k, v, grad)
    assert [result.dtype for result in wide] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    for one, other in zip(wide, narrow, strict=True):
        assert torch.equal(one.to(other.dtype), other)
