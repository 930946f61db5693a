// Every kernel, written once over the Vec16 of the instruction set whose header was included before this file.
// Compiled with -ffp-contract=off: each FMA below is meant, and no other exists.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace roofline {
namespace ISA_NAMESPACE {

// ---- elementary functions -------------------------------------------------------------------------------------------

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

// ---- weight formats: how a group of 32 inputs of a tile becomes canonical vectors and scales -------------------------

struct Tile {
    const uint8_t *values, *scales;
};

struct Nibbles {
    static constexpr int kValues = 256, kOffset = 0;
    static constexpr bool kWide = false, kMinimum = false, kHalves = false;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        Bytes n = bytes(v + J * 64);
        a = low_nibbles(n);
        b = high_nibbles(n);
    }
};
struct Q4_0 : Nibbles {
    static constexpr int kOffset = 8, kScales = 32;
    static inline F32 scale(const uint8_t* s, int64_t g) { return load_f16((const uint16_t*)(s + g * 32)); }
};
struct Q4_1 : Nibbles {
    static constexpr int kScales = 64;
    static constexpr bool kMinimum = true;
    static inline F32 scale(const uint8_t* s, int64_t g) { return load_f16((const uint16_t*)(s + g * 64)); }
    static inline F32 minimum(const uint8_t* s, int64_t g) { return load_f16((const uint16_t*)(s + g * 64 + 32)); }
};
struct Q8_0 {
    static constexpr int kValues = 512, kScales = 32, kOffset = kWideIsBiased ? 128 : 0;
    static constexpr bool kWide = true, kMinimum = false, kHalves = false;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        a = bytes(v + J * 128);
        b = bytes(v + J * 128 + 64);
    }
    static inline F32 scale(const uint8_t* s, int64_t g) { return load_f16((const uint16_t*)(s + g * 32)); }
};
struct Q4_K : Nibbles {
    static constexpr int kScales = 40;  // 320 bytes a superblock of 8 groups
    static constexpr bool kMinimum = true;
    static inline F32 scale(const uint8_t* s, int64_t g) {
        const uint8_t* super = s + g / 8 * 320;
        return mul(load_f16((const uint16_t*)super), load_u8(super + 64 + g % 8 * 32));
    }
    static inline F32 minimum(const uint8_t* s, int64_t g) {
        const uint8_t* super = s + g / 8 * 320;
        return sub(zero(), mul(load_f16((const uint16_t*)(super + 32)), load_u8(super + 64 + g % 8 * 32 + 16)));
    }
};
struct Q5_K : Q4_K {
    static constexpr int kValues = 320;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        Bytes n = bytes(v + J * 64);
        a = add16_where(low_nibbles(n), v + 256 + 16 * J);
        b = add16_where(high_nibbles(n), v + 256 + 16 * J + 8);
    }
};
struct Q6_K : Nibbles {
    static constexpr int kValues = 384, kScales = 36, kOffset = 32;
    static constexpr bool kHalves = true;  // a scale for 16 inputs
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        Bytes n = bytes(v + J * 64), high = bytes(v + 256 + J / 2 * 64);
        a = add_two_bits<J % 2 * 2>(low_nibbles(n), high);
        b = add_two_bits<J % 2 * 2 + 1>(high_nibbles(n), high);
    }
    static inline F32 half_scale(const uint8_t* s, int64_t g, int half) {
        const uint8_t* super = s + g / 8 * 288;
        return mul(load_f16((const uint16_t*)super), load_s8((const int8_t*)(super + 32 + (g % 8 * 2 + half) * 16)));
    }
    static inline F32 scale(const uint8_t* s, int64_t g) { return half_scale(s, g, 0); }
};

// ---- linear: orders "q8g32", "q15g32": exact int32 in a group, then one FMA (and one for a minimum) a group, ascending ------------

