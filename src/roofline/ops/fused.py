"""Ops that only passes make. Each rounds where the ops it stands for round; its reference is their composition."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops import activations, attention, elementwise, experts, matmul, norms
from roofline.ops.cost import Affine
from roofline.ops.registry import Call, CostRule, get, op
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Q8_GROUP, Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def _quantizing(name: str, part: str, flops: CostRule) -> Callable[..., matmul.Q8Rows]:
    """Declare quantize_rows(part(...)) as one op, with the operands and attributes of both."""
    first = get(part)
    parameters = inspect.signature(first.reference).parameters.values()
    quantize = list(inspect.signature(matmul.quantize_rows).parameters.values())[1:]

    def reference(*operands: object, group: int = Q8_GROUP, bits: int = 8, **attributes: object) -> matmul.Q8Rows:
        return matmul.quantize_rows(first.reference(*operands, **attributes), group, bits)

    def infer(call: Call) -> Type:
        return matmul.quantized_type(Call(x=first.infer(call), group=call.group, bits=call.bits))

    reference.__name__ = name
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in quantize]
    reference.__signature__ = inspect.Signature([*parameters, *keywords])  # type: ignore[attr-defined]
    traits = first.traits & {Trait.ROW_WISE, Trait.GATED}
    fuses = (part, "quantize_rows")
    declare = op(values=first.values, weights=first.weights, infer=infer, traits=traits, flops=flops, fuses=fuses)
    return declare(reference)


norm_quantize = _quantizing("norm_quantize", "rms_norm", elementwise.per_element(8))
layer_norm_quantize = _quantizing("layer_norm_quantize", "layer_norm", elementwise.per_element(10))
gelu_quantize = _quantizing("gelu_quantize", "gelu", elementwise.per_element(16))
gelu_mul_quantize = _quantizing("gelu_mul_quantize", "gelu_mul", activations.gated_flops(17))
relu_quantize = _quantizing("relu_quantize", "relu", elementwise.per_element(5))
silu_quantize = _quantizing("silu_quantize", "silu", elementwise.per_element(12))
silu_mul_quantize = _quantizing("silu_mul_quantize", "silu_mul", activations.gated_flops(13))
sigmoid_mul_quantize = _quantizing("sigmoid_mul_quantize", "sigmoid_mul", activations.gated_flops(13))
mul_quantize = _quantizing("mul_quantize", "mul", elementwise.per_element(5))
_ROWS = (Trait.ROW_WISE,)


def _add_norm_type(call: Call) -> tuple[Type, Type]:
    total = elementwise.same_pair(call)
    return total, norms.layer_norm_type(Call(x=total, w=call.w, bias=call.bias))


@op(
    values=("x", "y"),
    weights=("w", "bias"),
    infer=_add_norm_type,
    traits=_ROWS,
    flops=elementwise.per_element(5),
    inplace="x",
    fuses=("add", "rms_norm"),
)
def add_norm(
    x: "Tensor", y: "Tensor", w: "Tensor", bias: "Tensor | None" = None, *, eps: float, layer: bool = False
) -> "tuple[Tensor, Tensor]":
    """The sum s = x + y, and rms_norm(s, w), or layer_norm(s, w, bias) where `layer`."""
    total = elementwise.add(x, y)
    return total, norms.layer_norm(total, w, bias, eps=eps) if layer else norms.rms_norm(total, w, eps)


def _linear_add_type(call: Call) -> Type:
    out = matmul.linear_type(call)
    if call.residual != out:
        raise ConfigError(f"linear_add: residual {call.residual}, result {out}")
    return out


@op(
    values=("x", "residual"),
    weights=("w", "bias"),
    infer=_linear_add_type,
    traits=matmul.PRODUCT,
    flops=matmul.linear_flops,
    inplace="residual",
    fuses=("linear", "add"),
)
def linear_add(x: "Tensor | matmul.Q8Rows", residual: "Tensor", w: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
    """residual + (linear(x, w) + bias)."""
    return residual + matmul.linear(x, w, bias)


def _linear_silu_mul_type(call: Call) -> Type:
    return activations.gated_type(Call(gate=matmul.linear_type(Call(x=call.x, w=call.w, bias=None)), up=None))


@op(
    values=("x",),
    weights=("w",),
    infer=_linear_silu_mul_type,
    traits=matmul.PRODUCT,
    flops=matmul.linear_flops,
    fuses=("linear", "silu_mul"),
)
def linear_silu_mul(x: "Tensor | matmul.Q8Rows", w: "Tensor", gate_order: str = "", x_dtype: str = "f32") -> "Tensor":
    """silu_mul(linear(x, w)): w [2 * ffn, in] holds gate and up side by side; gate_order: the order of silu_mul;
    x_dtype: of linear.

    Its FLOPs are the products; those of silu run at another roof and beside them.
    """
    return activations.silu_mul(matmul.linear(x, w, x_dtype=x_dtype))


def _expert_linear_silu_mul_type(call: Call) -> Type:
    return activations.gated_type(Call(gate=experts.expert_linear_type(call), up=None))


@op(
    values=("x", "ids"),
    weights=("w",),
    infer=_expert_linear_silu_mul_type,
    traits=experts.EXPERTS,
    flops=experts.expert_linear_flops,
    weight_bytes=experts.expert_bytes,
    fuses=("expert_linear", "expert_linear", "silu_mul"),
)
def expert_linear_silu_mul(
    x: "Tensor | matmul.Q8Rows", ids: "Tensor", w: "Tensor", experts: int, gate_order: str = ""
) -> "Tensor":
    """silu(gate) * up for each of a token's experts: [tokens, top * ffn].

    w [experts * 2 * ffn, in]: of each expert its gate and below it its up; the rest as in expert_linear; gate_order:
    the order of silu_mul.
    """
    out = get("expert_linear").reference(x, ids, w, experts)  # [tokens, top * 2 * ffn]
    parts = out.view(-1, out.shape[1] // ids.shape[1])  # [tokens * top, 2 * ffn]
    return activations.silu_mul(parts).reshape(ids.shape[0], -1)


def _qkv_write_type(call: Call) -> tuple[Type, Type]:
    kv_heads, head_dim = call.cache.trailing
    if call.qkv.width != (call.heads + 2 * kv_heads) * head_dim:
        raise ConfigError(f"{call.qkv.width} columns of q, k, v for {call.heads} + 2 x {kv_heads} heads of {head_dim}")
    return Type(call.qkv.dtype, call.qkv.leading, (call.heads * head_dim,)), call.cache


def _normed_write_type(call: Call) -> tuple[Type, Type]:
    head_dim = call.cache.trailing[1]
    if any(w is not None and w.shape != (head_dim,) for w in (call.q_norm, call.k_norm)):
        raise ConfigError("q_norm and k_norm cover one head")
    return _qkv_write_type(call)


def _write_flops(call: Call, rope_flops: int) -> Affine:
    """rope_flops: of each element of q and k."""
    each = rope_flops + (4 if call.q_norm is not None else 0)
    scaled = call.heads * call.cache.trailing[1] if call.beta else 0
    return Affine.per(call.qkv.leading, each * (call.qkv.width - call.cache.width) + scaled)


@op(
    values=("qkv", "cache", "positions"),
    weights=("q_norm", "k_norm"),
    infer=_normed_write_type,
    flops=lambda call: _write_flops(call, 0),
    kv_bytes=attention.kv_write_bytes,
    fuses=("split", "split", "split", "kv_write"),
)
def qkv_write(
    qkv: "Tensor",
    cache: attention.KvCache,
    positions: "Tensor | None" = None,
    q_norm: "Tensor | None" = None,
    k_norm: "Tensor | None" = None,
    *,
    heads: int,
    layer: int,
    eps: float = 0.0,
    kv_dtype: str = "f32",
    beta: float = 0.0,
    context: int = 1,
    offset: int = 0,
) -> "tuple[Tensor, attention.KvCache]":
    """q, and the cache with k and v in it, where nothing is turned: positions are learned, ALiBi's, or none.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim]: q, k, v side by side. q_norm, k_norm [head_dim]: an RMS norm of
    each head, with eps. beta: not 0: q is then multiplied as scale_by_position says with it, context and offset; only
    then there are positions.
    """
    q, k, v = attention.split_heads(qkv, heads, cache.kv_heads)
    if q_norm is not None and k_norm is not None:
        q, k = norms.rms_norm(q, q_norm, eps, heads), norms.rms_norm(k, k_norm, eps, cache.kv_heads)
    if positions is not None:
        q = elementwise.scale_by_position(q, positions, beta, context, offset)
    return q, attention.kv_write(cache, k, v, layer, kv_dtype)


def _qk_norm_type(call: Call) -> Type:
    if call.q_norm.shape[0] + 2 * call.k_norm.shape[0] != call.qkv.width:
        raise ConfigError(f"qk_norm: weights of {call.q_norm.shape} and {call.k_norm.shape} for q, k, v in {call.qkv}")
    qkv: Type = call.qkv
    return qkv


@op(
    values=("qkv",),
    weights=("q_norm", "k_norm"),
    infer=_qk_norm_type,
    traits=_ROWS,
    flops=lambda call: Affine.per(call.qkv.leading, 4 * (call.q_norm.shape[0] + call.k_norm.shape[0])),
    fuses=("split", "split", "rms_norm", "rms_norm"),
)
def qk_norm(qkv: "Tensor", q_norm: "Tensor", k_norm: "Tensor", eps: float) -> "Tensor":
    """q, k, v side by side, all of q and all of k normed: qkv [tokens, q + 2 * k], q_norm [q], k_norm [k]."""
    import torch

    q, k = q_norm.shape[0], k_norm.shape[0]
    first, second, values = qkv.split([q, k, k], dim=1)
    return torch.cat([norms.rms_norm(first, q_norm, eps), norms.rms_norm(second, k_norm, eps), values], dim=1)


@op(
    values=("qkv", "positions", "cache"),
    weights=("q_norm", "k_norm"),
    infer=_normed_write_type,
    flops=lambda call: _write_flops(call, 3),
    kv_bytes=attention.kv_write_bytes,
    fuses=("split", "split", "split", "rope", "rope", "kv_write"),
)
def rope_kv_write(
    qkv: "Tensor",
    positions: "Tensor",
    cache: attention.KvCache,
    q_norm: "Tensor | None" = None,
    k_norm: "Tensor | None" = None,
    *,
    table: RopeTable,
    heads: int,
    layer: int,
    eps: float = 0.0,
    kv_dtype: str = "f32",
    norm_last: bool = False,
    beta: float = 0.0,
    context: int = 1,
    offset: int = 0,
) -> "tuple[Tensor, attention.KvCache]":
    """q after rope, and the cache with k after rope and v in it.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim]: q, k, v side by side. q_norm, k_norm [head_dim]: an RMS norm of
    each head, with eps: before rope (Qwen3) or, norm_last, behind it (Hunyuan). beta: not 0: q is then multiplied as
    scale_by_position says with it, context and offset.
    """
    kv_heads = cache.kv_heads
    q, k, v = attention.split_heads(qkv, heads, kv_heads)

    def norm_heads(q: "Tensor", k: "Tensor") -> "tuple[Tensor, Tensor]":
        if q_norm is None or k_norm is None:
            return q, k
        return norms.rms_norm(q, q_norm, eps, heads), norms.rms_norm(k, k_norm, eps, kv_heads)

    if not norm_last:
        q, k = norm_heads(q, k)
    q, k = attention.rope(q, positions, table, heads), attention.rope(k, positions, table, kv_heads)
    if norm_last:
        q, k = norm_heads(q, k)
    q = elementwise.scale_by_position(q, positions, beta, context, offset) if beta else q
    return q, attention.kv_write(cache, k, v, layer, kv_dtype)


def _queries_type(call: Call) -> Type:
    if call.q.width % call.heads:
        raise ConfigError(f"rope_queries: width {call.q.width} is not {call.heads} heads")
    if call.q_norm is not None and call.q_norm.shape != (call.q.width // call.heads,):
        raise ConfigError("q_norm covers one head")
    q: Type = call.q
    return q


@op(
    values=("q", "positions"),
    weights=("q_norm",),
    infer=_queries_type,
    flops=lambda call: Affine.per(
        call.q.leading, call.q.width * (3 * bool(call.table) + 4 * (call.q_norm is not None) + bool(call.beta))
    ),
    fuses=("rms_norm", "rope", "scale_by_position"),
)
def rope_queries(
    q: "Tensor",
    positions: "Tensor | None" = None,
    q_norm: "Tensor | None" = None,
    *,
    heads: int,
    table: RopeTable | None = None,
    eps: float = 0.0,
    norm_last: bool = False,
    beta: float = 0.0,
    context: int = 1,
    offset: int = 0,
) -> "Tensor":
    """q as attention takes it, where its keys are those that another layer wrote.

    q [tokens, heads * head_dim]; q_norm, norm_last, table, beta: as rope_kv_write has them, each if it is there.
    positions: where something depends on them.
    """
    if q_norm is not None and not norm_last:
        q = norms.rms_norm(q, q_norm, eps, heads)
    if positions is not None and table is not None:
        q = attention.rope(q, positions, table, heads)
    if q_norm is not None and norm_last:
        q = norms.rms_norm(q, q_norm, eps, heads)
    return elementwise.scale_by_position(q, positions, beta, context, offset) if positions is not None and beta else q
