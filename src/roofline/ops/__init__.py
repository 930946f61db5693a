"""The vocabulary: every op once, one declaration each.

On torch tensors an op computes at once and is differentiable; on Symbols it records into the trace that holds them.
Ops from outside the tree: decorate a reference with `ops.registry.op`. Ours are imported when the first is asked for:
a process that only runs a bundle needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline.ops.activations import above_spread, clamped_swiglu, gelu, gelu_mul, relu, sigmoid_mul, silu, silu_mul
    from roofline.ops.adapters import adapter_down, adapter_up
    from roofline.ops.attention import attend, kv_write, rope
    from roofline.ops.collectives import all_gather, all_reduce
    from roofline.ops.elementwise import (
        add,
        cast,
        embed,
        mul,
        scale,
        scale_by_position,
        scale_columns,
        soft_cap,
        split,
        take_rows,
    )
    from roofline.ops.experts import combine, expert_bias, expert_linear, expert_scale, route, sigmoid_scale
    from roofline.ops.fused import (
        add_norm,
        expert_linear_silu_mul,
        gelu_mul_quantize,
        gelu_quantize,
        layer_norm_quantize,
        linear_add,
        mul_quantize,
        norm_quantize,
        qk_norm,
        qkv_write,
        relu_quantize,
        rope_kv_write,
        rope_queries,
        sigmoid_mul_quantize,
        silu_mul_quantize,
        silu_quantize,
    )
    from roofline.ops.heads import cut_heads, head_linear, join_heads
    from roofline.ops.latent import latent_write, rope_latent_write
    from roofline.ops.matmul import Q8Rows, linear, quantize_rows
    from roofline.ops.norms import layer_norm, like_norm, rms_norm
    from roofline.ops.scan import selective_scan
    from roofline.ops.state import causal_conv, delta_rule

__all__ = ["clamped_swiglu", "gelu", "gelu_mul", "relu", "relu_quantize", "sigmoid_mul", "silu", "silu_mul"]
__all__ += ["adapter_down", "adapter_up"]
__all__ += ["attend", "kv_write", "rope"]
__all__ += ["all_gather", "all_reduce"]
__all__ += ["above_spread", "add", "cast", "embed", "mul", "scale", "scale_by_position", "scale_columns", "soft_cap"]
__all__ += ["split", "take_rows"]
__all__ += ["combine", "expert_bias", "expert_linear", "expert_scale", "route", "sigmoid_scale"]
__all__ += ["add_norm", "gelu_mul_quantize", "gelu_quantize", "layer_norm_quantize", "linear_add", "norm_quantize"]
__all__ += ["expert_linear_silu_mul", "mul_quantize", "qk_norm", "sigmoid_mul_quantize"]
__all__ += ["qkv_write", "rope_kv_write", "rope_queries", "silu_mul_quantize", "silu_quantize"]
__all__ += ["cut_heads", "head_linear", "join_heads"]
__all__ += ["latent_write", "rope_latent_write"]
__all__ += ["Q8Rows", "linear", "quantize_rows"]
__all__ += ["layer_norm", "like_norm", "rms_norm"]
__all__ += ["causal_conv", "delta_rule", "selective_scan"]
_MODULES = (
    *("activations", "adapters", "attention", "collectives", "elementwise", "experts", "fused", "heads", "latent"),
    *("matmul", "norms", "scan", "state"),
)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'roofline.ops' has no attribute {name!r}")
    load()
    return globals()[name]


def load() -> None:
    """Import every op of ours, which registers it. Passes ask for each instruction: the second time nothing is done."""
    if globals().keys() >= set(__all__):
        return
    for name in _MODULES:
        module = import_module(f"roofline.ops.{name}")
        globals().update({name: getattr(module, name) for name in __all__ if hasattr(module, name)})