template <class Fmt, int J, int D, int RT, int MT>
static inline void dot_quarter(const uint8_t* const (&v)[RT], const int8_t* const (&x)[D], I32 (&d)[D][RT][MT]) {
    Bytes a[RT], b[RT];
    for (int r = 0; r < RT; r++) Fmt::template two<J>(v[r], a[r], b[r]);
    for (int i = 0; i < D; i++)
        for (int m = 0; m < MT; m++) {
            Four x0 = four(x[i] + 32 * m + 8 * J), x1 = four(x[i] + 32 * m + 8 * J + 4);
            for (int r = 0; r < RT; r++) {
                d[i][r][m] = Fmt::kWide ? dot4_wide(d[i][r][m], a[r], x0) : dot4(d[i][r][m], a[r], x0);
                d[i][r][m] = Fmt::kWide ? dot4_wide(d[i][r][m], b[r], x1) : dot4(d[i][r][m], b[r], x1);
            }
        }
}

template <class Fmt, int D, int RT, int MT>
static inline void begin_dots(I32 (&d)[D][RT][MT], const int32_t* isum, int half) {
    for (int m = 0; m < MT; m++) {
        I32 start = izero();
        if constexpr (Fmt::kOffset != 0) {
            int32_t s = Fmt::kHalves ? isum[2 * m + half] : isum[2 * m] + isum[2 * m + 1];
            start = iset1(-Fmt::kOffset * s);
        }
        for (int r = 0; r < RT; r++) {
            if constexpr (D == 2) d[0][r][m] = izero();
            d[D - 1][r][m] = start;
        }
    }
}

// The integer dot product as float: exact up to this one conversion.
template <int D, int RT, int MT>
static inline F32 dot_value(const I32 (&d)[D][RT][MT], int r, int m) {
    if constexpr (D == 2) return to_float(iadd(ishl<7>(d[0][r][m]), d[1][r][m]));
    return to_float(d[0][r][m]);
}

// Tile r of a block: neighbours of one weight, or the same tile of the gate and of up.
static inline const uint8_t* tile_of(const Linear& a, int64_t tile, int r, size_t size) {
    return a.up ? (r ? a.up : a.weight) + tile * size : a.weight + (tile + r) * size;
}

template <class Fmt, int D, int RT, int MT>
static inline void quantised_block(const Linear& a, int64_t tile, const Panel& p, int64_t token, bool far, F32 (&acc)[RT][MT]) {
    const int64_t groups = a.k / 32;
    const size_t size = tile_bytes(a.format, a.k), step = size / groups;
    const uint8_t *v[RT], *s[RT];
    const size_t ahead = far ? (a.up ? 1 : RT) * size : 8192;
    const uint8_t* fetch[RT];
    for (int r = 0; r < RT; r++) fetch[r] = tile_of(a, tile, r, size) + ahead;
    const int8_t* x[D];
    x[0] = p.q + token * 32;
    if constexpr (D == 2) x[1] = p.low + token * 32;
    const float *xs = p.scale + token, *xz = p.sum + token;
    const int32_t* isum = p.isum + token * 2;
    for (int r = 0; r < RT; r++) {
        v[r] = tile_of(a, tile, r, size);
        s[r] = v[r] + groups * Fmt::kValues;
    }
    for (int r = 0; r < RT; r++)
        for (int m = 0; m < MT; m++) acc[r][m] = zero();
    for (int64_t g = 0; g < groups; g++) {
        I32 d[D][RT][MT];
        if (MT == 1 || far)
            for (int r = 0; r < RT; r++)
                for (size_t at = 0; at < step; at += 64) prefetch_far(fetch[r] + at);
        for (int r = 0; r < RT; r++) fetch[r] += step;
        begin_dots<Fmt, D, RT, MT>(d, isum, 0);
        dot_quarter<Fmt, 0, D, RT, MT>(v, x, d);
        dot_quarter<Fmt, 1, D, RT, MT>(v, x, d);
        if constexpr (Fmt::kHalves) {
            F32 scale[RT];
            for (int r = 0; r < RT; r++) scale[r] = Q6_K::half_scale(s[r], g, 0);
            for (int m = 0; m < MT; m++)
                for (int r = 0; r < RT; r++) acc[r][m] = fma(mul(scale[r], set1(xs[m])), dot_value<D, RT, MT>(d, r, m), acc[r][m]);
            begin_dots<Fmt, D, RT, MT>(d, isum, 1);
        }
        dot_quarter<Fmt, 2, D, RT, MT>(v, x, d);
        dot_quarter<Fmt, 3, D, RT, MT>(v, x, d);
        F32 scale[RT], minimum[RT];
        for (int r = 0; r < RT; r++) {
            if constexpr (Fmt::kHalves) scale[r] = Q6_K::half_scale(s[r], g, 1);
            else scale[r] = Fmt::scale(s[r], g);
            if constexpr (Fmt::kMinimum) minimum[r] = Fmt::minimum(s[r], g);
        }
        for (int m = 0; m < MT; m++) {
            F32 xscale = set1(xs[m]);
            for (int r = 0; r < RT; r++) {
                acc[r][m] = fma(mul(scale[r], xscale), dot_value<D, RT, MT>(d, r, m), acc[r][m]);
                if constexpr (Fmt::kMinimum) acc[r][m] = fma(minimum[r], set1(xz[m]), acc[r][m]);
            }
        }
        for (int r = 0; r < RT; r++) v[r] += Fmt::kValues;
        for (int i = 0; i < D; i++) x[i] += p.tokens * 32;
        xs += p.tokens;
        xz += p.tokens;
        isum += p.tokens * 2;
    }
}

