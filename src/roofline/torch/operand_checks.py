"""Checks of what the operators of `roofline.torch.ops` are given: their kernels read what the shapes say, and no more.

They hold for real tensors and, while torch compiles, for those that have shapes alone. Each raises RuntimeError, as
torch does for its own operators, with the operator's name and what is wrong.
"""

import torch
from torch import Tensor

from roofline.backends.gpu.pack import CHUNK, LAYOUTS, SUPER

_CODES, _HALF, _BYTE = torch.int32, torch.float16, torch.int8


def check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """Operands of `norm`, and of `add_norm` without its residual."""
    check_floats("norm", x, weight, bias)
    torch._check(eps >= 0, lambda: f"norm: eps = {eps} is negative")
    for part in (weight, bias):
        if part is not None:
            torch._check(part.dim() == 1, lambda: "norm: weight and bias have one dimension")
            torch._check(part.shape[0] == x.shape[-1], lambda: "norm: weight and bias are as wide as x")


def check_same(op: str, first: Tensor, second: Tensor) -> None:
    """Two operands of one shape."""
    check_floats(op, first, second)
    torch._check(first.dim() == second.dim(), lambda: f"{op}: the two operands have the same shape")
    for a, b in zip(first.shape, second.shape, strict=True):
        torch._check(a == b, lambda: f"{op}: the two operands have the same shape")


def check_attend(q: Tensor, k: Tensor, v: Tensor, window: int, soft_cap: float) -> None:
    """Operands and options of `attend`."""
    torch._check(q.dim() == k.dim() == 4, lambda: "attend: q, k, v are [batch, heads, tokens, dim]")
    check_same("attend", k, v)
    check_floats("attend", q, k)
    torch._check(q.dtype == k.dtype == v.dtype, lambda: "attend: q, k, v have one dtype")
    torch._check(q.shape[0] == k.shape[0], lambda: "attend: q and k have as many sequences")
    torch._check(q.shape[3] == k.shape[3], lambda: "attend: heads of q and k have as many dimensions")
    torch._check(k.shape[1] > 0, lambda: "attend: there are no kv heads")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "attend: heads are a multiple of kv heads")
    torch._check(q.shape[2] <= k.shape[2], lambda: "attend: the queries are the last of the keys' positions")
    torch._check(window >= 0, lambda: f"attend: window = {window} is negative; 0 is none")
    torch._check(soft_cap >= 0, lambda: f"attend: soft_cap = {soft_cap} is negative; 0 is none")


def check_quant(x: Tensor, arrays: dict[str, Tensor | None], bias: Tensor | None, format: str) -> None:
    """Operands of `linear_quant`. arrays: those of `backends.gpu.pack.Packed`, by name."""
    torch._check(format in LAYOUTS, lambda: f"linear_quant: {format} is none of {', '.join(LAYOUTS)}")
    layout, words = LAYOUTS[format], arrays["words"]
    assert words is not None, "the schema asks for it"
    check_floats("linear_quant", x, bias)
    torch._check(words.dim() == 3, lambda: "linear_quant: words are [columns / 32, rows, n]")
    rows, columns = words.shape[1], words.shape[0] * CHUNK
    torch._check(x.shape[-1] == columns, lambda: f"linear_quant: the matrix has {columns} columns")
    low_bits = 8 if layout.bits == 8 else 4
    groups, scales = columns // layout.group, _BYTE if layout.two_level else _HALF
    upper = (columns // SUPER, rows)
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {
        "words": (_CODES, (columns // CHUNK, rows, low_bits)),
        "high": (_CODES, (groups, rows)) if layout.bits > low_bits else None,
        "scale": (scales, (groups, rows)),
        "minimum": (scales, (groups, rows)) if layout.has_minimum else None,
        "super_scale": (_HALF, upper) if layout.two_level else None,
        "super_minimum": (_HALF, upper) if layout.two_level and layout.has_minimum else None,
    }
    for name, form in forms.items():
        _check_array(f"linear_quant: {name} of {format}", arrays[name], form, x.device)
    if bias is not None:
        torch._check(bias.dim() == 1, lambda: "linear_quant: bias has one dimension")
        torch._check(bias.shape[0] == rows, lambda: f"linear_quant: the matrix has {rows} rows, bias not as many")


def _check_array(
    what: str, array: Tensor | None, form: tuple[torch.dtype, tuple[int, ...]] | None, device: torch.device
) -> None:
    if form is None or array is None:
        torch._check(
            form is None and array is None, lambda: f"{what} is {'missing' if form else 'not read: give None'}"
        )
        return
    dtype, shape = form
    torch._check(array.dtype == dtype, lambda: f"{what} is {array.dtype}, not {dtype}")
    torch._check(array.device == device, lambda: f"{what} is on {array.device}, x on {device}")
    torch._check(array.dim() == len(shape), lambda: f"{what} has shape {list(array.shape)}, not {list(shape)}")
    for size, due in zip(array.shape, shape, strict=True):
        torch._check(size == due, lambda: f"{what} has shape {list(array.shape)}, not {list(shape)}")
    torch._check(array.is_contiguous(), lambda: f"{what} is not contiguous")


def check_floats(op: str, first: Tensor, *others: Tensor | None) -> None:
    """Floating-point operands on one device."""
    for part in (first, *others):
        if part is not None:
            kind, device = part.dtype, part.device
            torch._check(kind.is_floating_point, lambda kind=kind: f"{op}: an operand is {kind}, not floating point")
            torch._check(device == first.device, lambda at=device: f"{op}: operands on {first.device} and {at}")
