"""Random projections of tensors (sketches): 32 numbers from which the distance of two tensors can be estimated.

Each number is the tensor's product with a fixed random vector of +1 and -1 (Johnson and Lindenstrauss 1984; Achlioptas
2003), so sketches add as tensors do. A tensor is treated as a matrix, and the vector is the product of signs for its
rows and signs for its columns (Sun et al. 2018, tensor random projections). This costs one multiplication by 32 columns
and needs only as many signs as the matrix has rows and columns.

The standard deviation of a length from a sketch is about 1 / sqrt(2 * 32), an eighth, for a tensor whose content is
spread over many directions, and up to twice that for one of rank one.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

SIZE = 32
ELEMENTS = 1 << 22  # of a tensor that are converted to float32 at a time


def signs(key: str, start: int, count: int) -> NDArray[np.float32]:
    """Rows `start` to `start + count` of a key's signs: float32 [count, SIZE], the same on every machine.

    They are Philox's raw bits (Salmon et al. 2011), which numpy keeps stable; a step of its counter gives eight rows.
    """
    words = np.frombuffer(hashlib.sha256(f"roofline sketch 1/{key}".encode()).digest()[:16], "<u8")
    block, lead = divmod(start, 8)
    raw = np.random.Philox(key=words, counter=block).random_raw((lead + count + 1) // 2)
    rows = raw.astype("<u8").view(np.uint8).reshape(-1, SIZE // 8)[lead : lead + count]
    return np.unpackbits(rows, axis=1, bitorder="little").astype(np.float32) * 2 - 1


def sums(key: str, x: "torch.Tensor", first: int = 0, first_column: int = 0) -> NDArray[np.float64]:
    """The sum of squares of a tensor [rows, ...], then its projections: float64 [1 + SIZE].

    first, first_column: where x begins in the full tensor, as a matrix; the sums of its parts add up to those of the
    full tensor. Projections are divided by sqrt(SIZE), so that their squares sum to about the sum of squares.
    """
    import torch

    matrix = x.detach().reshape(x.shape[0], -1) if x.numel() else x.new_zeros(0, 1)
    columns = torch.from_numpy(signs(f"{key}/columns", first_column, matrix.shape[1])).to(matrix.device)
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
