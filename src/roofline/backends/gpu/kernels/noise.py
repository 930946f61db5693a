"""Gumbel noise on the device: the counter-based generator of backends/reference/sampling.py, bit for bit.

Its logarithm is our own, the C++ core's, of multiply-adds that nothing reorders: a chip's own is too coarse near 1,
where the ids that win have theirs.
"""

import triton
import triton.language as tl


@triton.jit
def noise_key(seed_low, seed_high, sample_index, position):
    """uint64 key of a row; the arguments are int32 scalars, a 64-bit seed in two halves."""
    counter = (_unsigned(sample_index) << 32) | _unsigned(position)
    z = ((_unsigned(seed_high) << 32) | _unsigned(seed_low)) + 0x9E3779B97F4A7C15 * (counter + 1)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _unsigned(x):
    return x.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def noise_bits(key, ids):
    """uint32 bits of each id (int32)."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    return _mix(_mix(ids.to(tl.uint32, bitcast=True) ^ low) + high)


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def gumbel(key, ids):
    """float32 noise of each id: -log(E), E = -log(1 - u) with a correction for what 1 - u rounds away."""
    u = tl.fma(noise_bits(key, ids).to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)  # 2^-32, 2^-33
    y = tl.maximum(1.0 - u, 2.9802322387695312e-08)  # 2^-25
    exponential = _log(y) + tl.div_rn((1.0 - y) - u, y)
    return -_log(-exponential)


@triton.jit
def _log(x):
    """Natural logarithm of a positive normal number (Cephes' polynomial), about 2 ulp: native/elementary_impl.h."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    m = ((bits & 0x007FFFFF) + 0x3F000000).to(tl.float32, bitcast=True)  # [0.5, 1)
    low = m < 0.7071067811865475
    exponent = tl.where(low, exponent - 1.0, exponent)
    m = tl.where(low, m + m, m) - 1.0
    z = m * m
    p = tl.fma(7.0376836292e-2, m, -1.1514610310e-1)
    p = tl.fma(p, m, 1.1676998740e-1)
    p = tl.fma(p, m, -1.2420140846e-1)
    p = tl.fma(p, m, 1.4249322787e-1)
    p = tl.fma(p, m, -1.6668057665e-1)
    p = tl.fma(p, m, 2.0000714765e-1)
    p = tl.fma(p, m, -2.4999993993e-1)
    p = tl.fma(p, m, 3.3333331174e-1)
    y = p * m * z
    y = tl.fma(exponent, -2.12194440e-4, y)
    y = tl.fma(z, -0.5, y)
    return tl.fma(exponent, 0.693359375, m + y)
