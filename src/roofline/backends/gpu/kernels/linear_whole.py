"""The loop of a quantised product where nothing is left over, for chips whose matrix units 4 lanes feed (NVIDIA's).

w is the first operand and x the second, [chunks, rows of w, 32] x [chunks, 32, rows of x]: a row of x is a column, so
eight are enough for a tile. Warps share chunks, not rows: nothing is unpacked twice, and sums of chunks are added once,
at the end. What a word of codes unpacks to is what its lane multiplies (`order` in backends/gpu/pack.py), and rows of a
tile are numbered so that a lane's scales lie side by side: in the loop nothing goes through shared memory but what is
loaded. Only the assembly says whether the compiler sees it so. It did not where scales were computed before their rows
were put in the tile's order (two barriers more), nor where the ones were not joined (x loaded and stored by hand).
"""

import triton
import triton.language as tl


@triton.jit
def code_pairs(packed, high, base, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """Return base + code as bits of 16-bit floats by twos, int32 [chunks, rows, lane, nibble].

    packed: int32 [chunks, rows, 4]; high: int32 [chunks, rows], with 6 bits [chunks, rows, 2]. base: the power of two
    in both halves of an int32. It is an argument of the kernel because an instruction that masks and sets bits has room
    for one constant.
    """
    nibble = tl.arange(0, 4)
    # Bits that are 0 are set by "xor": "or" is reordered, and takes half as many instructions more.
    pairs = (((packed[:, :, :, None] >> (4 * nibble)) & 0x000F000F) << SHIFT) | base  # [groups, rows, lane, nibble]
    if BITS == 5:
        lane = high[:, :, None] >> (4 * tl.arange(0, 4))
        pairs ^= (lane[:, :, :, None] << (4 + SHIFT - nibble)) & (0x00010001 << (4 + SHIFT))
    if BITS == 6:
        lane = high[:, :, None, :] >> (4 * tl.arange(0, 4))[None, None, :, None]
        up = (lane[:, :, :, :, None] << (4 + SHIFT - 2 * tl.arange(0, 2))) & (0x00030003 << (4 + SHIFT))
        pairs ^= tl.reshape(up, (packed.shape[0], packed.shape[1], 4, 4))
    return pairs


@triton.jit
def _values(packed, high, base, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """The same in the order of columns, int16 [chunks, rows, 32]."""
    G: tl.constexpr = packed.shape[0]
    N: tl.constexpr = packed.shape[1]
    pairs = code_pairs(packed, high, base, BITS, SHIFT)
    joined = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))  # the codes of a lane are (nibble, half)
    return tl.reshape(tl.permute(tl.reshape(joined, (G, N, 4, 2, 4)), (0, 1, 3, 2, 4)), (G, N, 32))


@triton.jit
def _all(value: tl.constexpr, dtype: tl.constexpr, G: tl.constexpr, N: tl.constexpr):
    """One value in [groups, rows, 32]. Joined as `_values` are: x is then read once, in the order of their lanes."""
    half = tl.full((G, N, 16), value, tl.float32).to(dtype)
    return tl.reshape(tl.join(half, half), (G, N, 32))


