"""Weight formats as torch reads them: the bytes of a frozen matrix to its values, some rows at a time.

The formats that most models come in are widened by torch, on any device and inside torch.compile; the values are those
of `ops.formats`, to the bit, before they are rounded. Others are widened by numpy, on the CPU.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roofline.ops import formats
from roofline.ops.formats.nf4 import VALUES

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ELEMENTS = 1 << 19  # that are widened at once, so that what is between bytes and values stays in the cache


def widened(raw: Tensor, name: str, columns: int, dtype: torch.dtype) -> Tensor:
    """The values [rows, columns] of a matrix in `dtype`.

    raw: of a plain format the values [rows, columns], which are not copied where they have that type; of a format of
    blocks its bytes, uint8 [rows, bytes].
    """
    if name in PLAIN:
        return raw.to(dtype)
    form, rows = formats.get(name), raw.shape[0]
    unpack = _UNPACK.get(name)
    blocks = raw.view(-1, form.block_bytes)  # blocks never span rows
    if unpack is None:
        return torch.ops.roofline_train.widen(blocks, name, form.block).view(rows, columns).to(dtype)
    step = max(1, ELEMENTS // form.block)
    if len(blocks) <= step or torch.compiler.is_compiling():
        return unpack(blocks).view(rows, columns).to(dtype)
    out = torch.empty(len(blocks), form.block, dtype=dtype, device=raw.device)
    for start in range(0, len(blocks), step):
        out[start : start + step] = unpack(blocks[start : start + step])
    return out.view(rows, columns)


@torch.library.custom_op("roofline_train::widen", mutates_args=())
def _widen(blocks: Tensor, name: str, block: int) -> Tensor:
    """float32 [blocks, block] by numpy."""
    values = formats.get(name).dequantize(blocks.cpu().numpy().reshape(-1), (blocks.shape[0], block))
    return torch.from_numpy(values).to(blocks.device)


@_widen.register_fake
def _(blocks: Tensor, name: str, block: int) -> Tensor:
    return torch.empty(blocks.shape[0], block, device=blocks.device)


def _half(blocks: Tensor, start: int) -> Tensor:
    """float32 [n, 1] of the float16 at byte `start`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, bytes] -> [n, 2 * bytes], all low halves first."""
    return torch.cat([packed & 15, packed >> 4], 1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 4:]).float() * _half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: Tensor) -> Tensor:
    return _affine(blocks, _low_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = torch.stack([(blocks[:, 16:48] >> group) & 1 for group in range(8)], 1)  # [n, 8, 32]
    return _affine(blocks, _low_nibbles(blocks[:, 48:176]) | (fifth << 4))


def _low_nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, 128] -> [n, 8, 32], see `ops.formats.blocks256`."""
    quads = packed.reshape(-1, 4, 32)
    return torch.stack([quads & 15, quads >> 4], 2).view(-1, 8, 32)


def _affine(blocks: Tensor, codes: Tensor) -> Tensor:
    """(d * scale) * code - (dmin * minimum). codes: uint8 [n, 8, 32]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1).float() * _half(blocks, 0)  # [n, 8]
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1).float() * _half(blocks, 2)
    return codes.float().mul_(scales[:, :, None]).sub_(minima[:, :, None]).view(len(blocks), -1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.stack([low & 15, low >> 4], 2).view(-1, 16, 16)
    pairs = blocks[:, 128:192].reshape(-1, 2, 32)
    high = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], 2).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)  # [n, 16]
    return ((low | (high << 4)).float() - 32).mul_(scales[:, :, None]).view(len(blocks), -1)


def _nf4(blocks: Tensor) -> Tensor:
    scale = blocks[:, :4].contiguous().view(torch.float32)
    pairs = torch.from_numpy(_NF4_PAIRS).to(blocks.device)  # of each byte, the two values as one number of 64 bits
    values = pairs.index_select(0, blocks[:, 4:].flatten().int()).view(torch.float32)
    return values.view(len(blocks), -1).mul_(scale)


_NF4_PAIRS = np.stack([VALUES[np.arange(256) >> 4], VALUES[np.arange(256) & 15]], 1).view(np.float64).reshape(-1)
_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "NF4": _nf4,
}