template <int RT, int MT>
static inline void store_block(const Linear& a, int64_t tile, int64_t token, F32 (&acc)[RT][MT]) {
    if constexpr (RT == 2)
        if (a.up) {
            const int64_t row = tile * kTileRows, left = a.rows - row;
            const Mask m = mask_of(left >= kTileRows ? 0xffffu : (1u << left) - 1);
            for (int t = 0; t < MT; t++) store_masked(a.y + (token + t) * a.ldy + row, m, mul(silu(acc[0][t]), acc[1][t]));
            return;
        }
    for (int r = 0; r < RT; r++) {
        const int64_t row = (tile + r) * kTileRows;
        const int64_t left = a.rows - row;
        const Mask m = mask_of(left >= kTileRows ? 0xffffu : (1u << left) - 1);
        F32 bias = a.bias ? load_masked(a.bias + row, m) : zero();
        for (int t = 0; t < MT; t++) {
            F32 y = acc[r][t];
            if (a.bias) y = add(y, bias);
            if (a.residual) y = add(load_masked(a.residual + (token + t) * a.ldr + row, m), y);
            if (left >= kTileRows) store(a.y + (token + t) * a.ldy + row, y);
            else store_masked(a.y + (token + t) * a.ldy + row, m, y);
        }
    }
}

template <class Fmt, int D, int RT, int MT>
static void run_block(const Linear& a, int64_t tile, const Panel& p, int64_t first, int64_t token, bool far) {
    F32 acc[RT][MT];
    quantised_block<Fmt, D, RT, MT>(a, tile, p, token, far, acc);
    store_block<RT, MT>(a, tile, first + token, acc);
}

// Tokens of a block: two tiles on an instruction set that holds one leave room for half as many.
template <int D, int RT> static constexpr int kTokens = std::max(1, (D == 2 ? kMaxTokensWide : kMaxTokens) * kMaxRowTiles / std::max(RT, kMaxRowTiles));

template <class Fmt, int D, int RT>
static inline void run_tokens(const Linear& a, int64_t tile, const Panel& p, int64_t first, int64_t token, int count, bool far) {
    switch (count) {
        case 1: return run_block<Fmt, D, RT, 1>(a, tile, p, first, token, far);
        case 2: if constexpr (kTokens<D, RT> >= 2) return run_block<Fmt, D, RT, 2>(a, tile, p, first, token, far); break;
        case 3: if constexpr (kTokens<D, RT> >= 3) return run_block<Fmt, D, RT, 3>(a, tile, p, first, token, far); break;
        case 4: if constexpr (kTokens<D, RT> >= 4) return run_block<Fmt, D, RT, 4>(a, tile, p, first, token, far); break;
        case 5: if constexpr (kTokens<D, RT> >= 5) return run_block<Fmt, D, RT, 5>(a, tile, p, first, token, far); break;
    }
}

