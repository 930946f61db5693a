"""What the ops of `roofline.torch.ops` do to tensors on the CPU: plain torch, float32 inside."""

import numpy as np
import torch
from torch import Tensor

from roofline.backends.gpu.pack import LAYOUTS, SUPER, high_order, order


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layer: bool) -> Tensor:
    """RMS norm, or layer norm, of the last dimension; float32."""
    wide = x.float().contiguous()
    if layer:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed if bias is None else normed + bias.float()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; float32."""
    return torch.nn.functional.silu(gate.float().contiguous()) * up.float().contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, soft_cap: float) -> Tensor:
    """Causal grouped attention [batch, heads, queries, dim], the queries the last of the keys' positions; float32."""
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale  # [batch, heads, queries, keys]
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None, :]
    hidden = key > at if not window else (key > at) | (key <= at - window)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v


def dequantized(
    words: Tensor,
    high: Tensor | None,
    scale: Tensor,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
    format: str,
) -> Tensor:
    """float32 [rows, columns] of a matrix that backends.gpu.pack laid out."""
    layout = LAYOUTS[format]
    rows, low_bits = words.shape[1], 8 if layout.bits == 8 else 4
    codes = _codes(words, low_bits, order(low_bits))  # [rows, columns]
    if high is not None:
        codes = codes | _codes(high[..., None], layout.bits - low_bits, high_order(layout.group)) << low_bits
    codes = codes.reshape(rows, -1, layout.group).transpose(0, 1)  # [groups, rows, group]
    values = _scales(scale, super_scale, layout.group) * (codes - layout.zero)
    if minimum is not None:
        low = _scales(minimum, super_minimum, layout.group)
        values = values - low if layout.two_level else values + low
    return values.transpose(0, 1).reshape(rows, -1)


def _codes(words: Tensor, low_bits: int, places: np.ndarray) -> Tensor:
    """int32 [n, rows, words] -> the numbers of `each` bits in them by row, where `places` says which lies where."""
    shifts = torch.arange(0, 32, low_bits, dtype=torch.int32)
    codes = ((words[..., None] >> shifts) & ((1 << low_bits) - 1)).flatten(2)
    return codes[:, :, torch.from_numpy(np.argsort(places))].transpose(0, 1).reshape(words.shape[1], -1)


def _scales(scale: Tensor, upper: Tensor | None, group: int) -> Tensor:
    """float32 [groups, rows, 1]."""
    wide = scale.float()
    if upper is not None:
        wide = wide * upper.float().repeat_interleave(SUPER // group, dim=0)
    return wide[..., None]
