// Ops with recurrent state: a short convolution over the last tokens, and the gated delta rule, one token after the other.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is
// meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// Order "taps": acc = fma(w[tap], x[tap], acc) from 0, the oldest row first, then + bias, then silu.
static void causal_conv(const CausalConv& c) {
    static const float zeros[kConvChannels] = {};
    const float* rows[kMostTaps];
    for (int64_t t = 0; t < c.tokens; t++) {
        for (int64_t tap = 0; tap < c.taps; tap++) {
            const int64_t row = t - (c.taps - 1) + tap;
            rows[tap] = row >= 0 ? c.x + row * c.stride : c.before ? c.before + (c.taps - 1 + row) * c.stride : zeros;
        }
        float* const y = c.y + t * c.stride;
        for (int64_t i = 0; i < c.channels; i += 16) {
            const bool whole = c.channels - i >= 16;
            const Mask mask = mask_of(whole ? 0xffffu : (1u << (c.channels - i)) - 1);
            const auto read = [&](const float* p) { return whole ? load(p + i) : load_masked(p + i, mask); };
            F32 sum = zero();
            for (int64_t tap = 0; tap < c.taps; tap++) sum = fma(read(c.weight + tap * c.stride), read(rows[tap]), sum);
            if (c.bias) sum = add(sum, read(c.bias));
            if (c.silu) sum = silu(sum);
            if (whole) store(y + i, sum);
            else store_masked(y + i, mask, sum);
        }
    }
}

// x / sqrt(sum of squares + eps) * factor; the sum in sixteen lanes, added as the fixed tree.
static void normalise(const float* x, int64_t n, float eps, float factor, float* out) {
    const int64_t whole = n / 16 * 16;
    const Mask tail = mask_of((1u << (n - whole)) - 1);
    F32 sum = zero();
    for (int64_t i = 0; i < whole; i += 16) {
        const F32 v = load(x + i);
        sum = fma(v, v, sum);
    }
    if (whole < n) {
        const F32 v = load_masked(x + whole, tail);
        sum = fma(v, v, sum);
    }
    const F32 by = set1(factor * (1.0f / std::sqrt(reduce_add(sum) + eps)));
    for (int64_t i = 0; i < whole; i += 16) store(out + i, mul(load(x + i), by));
    if (whole < n) store_masked(out + whole, tail, mul(load_masked(x + whole, tail), by));
}

// Of up to sixteen tokens: how much of the state stays, 2^(-(rate softplus(a + dt_bias)) log2(e)), and the step's size.
static void delta_gates(const DeltaRule& r, int64_t first, int64_t count, float* decay, float* beta) {
    float a[16] = {0}, b[16] = {0};
    for (int64_t t = 0; t < count; t++) a[t] = r.a[(first + t) * r.ldg], b[t] = r.b[(first + t) * r.ldg];
    const F32 rate = exp2(within_exp2(mul(set1(r.a_log), set1(0x1.715476p+0f))));
    const F32 g = mul(rate, softplus(add(load(a), set1(r.dt_bias))));
    store(decay, exp2(mul(sub(zero(), g), set1(0x1.715476p+0f))));
    store(beta, sigmoid(load(b)));
}

// What a block of tokens has made ready: keys and queries, a row a token, and the key behind them; gates.
struct DeltaStretch {
    static constexpr int64_t kTokens = kDeltaTokens;
    int64_t first, count, row;  // row: floats from a key to the next
    float *keys, *queries, *decay, *beta;
};

// S = e S + k u in scratch, o = q S, and with a next token m = next S; Keep: into slots too. Chains over keys ascend.
template <int N, bool Next, bool Keep>
static inline void delta_pass(const DeltaRule& r, float* s, const float* k, const float* q, float decay, const F32 (&u)[N],
                              F32 (&o)[N], F32 (&m)[N], const float* next, float* target, float* save, Mask tail) {
    const F32 e = set1(decay);
    for (int c = 0; c < N; c++) o[c] = m[c] = zero();
    for (int64_t d = 0; d < r.key_dim; d++, s += 16 * N) {
        const F32 kd = set1(k[d]), qd = set1(q[d]), nd = Next ? set1(next[d]) : zero();
        for (int c = 0; c < N; c++) {
            const F32 v = fma(kd, u[c], mul(e, load(s + 16 * c)));
            store(s + 16 * c, v);
            if (Keep && target) store_masked(target + d * r.lds + 16 * c, c + 1 < N ? mask_of(0xffffu) : tail, v);
            if (Keep && save) store_masked(save + d * r.lds + 16 * c, c + 1 < N ? mask_of(0xffffu) : tail, v);
            o[c] = fma(v, qd, o[c]);
            if (Next) m[c] = fma(v, nd, m[c]);
        }
    }
}

// The state's columns into scratch, and m = k S of the first token.
template <int N>
static inline void delta_load(const DeltaRule& r, const float* source, const float* k, float* s, F32 (&m)[N], Mask tail) {
    for (int c = 0; c < N; c++) m[c] = zero();
    for (int64_t d = 0; d < r.key_dim; d++, s += 16 * N) {
        const F32 kd = set1(k[d]);
        for (int c = 0; c < N; c++) {
            F32 v = zero();
            if (source) {
                const float* const p = source + d * r.lds + 16 * c;
                v = c + 1 < N ? load(p) : load_masked(p, tail);
                prefetch(p + 8 * r.lds);
            }
            store(s + 16 * c, v);
            m[c] = fma(v, kd, m[c]);
        }
    }
}

