"""Frozen matrices, with or without an adapter beside them: their products with gradients.

A frozen matrix gets no gradient, so its product keeps nothing but what an adapter needs. One that is quantised, or of
another type than the one computed in, is widened in the forward pass and again in the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from roofline.ops.own_weight import OwnWeight
from roofline.train.model.autograd import AutogradContext
from roofline.train.model.form import ParameterForm
from roofline.train.model.widen import PLAIN, widened

LIMIT = 1 << 26  # elements of a matrix that are widened at a time


def weight_of(form: ParameterForm, tensors: Sequence[Tensor], casts: "Casts") -> Tensor | OwnWeight:
    """What a family computes with. tensors: the stored one, then A, B and lengths."""
    return AdaptedWeight(form, tuple(tensors), casts) if form.opaque else tensors[0]


@dataclass(eq=False)
class Casts:
    """The last rows that were cast to the type computed in: neighbouring products, as of q, k and v, share them.

    keeps: products are kept by selective checkpointing, so nothing is written over them.
    """

    rows: Tensor | None = None
    cast: Tensor | None = None
    keeps: bool = False

    def of(self, x: Tensor) -> Tensor:
        """x in the type that autocast names, or as it is."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind) or x.dtype == torch.get_autocast_dtype(kind):
            return x
        if self.rows is not x or self.cast is None:
            self.rows, self.cast = x, x.to(torch.get_autocast_dtype(kind))
        return self.cast


