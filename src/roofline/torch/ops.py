"""torch.ops.roofline: our kernels as operators of torch, which torch.compile takes without looking inside.

Importing this module registers them. On the CPU they are plain torch (plain.py), on NVIDIA's and AMD's GPUs our Triton
kernels; torch calls both "cuda". They have no gradients: training uses the families' own text (roofline.train).
Inputs may have any leading dimensions; none is changed, and no result shares memory with one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import custom_op

from roofline.backends.gpu.pack import CHUNK, LAYOUTS
from roofline.backends.gpu.runtime import dense
from roofline.hardware.chips.chips import Chip
from roofline.torch import plain


@contextmanager
def _on(tensor: Tensor) -> Iterator[Chip]:
    """The chip of a tensor's device, which is the current one meanwhile: Triton launches there."""
    with torch.cuda.device(tensor.device):
        yield dense.chip_of(tensor.device.index)


@custom_op("roofline::norm", mutates_args=(), device_types="cpu")
def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, layer: bool = False) -> Tensor:
    """RMS norm of x [..., width], with `layer` layer norm, times weight [width], plus bias [width]; in x's dtype."""
    _check_norm(x, weight, bias)
    return plain.norm(x, weight, bias, eps, layer).to(x.dtype)


@norm.register_kernel("cuda")
def _norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, layer: bool = False) -> Tensor:
    _check_norm(x, weight, bias)
    with _on(x) as chip:
        return dense.norm(chip, x, weight, bias, eps, layer)


@norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, layer: bool = False) -> Tensor:
    _check_norm(x, weight, bias)
    return x.new_empty(x.shape)


@custom_op("roofline::add_norm", mutates_args=(), device_types="cpu")
def add_norm(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    layer: bool = False,
) -> tuple[Tensor, Tensor]:
    """(residual + delta in float32, its norm in delta's dtype), both [..., width]; as `norm` for the rest.

    The residual stream is meant to be float32: then it is rounded nowhere between the embedding and the head.
    """
    _check_add_norm(residual, delta, weight, bias)
    summed = residual.float().contiguous() + delta.float().contiguous()
    return summed, plain.norm(summed, weight, bias, eps, layer).to(delta.dtype)


@add_norm.register_kernel("cuda")
def _add_norm(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    layer: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_add_norm(residual, delta, weight, bias)
    with _on(residual) as chip:
        return dense.add_norm(chip, residual, delta, weight, bias, eps, layer)


@add_norm.register_fake
def _(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    layer: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_add_norm(residual, delta, weight, bias)
    return residual.new_empty(residual.shape, dtype=torch.float32), delta.new_empty(delta.shape)


@custom_op("roofline::silu_mul", mutates_args=(), device_types="cpu")
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [..., ffn]; in gate's dtype."""
    _check_same(gate, up)
    return plain.silu_mul(gate, up).to(gate.dtype)


@silu_mul.register_kernel("cuda")
def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    _check_same(gate, up)
    with _on(gate) as chip:
        return dense.silu_mul(chip, gate, up)


@silu_mul.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    _check_same(gate, up)
    return gate.new_empty(gate.shape)


@custom_op("roofline::attend", mutates_args=(), device_types="cpu")
def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention, the queries being the last positions of the keys: [batch, heads, queries, dim] in q's dtype.

    q [batch, heads, queries, dim]; k, v [batch, kv_heads, keys, dim], keys >= queries, heads a multiple of kv_heads;
    scale None: dim ** -0.5; window > 0: a query sees itself and the window - 1 keys before it; soft_cap > 0: scores
    become soft_cap * tanh(score / soft_cap).
    """
    _check_attend(q, k, v)
    return plain.attend(q, k, v, _scale(q, scale), window, soft_cap).to(q.dtype)


@attend.register_kernel("cuda")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    _check_attend(q, k, v)
    with _on(q) as chip:
        return dense.attend(chip, q, k, v, _scale(q, scale), window, soft_cap)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int = 0, soft_cap: float = 0.0) -> Tensor:
    _check_attend(q, k, v)
    return q.new_empty(q.shape)


@custom_op("roofline::linear_quant", mutates_args=(), device_types="cpu")
def linear_quant(
    x: Tensor,
    words: Tensor,
    high: Tensor | None,
    scale: Tensor,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
    bias: Tensor | None,
    format: str,
) -> Tensor:
    """x [..., columns] times a quantised matrix, transposed, plus bias [rows]: [..., rows] in x's dtype.

    words ... super_minimum: the arrays of `backends.gpu.pack.Packed` for a format of its LAYOUTS ("Q4_0", "Q4_K", ...);
    `roofline.torch.PackedLinear` holds them.
    """
    _check_quant(x, words, format)
    values = plain.dequantized(words, high, scale, minimum, super_scale, super_minimum, format)
    return torch.nn.functional.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)


@linear_quant.register_kernel("cuda")
def _linear_quant(
    x: Tensor,
    words: Tensor,
    high: Tensor | None,
    scale: Tensor,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
    bias: Tensor | None,
    format: str,
) -> Tensor:
    _check_quant(x, words, format)
    with _on(x) as chip:
        return dense.linear_quant(chip, x, words, high, scale, minimum, super_scale, super_minimum, bias, format)


@linear_quant.register_fake
def _(
    x: Tensor,
    words: Tensor,
    high: Tensor | None,
    scale: Tensor,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
    bias: Tensor | None,
    format: str,
) -> Tensor:
    _check_quant(x, words, format)
    return x.new_empty((*x.shape[:-1], words.shape[1]))


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for part in (weight, bias):
        if part is not None:
            torch._check(part.dim() == 1, lambda: "norm: weight and bias have one dimension")
            torch._check(part.shape[0] == x.shape[-1], lambda: "norm: weight and bias are as wide as x")


def _check_add_norm(residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_same(residual, delta)
    _check_norm(delta, weight, bias)


def _check_same(first: Tensor, second: Tensor) -> None:
    torch._check(first.dim() == second.dim(), lambda: "the two operands have the same shape")
    for a, b in zip(first.shape, second.shape, strict=True):
        torch._check(a == b, lambda: "the two operands have the same shape")


def _check_attend(q: Tensor, k: Tensor, v: Tensor) -> None:
    torch._check(q.dim() == k.dim() == 4, lambda: "attend: q, k, v are [batch, heads, tokens, dim]")
    _check_same(k, v)
    torch._check(q.dtype == k.dtype == v.dtype, lambda: "attend: q, k, v have one dtype")
    torch._check(q.shape[0] == k.shape[0], lambda: "attend: q and k have as many sequences")
    torch._check(q.shape[3] == k.shape[3], lambda: "attend: heads of q and k have as many dimensions")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "attend: heads are a multiple of kv heads")
    torch._check(q.shape[2] <= k.shape[2], lambda: "attend: the queries are the last of the keys' positions")


def _check_quant(x: Tensor, words: Tensor, format: str) -> None:
    torch._check(format in LAYOUTS, lambda: f"linear_quant: {format} is none of {', '.join(LAYOUTS)}")
    columns = words.shape[0] * CHUNK
    torch._check(x.shape[-1] == columns, lambda: f"linear_quant: the matrix has {columns} columns")
