"""Our kernels on plain torch tensors of any leading shape, without batch, pages or Program: results are allocated here.

A tensor's device says which chip is meant (`chip_of`); the launchers below are told, so that Triton's interpreter can
run them on the CPU.
"""

from functools import cache
from typing import TYPE_CHECKING

from roofline.backends.gpu.pack import Packed
from roofline.hardware.chips.chips import Chip
from roofline.hardware.gpus import libraries as gpus_libraries
from roofline.ops.batch import PAGE_TOKENS

if TYPE_CHECKING:
    from torch import Tensor


@cache
def chip_of(number: int) -> Chip:
    """The chip of a device by its number in torch.cuda. Raises UnsupportedError for one that no kernel serves."""
    import torch

    return gpus_libraries.from_torch(torch)[number].chip()


def norm(chip: Chip, x: "Tensor", weight: "Tensor", bias: "Tensor | None", eps: float, layer: bool) -> "Tensor":
    """RMS norm, or layer norm, of the last dimension, times weight, plus bias; in x's dtype."""
    import torch

    from roofline.backends.gpu.kernels.add_norm import add_norm as launch

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    launch(chip, rows, None, weight.contiguous(), _in_order(bias), eps, layer=layer, summed=None, out=out)
    return out.view(x.shape)


def add_norm(
    chip: Chip, residual: "Tensor", delta: "Tensor", weight: "Tensor", bias: "Tensor | None", eps: float, layer: bool
) -> "tuple[Tensor, Tensor]":
    """(residual + delta in float32, its norm in delta's dtype); see `norm`."""
    import torch

    from roofline.backends.gpu.kernels.add_norm import add_norm as launch

    first, second = (t.reshape(-1, t.shape[-1]).contiguous() for t in (residual, delta))
    summed, out = torch.empty_like(first, dtype=torch.float32), torch.empty_like(second)
    launch(chip, first, second, weight.contiguous(), _in_order(bias), eps, layer=layer, summed=summed, out=out)
    return summed.view(residual.shape), out.view(delta.shape)


def silu_mul(chip: Chip, gate: "Tensor", up: "Tensor") -> "Tensor":
    """silu(gate) * up, in gate's dtype."""
    import torch

    from roofline.backends.gpu.kernels.gated import gated

    first, second = (t.reshape(-1, t.shape[-1]) for t in (gate, up))
    first, second = (t if t.stride(1) == 1 else t.contiguous() for t in (first, second))
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    gated(chip, "silu", first, second, out=out)
    return out.view(gate.shape)


def attend(
    chip: Chip, q: "Tensor", k: "Tensor", v: "Tensor", scale: float, window: int = 0, soft_cap: float = 0.0
) -> "Tensor":
    """Causal grouped attention; q [batch, heads, queries, dim] are the last of the keys' positions, k, v [batch,
    kv_heads, keys, dim]; [batch, heads, queries, dim] in q's dtype.

    Each kv head of each sequence is a segment of its own to the paged kernel, and its keys are pages as they lie: they
    are copied only where their number is no multiple of 16. Raises UnsupportedError for head sizes it does not have.
    """
    import torch
    from torch.nn.functional import pad

    from roofline.backends.gpu.kernels.attend import attend as launch
    from roofline.backends.gpu.kernels.attend_launches import prepare, workspace_floats

    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    group, segments, each = heads // kv_heads, batch * kv_heads, -(-keys // PAGE_TOKENS)
    rows = q.reshape(batch, kv_heads, group, queries, dim).transpose(2, 3).reshape(segments * queries, group * dim)
    missing = each * PAGE_TOKENS - keys
    k, v = (pad(t, (0, 0, 0, missing)) if missing else t for t in (k, v))
    k_pages, v_pages = (t.contiguous().view(segments * each, 1, PAGE_TOKENS, dim) for t in (k, v))
    prepared = prepare(
        chip, tokens=segments * queries, segments=segments, max_query=queries, max_context=keys, heads=group,
        kv_heads=1, head_dim=dim, window=window, element_bytes=q.element_size(),
    )  # fmt: skip

    def count(number: int) -> "Tensor":
        return torch.arange(number, dtype=torch.int32, device=q.device)

    counted = count(segments + 1)
    workspace = torch.empty(workspace_floats(prepared), dtype=torch.float32, device=q.device)
    out = torch.empty_like(rows)
    launch(
        prepared, rows, k_pages, v_pages, counted * queries, torch.full_like(counted[1:], keys), counted * each,
        count(segments * each), scale=scale, soft_cap=soft_cap, workspace=workspace, out=out,
    )  # fmt: skip
    return out.view(batch, kv_heads, queries, group, dim).transpose(2, 3).reshape(q.shape)


def linear_quant(chip: Chip, x: "Tensor", weight: "Packed[Tensor]", bias: "Tensor | None") -> "Tensor":
    """x [..., columns] times a quantised matrix, transposed, plus bias: [..., rows] in x's dtype."""
    from roofline.backends.gpu.kernels.linear_quant import linear_quant as launch

    rows = x.reshape(-1, weight.columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = rows.new_empty(len(rows), weight.rows)
    launch(chip, rows, weight, _in_order(bias), out)
    return out.view(*x.shape[:-1], weight.rows)


def _in_order(bias: "Tensor | None") -> "Tensor | None":
    """A bias whose numbers lie side by side, as kernels read them."""
    return None if bias is None else bias.contiguous()