@dataclass(frozen=True, eq=False)
class AdaptedWeight(OwnWeight):
    """A frozen matrix with its adapter. tensors: as `weight_of` has them."""

    form: ParameterForm
    tensors: tuple[Tensor, ...]
    casts: Casts = field(default_factory=Casts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(self.casts.of(x), self.tensors, bias)

    def expert_linear(self, x: Tensor, ids: Tensor, experts: int) -> Tensor:
        tokens, top = ids.shape
        x = self.casts.of(x)
        order = torch.argsort(ids.flatten(), stable=True)  # [tokens * top], places in the order of their experts
        parts = x.unflatten(1, (-1, self.form.shape[1]))  # [tokens, 1 or top, in]
        rows = parts.expand(-1, top, -1).flatten(0, 1)[order] if parts.shape[1] > 1 else x[order // top]
        counts = _counts(ids.flatten(), experts)
        pieces = zip(*(tensor.chunk(experts) for tensor in self.tensors), strict=True)
        results = [
            self._product(part, tensors, None)
            for part, tensors in zip(rows.split(counts), pieces, strict=True)
            if len(part)
        ]
        return torch.cat(results)[torch.argsort(order)].view(tokens, -1)

    def rows(self, ids: Tensor) -> Tensor:
        raw = functional.embedding(ids, self.tensors[0])
        return widened(raw, self.form.format, self.form.shape[1], torch.float32)

    def _product(self, x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        form, (raw, *trained) = self.form, tensors
        a, b = trained[:2] if trained else (None, None)
        what = _What(form.format, form.shape[1], form.scale, self.casts.keeps)
        if not form.dora:
            return _Product.apply(x, raw, a, b, bias, what)
        factor = trained[2] / _lengths(raw, trained[0], trained[1], form)
        out = _Product.apply(x, raw, a, b, None, what) * factor.to(x.dtype)
        return out if bias is None else out + bias.to(out.dtype)


def _counts(ids: Tensor, experts: int) -> list[int]:
    """How many rows go to each expert; of tensors without data, by which memory is predicted, equally many."""
    if isinstance(ids, FakeTensor):
        return [len(ids) // experts + (number < len(ids) % experts) for number in range(experts)]
    return torch.bincount(ids, minlength=experts).tolist()


def _lengths(raw: Tensor, a: Tensor, b: Tensor, form: ParameterForm) -> Tensor:
    """The length of each row of W + scale * B A, float32 [rows]; a constant to the gradients, as DoRA has it.

    |W + sBA|^2 = |W|^2 + 2 s W A^T . B + s^2 B A A^T . B, row by row, so that B A never exists.
    """
    with torch.autocast(raw.device.type, enabled=False):
        a, b = a.detach().float(), b.detach().float()
        step, squares = max(1, (LIMIT >> 4) // form.shape[1]), []
        for start in range(0, len(raw), step):
            w = widened(raw[start : start + step], form.format, form.shape[1], torch.float32)
            part = b[start : start + step]
            mixed = (w @ a.T) * (2 * form.scale) + (part @ (a @ a.T)) * form.scale**2
            squares.append(w.square().sum(1) + (mixed * part).sum(1))
        return torch.cat(squares).clamp_(min=0).sqrt_()


class _What(NamedTuple):
    """Of a product: the matrix's format and columns, the adapter's scale, and `Casts.keeps`."""

    format: str
    columns: int
    scale: float
    keeps: bool


class _Product(torch.autograd.Function):
    """x W^T + bias + scale * (x A^T) B^T for x [tokens, in] in the type computed in; W and bias are constants."""

    @staticmethod
    def forward(
        ctx: "_Saved",
        x: Tensor,
        raw: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        bias: Tensor | None,
        what: _What,
    ) -> Tensor:
        ctx.what = what
        with torch.autocast(x.device.type, enabled=False):
            out = _times_rows(x, raw, what, None if bias is None else bias.to(x.dtype))
            if a is None or b is None:
                ctx.save_for_backward(raw)
                return out
            inner = x @ a.to(x.dtype).T * what.scale  # [tokens, rank]
            ctx.save_for_backward(raw, x, inner, a, b)
            b_t = b.to(x.dtype).T
            return torch.addmm(out, inner, b_t) if what.keeps else out.addmm_(inner, b_t)

    @staticmethod
    def backward(ctx: "_Saved", *grads: Tensor) -> tuple[Tensor | None, ...]:
        raw, *saved = ctx.saved_tensors
        grad = grads[0]
        into_x = _times_columns(grad, raw, ctx.what) if ctx.needs_input_grad[0] else None
        if not saved:
            return into_x, None, None, None, None, None
        x, inner, a, b = saved
        into_inner = (grad @ b.to(grad.dtype)).mul_(ctx.what.scale)  # [tokens, rank]
        if into_x is not None:
            into_x = into_x.addmm_(into_inner, a.to(grad.dtype))
        into_a, into_b = into_inner.T @ x, grad.T @ inner
        return into_x, None, into_a.to(a.dtype), into_b.to(b.dtype), None, None


class _Saved(AutogradContext):
    what: _What


def _slices(raw: Tensor, name: str, columns: int, dtype: torch.dtype) -> list[slice]:
    """Rows that are widened together; all of them where they need not be."""
    step = max(1, LIMIT // columns) if PLAIN.get(name) != dtype else len(raw)
    return [slice(start, start + step) for start in range(0, len(raw), step)]


def _times_rows(x: Tensor, raw: Tensor, what: _What, bias: Tensor | None) -> Tensor:
    """x W^T + bias."""
    name, columns = what.format, what.columns
    slices = _slices(raw, name, columns, x.dtype)
    if len(slices) == 1:
        return functional.linear(x, widened(raw, name, columns, x.dtype), bias)
    out = x.new_empty(len(x), len(raw))
    for part in slices:
        w = widened(raw[part], name, columns, x.dtype)
        out[:, part] = functional.linear(x, w, None if bias is None else bias[part])
    return out


def _times_columns(grad: Tensor, raw: Tensor, what: _What) -> Tensor:
    """grad W."""
    name, columns = what.format, what.columns
    slices = _slices(raw, name, columns, grad.dtype)
    if len(slices) == 1:
        return grad @ widened(raw, name, columns, grad.dtype)
    total = torch.zeros(len(grad), columns, device=grad.device)  # in float32: it is a sum of several products
    for part in slices:
        total += grad[:, part] @ widened(raw[part], name, columns, grad.dtype)
    return total.to(grad.dtype)