// One row block against all tokens of a panel (whose first is token `first`), in even shares: 8 tokens are 4 + 4, not 5 + 3.
template <class Fmt, int D, int RT>
static inline void run_panel(const Linear& a, int64_t tile, const Panel& p, int64_t first, bool more) {
    const int64_t count = p.tokens, blocks = (count + kTokens<D, RT> - 1) / kTokens<D, RT>;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t token = count * b / blocks;
        run_tokens<Fmt, D, RT>(a, tile, p, first, token, (int)(count * (b + 1) / blocks - token), more && b == 0);
    }
}

template <class Fmt, int D>
static void linear_digits(const Linear& a, int64_t tile_begin, int64_t tile_end) {
    const int64_t full = a.rows / kTileRows;
    const int wanted = a.up || (a.tokens > 1 && kMaxRowTiles == 2) ? 2 : 1;
    const int step = a.up ? 1 : wanted;  // the gate's and up's tile of one number are one step
    for (int64_t first = 0; first < a.tokens; first += Quantised::kPanel) {
        const Panel p = a.x.panel(first / Quantised::kPanel);
        for (int64_t tile = tile_begin; tile < tile_end;) {
            const bool pair = wanted == 2 && (a.up || (tile + 2 <= tile_end && tile + 2 <= full));
            const bool more = a.tokens > 1 && tile + 2 * step <= tile_end;
            if (pair) run_panel<Fmt, D, 2>(a, tile, p, first, more);
            else run_panel<Fmt, D, 1>(a, tile, p, first, more);
            tile += pair ? step : 1;
        }
    }
}

template <class Fmt>
static void linear_quantised(const Linear& a, int64_t tile_begin, int64_t tile_end) {
    if (a.x.digits == 2) linear_digits<Fmt, 2>(a, tile_begin, tile_end);
    else linear_digits<Fmt, 1>(a, tile_begin, tile_end);
}

// Float weights: one chain of FMAs over ascending inputs. Four tiles at a time hide the latency of a chain.
template <class Load, int RT, int MT>
static inline void float_block(const Linear& a, int64_t tile, int64_t token, Load load_row, int width) {
    const size_t size = tile_bytes(a.format, a.k);
    F32 acc[RT][MT];
    for (int r = 0; r < RT; r++)
        for (int m = 0; m < MT; m++) acc[r][m] = zero();
    const float* x = a.xf + token * a.k;
    for (int64_t c = 0; c < a.k; c++)
        for (int r = 0; r < RT; r++) {
            F32 w = load_row(tile_of(a, tile, r, size) + c * kTileRows * width);
            for (int m = 0; m < MT; m++) acc[r][m] = fma(w, set1(x[m * a.k + c]), acc[r][m]);
        }
    store_block<RT, MT>(a, tile, token, acc);
}

template <class Load>
static void linear_float(const Linear& a, int64_t tile_begin, int64_t tile_end, Load load_row, int width) {
    if (a.up) {
        for (int64_t tile = tile_begin; tile < tile_end; tile++)
            for (int64_t t = 0; t < a.tokens; t++) float_block<Load, 2, 1>(a, tile, t, load_row, width);
        return;
    }
    int64_t tile = tile_begin;
    for (; tile < tile_end;) {
        const bool four_tiles = kMaxRowTiles == 2 && tile + 4 <= tile_end && tile + 4 <= a.rows / kTileRows;
        int64_t t = 0;
        if (four_tiles) {
            for (; t + 4 <= a.tokens; t += 4) float_block<Load, 4, 4>(a, tile, t, load_row, width);
            for (; t < a.tokens; t++) float_block<Load, 4, 1>(a, tile, t, load_row, width);
        } else {
            for (; t + 4 <= a.tokens; t += 4) float_block<Load, 1, 4>(a, tile, t, load_row, width);
            for (; t < a.tokens; t++) float_block<Load, 1, 1>(a, tile, t, load_row, width);
        }
        tile += four_tiles ? 4 : 1;
    }
}

