// What is done to a row at a time: norm, quantisation, gate, rope.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// ---- rows: norm, quantisation, gate, rope ----------------------------------------------------------------------------

// Order "lanes16": sixteen virtual lanes, then the fixed tree.
static void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    F32 sum = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        F32 v = load(x + i);
        sum = fma(v, v, sum);
    }
    const Mask tail = mask_of((1u << (n - i)) - 1);
    if (i < n) {
        F32 v = load_masked(x + i, tail);
        sum = fma(v, v, sum);
    }
    const F32 inv = set1(1.0f / std::sqrt(reduce_add(sum) / (float)n + eps));
    if (!weight) {
        for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(load(x + i), inv));
        if (i < n) store_masked(out + i, tail, mul(load_masked(x + i, tail), inv));
        return;
    }
    for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), inv), load(weight + i)));
    if (i < n) store_masked(out + i, tail, mul(mul(load_masked(x + i, tail), inv), load_masked(weight + i, tail)));
}

// Order "lanes16" twice: the mean, then the variance around it. Lanes behind the end add nothing to either.
static void layer_norm(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out) {
    const int64_t whole = n / 16 * 16;
    const Mask tail = mask_of((1u << (n - whole)) - 1);
    F32 sum = zero(), squares = zero();
    for (int64_t i = 0; i < whole; i += 16) sum = add(sum, load(x + i));
    if (whole < n) sum = add(sum, load_masked(x + whole, tail));
    const F32 mean = set1(reduce_add(sum) / (float)n);
    for (int64_t i = 0; i < whole; i += 16) {
        const F32 d = sub(load(x + i), mean);
        squares = fma(d, d, squares);
    }
    if (whole < n) {
        const F32 d = select(tail, sub(load_masked(x + whole, tail), mean), zero());
        squares = fma(d, d, squares);
    }
    const F32 inv = set1(1.0f / std::sqrt(reduce_add(squares) / (float)n + eps));
    for (int64_t i = 0; i < whole; i += 16) {
        const F32 normed = mul(sub(load(x + i), mean), inv), w = load(weight + i);
        store(out + i, bias ? fma(normed, w, load(bias + i)) : mul(normed, w));
    }
    if (whole == n) return;
    const F32 normed = mul(sub(load_masked(x + whole, tail), mean), inv), w = load_masked(weight + whole, tail);
    store_masked(out + whole, tail, bias ? fma(normed, w, load_masked(bias + whole, tail)) : mul(normed, w));
}

// Order "lanes16", as layer_norm: the mean, then the variance around it; then max(0, x - (mean + z * deviation)).
static void above_spread(const float* x, float z, int64_t n, float* out) {
    const int64_t whole = n / 16 * 16;
    const Mask tail = mask_of((1u << (n - whole)) - 1);
    F32 sum = zero(), squares = zero();
    for (int64_t i = 0; i < whole; i += 16) sum = add(sum, load(x + i));
    if (whole < n) sum = add(sum, load_masked(x + whole, tail));
    const float mean = reduce_add(sum) / (float)n;
    const F32 middle = set1(mean);
    for (int64_t i = 0; i < whole; i += 16) {
        const F32 d = sub(load(x + i), middle);
        squares = fma(d, d, squares);
    }
    if (whole < n) {
        const F32 d = select(tail, sub(load_masked(x + whole, tail), middle), zero());
        squares = fma(d, d, squares);
    }
    const float spread = std::sqrt(reduce_add(squares) / (float)n) * z;  // a product by itself: no FMA
    const F32 bound = set1(mean + spread);
    for (int64_t i = 0; i < whole; i += 16) store(out + i, relu(sub(load(x + i), bound)));
    if (whole < n) store_masked(out + whole, tail, relu(sub(load_masked(x + whole, tail), bound)));
}

// Order "lanes16": the mean square of a row.
static inline float mean_square(const float* x, int64_t n) {
    F32 sum = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const F32 v = load(x + i);
        sum = fma(v, v, sum);
    }
    if (i < n) {
        const F32 v = load_masked(x + i, mask_of((1u << (n - i)) - 1));
        sum = fma(v, v, sum);
    }
    return reduce_add(sum) / (float)n;
}

