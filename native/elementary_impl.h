// exp2, log and silu, the only elementary functions of the kernels.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is meant.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace roofline {
namespace ISA_NAMESPACE {

// 2^x for x in [-126, 126], 0 below: round to the nearest integer, degree-6 polynomial on [-1/2, 1/2].
static inline F32 exp2(F32 x) {
    F32 n = round_even(x), f = sub(x, n);
    F32 p = set1(0x1.430912p-13f);
    p = fma(p, f, set1(0x1.5d87fep-10f));
    p = fma(p, f, set1(0x1.3b2ab6p-7f));
    p = fma(p, f, set1(0x1.c6b08ep-5f));
    p = fma(p, f, set1(0x1.ebfbdap-3f));
    p = fma(p, f, set1(0x1.62e430p-1f));
    p = fma(p, f, set1(1.0f));
    F32 scaled = mul(p, as_float(ishl<23>(iadd(to_int(n), iset1(127)))));
    return select(less(x, set1(-126.0f)), zero(), scaled);
}

// Natural logarithm of a positive normal number (Cephes' polynomial), about 2 ulp.
static inline F32 log(F32 x) {
    I32 bits = as_int(x);
    F32 e = to_float(isub(ishr<23>(bits), iset1(126)));
    F32 m = as_float(iadd(iand(bits, iset1(0x007fffff)), iset1(0x3f000000)));  // [0.5, 1)
    Mask low = less(m, set1(0.707106781186547524f));
    e = select(low, sub(e, set1(1.0f)), e);
    m = sub(select(low, add(m, m), m), set1(1.0f));
    F32 z = mul(m, m), p = set1(7.0376836292e-2f);
    p = fma(p, m, set1(-1.1514610310e-1f));
    p = fma(p, m, set1(1.1676998740e-1f));
    p = fma(p, m, set1(-1.2420140846e-1f));
    p = fma(p, m, set1(1.4249322787e-1f));
    p = fma(p, m, set1(-1.6668057665e-1f));
    p = fma(p, m, set1(2.0000714765e-1f));
    p = fma(p, m, set1(-2.4999993993e-1f));
    p = fma(p, m, set1(3.3333331174e-1f));
    F32 y = mul(mul(p, m), z);
    y = fma(e, set1(-2.12194440e-4f), y);
    y = fma(z, set1(-0.5f), y);
    return fma(e, set1(0.693359375f), add(m, y));
}

static inline F32 silu(F32 x) {
    F32 t = mul(sub(zero(), x), set1(0x1.715476p+0f));
    t = min(max(t, set1(-126.0f)), set1(126.0f));
    return div(x, add(set1(1.0f), exp2(t)));
}

static inline float quiet_nan() { return std::numeric_limits<float>::quiet_NaN(); }
static inline float infinity() { return std::numeric_limits<float>::infinity(); }

}  // namespace ISA_NAMESPACE
}  // namespace roofline