static void linear(const Linear& a, int64_t begin, int64_t end) {
    switch (a.format) {
        case Format::F32: return linear_float(a, begin, end, [](const uint8_t* p) { return load((const float*)p); }, 4);
        case Format::F16: return linear_float(a, begin, end, [](const uint8_t* p) { return load_f16((const uint16_t*)p); }, 2);
        case Format::BF16: return linear_float(a, begin, end, [](const uint8_t* p) { return load_bf16((const uint16_t*)p); }, 2);
        case Format::Q8_0: return linear_quantised<Q8_0>(a, begin, end);
        case Format::Q4_0: return linear_quantised<Q4_0>(a, begin, end);
        case Format::Q4_1: return linear_quantised<Q4_1>(a, begin, end);
        case Format::Q4_K: return linear_quantised<Q4_K>(a, begin, end);
        case Format::Q5_K: return linear_quantised<Q5_K>(a, begin, end);
        case Format::Q6_K: return linear_quantised<Q6_K>(a, begin, end);
        default: return;
    }
}

// ---- embedding: one row gathered from the head's packed tiles --------------------------------------------------------

template <class Fmt, int J>
static inline void embed_quarter(const uint8_t* v, int lane, float (&q)[32]) {
    Bytes two[2];
    Fmt::template two<J>(v, two[0], two[1]);
    for (int h = 0; h < 2; h++) {
        uint8_t raw[64];
        std::memcpy(raw, &two[h], 64);
        for (int c = 0; c < 4; c++) q[8 * J + 4 * h + c] = Fmt::kWide ? (float)((int)raw[lane * 4 + c] - 128) : (float)raw[lane * 4 + c];
    }
}

template <class Fmt>
static void embed_quantised(const uint8_t* tile, int64_t k, int lane, float* out) {
    const uint8_t* s = tile + k / 32 * Fmt::kValues;
    for (int64_t g = 0; g < k / 32; g++) {
        float q[32], scale[16], minimum[16];
        embed_quarter<Fmt, 0>(tile + g * Fmt::kValues, lane, q);
        embed_quarter<Fmt, 1>(tile + g * Fmt::kValues, lane, q);
        embed_quarter<Fmt, 2>(tile + g * Fmt::kValues, lane, q);
        embed_quarter<Fmt, 3>(tile + g * Fmt::kValues, lane, q);
        store(scale, Fmt::scale(s, g));
        if constexpr (Fmt::kMinimum) store(minimum, Fmt::minimum(s, g));
        for (int i = 0; i < 32; i++) {
            if constexpr (Fmt::kHalves)
                if (i == 16) store(scale, Q6_K::half_scale(s, g, 1));
            const float centred = Fmt::kWide ? q[i] : q[i] - Fmt::kOffset;
            out[g * 32 + i] = scale[lane] * centred;
            if constexpr (Fmt::kMinimum) out[g * 32 + i] += minimum[lane];
        }
    }
}