// x * sqrt(mean square of y) / sqrt(that of x, at least 1e-5), the product rounded before it is divided.
static void like_norm(const float* x, const float* y, int64_t n, float* out) {
    const float own = mean_square(x, n), least = 1e-5f;
    const F32 length = set1(std::sqrt(mean_square(y, n))), divisor = set1(std::sqrt(own < least ? least : own));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, div(mul(load(x + i), length), divisor));
    if (i == n) return;
    const Mask tail = mask_of((1u << (n - i)) - 1);
    store_masked(out + i, tail, div(mul(load_masked(x + i, tail), length), divisor));
}

// q to bytes, or to a high and a low digit: q = 128 * high + low, low in [-64, 63].
static inline void store_digits(const Panel& out, int64_t at, I32 q) {
    if (!out.low) return store_s8(out.q + at, q);
    const I32 high = isra<7>(iadd(q, iset1(64)));
    store_s8(out.q + at, high);
    store_s8(out.low + at, isub(q, ishl<7>(high)));
}

static void quantise(const float* x, const Quantised& all, int64_t row) {
    const Panel out = all.panel(row / Quantised::kPanel);
    const int64_t groups = all.k / 32;
    const float limit = out.low ? 127.0f * 128.0f : 127.0f;
    int64_t at = row % Quantised::kPanel;
    for (int64_t g = 0; g < groups; g++, at += out.tokens) {
        F32 a = load(x + g * 32), b = load(x + g * 32 + 16);
        F32 top = max(abs(a), abs(b));
        const float amax = reduce_max(top);
        const bool finite = bits(less(abs(a), set1(infinity()))) == 0xffffu && bits(less(abs(b), set1(infinity()))) == 0xffffu;
        const float scale = finite ? amax / limit : quiet_nan();  // a NaN stays visible in every output of the row
        const F32 inv = set1(scale > 0.0f ? limit / amax : 0.0f);  // a scale flushed to 0 takes no q: the quotient may be infinite
        I32 qa = to_int(mul(a, inv)), qb = to_int(mul(b, inv));
        if (!finite) qa = qb = izero();
        store_digits(out, at * 32, qa);
        store_digits(out, at * 32 + 16, qb);
        int32_t sa, sb;
        sums(qa, qb, sa, sb);
        out.scale[at] = scale;
        out.sum[at] = scale * (float)(sa + sb);
        out.isum[at * 2] = sa;
        out.isum[at * 2 + 1] = sb;
    }
}

// out = f of the elements of each input, sixteen at a time; out may be an input.
template <class F, class... Inputs>
static inline void element_wise(F f, int64_t n, float* out, const Inputs*... inputs) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, f(load(inputs + i)...));
    if (i == n) return;
    const Mask tail = mask_of((1u << (n - i)) - 1);
    store_masked(out + i, tail, f(load_masked(inputs + i, tail)...));
}

template <F32 activation(F32)>
static void activate(const float* x, const float* up, int64_t n, float* out) {
    if (up) element_wise([](F32 v, F32 w) { return mul(activation(v), w); }, n, out, x, up);
    else element_wise([](F32 v) { return activation(v); }, n, out, x);
}

static void activate(Activation kind, const float* x, const float* up, int64_t n, float* out) {
    switch (kind) {
        case Activation::Silu: return activate<silu>(x, up, n, out);
        case Activation::Gelu: return activate<gelu_exact>(x, up, n, out);
        case Activation::GeluTanh: return activate<gelu_tanh>(x, up, n, out);
        case Activation::Relu: return activate<relu>(x, up, n, out);
        case Activation::ReluSquared: return activate<relu_squared>(x, up, n, out);
    }
}

static void add(const float* x, const float* y, int64_t n, float* out) {
    element_wise([](F32 v, F32 w) { return add(v, w); }, n, out, x, y);
}

static void scale(const float* x, float factor, int64_t n, float* out) {
    const F32 f = set1(factor);
    element_wise([f](F32 v) { return mul(v, f); }, n, out, x);
}

static void soft_cap(const float* x, float cap, int64_t n, float* out) {
    const F32 c = set1(cap);
    element_wise([c](F32 v) { return capped(v, c); }, n, out, x);
}

