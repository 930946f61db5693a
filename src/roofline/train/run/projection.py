"""Sketches: 32 numbers for a tensor, from which the distance between two tensors is told without either.

Each number is the product with a fixed random vector of +1 and -1 (Johnson and Lindenstrauss 1984; Achlioptas 2003), so
sketches add as tensors do. A tensor is taken as a matrix, and the vector as the product of signs for its rows and signs
for its columns (Sun et al. 2018, tensor random projections): as good as one multiplication by 32 columns is cheap, and
no more signs are held than a matrix has rows and columns.

A length told by a sketch is off by about 1 / sqrt(2 * 32), an eighth (standard deviation), for a tensor whose content
is spread over many directions, and by up to twice that for one of rank one.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

SIZE = 32
ELEMENTS = 1 << 22  # of a tensor that are widened to float32 at a time


def signs(key: str, start: int, count: int) -> NDArray[np.float32]:
    """Signs `start` to `start + count` of the endless rows of a key: float32 [count, SIZE], the same on every machine.

    Philox's raw bits (Salmon et al. 2011), which numpy keeps for ever: a counter's block is eight rows.
    """
    words = np.frombuffer(hashlib.sha256(f"roofline sketch 1/{key}".encode()).digest()[:16], "<u8")
    block, lead = divmod(start, 8)
    raw = np.random.Philox(key=words, counter=block).random_raw((lead + count + 1) // 2)
    rows = raw.astype("<u8").view(np.uint8).reshape(-1, SIZE // 8)[lead : lead + count]
    return np.unpackbits(rows, axis=1, bitorder="little").astype(np.float32) * 2 - 1


def sums(key: str, x: "torch.Tensor", first: int = 0) -> NDArray[np.float64]:
    """Of rows `first` and on of a tensor [rows, ...]: float64 [1 + SIZE], the sum of squares, then the projections.

    Those of parts of a tensor add up to those of the whole. Projections are divided by sqrt(SIZE): their squares sum to
    about the sum of squares.
    """
    import torch

    matrix = x.detach().reshape(x.shape[0], -1) if x.numel() else x.new_zeros(0, 1)
    columns = torch.from_numpy(signs(f"{key}/columns", 0, matrix.shape[1])).to(matrix.device)
    total = np.zeros(1 + SIZE)
    step = max(1, ELEMENTS // matrix.shape[1])
    for start in range(0, matrix.shape[0], step):
        part = matrix[start : start + step].float()
        total[0] += float(part.square().sum())
        with torch.autocast(part.device.type, enabled=False):
            projected = (part @ columns).cpu().numpy().astype(np.float64)
        total[1:] += np.einsum("rk,rk->k", signs(f"{key}/rows", first + start, len(part)), projected)
    total[1:] /= np.sqrt(SIZE)
    return total