@triton.jit
def _in_tile(values, G: tl.constexpr, N: tl.constexpr):
    """[groups, rows] in the rows' own order -> in the tile's: N / 8 rows that follow one another are one lane's."""
    return tl.reshape(tl.permute(tl.reshape(values, (G, 8, N // 8)), (0, 2, 1)), (G, N))


@triton.jit
def _halves(packed, G: tl.constexpr, N: tl.constexpr):
    """float16 by twos, int32 [groups, rows / 2] -> float32 [groups, rows]: a copy ahead takes 4 bytes at least."""
    bits = tl.reshape((packed[:, :, None] >> (16 * tl.arange(0, 2))).to(tl.int16), (G, N))
    return _in_tile(bits, G, N).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _row(start, i, results, HALF: tl.constexpr):
    """Row of w of the tile's i-th in their own order: HALF of them from `start` on, the others `results` further."""
    return start + i % HALF + i // HALF * results


@triton.jit
def _scales(
    plane, upper, first, start, columns, results, G: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr,
    EACH: tl.constexpr, TWO_LEVEL: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Scales (or minima) times FACTOR of G chunks, float32 [chunks, rows of the tile], of EACH groups a chunk with
    another dimension for them; two levels: the chunks are one block of 256."""
    word: tl.constexpr = tl.pointer_type(tl.int32)
    pair = _row(start // 2, tl.arange(0, N // 2), results // 2, HALF // 2)[None, :]  # the compiler sees them in a row
    if TWO_LEVEL:
        four = _row(start // 4, tl.arange(0, N // 4), results // 4, HALF // 4)[None, :]
        at = (EACH * first + tl.arange(0, EACH * G))[:, None] * (columns // 4) + four
        packed = tl.load(plane.to(word, bitcast=True) + at)
        signed = tl.reshape((packed[:, :, None] << (24 - 8 * tl.arange(0, 4))) >> 24, (EACH * G, N))
        signed = _in_tile(signed, EACH * G, N).to(tl.float32)
        packed = tl.load(upper.to(word, bitcast=True) + first // G * (columns // 2) + pair)
        scales = signed * (_halves(packed, 1, N) * FACTOR)
        if EACH == 2:
            scales = tl.permute(tl.reshape(scales, (G, EACH, N)), (0, 2, 1))
    else:
        at = (first + tl.arange(0, G))[:, None] * (columns // 2) + pair
        scales = _halves(tl.load(plane.to(word, bitcast=True) + at), G, N) * FACTOR
    return scales


@triton.jit
def whole_product(
    x, words, high, scale, minimum, super_scale, super_minimum,
    row, start, results, rows, columns, chunks, stride, base,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BASE: tl.constexpr, BASE_SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N] in the order of `_row`; chunks of 32 columns, a multiple of G of them.

    row: int [BLOCK_M] of the result; start: first row of w; columns: rows of all of w; results: from gate to up.
    Groups of 16: a row of x is two columns of its tile: its first 16 values of a chunk, and the others.
    """
    K: tl.constexpr = 32
    EACH: tl.constexpr = K // GROUP
    T: tl.constexpr = BLOCK_M * EACH
    g, i = tl.arange(0, G), tl.arange(0, BLOCK_N)
    # Words of a chunk in the tile's order of rows, as one dimension: lanes that follow one another then copy words that
    # lie side by side. In three dimensions they went along chunks, and 32 of them met in one bank.
    word = tl.arange(0, 4 * BLOCK_N)
    near = word // 32 + word // 4 % 8 * (BLOCK_N // 8)  # place in the tile -> in the rows' own order
    column = _row(start, near, results, HALF) * 4 + word % 4
    in_x = (row < rows)[:, None]
    if EACH == 1:  # a row of a tile in one piece, for the same reason
        x_at = x + row.to(tl.int64)[:, None] * stride + tl.arange(0, G * K)[None, :]
    else:
        k = tl.arange(0, K)
        row = tl.reshape(tl.broadcast_to(row[None, :], (EACH, BLOCK_M)), (T,))
        in_x = ((row < rows)[:, None] & (k[None, :] // GROUP == (tl.arange(0, T) // BLOCK_M)[:, None]))[None, :, :]
        x_at = x + row.to(tl.int64)[None, :, None] * stride + (g * K)[:, None, None] + k[None, None, :]
    w_at = g.to(tl.int64)[:, None] * columns * 4 + column[None, :]
    acc = tl.zeros((G, BLOCK_N, T), tl.float32)
    for first in tl.range(0, chunks, G, num_stages=STAGES):
        first = tl.cast(first, tl.int32)
        part = tl.load(x_at + first * K, mask=in_x, other=0.0)
        if EACH == 1:
            part = tl.permute(tl.reshape(part, (T, G, K)), (1, 2, 0))
        else:
            part = tl.permute(part, (0, 2, 1))
        packed = tl.reshape(tl.load(words + first.to(tl.int64) * columns * 4 + w_at), (G, BLOCK_N, 4))
        upper = packed
        if BITS == 5 or BITS == 6:
            at = EACH * (first + g)[:, None] * columns + _row(start, i, results, HALF)[None, :]
            upper = _in_tile(tl.load(high + at), G, BLOCK_N)
            if BITS == 6:
                upper = tl.join(upper, _in_tile(tl.load(high + at + columns), G, BLOCK_N))
        values = _values(packed, upper, base, BITS, BASE_SHIFT).to(part.dtype, bitcast=True)
        # What BASE and ZERO add to a group's product: that often the sum of its x, which the minimum needs as well.
        offset: tl.constexpr = -BASE if HAS_MINIMUM else -(BASE + ZERO)
        total = tl.dot(_all(offset, part.dtype, G, BLOCK_N), part, input_precision="ieee")
        product = tl.dot(values, part, total, input_precision="ieee")
        s = _scales(scale, super_scale, first, start, columns, results, G, BLOCK_N, HALF, EACH, TWO_LEVEL, 1.0)
        if EACH == 2:
            s = tl.reshape(tl.broadcast_to(s[:, :, :, None], (G, BLOCK_N, EACH, BLOCK_M)), (G, BLOCK_N, T))
        else:
            s = tl.broadcast_to(s[:, :, None], (G, BLOCK_N, T))
        acc = tl.fma(product, s, acc)
        if HAS_MINIMUM:
            factor: tl.constexpr = 1.0 / BASE if TWO_LEVEL else -1.0 / BASE
            m = _scales(
                minimum, super_minimum, first, start, columns, results, G, BLOCK_N, HALF, EACH, TWO_LEVEL, factor
            )  # fmt: skip
            acc = tl.fma(total, tl.broadcast_to(m[:, :, None], (G, BLOCK_N, BLOCK_M)), acc)
    sums = tl.sum(acc, axis=0)
    if EACH == 2:
        sums = tl.sum(tl.reshape(sums, (BLOCK_N, EACH, BLOCK_M)), axis=1)
    turned = tl.reshape(sums, (BLOCK_N // 8, 8, BLOCK_M))
    return tl.trans(tl.reshape(tl.permute(turned, (1, 0, 2)), (BLOCK_N, BLOCK_M)))