// Rotation in separately rounded products, as the reference writes it. Vectors of the type above only: left to itself, gcc
// 12 turns an interleaved scalar loop into fmaddsub even under -ffp-contract=off.
static void rotate(const Rope& r, const float* x, int32_t position, float* out) {
    const int half = r.rotated / 2, whole = half / 16 * 16;
    const float *cos = r.table + (int64_t)position * r.rotated, *sin = cos + half;
    for (int i = r.rotated; i < r.head_dim; i++) out[i] = x[i];
    for (int i = 0; i < whole; i += 16) {
        const F32 c = load(cos + i), s = load(sin + i);
        F32 a, b;
        if (r.interleaved) load_pairs(x + 2 * i, a, b);
        else a = load(x + i), b = load(x + half + i);
        const F32 first = sub(mul(a, c), mul(b, s)), second = add(mul(b, c), mul(a, s));
        if (r.interleaved) store_pairs(out + 2 * i, first, second);
        else store(out + i, first), store(out + half + i, second);
    }
    if (whole == half) return;
    float first[16] = {0}, second[16] = {0};
    for (int i = whole; i < half; i++) {
        first[i - whole] = x[r.interleaved ? 2 * i : i];
        second[i - whole] = x[r.interleaved ? 2 * i + 1 : i + half];
    }
    const Mask m = mask_of((1u << (half - whole)) - 1);
    const F32 c = load_masked(cos + whole, m), s = load_masked(sin + whole, m), a = load(first), b = load(second);
    store(first, sub(mul(a, c), mul(b, s)));
    store(second, add(mul(b, c), mul(a, s)));
    for (int i = whole; i < half; i++) {
        out[r.interleaved ? 2 * i : i] = first[i - whole];
        out[r.interleaved ? 2 * i + 1 : i + half] = second[i - whole];
    }
}

// A head normed and rotated where that is asked for: it lies in `made`, or is `head` itself.
static const float* turned(const Rope& r, const float* norm, const float* head, int32_t position, float (&made)[kMostHeadDim]) {
    float normed[kMostHeadDim];
    if (norm && r.table && r.norm_last) {
        rotate(r, head, position, normed);
        rms_norm(normed, norm, r.head_dim, r.eps, made);
        return made;
    }
    if (norm) rms_norm(head, norm, r.head_dim, r.eps, r.table ? normed : made), head = r.table ? normed : made;
    if (!r.table) return head;
    rotate(r, head, position, made);
    return made;
}

// The last elements of a head that is no multiple of sixteen, from `i` on, and zeros behind them.
static inline F32 load_tail(const float* x, int64_t i, int64_t n) { return load_masked(x + i, mask_of((1u << (n - i)) - 1)); }

static void rope_query(const Rope& r, const float* head, int32_t position, uint16_t* out) {
    float made[kMostHeadDim];
    head = turned(r, r.q_norm, head, position, made);
    const F32 factor = set1(r.q_factor), scale = set1(r.q_scale);
    int i = 0;
    for (; i + 16 <= r.head_dim; i += 16) store_bf16(out + i, mul(mul(load(head + i), factor), scale));
    if (i < r.head_dim) store_bf16(out + i, mul(mul(load_tail(head, i, r.head_dim), factor), scale));
}

static void to_bf16(const float* x, int64_t n, uint16_t* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, load(x + i));
    if (i < n) store_bf16(out + i, load_tail(x, i, n));
}

static void rope_key(const Rope& r, const float* head, int32_t position, uint16_t* out) {
    float made[kMostHeadDim];
    to_bf16(turned(r, r.k_norm, head, position, made), r.head_dim, out);
}

// A head of K or V as integers with one scale: the rule of `quantise`, over n elements.
static float to_int8(const float* x, int64_t n, int8_t* out) {
    F32 top = zero();
    bool finite = true;
    for (int64_t i = 0; i < n; i += 16) {
        const F32 a = abs(i + 16 <= n ? load(x + i) : load_tail(x, i, n));
        finite = finite && bits(less(a, set1(infinity()))) == 0xffffu;
        top = max(top, a);
    }
    const float amax = reduce_max(top), scale = finite ? amax / 127.0f : quiet_nan();
    const F32 inv = set1(scale > 0.0f ? 127.0f / amax : 0.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const F32 v = i + 16 <= n ? load(x + i) : load_tail(x, i, n);
        store_s8(out + i, finite ? to_int(mul(v, inv)) : izero());
    }
    return scale;
}

static float rope_key_int8(const Rope& r, const float* head, int32_t position, int8_t* out) {
    float made[kMostHeadDim];
    return to_int8(turned(r, r.k_norm, head, position, made), r.head_dim, out);
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
