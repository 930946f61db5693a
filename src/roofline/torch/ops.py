"""torch.ops.roofline: our kernels as operators of torch, which torch.compile takes without looking inside.

Importing this module registers them. On the CPU they are plain torch (plain.py), on NVIDIA's and AMD's GPUs our Triton
kernels; torch calls both "cuda". They have no gradients: training uses the families' own text (roofline.train).
Inputs may have any leading dimensions; none is changed, and no result shares memory with one.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from roofline.backends.gpu.pack import LAYOUTS, Packed
from roofline.backends.gpu.runtime import dense
from roofline.hardware.chips.chips import Chip
from roofline.torch import plain
from roofline.torch.operand_checks import check_attend, check_norm, check_quant, check_same

ARRAYS = tuple(field.name for field in fields(Packed) if field.name not in ("layout", "rows", "columns"))


@custom_op("roofline::norm", mutates_args=(), device_types="cpu")
def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, layer: bool = False) -> Tensor:
    """RMS norm of x [..., width], with `layer` layer norm, times weight [width], plus bias [width]; in x's dtype."""
    check_norm(x, weight, bias, eps)
    return plain.norm(x, weight, bias, eps, layer).to(x.dtype)


@custom_op("roofline::add_norm", mutates_args=(), device_types="cpu")
def add_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, layer: bool = False
) -> tuple[Tensor, Tensor]:
    """(residual + delta in float32, its norm in delta's dtype), both [..., width]; as `norm` for the rest.

    The residual stream is meant to be float32: then it is rounded nowhere between the embedding and the head.
    """
    _check_add_norm(residual, delta, weight, bias, eps)
    summed = residual.float().contiguous() + delta.float().contiguous()
    return summed, plain.norm(summed, weight, bias, eps, layer).to(delta.dtype)


@custom_op("roofline::silu_mul", mutates_args=(), device_types="cpu")
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [..., ffn]; in gate's dtype."""
    check_same("silu_mul", gate, up)
    return plain.silu_mul(gate, up).to(gate.dtype)


@custom_op("roofline::attend", mutates_args=(), device_types="cpu")
def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention, the queries being the last positions of the keys: [batch, heads, queries, dim] in q's dtype.

    q [batch, heads, queries, dim]; k, v [batch, kv_heads, keys, dim], keys >= queries, heads a multiple of kv_heads;
    scale None: dim ** -0.5; window > 0: a query sees itself and the window - 1 keys before it; soft_cap > 0: scores
    become soft_cap * tanh(score / soft_cap).
    """
    check_attend(q, k, v, window, soft_cap)
    return plain.attend(q, k, v, _scale(q, scale), window, soft_cap).to(q.dtype)


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
    arrays = _arrays(words, high, scale, minimum, super_scale, super_minimum)
    check_quant(x, arrays, bias, format)
    values = plain.dequantized(words, high, scale, minimum, super_scale, super_minimum, format)
    return torch.nn.functional.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)


def _register(
    name: str, check: Callable[..., None], launch: Callable[..., object], empty: Callable[..., object]
) -> Callable[..., object]:
    """Give an operator its GPU kernel and, for torch.compile, the shape of its result; both check the operands first.

    Returns the GPU kernel.

    Args:
        check, empty: take the operator's own arguments.
        launch: takes a chip before them.
    """
    # torch leaves out trailing arguments that have their default values.
    defaults = tuple(argument.default_value for argument in getattr(torch.ops.roofline, name).default._schema.arguments)

    def gpu_kernel(*args: Any) -> object:
        args += defaults[len(args) :]
        check(*args)
        device = args[0].device
        with torch.cuda.device(device):  # Triton launches on the current device
            return launch(dense.chip_of(device.index), *args)

    def fake_kernel(*args: Any) -> object:
        args += defaults[len(args) :]
        check(*args)
        return empty(*args)

    torch.library.register_kernel(f"roofline::{name}", "cuda", gpu_kernel)
    torch.library.register_fake(f"roofline::{name}", fake_kernel)
    return gpu_kernel


def _launch_quant(chip: Chip, x: Tensor, words: Tensor, *rest: Any) -> Tensor:
    *arrays, bias, format = rest
    return dense.linear_quant(chip, x, Packed(LAYOUTS[format], words.shape[1], x.shape[-1], words, *arrays), bias)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _arrays(words: Tensor, *rest: Tensor | None) -> dict[str, Tensor | None]:
    return dict(zip(ARRAYS, (words, *rest), strict=True))


def _check_add_norm(residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    check_same("add_norm", residual, delta)
    check_norm(delta, weight, bias, eps)


_norm = _register(
    "norm",
    lambda x, weight, bias, eps, _layer: check_norm(x, weight, bias, eps),
    dense.norm,
    lambda x, *_: x.new_empty(x.shape),
)
_add_norm = _register(
    "add_norm",
    lambda residual, delta, weight, bias, eps, _layer: _check_add_norm(residual, delta, weight, bias, eps),
    dense.add_norm,
    lambda residual, delta, *_: (residual.new_empty(residual.shape, dtype=torch.float32), delta.new_empty(delta.shape)),
)
_silu_mul = _register(
    "silu_mul",
    lambda gate, up: check_same("silu_mul", gate, up),
    dense.silu_mul,
    lambda gate, up: gate.new_empty(gate.shape),
)
_attend = _register(
    "attend",
    lambda q, k, v, _scale, window, soft_cap: check_attend(q, k, v, window, soft_cap),
    lambda chip, q, k, v, scale, *rest: dense.attend(chip, q, k, v, _scale(q, scale), *rest),
    lambda q, *_: q.new_empty(q.shape),
)
_linear_quant = _register(
    "linear_quant",
    lambda x, *rest: check_quant(x, _arrays(*rest[:-2]), *rest[-2:]),
    _launch_quant,
    lambda x, words, *_: x.new_empty((*x.shape[:-1], words.shape[1])),
)
