"""rms_norm, layer_norm, like_norm. Computed in float32 whatever comes in."""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.elementwise import per_element, same_as_x, same_pair
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def norm_type(call: Call) -> Type:
    """Type rule: the weight, if there is one, covers one head, for all of them, or the whole row."""
    fits = call.w is None or call.w.shape in ((call.x.width // call.heads,), (call.x.width,))
    if not fits or call.x.width % call.heads:
        weight = "no weight" if call.w is None else f"weight of shape {call.w.shape}"
        raise ConfigError(f"norm: {weight} for {call.heads} heads in {call.x.width}")
    return same_as_x(call)


_NORM = (Trait.ROW_WISE, Trait.ROUNDED, Trait.READS_WIDE, Trait.SCALES)


@op(values=("x",), weights=("w",), infer=norm_type, traits=(*_NORM, Trait.BY_HEAD), flops=per_element(4))
def rms_norm(x: "Tensor", w: "Tensor | None", eps: float, heads: int = 1) -> "Tensor":
    """x / sqrt(mean(x^2) + eps) * w, over each of `heads` equal parts of a row; without w nothing is multiplied.

    w is that of one part, which all share, or of the whole row. Source: Zhang and Sennrich 2019.
    """
    import torch

    parts = x.float().view(x.shape[0], heads, x.shape[1] // heads)
    normed = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    normed = normed.to(x.dtype)
    return (normed if w is None else normed * w.view(-1, parts.shape[2])).view(x.shape)


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


LEAST_SQUARE = 1e-5  # the mean square of a row is taken for no less than this


@op(values=("x", "y"), infer=same_pair, traits=(Trait.ROW_WISE, Trait.READS_WIDE), flops=per_element(6), inplace="x")
def like_norm(x: "Tensor", y: "Tensor") -> "Tensor":
    """x * sqrt(mean(y^2)) / sqrt(max(mean(x^2), 1e-5)), of rows: x made as long as y. Source: Gemma 3n's streams."""
    import torch

    length = y.float().square().mean(dim=-1, keepdim=True).sqrt()
    divisor = torch.sqrt(x.float().square().mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE))
    return (x.float() * length / divisor).to(x.dtype)