static void embed(Format f, const uint8_t* weight, int64_t k, int64_t row, float* out) {
    const int lane = (int)(row % kTileRows);
    const uint8_t* tile = weight + row / kTileRows * tile_bytes(f, k);
    float values[16];
    switch (f) {
        case Format::F32:
            for (int64_t c = 0; c < k; c++) std::memcpy(out + c, tile + (c * 16 + lane) * 4, 4);
            return;
        case Format::F16:
            for (int64_t c = 0; c < k; c++) store(values, load_f16((const uint16_t*)tile + c * 16)), out[c] = values[lane];
            return;
        case Format::BF16:
            for (int64_t c = 0; c < k; c++) store(values, load_bf16((const uint16_t*)tile + c * 16)), out[c] = values[lane];
            return;
        case Format::Q8_0: return embed_quantised<Q8_0>(tile, k, lane, out);
        case Format::Q4_0: return embed_quantised<Q4_0>(tile, k, lane, out);
        case Format::Q4_1: return embed_quantised<Q4_1>(tile, k, lane, out);
        case Format::Q4_K: return embed_quantised<Q4_K>(tile, k, lane, out);
        case Format::Q5_K: return embed_quantised<Q5_K>(tile, k, lane, out);
        case Format::Q6_K: return embed_quantised<Q6_K>(tile, k, lane, out);
        default: return;
    }
}

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
    for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), inv), load(weight + i)));
    if (i < n) store_masked(out + i, tail, mul(mul(load_masked(x + i, tail), inv), load_masked(weight + i, tail)));
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
        const F32 inv = set1(finite && amax > 0.0f ? limit / amax : 0.0f);
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

static void gated(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, mul(silu(load(gate + i)), load(up + i)));
    if (i < n) {
        const Mask m = mask_of((1u << (n - i)) - 1);
        store_masked(out + i, m, mul(silu(load_masked(gate + i, m)), load_masked(up + i, m)));
    }
}

static constexpr int kMaxHeadDim = 512;

// Rotation in separately rounded products, as the reference writes it. Vectors of the type above only: left to itself, gcc
// 12 turns an interleaved scalar loop into fmaddsub even under -ffp-contract=off.
static void rotate(const Rope& r, const float* x, int32_t position, float* out) {
    const int half = r.head_dim / 2, whole = half / 16 * 16;
    const float *cos = r.table + (int64_t)position * r.head_dim, *sin = cos + half;
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

static void rope_query(const Rope& r, const float* head, int32_t position, uint16_t* out) {
    float normed[kMaxHeadDim], rotated[kMaxHeadDim];
    if (r.q_norm) rms_norm(head, r.q_norm, r.head_dim, r.eps, normed), head = normed;
    rotate(r, head, position, rotated);
    const F32 scale = set1(r.q_scale);
    for (int i = 0; i < r.head_dim; i += 16) store_bf16(out + i, mul(load(rotated + i), scale));
}

static void rope_key(const Rope& r, const float* head, int32_t position, uint16_t* out) {
    float normed[kMaxHeadDim], rotated[kMaxHeadDim];
    if (r.k_norm) rms_norm(head, r.k_norm, r.head_dim, r.eps, normed), head = normed;
    rotate(r, head, position, rotated);
    for (int i = 0; i < r.head_dim; i += 16) store_bf16(out + i, load(rotated + i));
}

static void to_bf16(const float* x, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += 16) store_bf16(out + i, load(x + i));
}

// ---- attention: order "pages64": blocks of 64 absolute positions ascend within a split -------------------------------

static constexpr int kBlock = 64, kPage = 16;
static constexpr int kKeyVectors = kMaxQueries > 2 ? 4 : 1;   // pages whose scores are in registers together
static constexpr int kValueVectors = kMaxQueries > 2 ? 4 : 1;  // sixteen-wide slices of V in registers together

struct BlockPages {
    const uint16_t *k[4], *v[4];
    int pages, keys;   // pages present, keys of the context in this block
    int64_t next[4];   // bytes from each page to the one four further, fetched while this one is used; 0: none
};

static inline BlockPages block_pages(const Attend& a, int32_t begin) {
    BlockPages b;
    const int64_t head = (int64_t)a.head_dim * kPage;  // elements of K (or V) of one kv head in a page
    b.keys = std::min(kBlock, a.context - begin);
    b.pages = (b.keys + kPage - 1) / kPage;
    for (int i = 0; i < b.pages; i++) {
        const uint16_t* page = (const uint16_t*)(a.cache + a.pages[begin / kPage + i] * a.page_stride);
        b.k[i] = page + a.kv_head * head;
        b.v[i] = page + (a.kv_heads + a.kv_head) * head;
        const int further = begin / kPage + i + 4;
        b.next[i] = a.fetch_ahead && further * kPage < a.context ? (a.pages[further] - a.pages[further - 4]) * a.page_stride : 0;
    }
    return b;
}

