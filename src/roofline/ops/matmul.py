"""linear and quantize_rows: where the weights are."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.attention import flushed, round_to
from roofline.ops.cost import Affine
from roofline.ops.elementwise import per_element
from roofline.ops.own_weight import OwnWeight
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Q8_GROUP, Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor

# Bits of an activation -> the largest integer it becomes.
LEVELS = {8: 127.0, 15: 127.0 * 128.0}


@dataclass(frozen=True)
class Q8Rows:
    """Rows of integer activations: value = q * scale.

    q: int8 (8 bits) or int16 (15 bits) [rows, width]; scale: float32 [rows, width / group].
    """

    q: "Tensor"
    scale: "Tensor"

    def dequantize(self) -> "Tensor":
        """float32 [rows, width]."""
        rows, width = self.q.shape
        groups = self.scale.shape[1]
        return (self.q.float().view(rows, groups, width // groups) * self.scale[:, :, None]).view(rows, width)


def linear_type(call: Call) -> Type:
    """Type rule shared with the fused forms: w is [out, in], bias [out]."""
    out, width = call.w.shape
    if call.x.width != width:
        raise ConfigError(f"linear: input of width {call.x.width}, weight of {width} columns")
    if call.bias is not None and call.bias.shape != (out,):
        raise ConfigError(f"linear: bias of shape {call.bias.shape} for {out} outputs")
    return Type("f32", call.x.leading, (out,))


def linear_flops(call: Call) -> Affine:
    """2 * in * out a row; the bias and the scales of quantised groups are not counted."""
    return Affine.per(call.x.leading, 2 * call.w.shape[0] * call.w.shape[1])


def round_rows(x: "Tensor", dtype: str) -> "Tensor":
    """x [rows, width] rounded to 8-bit floats ("e4m3fn", "e4m3fnuz"; top: their largest) and widened again, with a
    scale for each row: max |x| / top; a value is round(x * (top / max |x|)) * scale, and 0 in a row where max |x| is
    below 2^-100. "f32" leaves x."""
    import torch

    if dtype == "f32":
        return x
    top = torch.finfo(getattr(torch, f"float8_{dtype}")).max
    amax = x.float().abs().amax(dim=1, keepdim=True)
    inverse = torch.where(amax >= 2.0**-100, torch.full_like(amax, top) / amax, 0.0)
    return (round_to(x.float() * inverse, dtype) * (amax / top)).to(x.dtype)


PRODUCT = (Trait.ROW_WISE, Trait.PRODUCT, Trait.LONG_SUM)
_LINEAR = (*PRODUCT, Trait.ROUNDED, Trait.SPLITS)


@op(values=("x",), weights=("w", "bias"), infer=linear_type, traits=_LINEAR, flops=linear_flops)
def linear(x: "Tensor | Q8Rows", w: "Tensor", bias: "Tensor | None" = None, x_dtype: str = "f32") -> "Tensor":
    """x @ w.T + bias; x [rows, in] (or Q8Rows of that shape), w [out, in], bias [out]. x_dtype: what rows of floats are
    rounded to before, see `round_rows`."""
    from torch.nn import functional

    rows = x.dequantize() if isinstance(x, Q8Rows) else round_rows(x, x_dtype)
    if isinstance(w, OwnWeight):
        return w.linear(rows, bias)
    return functional.linear(rows, w, bias)


def quantized_type(call: Call) -> Type:
    """Type rule of integer rows."""
    if call.bits not in LEVELS:
        raise ConfigError(f"quantize_rows: {call.bits} bits; {', '.join(map(str, LEVELS))} are known")
    if call.group != Q8_GROUP or call.x.width % call.group:
        raise ConfigError(f"quantize_rows: width {call.x.width} in groups of {call.group}; groups are of {Q8_GROUP}")
    return Type(f"q{call.bits}g32", call.x.leading, call.x.trailing)


@op(values=("x",), infer=quantized_type, traits=(Trait.ROW_WISE,), flops=per_element(4))
def quantize_rows(x: "Tensor", group: int = Q8_GROUP, bits: int = 8) -> Q8Rows:
    """Symmetric integer rows with one scale for each (row, group of inputs).

    top = 127 for 8 bits, 127 * 128 for 15 (two 8-bit digits: q = 128 * high + low, so that integer products of bytes
    serve both); amax = max |x|; scale = amax / top, 0 where that is below the smallest normal number, which cores flush
    to 0; inverse = top / amax, 0 where the scale is; q = round-half-even(x * inverse): every step rounded to float32.
    """
    import torch

    top = LEVELS[bits]
    rows, width = x.shape
    grouped = x.float().view(rows, width // group, group)
    amax = grouped.abs().amax(dim=2)
    scale = flushed(amax / top)
    inverse = torch.where(scale > 0, torch.full_like(amax, top) / amax, 0.0)  # top / amax would round twice
    q = torch.round(grouped * inverse[:, :, None]).to(torch.int8 if bits == 8 else torch.int16)
    return Q8Rows(q.view(rows, width), scale)
