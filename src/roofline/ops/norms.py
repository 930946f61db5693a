"""rms_norm and layer_norm. Computed in float32 whatever comes in."""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.elementwise import per_element, same_as_x
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def norm_type(call: Call) -> Type:
    """Type rule: the weight covers one head, for all of them, or the whole row."""
    if call.w.shape not in ((call.x.width // call.heads,), (call.x.width,)) or call.x.width % call.heads:
        raise ConfigError(f"norm: weight of shape {call.w.shape} for {call.heads} heads in {call.x.width}")
    return same_as_x(call)


_NORM = (Trait.ROW_WISE, Trait.ROUNDED, Trait.READS_WIDE, Trait.SCALES)


@op(values=("x",), weights=("w",), infer=norm_type, traits=(*_NORM, Trait.BY_HEAD), flops=per_element(4))
def rms_norm(x: "Tensor", w: "Tensor", eps: float, heads: int = 1) -> "Tensor":
    """x / sqrt(mean(x^2) + eps) * w, over each of `heads` equal parts of a row. Source: Zhang and Sennrich 2019.

    w is that of one part, which all share, or of the whole row.
    """
    import torch

    parts = x.float().view(x.shape[0], heads, x.shape[1] // heads)
    normed = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * w.view(-1, parts.shape[2])).view(x.shape)


def layer_norm_type(call: Call) -> Type:
    """Type rule: weight and bias, if there is one, cover the whole row."""
    if call.w.shape != (call.x.width,) or (call.bias is not None and call.bias.shape != call.w.shape):
        raise ConfigError(f"layer_norm: weight of shape {call.w.shape} for width {call.x.width}")
    return same_as_x(call)


@op(values=("x",), weights=("w", "bias"), infer=layer_norm_type, traits=_NORM, flops=per_element(6))
def layer_norm(x: "Tensor", w: "Tensor", bias: "Tensor | None" = None, *, eps: float) -> "Tensor":
    """(x - mean) / sqrt(variance + eps) * w + bias. Source: Ba et al. 2016."""
    from torch.nn import functional

    weight, shift = w.float(), None if bias is None else bias.float()
    return functional.layer_norm(x.float(), (x.shape[1],), weight, shift, eps).to(x.dtype)