// Keys of a page that a query at `position` may see, as bits.
static inline uint32_t visible(const Attend& a, int32_t position, int32_t first_key) {
    const int32_t upto = std::min(16, std::max(0, position - first_key + 1));
    uint32_t m = (1u << upto) - 1;
    if (a.window > 0) {
        const int32_t hidden = std::min(16, std::max(0, position - a.window + 1 - first_key));
        m &= ~((1u << hidden) - 1);
    }
    return m;
}

template <int Q, int V, bool Ahead>
static inline void score_pages(int head_dim, const BlockPages& b, const uint16_t* q, F32 (*s)[4], int first) {
    F32 acc[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) acc[i][v] = zero();
    for (int d = 0; d < head_dim; d += 2) {
        Pairs keys[V];
        for (int v = 0; v < V; v++) {
            const uint16_t* at = b.k[first + v] + d * kPage;
            keys[v] = pairs(at);
            if (Ahead && b.next[first + v]) prefetch((const char*)at + b.next[first + v]);
        }
        for (int i = 0; i < Q; i++) {
            const Pair query = pair(q + (int64_t)i * head_dim + d);
            for (int v = 0; v < V; v++) acc[i][v] = dot2(acc[i][v], keys[v], query);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) s[i][first + v] = acc[i][v];
}

template <int Q, int V, bool Ahead>
static inline void add_values(int head_dim, const BlockPages& b, const uint16_t (*p)[kBlock], const float* alpha, int slice, float* acc) {
    F32 r[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) r[i][v] = mul(load(acc + (int64_t)i * head_dim + slice + 16 * v), set1(alpha[i]));
    const int whole = b.keys / 2;
    for (int j = 0; j < whole; j++) {
        const uint16_t* row = b.v[j / 8] + (int64_t)(j % 8) * head_dim * 2 + slice * 2;
        const int64_t next = b.next[j / 8];
        Pairs values[V];
        for (int v = 0; v < V; v++) {
            values[v] = pairs(row + 32 * v);
            if (Ahead && next) prefetch((const char*)(row + 32 * v) + next);
        }
        for (int i = 0; i < Q; i++) {
            const Pair weight = pair(p[i] + 2 * j);
            for (int v = 0; v < V; v++) r[i][v] = dot2(r[i][v], values[v], weight);
        }
    }
    if (b.keys % 2) {  // the slot after the context's last key is stale and may hold NaN: taken out, not multiplied by 0
        const uint16_t* row = b.v[whole / 8] + (int64_t)(whole % 8) * head_dim * 2 + slice * 2;
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) r[i][v] = dot2(r[i][v], first_of_pairs(pairs(row + 32 * v)), pair(p[i] + 2 * whole));
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) store(acc + (int64_t)i * head_dim + slice + 16 * v, r[i][v]);
}

