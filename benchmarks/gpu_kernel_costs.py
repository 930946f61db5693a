"""What one launch of each kernel of the gpu backend costs at least: (FLOPs, bytes), each operand moved once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from roofline.backends.gpu.kernels.float8 import Float8Weight
from roofline.backends.gpu.pack import Packed


def adapter(rows: int, width: int, columns: int, rank: int, hit: int, out_bytes: int = 4) -> tuple[int, int]:
    """(FLOPs, bytes) of one call in 16 bits; hit: adapters that have a row."""
    moved = 2 * (rows * width + hit * rank * (width + columns)) + 4 * rows * rank
    return 2 * rows * rank * (width + columns), moved + 2 * rows * columns * out_bytes


def add_norm(rows: int, width: int, delta: bool, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch."""
    return rows * width * 5, rows * width * (4 + (2 + 4 if delta else 0) + out_bytes) + 4 * width


def attend(
    segments: Iterable[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int = 0,
    element_bytes: int = 2,
    cache_bytes: int = 2,
) -> tuple[int, int]:
    """(FLOPs, bytes) of one step of segments (queries, context): pairs that are seen, keys read once a kv head."""
    pairs = keys = rows = 0
    for queries, context in segments:
        visible = min(window, context) if window else context
        growing = max(0, queries - (context - visible))  # the first queries, which see fewer keys than the last
        pairs += queries * visible - growing * (growing - 1) // 2
        keys += min(context, visible + queries - 1)
        rows += queries
    io = 2 * rows * heads * head_dim * element_bytes
    return 4 * pairs * heads * head_dim, 2 * keys * kv_heads * head_dim * cache_bytes + io


def cutoff(rows: int, vocab: int, searches: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch; searches: 1 for top-k or top-p, 2 for both, 0 for min-p. As it is where few scores
    lie as high as a cut can: a row is read for its largest scores, their weights and the list, mostly from a cache."""
    return rows * vocab * (8 if searches else 1), rows * vocab * 4 * (3 if searches else 1)


def dequantize(weight: Packed[Tensor] | Float8Weight, rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(FLOPs, bytes) of widening so many rows."""
    values = rows * weight.columns
    flops = values if isinstance(weight, Float8Weight) else 2 * values
    return flops, rows * weight.nbytes // weight.rows + values * dtype.itemsize


def embed(tokens: int, width: int, table_bytes: int = 2, out_bytes: int = 4) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch."""
    return 0, tokens * (width * (table_bytes + out_bytes) + 4)


def experts(slots: int, hit: int, out: int, width: int, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one product in 16 bits; hit: experts that have a slot."""
    return 2 * slots * out * width, 2 * (hit * out * width + slots * width) + slots * out * out_bytes


def rows_fp8(rows: int, width: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch of `rows_fp8` on 16-bit rows."""
    return 2 * rows * width, 3 * rows * width + 4 * rows


def gated(rows: int, width: int, with_up: bool, in_bytes: int = 2, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch; width: of the result."""
    return rows * width * (9 if with_up else 8), rows * width * (in_bytes * (1 + with_up) + out_bytes)


def linear_float(rows: int, columns: int, width: int, itemsize: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: each operand once."""
    return 2 * rows * columns * width, itemsize * (columns * width + rows * (columns + width))


def linear_quant(rows: int, weight: Packed[Tensor] | Float8Weight, itemsize: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: the weight once, x once, the result once in 16 bits."""
    moved = weight.nbytes + rows * (itemsize * weight.columns + 2 * weight.rows)
    return 2 * rows * weight.rows * weight.columns, moved


def logprobs(rows: int, vocab: int, count: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch where each row asks for `count` entries; a row is read once for each and once more,
    mostly from a cache."""
    return rows * vocab * (2 + 4 * (count + 1)), rows * vocab * 4 * (2 + count)


def rope_kv_write(tokens: int, heads: int, kv_heads: int, head_dim: int, cache_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch with rope, in 16 bits; cache_bytes: of one cached element."""
    turned = tokens * (heads + kv_heads) * head_dim
    values = 2 * tokens * kv_heads * head_dim
    return 3 * turned, 2 * (tokens * heads * head_dim + values) + 2 * tokens * heads * head_dim + cache_bytes * values


def route(tokens: int, experts: int, top: int) -> tuple[int, int]:
    """(FLOPs, bytes) of routing on float32 logits."""
    return tokens * experts * (4 + 2 * top), tokens * (4 * experts + 8 * top)


def combine(tokens: int, top: int, width: int, in_bytes: int = 2, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one combination."""
    return 2 * tokens * top * width, tokens * (width * (top * in_bytes + out_bytes) + 4 * top)


def sample(rows: int, vocab: int) -> tuple[int, int]:
    """(FLOPs, bytes) of the pass that chooses, with noise on every row."""
    return 60 * rows * vocab, 4 * rows * vocab


def scores(rows: int, vocab: int, adjusted: bool) -> tuple[int, int]:
    """(FLOPs, bytes) of one call; adjusted: with biases or penalties, whose entries are not counted."""
    return rows * vocab, rows * vocab * (16 if adjusted else 8)


def slots(tokens: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: an id, a position and a page read, a slot written for each token."""
    return 0, tokens * (4 + 4 + 4 + 8)
