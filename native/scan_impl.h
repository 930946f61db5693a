// The selective scan of Mamba and Mamba-2, one token after the other.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is
// meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// How far a token moves the state; in this order a NaN stays one.
static inline F32 scan_step(const SelectiveScan& r, F32 dt, F32 bias) {
    return min(set1(r.most), max(set1(r.least), softplus(add(dt, bias))));
}

static inline F32 scan_rate(F32 a_log) { return exp2(within_exp2(mul(a_log, set1(0x1.715476p+0f)))); }

static inline F32 scan_decay(F32 rate, F32 step) {
    return exp2(mul(sub(zero(), mul(rate, step)), set1(0x1.715476p+0f)));
}

// Some columns, N vectors of them, and where a head's channels differ, the rates of each of their states.
template <int N>
struct ScanColumns {
    int64_t column;
    Mask tail;
    float *state, *rates;
    F32 read(const float* p, int c) const { return c + 1 < N ? load(p + 16 * c) : load_masked(p + 16 * c, tail); }
    void write(float* p, int c, F32 v) const {
        if (c + 1 < N) store(p + 16 * c, v);
        else store_masked(p + 16 * c, tail, v);
    }
};

template <int N, bool Rates>
static inline void scan_load(const SelectiveScan& r, const ScanColumns<N>& x) {
    for (int64_t n = 0; n < r.states; n++)
        for (int c = 0; c < N; c++) {
            float* const at = x.state + (n * N + c) * 16;
            store(at, r.source ? x.read(r.source + n * r.lds + x.column, c) : zero());
            if (Rates) store(x.rates + (n * N + c) * 16, scan_rate(x.read(r.a_log + n * r.lda + x.column, c)));
        }
}

// h = e h + B u in scratch and, where Keep, in slots; o = the sum of C h, a chain over ascending states.
template <int N, bool Rates, bool Keep>
static inline void scan_pass(const SelectiveScan& r, const ScanColumns<N>& x, int64_t token, const F32 (&step)[N], F32 e,
                             const F32 (&u)[N], F32 (&o)[N], float* target, float* save) {
    const float *const b = r.b + token * r.ld, *const c_row = r.c + token * r.ld;
    for (int64_t n = 0; n < r.states; n++) {
        const F32 bn = set1(b[n]), cn = set1(c_row[n]);
        for (int c = 0; c < N; c++) {
            float* const at = x.state + (n * N + c) * 16;
            const F32 decay = Rates ? scan_decay(load(x.rates + (n * N + c) * 16), step[c]) : e;
            const F32 h = fma(bn, u[c], mul(decay, load(at)));
            store(at, h);
            if (Keep && target) x.write(target + n * r.lds, c, h);
            if (Keep && save) x.write(save + n * r.lds, c, h);
            o[c] = fma(h, cn, o[c]);
        }
    }
}

template <int N, bool Rates>
static void scan_columns(const SelectiveScan& r, int64_t column) {
    const int64_t last = r.columns - column - 16 * (N - 1);
    const ScanColumns<N> x{column, mask_of(last >= 16 ? 0xffffu : (1u << last) - 1), r.scratch, r.scratch + 16 * N * r.states};
    scan_load<N, Rates>(r, x);
    float steps[16], decays[16];  // of the head: of sixteen tokens
    for (int64_t t = 0; t < r.tokens; t++) {
        F32 step[N], u[N], o[N], value[N];
        if (!Rates && t % 16 == 0) {
            float dt[16] = {0};
            for (int64_t i = 0; i < 16 && t + i < r.tokens; i++) dt[i] = r.dt[(t + i) * r.ldt];
            const F32 sixteen = scan_step(r, load(dt), set1(r.dt_bias[0]));
            store(steps, sixteen);
            store(decays, scan_decay(scan_rate(set1(r.a_log[0])), sixteen));
        }
        for (int c = 0; c < N; c++) {
            value[c] = x.read(r.x + t * r.ld + column, c);
            step[c] = Rates ? scan_step(r, x.read(r.dt + t * r.ldt + column, c), x.read(r.dt_bias + column, c)) : set1(steps[t % 16]);
            u[c] = mul(step[c], value[c]);
            o[c] = zero();
        }
        const F32 e = set1(Rates ? 0.0f : decays[t % 16]);
        float* const save = r.save && t + 1 == r.save_after ? r.save + column : nullptr;
        float* const target = r.target && t + 1 == r.tokens ? r.target + column : nullptr;
        if (save || target) scan_pass<N, Rates, true>(r, x, t, step, e, u, o, target, save);
        else scan_pass<N, Rates, false>(r, x, t, step, e, u, o, nullptr, nullptr);
        for (int c = 0; c < N; c++) x.write(r.y + t * r.ldy + column, c, fma(Rates ? x.read(r.d + column, c) : set1(r.d[0]), value[c], o[c]));
    }
}

template <int N>
static void scan_columns(int vectors, const SelectiveScan& r, int64_t column) {
    if (vectors == N) return r.rates ? scan_columns<N, true>(r, column) : scan_columns<N, false>(r, column);
    if constexpr (N > 1) scan_columns<N - 1>(vectors, r, column);
}

// Order "tokens": each column of the state by itself; see backends/reference/state_orders.py.
static void selective_scan(const SelectiveScan& r) {
    for (int64_t column = 0; column < r.columns; column += 16 * kStateVectors)
        scan_columns<kStateVectors>((int)std::min<int64_t>(kStateVectors, (r.columns - column + 15) / 16), r, column);
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
