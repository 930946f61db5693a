// exp2, log, silu, sigmoid, softplus, gelu, relu and its square, the only elementary functions of the kernels.
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

// Where exp2 is right on both sides; in this order a NaN stays one.
static inline F32 within_exp2(F32 t) { return min(set1(126.0f), max(set1(-126.0f), t)); }

static inline F32 sigmoid(F32 x) {
    const F32 t = within_exp2(mul(sub(zero(), x), set1(0x1.715476p+0f)));
    return div(set1(1.0f), add(set1(1.0f), exp2(t)));
}

// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|; what 1 + t rounds away is put back: log(w) + (t - (w - 1)) / w.
static inline F32 softplus(F32 x) {
    const F32 one = set1(1.0f), t = exp2(mul(sub(zero(), abs(x)), set1(0x1.715476p+0f))), w = add(one, t);
    return add(max(x, zero()), add(log(w), div(sub(t, sub(w, one)), w)));
}

static inline F32 silu(F32 x) {
    F32 t = mul(sub(zero(), x), set1(0x1.715476p+0f));
    t = min(max(t, set1(-126.0f)), set1(126.0f));
    return div(x, add(set1(1.0f), exp2(t)));
}

// P(X < -a) of a standard normal X, for a >= 0: 2^(p(a) - a^2 log2(e) / 2); p (ops/normal_tail.py) is fitted on [0, 6].
static inline F32 normal_tail(F32 a) {
    const F32 z = min(set1(6.0f), a);  // in this order a NaN stays one
    F32 p = set1(-0x1.3e0cf2p-26f);
    p = fma(p, z, set1(0x1.3da6fcp-21f));
    p = fma(p, z, set1(-0x1.0ef3a2p-17f));
    p = fma(p, z, set1(0x1.f2ba5ep-15f));
    p = fma(p, z, set1(-0x1.cebe2ep-13f));
    p = fma(p, z, set1(-0x1.0257bep-13f));
    p = fma(p, z, set1(0x1.d13032p-8f));
    p = fma(p, z, set1(-0x1.ae70b6p-5f));
    p = fma(p, z, set1(0x1.0c73d8p-2f));
    p = fma(p, z, set1(-0x1.26af0ap+0f));
    p = fma(p, z, set1(-0x1.fffffep-1f));
    return exp2(fma(mul(a, a), set1(-0x1.715476p-1f), p));
}

// x P(X < x), as max(x, 0) - |x| P(X < -|x|): on either side the smaller part is the one that is computed.
static inline F32 gelu_exact(F32 x) {
    const F32 a = min(set1(100.0f), abs(x));  // infinity would meet a tail of 0
    return fma(sub(zero(), a), normal_tail(a), max(zero(), x));
}

// x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3): what x (1 + tanh(u)) / 2 equals.
static inline F32 gelu_tanh(F32 x) {
    F32 t = mul(x, fma(mul(x, x), set1(-0x1.a5a7d0p-4f), set1(-0x1.26aec2p+1f)));
    t = min(max(t, set1(-126.0f)), set1(126.0f));
    return div(x, add(set1(1.0f), exp2(t)));
}

// The second operand is what comes of a NaN.
// The sum turns a subnormal into zero where threads flush them: a comparison alone does so on x86 and not on aarch64.
static inline F32 relu(F32 x) { return max(zero(), add(x, zero())); }

static inline F32 relu_squared(F32 x) {
    const F32 r = relu(x);
    return mul(r, r);
}

// cap * tanh(x / cap), with tanh(u) = 1 - 2 / (e^(2u) + 1).
static inline F32 capped(F32 x, F32 cap) {
    F32 t = mul(mul(set1(2.0f), div(x, cap)), set1(0x1.715476p+0f));
    t = min(max(t, set1(-126.0f)), set1(126.0f));
    return mul(cap, sub(set1(1.0f), div(set1(2.0f), add(exp2(t), set1(1.0f)))));
}

static inline float quiet_nan() { return std::numeric_limits<float>::quiet_NaN(); }
static inline float infinity() { return std::numeric_limits<float>::infinity(); }

}  // namespace ISA_NAMESPACE
}  // namespace roofline
