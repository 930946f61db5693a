"""Rounding to block formats with the least weighted squared error, as far as a search over scales finds it.

The packers of `ops.formats` take a group's scale from its extremes. Here each group tries several scales; for the codes
that each gives, the best scale (and minimum) is the solution of a least-squares problem, and the candidate with the
least error stays. The formats with two levels then solve once more for their upper scales, with all codes of a block.

The error of a weight counts as much as `importance` says of its column (the mean square of what it is multiplied with,
where that was measured), times the root of the mean square of its block plus its own square: large weights are more
often those that matter.

With `factor` the columns are rounded one after the other, and each error is made up for in the columns behind it, as
far as these are multiplied with similar values: GPTQ (Frantar et al., 2022, arXiv 2210.17323), whose scales of a block
are fitted when its turn comes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roofline.ops import formats
from roofline.ops.formats.blocks32 import half, half_bytes, inverse

_TINY = np.float32(1e-12)  # no float16 scale holds a block of such values: it becomes zeros
_CHUNK = 1 << 16  # values handled at once: temporaries stay in the cache
# What is added to the largest code when a candidate's scale is taken from the extreme.
_SYMMETRIC_STEPS = np.arange(-9, 10, dtype=np.float32) * np.float32(0.1)
_AFFINE_STEPS = np.arange(-10, 21, 2, dtype=np.float32) * np.float32(0.1)


@dataclass(frozen=True)
class ValueGrid:
    """The values that the weights of some blocks can have: scale * code + minimum, with a code from low to high.

    scale, minimum: float32 [blocks, groups, 1]. pack: codes, float32 [blocks, groups, weights of a group] -> bytes of
    the blocks, uint8 [blocks, bytes of a block].
    """

    scale: np.ndarray
    minimum: np.ndarray
    low: int
    high: int
    pack: Callable[[np.ndarray], np.ndarray]

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """The nearest codes, float32 [blocks, groups, weights of a group], of weights [blocks, weights of a block]."""
        groups = blocks.reshape(*self.scale.shape[:2], -1)
        return _codes(groups - self.minimum, self.scale, self.low, self.high)


# Blocks and how much the error of each weight counts, float32 [blocks, weights of a block] each.
Fit = Callable[[np.ndarray, np.ndarray], ValueGrid]
# Codes, uint8 [blocks, weights of a block] or [blocks, groups, weights of a group] -> their bytes [blocks, bytes].
Packer = Callable[[np.ndarray], np.ndarray]


def round_to(
    form: str, values: np.ndarray, importance: np.ndarray | None = None, factor: np.ndarray | None = None
) -> np.ndarray:
    """uint8 [nbytes] of a matrix in a format.

    Args:
        values: float32 [rows, cols], finite.
        importance: float32 [cols], positive: how much an error in a column counts; None: all the same.
        factor: float32 [cols, cols], as `inverse_factor` gives it; None: errors stay where they are. Formats that no
            scales are searched for (Q8_0, and what is no block format) leave them there too.
    """
    if form not in _FITS:
        return formats.get(form).quantize(values)
    block, fit = formats.get(form).block, _FITS[form]
    values = np.ascontiguousarray(values, np.float32)
    if factor is not None:
        return _round_in_turn(values, importance, factor, block, fit)
    blocks = values.reshape(-1, block)
    each_row = None if importance is None else importance.astype(np.float32).reshape(-1, block)
    step = max(1, _CHUNK // block)
    out = np.empty((len(blocks), formats.get(form).block_bytes), np.uint8)
    for start in range(0, len(blocks), step):
        part = _without_tiny(blocks[start : start + step])
        weights = _weights(part)
        if each_row is not None:
            weights *= each_row[np.arange(start, start + len(part)) % len(each_row)]
        grid = fit(part, weights)
        out[start : start + step] = grid.pack(grid.codes(part))
    return out.reshape(-1)


def searches_scales(form: str) -> bool:
    """Return whether scales are searched for in a format: in others calibration changes what columns are scaled by."""
    return form in _FITS


def inverse_factor(products: np.ndarray, damping: float = 0.01) -> np.ndarray:
    """float32 [cols, cols]: the upper triangle U with U^T U = (X^T X + d)^-1, as GPTQ uses it.

    Args:
        products: [cols, cols], X^T X of the rows X that a matrix is multiplied with.
        damping: d as a part of the mean of the diagonal: columns that a text never used have an inverse too.
    """
    damped = products.astype(np.float64)
    damped[np.diag_indices_from(damped)] += max(damping * float(np.diagonal(damped).mean()), 1e-30)
    return np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)


def _round_in_turn(
    values: np.ndarray, importance: np.ndarray | None, factor: np.ndarray, block: int, fit: Fit
) -> np.ndarray:
    residuals = values.copy()  # [rows, cols], with what errors so far have changed
    parts = []
    for start in range(0, values.shape[1], block):
        end = start + block
        part = _without_tiny(residuals[:, start:end])
        weights = _weights(part)
        if importance is not None:
            weights *= importance[start:end]
        grid = fit(part, weights)
        codes = np.empty((len(part), *grid.scale.shape[1:2], block // grid.scale.shape[1]), np.float32)
        errors = np.empty_like(part)
        group = codes.shape[2]
        for column in range(block):
            scale, minimum = (numbers[:, column // group, 0] for numbers in (grid.scale, grid.minimum))
            code = _codes(part[:, column] - minimum, scale, grid.low, grid.high)
            codes[:, column // group, column % group] = code
            behind = factor[start + column, start + column : end]  # of this column, then of those behind it
            errors[:, column] = (part[:, column] - (scale * code + minimum)) / behind[0]
            part[:, column + 1 :] -= errors[:, column, None] * behind[1:]
        residuals[:, end:] -= errors @ factor[start:end, end:]
        parts.append(grid.pack(codes))
    return np.concatenate(parts, axis=1).reshape(-1)


def _without_tiny(blocks: np.ndarray) -> np.ndarray:
    return np.where(np.abs(blocks).max(axis=1, keepdims=True) < _TINY, np.float32(0), blocks)


def _weights(blocks: np.ndarray) -> np.ndarray:
    """float32 [blocks, block]: how much the error of a weight counts; nowhere 0, so that all sums can be divided by."""
    squares = blocks * blocks
    mean = squares.mean(axis=1, keepdims=True)
    return np.sqrt(mean + squares) + np.float32(1e-20)


def _symmetric(groups: np.ndarray, weights: np.ndarray, low: int, high: int) -> np.ndarray:
    """float32 [..., 1]: the scale of each group [..., n] with codes low..high (low = -high - 1)."""
    at = np.abs(groups).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(groups, at, axis=-1)
    weighted = weights * groups
    best = np.full(extreme.shape, -1, np.float32)
    scale = np.zeros_like(extreme)
    for delta in _SYMMETRIC_STEPS:
        codes = np.rint(groups * ((np.float32(low) + delta) * inverse(extreme)))
        np.clip(codes, low, high, out=codes)
        dot = np.einsum("...i,...i->...", weighted, codes)[..., None]
        norm = np.einsum("...i,...i,...i->...", weights, codes, codes)[..., None]
        gain = dot * dot * inverse(norm)  # what the best scale for these codes takes off the error
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better, dot * inverse(norm), scale)
    return scale


def _affine(groups: np.ndarray, weights: np.ndarray, top: int, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """float32 [..., 1] each: scale and minimum of groups [..., n] with codes 0..top. signed: minima may be above 0."""
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    low = low if signed else np.minimum(low, 0)
    sum_w = weights.sum(axis=-1, keepdims=True)
    weighted = weights * groups
    sum_x = weighted.sum(axis=-1, keepdims=True)
    best = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), low.copy()
    for delta in _AFFINE_STEPS:
        codes = np.rint((groups - low) * ((np.float32(top) + delta) * inverse(high - low)))
        np.clip(codes, 0, top, out=codes)
        coded = weights * codes
        sum_l = coded.sum(axis=-1, keepdims=True)
        sum_l2 = np.einsum("...i,...i->...", coded, codes)[..., None]
        sum_xl = np.einsum("...i,...i->...", weighted, codes)[..., None]
        determinant = sum_w * sum_l2 - sum_l * sum_l
        d = (sum_w * sum_xl - sum_x * sum_l) * inverse(determinant)
        m = (sum_l2 * sum_x - sum_l * sum_xl) * inverse(determinant)
        if not signed:
            free = m <= 0
            d, m = np.where(free, d, sum_xl * inverse(sum_l2)), np.where(free, m, 0)
        error = groups - d * codes
        error -= m
        error *= error
        loss = np.einsum("...i,...i->...", weights, error)[..., None]
        better = (loss < best) & (d > 0)
        best = np.where(better, loss, best)
        scale, minimum = np.where(better, d, scale), np.where(better, m, minimum)
    return scale, minimum


def _codes(values: np.ndarray, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    codes = np.rint(values * inverse(scale))
    return np.clip(codes, low, high, out=codes)


def _stored(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the values [blocks, 1] as float16, and the float32 values that are read back."""
    data = half_bytes(np.ascontiguousarray(values))
    return data, half(data, 0)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[:, :16] | (codes[:, 16:] << np.uint8(4))


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 32] -> uint8 [blocks, 4]: bit i of the 32 is the fifth bit of code i."""
    return np.packbits((codes >> np.uint8(4)) & np.uint8(1), axis=1, bitorder="little")


def _flat(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(len(codes), -1).astype(np.uint8)


def _symmetric_block(blocks: np.ndarray, weights: np.ndarray, high: int, codes_of: Packer) -> ValueGrid:
    """Q4_0, Q5_0: a scale before the codes, which are stored as numbers from 0."""
    data, scale = _stored(_symmetric(blocks, weights, -high - 1, high))

    def pack(codes: np.ndarray) -> np.ndarray:
        return np.concatenate([data, codes_of(_flat(codes + (high + 1)))], axis=1)

    scale = scale[:, None]
    return ValueGrid(scale, np.zeros_like(scale), -high - 1, high, pack)


def _affine_block(blocks: np.ndarray, weights: np.ndarray, top: int, codes_of: Packer) -> ValueGrid:
    """Q4_1, Q5_1: a scale and a minimum before the codes."""
    scale, minimum = _affine(blocks, weights, top, signed=True)
    (scale_data, scale), (minimum_data, minimum) = _stored(scale), _stored(minimum)

    def pack(codes: np.ndarray) -> np.ndarray:
        return np.concatenate([scale_data, minimum_data, codes_of(_flat(codes))], axis=1)

    return ValueGrid(scale[:, None], minimum[:, None], 0, top, pack)


def _pack_fives(codes: np.ndarray) -> np.ndarray:
    return np.concatenate([_fifth_bits(codes), _pack_nibbles(codes & np.uint8(15))], axis=1)


def _q4_0(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    return _symmetric_block(blocks, weights, 7, _pack_nibbles)


def _q5_0(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    return _symmetric_block(blocks, weights, 15, _pack_fives)


def _q4_1(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    return _affine_block(blocks, weights, 15, _pack_nibbles)


def _q5_1(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    return _affine_block(blocks, weights, 31, _pack_fives)


def _affine_k(blocks: np.ndarray, weights: np.ndarray, top: int, codes_of: Packer) -> ValueGrid:
    """Q4_K, Q5_K: 16 bytes before the codes."""
    groups, w = blocks.reshape(-1, 8, 32), weights.reshape(-1, 8, 32)
    scale, minimum = (part[..., 0] for part in _affine(groups, w, top, signed=False))  # [blocks, 8]
    d = scale.max(axis=1, keepdims=True) / np.float32(63)
    dmin = (-minimum).max(axis=1, keepdims=True) / np.float32(63)
    scales, minima = _codes(scale, d, 0, 63), _codes(-minimum, dmin, 0, 63)
    codes = _codes(groups + (dmin * minima)[..., None], (d * scales)[..., None], 0, top)
    d, dmin = _upper_scales(groups, w, codes * scales[..., None], minima)
    (d_data, d), (dmin_data, dmin) = _stored(d), _stored(dmin)
    packed = _pack_scales(scales.astype(np.uint8), minima.astype(np.uint8))

    def pack(codes: np.ndarray) -> np.ndarray:
        return np.concatenate([d_data, dmin_data, packed, codes_of(codes.astype(np.uint8))], axis=1)

    return ValueGrid((d * scales)[..., None], -(dmin * minima)[..., None], 0, top, pack)


def _upper_scales(
    groups: np.ndarray, w: np.ndarray, a: np.ndarray, minima: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """d and dmin of blocks whose weights are d * a - dmin * minima, least squares over each block; neither below 0."""
    b = np.broadcast_to(minima[..., None], a.shape)
    aa, ab, bb, ax, bx = (
        np.einsum("ngi,ngi,ngi->n", w, first, second)[:, None]
        for first, second in ((a, a), (a, b), (b, b), (a, groups), (b, groups))
    )
    determinant = aa * bb - ab * ab
    alone = ax * inverse(aa)
    solvable = determinant > np.float32(1e-6) * aa * bb
    d = np.where(solvable, (ax * bb - ab * bx) * inverse(determinant), alone)
    dmin = np.where(solvable, (ab * ax - aa * bx) * inverse(determinant), 0)
    fits = (d > 0) & (dmin >= 0)
    return np.where(fits, d, np.maximum(alone, 0)), np.where(fits, dmin, 0)


def _pack_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 12], as `blocks256.affine_scales` reads them."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=1)


def _nibble_groups(codes: np.ndarray) -> np.ndarray:
    pairs = (codes & np.uint8(15)).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(-1, 128)


def _fifths_and_nibbles(codes: np.ndarray) -> np.ndarray:
    fifth = np.bitwise_or.reduce((codes >> np.uint8(4)) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.concatenate([fifth, _nibble_groups(codes)], axis=1)


def _q4_k(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    return _affine_k(blocks, weights, 15, _nibble_groups)


def _q5_k(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    return _affine_k(blocks, weights, 31, _fifths_and_nibbles)


def _q6_k(blocks: np.ndarray, weights: np.ndarray) -> ValueGrid:
    groups, w = blocks.reshape(-1, 16, 16), weights.reshape(-1, 16, 16)
    scale = _symmetric(groups, w, -32, 31)[..., 0]  # [blocks, 16], signed
    at = np.abs(scale).argmax(axis=1)[:, None]
    d = np.take_along_axis(scale, at, axis=1) / np.float32(-128)
    scales = _codes(scale, d, -128, 127)
    codes = _codes(groups, (d * scales)[..., None], -32, 31)
    products = codes * scales[..., None]
    dot = np.einsum("ngi,ngi,ngi->n", w, products, groups)[:, None]
    norm = np.einsum("ngi,ngi,ngi->n", w, products, products)[:, None]
    data, d = _stored(np.where(norm > 0, dot * inverse(norm), d))

    def pack(codes: np.ndarray) -> np.ndarray:
        codes = (codes + 32).astype(np.uint8).reshape(-1, 256)
        halves = (codes & np.uint8(15)).reshape(-1, 2, 2, 64)
        low = (halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))).reshape(-1, 128)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
        high = np.bitwise_or.reduce((codes >> np.uint8(4)).reshape(-1, 2, 4, 32) << shifts, axis=2).reshape(-1, 64)
        return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), data], axis=1)

    scale = (d * scales)[..., None]
    return ValueGrid(scale, np.zeros_like(scale), -32, 31, pack)


_FITS: dict[str, Fit] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