template <int Q, bool Ahead>
static inline void attend_block(const Attend& a, const uint16_t* q, const int32_t* position, int32_t begin, AttendState* state, float* acc) {
    const BlockPages b = block_pages(a, begin);
    const F32 none = set1(-infinity());
    F32 s[Q][4];
    int page = 0;
    for (; page + kKeyVectors <= b.pages; page += kKeyVectors) score_pages<Q, kKeyVectors, Ahead>(a.head_dim, b, q, s, page);
    for (; page < b.pages; page++) score_pages<Q, 1, Ahead>(a.head_dim, b, q, s, page);
    alignas(64) uint16_t p[Q][kBlock];
    alignas(64) float change[16] = {0}, alpha[16];
    float m_new[Q];
    for (int i = 0; i < Q; i++) {
        F32 top = none;
        for (int v = 0; v < b.pages; v++) {
            const uint32_t seen = visible(a, position[i], begin + v * kPage);
            if (seen != 0xffffu) s[i][v] = select(mask_of(seen), s[i][v], none);
            top = max(top, s[i][v]);
        }
        m_new[i] = std::max(state[i].m, reduce_max(top));
        change[i] = m_new[i] == -infinity() ? 0.0f : state[i].m - m_new[i];
    }
    store(alpha, exp2(load(change)));
    for (int i = 0; i < Q; i++) {
        const F32 m = set1(m_new[i] == -infinity() ? 0.0f : m_new[i]);  // nothing seen yet: every p is 0
        F32 l = mul(load(state[i].l), set1(alpha[i]));
        for (int v = 0; v < b.pages; v++) {
            F32 e = exp2(sub(s[i][v], m));
            l = add(l, e);
            store_bf16(p[i] + v * kPage, e);
        }
        store(state[i].l, l);
        state[i].m = m_new[i];
    }
    int slice = 0;
    for (; slice + 16 * kValueVectors <= a.head_dim; slice += 16 * kValueVectors)
        add_values<Q, kValueVectors, Ahead>(a.head_dim, b, p, alpha, slice, acc);
    for (; slice < a.head_dim; slice += 16) add_values<Q, 1, Ahead>(a.head_dim, b, p, alpha, slice, acc);
}

template <int Q>
static void attend_queries(const Attend& a, const uint16_t* q, const int32_t* position, int32_t begin, int32_t end, AttendState* state, float* acc) {
    for (int i = 0; i < Q; i++) {
        state[i].m = -infinity();
        store(state[i].l, zero());
        for (int d = 0; d < a.head_dim; d += 16) store(acc + (int64_t)i * a.head_dim + d, zero());
    }
    for (int32_t at = begin / kBlock * kBlock; at < end; at += kBlock) {
        if (a.fetch_ahead) attend_block<Q, true>(a, q, position, at, state, acc);
        else attend_block<Q, false>(a, q, position, at, state, acc);
    }
}

static void attend_split(const Attend& a, const uint16_t* q, const int32_t* position, int queries, int32_t begin, int32_t end, AttendState* state, float* acc) {
    switch (queries) {
        case 1: return attend_queries<1>(a, q, position, begin, end, state, acc);
        case 2: return attend_queries<2>(a, q, position, begin, end, state, acc);
        case 3: if constexpr (kMaxQueries >= 3) return attend_queries<3>(a, q, position, begin, end, state, acc); break;
        case 4: if constexpr (kMaxQueries >= 4) return attend_queries<4>(a, q, position, begin, end, state, acc); break;
        case 5: if constexpr (kMaxQueries >= 5) return attend_queries<5>(a, q, position, begin, end, state, acc); break;
        case 6: if constexpr (kMaxQueries >= 6) return attend_queries<6>(a, q, position, begin, end, state, acc); break;
    }
}

// Merges a later split into an earlier total. A split in which a query saw nothing changes nothing.
static void attend_merge(int head_dim, AttendState& into, float* acc, const AttendState& part, const float* part_acc) {
    if (part.m == -infinity()) return;
    if (into.m == -infinity()) {
        into = part;
        std::copy(part_acc, part_acc + head_dim, acc);
        return;
    }
    const float m = std::max(into.m, part.m);
    alignas(64) float change[16] = {into.m - m, part.m - m}, factor[16];
    store(factor, exp2(load(change)));
    const F32 f1 = set1(factor[0]), f2 = set1(factor[1]);
    store(into.l, add(mul(load(into.l), f1), mul(load(part.l), f2)));
    for (int d = 0; d < head_dim; d += 16) store(acc + d, add(mul(load(acc + d), f1), mul(load(part_acc + d), f2)));
    into.m = m;
}

static void attend_finish(int head_dim, const AttendState& state, const float* acc, float* out) {
    const F32 inv = set1(1.0f / reduce_add(load(state.l)));
    for (int d = 0; d < head_dim; d += 16) store(out + d, add(mul(load(acc + d), inv), zero()));  // + 0: no negative zero
}

static void exp2_many(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i + 16 <= n; i += 16) store(out + i, exp2(load(x + i)));
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