// Columns from `column` on, N vectors of them, through a stretch of tokens. s: their state, `m_kept` their m, meanwhile.
template <int N>
static void delta_columns(const DeltaRule& r, const DeltaStretch& x, int64_t column, float* s, float* m_kept) {
    const int64_t last = r.columns - column - 16 * (N - 1);
    const Mask tail = mask_of(last >= 16 ? 0xffffu : (1u << last) - 1);
    F32 u[N], o[N], m[N];
    if (x.first == 0) delta_load<N>(r, r.source ? r.source + column : nullptr, x.keys, s, m, tail);
    else for (int c = 0; c < N; c++) m[c] = load(m_kept + 16 * c);
    for (int64_t t = 0; t < x.count; t++) {
        const int64_t token = x.first + t;
        const float* const v = r.v + token * r.ld + column;
        const F32 e = set1(-x.decay[t]), b = set1(x.beta[t]);
        for (int c = 0; c < N; c++)
            u[c] = mul(b, fma(e, m[c], c + 1 < N ? load(v + 16 * c) : load_masked(v + 16 * c, tail)));
        const float *const k = x.keys + t * x.row, *const q = x.queries + t * x.row, *const next = k + x.row;
        float* const save = r.save && token + 1 == r.save_after ? r.save + column : nullptr;
        float* const target = r.target && token + 1 == r.tokens ? r.target + column : nullptr;
        if (token + 1 == r.tokens) delta_pass<N, false, true>(r, s, k, q, x.decay[t], u, o, m, nullptr, target, save, tail);
        else if (save) delta_pass<N, true, true>(r, s, k, q, x.decay[t], u, o, m, next, nullptr, save, tail);
        else delta_pass<N, true, false>(r, s, k, q, x.decay[t], u, o, m, next, nullptr, nullptr, tail);
        float* const y = r.y + token * r.ldy + column;
        for (int c = 0; c < N; c++)
            if (c + 1 < N) store(y + 16 * c, o[c]);
            else store_masked(y + 16 * c, tail, o[c]);
    }
    for (int c = 0; c < N; c++) store(m_kept + 16 * c, m[c]);
}

template <int N>
static void delta_columns(int vectors, const DeltaRule& r, const DeltaStretch& x, int64_t column, float* s, float* m_kept) {
    if (vectors == N) return delta_columns<N>(r, x, column, s, m_kept);
    if constexpr (N > 1) delta_columns<N - 1>(vectors, r, x, column, s, m_kept);
}

// Order "tokens": one token after the other, each column of the state by itself; see backends/reference/state_orders.py.
// Some columns at a time stay in the first-level cache for a stretch of tokens; none of this changes a bit.
static void delta_rule(const DeltaRule& r) {
    DeltaStretch x;
    x.row = (r.key_dim + 15) / 16 * 16;
    x.keys = r.scratch;
    x.queries = x.keys + (DeltaStretch::kTokens + 1) * x.row;
    x.decay = x.queries + DeltaStretch::kTokens * x.row;
    x.beta = x.decay + DeltaStretch::kTokens;
    float* const m_kept = x.beta + DeltaStretch::kTokens;
    float* const state = m_kept + (r.columns + 15) / 16 * 16;
    for (x.first = 0; x.first < r.tokens; x.first += DeltaStretch::kTokens) {
        x.count = std::min(DeltaStretch::kTokens, r.tokens - x.first);
        for (int64_t t = 0; t < x.count; t++) normalise(r.q + (x.first + t) * r.ld, r.key_dim, r.eps, r.q_factor, x.queries + t * x.row);
        const int64_t keys = std::min(x.count + 1, r.tokens - x.first);
        for (int64_t t = 0; t < keys; t++) normalise(r.k + (x.first + t) * r.ld, r.key_dim, r.eps, 1.0f, x.keys + t * x.row);
        for (int64_t t = 0; t < x.count; t += 16)
            delta_gates(r, x.first + t, std::min<int64_t>(16, x.count - t), x.decay + t, x.beta + t);
        for (int64_t column = 0; column < r.columns; column += 16 * kStateVectors) {
            const int vectors = (int)std::min<int64_t>(kStateVectors, (r.columns - column + 15) / 16);
            delta_columns<kStateVectors>(vectors, r, x, column, state + column * r.key_dim, m_kept + column);
        }
    }
}

static void mul(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const Mask mask = mask_of(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        store_masked(out + i, mask, mul(load_masked(x + i, mask), load_masked(y + i, mask)));
    }
}

// Order "exp2": (1 / (1 + 2^(-gate log2(e)))) * up.
static void sigmoid_mul(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const Mask mask = mask_of(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        store_masked(out + i, mask, mul(sigmoid(load_masked(gate + i, mask)), load_masked(up + i, mask)));
    }
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
