// Linear layers and the embedding: everything that reads packed weights.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is meant.
#pragma once
#include "elementary_impl.h"

// gcc stops inlining when a file has grown by some share: one more block size made others call their inner loops as
// functions, a third slower. Whatever holds values of a block in registers says so itself.
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline))

namespace roofline {
namespace ISA_NAMESPACE {

// ---- weight formats: how a group of 32 inputs of a tile becomes canonical vectors and scales -------------------------

// What the bytes of `two` are turned into: nothing, or values of the format's table, biased by 128 as wide values are.
struct Plain {
    explicit Plain(Format) {}
    Bytes operator()(const Bytes& v) const { return v; }
};
struct Looked {
    Table values;
    explicit Looked(Format f) {
        uint8_t biased[16];
        for (int i = 0; i < 16; i++) biased[i] = (uint8_t)(table_of(f)[i] ^ 0x80);
        values = table16(biased);
    }
    Bytes operator()(const Bytes& v) const { return look_up(values, v); }
};

struct Nibbles {
    using Codes = Plain;
    static constexpr int kValues = 256, kOffset = 0;
    static constexpr bool kWide = false, kMinimum = false, kHalves = false, kZero = false;
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
    using Codes = Plain;
    static constexpr int kValues = 512, kScales = 32, kOffset = kWideIsBiased ? 128 : 0;
    static constexpr bool kWide = true, kMinimum = false, kHalves = false, kZero = false;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        a = bytes(v + J * 128);
        b = bytes(v + J * 128 + 64);
    }
    static inline F32 scale(const uint8_t* s, int64_t g) { return load_f16((const uint16_t*)(s + g * 32)); }
};
struct INT8 : Q8_0 {  // as Q8_0, with float32 scales
    static constexpr int kScales = 64;
    static inline F32 scale(const uint8_t* s, int64_t g) { return load((const float*)(s + g * 64)); }
};
struct INT4 : Nibbles {  // scale * (code - zero point)
    static constexpr int kScales = 80;
    static constexpr bool kZero = true;
    static inline F32 scale(const uint8_t* s, int64_t g) { return load((const float*)(s + g * 80)); }
    static inline F32 minus_zero(const uint8_t* s, int64_t g) { return sub(zero(), load_u8(s + g * 80 + 64)); }
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
        a = add_where<16>(low_nibbles(n), v + 256 + 16 * J);
        b = add_where<16>(high_nibbles(n), v + 256 + 16 * J + 8);
    }
};
struct Q5_0 : Q4_0 {
    static constexpr int kValues = 320, kOffset = 16;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) { Q5_K::two<J>(v, a, b); }
};
struct Q5_1 : Q4_1 {
    static constexpr int kValues = 320;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) { Q5_K::two<J>(v, a, b); }
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
};
struct Q2_K : Nibbles {
    static constexpr int kValues = 128, kScales = 40;
    static constexpr bool kMinimum = true, kHalves = true;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        Bytes n = bytes(v + J / 2 * 64);
        a = two_bits<J % 2 * 2>(n);
        b = two_bits<J % 2 * 2 + 1>(n);
    }
    static inline I32 packed(const uint8_t* super, int64_t g, int half) {
        return iload_u8(super + 64 + (g % 8 * 2 + half) * 16);
    }
    static inline F32 half_scale(const uint8_t* s, int64_t g, int half) {
        const uint8_t* super = s + g / 8 * 320;
        return mul(load_f16((const uint16_t*)super), to_float(iand(packed(super, g, half), iset1(15))));
    }
    static inline F32 half_minimum(const uint8_t* s, int64_t g, int half) {
        const uint8_t* super = s + g / 8 * 320;
        return sub(zero(), mul(load_f16((const uint16_t*)(super + 32)), to_float(ishr<4>(packed(super, g, half)))));
    }
};
struct Q3_K : Nibbles {
    static constexpr int kValues = 192, kScales = 36, kOffset = 4;
    static constexpr bool kHalves = true;
    template <int J> static inline void two(const uint8_t* v, Bytes& a, Bytes& b) {
        Q2_K::two<J>(v, a, b);
        a = add_where<4>(a, v + 128 + 16 * J);
        b = add_where<4>(b, v + 128 + 16 * J + 8);
    }
    static inline F32 half_scale(const uint8_t* s, int64_t g, int half) { return Q6_K::half_scale(s, g, half); }
};
// Codes of a table, whose values reach 127: as wide as those of Q8_0.
struct OfTable : Nibbles {
    using Codes = Looked;
    static constexpr int kOffset = kWideIsBiased ? 128 : 0;
    static constexpr bool kWide = true;
};
struct IQ4_NL : OfTable {
    static constexpr int kScales = 32;
    static inline F32 scale(const uint8_t* s, int64_t g) { return load_f16((const uint16_t*)(s + g * 32)); }
};
struct MXFP4 : OfTable {  // 2^(e - 128) as a float's exponent: below 2^-126 it is zero, as all that small is here
    static constexpr int kScales = 16;
    static inline F32 scale(const uint8_t* s, int64_t g) { return as_float(ishl<23>(isub(iload_u8(s + g * 16), iset1(1)))); }
};
struct T32 : OfTable {
    static constexpr int kScales = 24;
    static inline F32 scale(const uint8_t* s, int64_t g) {
        const uint8_t* super = s + g / 8 * 192;
        return mul(load((const float*)super), load_s8((const int8_t*)(super + 64 + g % 8 * 16)));
    }
};
struct T16 : OfTable {
    static constexpr int kScales = 40;
    static constexpr bool kHalves = true;
    static inline F32 half_scale(const uint8_t* s, int64_t g, int half) {
        const uint8_t* super = s + g / 8 * 320;
        return mul(load((const float*)super), load_s8((const int8_t*)(super + 64 + (g % 8 * 2 + half) * 16)));
    }
};

// The scale and the minimum of a group of 32, or of its half.
template <class Fmt> static ALWAYS_INLINE F32 scale_of(const uint8_t* s, int64_t g, int half) {
    if constexpr (Fmt::kHalves) return Fmt::half_scale(s, g, half);
    else return Fmt::scale(s, g);
}
template <class Fmt> static ALWAYS_INLINE F32 minimum_of(const uint8_t* s, int64_t g, int half) {
    if constexpr (Fmt::kHalves) return Fmt::half_minimum(s, g, half);
    else return Fmt::minimum(s, g);
}

// ---- linear: orders "q8g32", "q15g32": exact int32 in a group, then one FMA (and one for a minimum) a group, ascending ------------

template <class Fmt, int J, int D, int RT, int MT>
static ALWAYS_INLINE void dot_quarter(const typename Fmt::Codes& codes, const uint8_t* const (&v)[RT],
                                      const int8_t* const (&x)[D], I32 (&d)[D][RT][MT]) {
    Bytes a[RT], b[RT];
    for (int r = 0; r < RT; r++) {
        Fmt::template two<J>(v[r], a[r], b[r]);
        a[r] = codes(a[r]), b[r] = codes(b[r]);
    }
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
static ALWAYS_INLINE void begin_dots(I32 (&d)[D][RT][MT], const int32_t* isum, int half) {
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
static ALWAYS_INLINE F32 dot_value(const I32 (&d)[D][RT][MT], int r, int m) {
    if constexpr (D == 2) return to_float(iadd(ishl<7>(d[0][r][m]), d[1][r][m]));
    return to_float(d[0][r][m]);
}

// Scales the dots of a group, or of its half, and adds them and the minimum's part.
template <class Fmt, int D, int RT, int MT>
static ALWAYS_INLINE void add_dots(const uint8_t* const (&s)[RT], int64_t g, int half, const float* xs, const float* xz,
                                   const int32_t* isum, const I32 (&d)[D][RT][MT], F32 (&acc)[RT][MT]) {
    F32 scale[RT], minimum[RT], minus_zero[RT];
    for (int r = 0; r < RT; r++) {
        scale[r] = scale_of<Fmt>(s[r], g, half);
        if constexpr (Fmt::kZero) minus_zero[r] = Fmt::minus_zero(s[r], g);
        if constexpr (Fmt::kMinimum) minimum[r] = minimum_of<Fmt>(s[r], g, half);
    }
    for (int m = 0; m < MT; m++) {
        const F32 xscale = set1(xs[m]);
        for (int r = 0; r < RT; r++) {
            F32 dot = dot_value<D, RT, MT>(d, r, m);
            // Below 2^24 in magnitude all three, so the zero point is taken off without a rounding.
            if constexpr (Fmt::kZero) dot = fma(minus_zero[r], set1((float)(isum[2 * m] + isum[2 * m + 1])), dot);
            acc[r][m] = fma(mul(scale[r], xscale), dot, acc[r][m]);
            if constexpr (Fmt::kMinimum && Fmt::kHalves)
                acc[r][m] = fma(minimum[r], mul(xscale, to_float(iset1(isum[2 * m + half]))), acc[r][m]);
            else if constexpr (Fmt::kMinimum)
                acc[r][m] = fma(minimum[r], set1(xz[m]), acc[r][m]);
        }
    }
}

// RT tiles against MT tokens of a panel.
template <class Fmt, int D, int RT, int MT>
static ALWAYS_INLINE void quantised_block(const Linear& a, const uint8_t* const (&tiles)[RT], const Panel& p, int64_t token, size_t ahead, F32 (&acc)[RT][MT]) {
    const int64_t groups = a.k / 32;
    const size_t step = tile_bytes(a.format, a.k) / groups;
    const typename Fmt::Codes codes(a.format);
    const uint8_t *v[RT], *s[RT];
    const uint8_t* fetch[RT];
    for (int r = 0; r < RT; r++) fetch[r] = tiles[r] + ahead;
    const int8_t* x[D];
    x[0] = p.q + token * 32;
    if constexpr (D == 2) x[1] = p.low + token * 32;
    const float *xs = p.scale + token, *xz = p.sum + token;
    const int32_t* isum = p.isum + token * 2;
    for (int r = 0; r < RT; r++) {
        v[r] = tiles[r];
        s[r] = v[r] + groups * Fmt::kValues;
    }
    for (int r = 0; r < RT; r++)
        for (int m = 0; m < MT; m++) acc[r][m] = zero();
    for (int64_t g = 0; g < groups; g++) {
        I32 d[D][RT][MT];
        if (ahead)
            for (int r = 0; r < RT; r++)
                for (size_t at = 0; at < step; at += 64) prefetch_far(fetch[r] + at);
        for (int r = 0; r < RT; r++) fetch[r] += step;
        begin_dots<Fmt, D, RT, MT>(d, isum, 0);
        dot_quarter<Fmt, 0, D, RT, MT>(codes, v, x, d);
        dot_quarter<Fmt, 1, D, RT, MT>(codes, v, x, d);
        if constexpr (Fmt::kHalves) {
            add_dots<Fmt, D, RT, MT>(s, g, 0, xs, xz, isum, d, acc);
            begin_dots<Fmt, D, RT, MT>(d, isum, 1);
        }
        dot_quarter<Fmt, 2, D, RT, MT>(codes, v, x, d);
        dot_quarter<Fmt, 3, D, RT, MT>(codes, v, x, d);
        add_dots<Fmt, D, RT, MT>(s, g, 1, xs, xz, isum, d, acc);
        for (int r = 0; r < RT; r++) v[r] += Fmt::kValues;
        for (int i = 0; i < D; i++) x[i] += p.tokens * 32;
        xs += p.tokens;
        xz += p.tokens;
        isum += p.tokens * 2;
    }
}

static ALWAYS_INLINE Mask rows_left(const Linear& a, int64_t row) {
    const int64_t left = a.rows - row;
    return mask_of(left >= kTileRows ? 0xffffu : (1u << left) - 1);
}

template <int RT, int MT>
static ALWAYS_INLINE void store_block(const Linear& a, int64_t tile, int64_t token, F32 (&acc)[RT][MT]) {
    for (int r = 0; r < RT; r++) {
        const int64_t row = (tile + r) * kTileRows;
        const bool whole = a.rows - row >= kTileRows;
        const Mask m = rows_left(a, row);
        F32 bias = a.bias ? load_masked(a.bias + row, m) : zero();
        for (int t = 0; t < MT; t++) {
            F32 y = acc[r][t];
            if (a.bias) y = add(y, bias);
            if (a.residual) y = add(load_masked(a.residual + (token + t) * a.ldr + row, m), y);
            if (whole) store(a.y + (token + t) * a.ldy + row, y);
            else store_masked(a.y + (token + t) * a.ldy + row, m, y);
        }
    }
}

template <int MT>
static ALWAYS_INLINE void store_gated(const Linear& a, int64_t tile, int64_t token, const F32 (&gate)[MT], const F32 (&up)[MT]) {
    const int64_t row = tile * kTileRows;
    for (int t = 0; t < MT; t++) store_masked(a.y + (token + t) * a.ldy + row, rows_left(a, row), mul(silu(gate[t]), up[t]));
}

// The tiles of a block are neighbours of one weight. With a second weight they are the same tile of the gate and of up:
// side by side (RT 2), or one after the other (RT 1).
template <class Fmt, int D, int RT, int MT>
static NEVER_INLINE void run_block(const Linear& a, int64_t tile, const Panel& p, int64_t first, int64_t token, size_t ahead) {
    const size_t size = tile_bytes(a.format, a.k);
    const uint8_t* tiles[RT];
    for (int r = 0; r < RT; r++) tiles[r] = a.up && r ? a.up + tile * size : a.weight + (a.up ? tile : tile + r) * size;
    F32 acc[RT][MT];
    quantised_block<Fmt, D, RT, MT>(a, tiles, p, token, ahead, acc);
    if (!a.up) return store_block<RT, MT>(a, tile, first + token, acc);
    if constexpr (RT == 2) {
        store_gated<MT>(a, tile, first + token, acc[0], acc[1]);
    } else {
        const uint8_t* other[1] = {a.up + tile * size};
        F32 up[1][MT];
        quantised_block<Fmt, D, 1, MT>(a, other, p, token, ahead, up);
        store_gated<MT>(a, tile, first + token, acc[0], up[0]);
    }
}

// Tokens of a block: two tiles on an instruction set that holds one leave room for half as many.
template <int D, int RT> static constexpr int kTokens = std::max(1, (D == 2 ? kMaxTokensWide : kMaxTokens) * kMaxRowTiles / std::max(RT, kMaxRowTiles));

// Up to so many tokens, blocks of one tile and many tokens: each weight is unpacked once for more of them.
template <int D> static constexpr int64_t kFewTokens = kMaxRowTiles < 2 ? 0 : D == 1 ? 16 : 12;

// The largest block there is code for: wider ones than kTokens may win where their loads do.
template <int D, int RT> static constexpr int kMostTokens = D == 1 && kMaxRowTiles == 2 ? std::max(kTokens<D, RT>, RT == 1 ? 8 : 6) : kTokens<D, RT>;

template <class Fmt, int D, int RT>
static inline void run_tokens(const Linear& a, int64_t tile, const Panel& p, int64_t first, int64_t token, int count, size_t ahead) {
    switch (count) {
        case 1: return run_block<Fmt, D, RT, 1>(a, tile, p, first, token, ahead);
        case 2: if constexpr (kMostTokens<D, RT> >= 2) return run_block<Fmt, D, RT, 2>(a, tile, p, first, token, ahead); break;
        case 3: if constexpr (kMostTokens<D, RT> >= 3) return run_block<Fmt, D, RT, 3>(a, tile, p, first, token, ahead); break;
        case 4: if constexpr (kMostTokens<D, RT> >= 4) return run_block<Fmt, D, RT, 4>(a, tile, p, first, token, ahead); break;
        case 5: if constexpr (kMostTokens<D, RT> >= 5) return run_block<Fmt, D, RT, 5>(a, tile, p, first, token, ahead); break;
        case 6: if constexpr (kMostTokens<D, RT> >= 6) return run_block<Fmt, D, RT, 6>(a, tile, p, first, token, ahead); break;
        case 7: if constexpr (kMostTokens<D, RT> >= 7) return run_block<Fmt, D, RT, 7>(a, tile, p, first, token, ahead); break;
        case 8: if constexpr (kMostTokens<D, RT> >= 8) return run_block<Fmt, D, RT, 8>(a, tile, p, first, token, ahead); break;
    }
}

// Bytes that a block fetches ahead. For one token weights come from memory all along, and about a tile ahead is best. For
// more, the first block of tokens fetches what the next row block will read (`more`: there is one), and the others find
// their weights in the cache.
template <int RT>
static inline size_t fetch_ahead(const Linear& a, int count, bool more, bool first) {
    const size_t next = more && first ? (a.up ? 1 : RT) * tile_bytes(a.format, a.k) : 0;
    if (a.blocks.fetch == Blocks::kFetchNext) return next;
    if (a.blocks.fetch >= 0) return first ? (size_t)a.blocks.fetch : 0;
    if (a.tokens > 1 && next) return next;
    return count == 1 ? std::clamp<size_t>(tile_bytes(a.format, a.k), 8192, 24576) : 0;
}

// One row block against all tokens of a panel (whose first is token `first`), in even shares: 8 tokens are 4 + 4, not 5 + 3.
template <class Fmt, int D, int RT>
static inline void run_panel(const Linear& a, int64_t tile, const Panel& p, int64_t first, bool more) {
    const int own = RT == 1 && a.tokens <= kFewTokens<D> ? kMostTokens<D, RT> : kTokens<D, RT>;
    const int64_t most = a.blocks.tokens ? std::min(a.blocks.tokens, kMostTokens<D, RT>) : own;
    const int64_t count = p.tokens, blocks = (count + most - 1) / most;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t token = a.blocks.greedy ? most * b : count * b / blocks;
        const int64_t end = a.blocks.greedy ? std::min(count, most * (b + 1)) : count * (b + 1) / blocks;
        run_tokens<Fmt, D, RT>(a, tile, p, first, token, (int)(end - token), fetch_ahead<RT>(a, (int)(end - token), more, b == 0));
    }
}

template <class Fmt, int D>
static void linear_digits(const Linear& a, int64_t tile_begin, int64_t tile_end) {
    const int64_t full = a.rows / kTileRows;
    const int own = a.tokens > std::max<int64_t>(1, kFewTokens<D>) && kMaxRowTiles == 2 ? 2 : 1;
    const int wanted = a.blocks.tiles ? a.blocks.tiles : a.up && a.tokens == 1 ? 2 : own;
    const int step = a.up ? 1 : wanted;  // the gate's and up's tile of one number are one step
    for (int64_t first = 0; first < a.tokens; first += Quantised::kPanel) {
        const Panel p = a.x.panel(first / Quantised::kPanel);
        for (int64_t tile = tile_begin; tile < tile_end;) {
            const bool pair = wanted == 2 && (a.up || (tile + 2 <= tile_end && tile + 2 <= full));
            const bool more = tile + 2 * step <= tile_end;
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

// Float weights: sixteen values of input c of a tile.
struct PlainF32 {
    static constexpr bool kCoded = false;
    static inline F32 column(const uint8_t* tile, int64_t c) { return load((const float*)(tile + c * 64)); }
};
struct PlainF16 {
    static constexpr bool kCoded = false;
    static inline F32 column(const uint8_t* tile, int64_t c) { return load_f16((const uint16_t*)(tile + c * 32)); }
};
struct PlainBF16 {
    static constexpr bool kCoded = false;
    static inline F32 column(const uint8_t* tile, int64_t c) { return load_bf16((const uint16_t*)(tile + c * 32)); }
};
// Coded floats: values of inputs c and c + 1 (c is even), to be multiplied by the scale of kGroup inputs: one rounding.
struct CodedE4M3 {
    static constexpr bool kCoded = true;
    static constexpr int64_t kGroup = 128;
    static inline F32 scale(const uint8_t* p) { return mul(load((const float*)p), set1(256.0f)); }  // load_e4m3 is a 256th
    static inline void two(const uint8_t* tile, int64_t c, F32& a, F32& b) {
        a = load_e4m3(tile + c * 16);
        b = load_e4m3(tile + c * 16 + 16);
    }
};
struct CodedNF4 {
    static constexpr bool kCoded = true;
    static constexpr int64_t kGroup = 64;
    // The values of bitsandbytes' NF4 (Dettmers et al. 2023), as float32.
    static constexpr float kValues[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    static inline F32 scale(const uint8_t* p) { return load((const float*)p); }
    static inline void two(const uint8_t* tile, int64_t c, F32& a, F32& b) {
        const I32 codes = iload_u8(tile + c * 8);
        a = lookup16(kValues, codes);
        b = lookup16(kValues, ishr<4>(codes));
    }
};

// One chain of FMAs over ascending inputs. Four tiles at a time hide the latency of a chain.
template <class Values, int RT, int MT>
static inline void float_block(const Linear& a, int64_t tile, int64_t token) {
    const size_t size = tile_bytes(a.format, a.k);
    const uint8_t* tiles[RT];
    for (int r = 0; r < RT; r++) tiles[r] = a.up && r ? a.up + tile * size : a.weight + (a.up ? tile : tile + r) * size;
    F32 acc[RT][MT];
    for (int r = 0; r < RT; r++)
        for (int m = 0; m < MT; m++) acc[r][m] = zero();
    const float* x = a.xf + token * a.k;
    if constexpr (Values::kCoded) {
        const size_t scales = values_bytes(a.format, a.k);
        for (int64_t first = 0; first < a.k; first += Values::kGroup) {
            F32 scale[RT];
            for (int r = 0; r < RT; r++) scale[r] = Values::scale(tiles[r] + scales + first / Values::kGroup * 64);
            for (int64_t c = first; c < first + Values::kGroup; c += 2)
                for (int r = 0; r < RT; r++) {
                    F32 even, odd;
                    Values::two(tiles[r], c, even, odd);
                    even = mul(even, scale[r]);
                    odd = mul(odd, scale[r]);
                    for (int m = 0; m < MT; m++) acc[r][m] = fma(even, set1(x[m * a.k + c]), acc[r][m]);
                    for (int m = 0; m < MT; m++) acc[r][m] = fma(odd, set1(x[m * a.k + c + 1]), acc[r][m]);
                }
        }
    } else {
        for (int64_t c = 0; c < a.k; c++)
            for (int r = 0; r < RT; r++) {
                F32 w = Values::column(tiles[r], c);
                for (int m = 0; m < MT; m++) acc[r][m] = fma(w, set1(x[m * a.k + c]), acc[r][m]);
            }
    }
    if constexpr (RT == 2)
        if (a.up) return store_gated<MT>(a, tile, token, acc[0], acc[1]);
    store_block<RT, MT>(a, tile, token, acc);
}

template <class Values, int RT>
static inline void float_tokens(const Linear& a, int64_t tile) {
    constexpr int kMany = kMaxRowTiles == 2 ? (RT == 4 ? 6 : 8) : 4 / RT;  // tokens whose chains the registers hold
    int64_t t = 0;
    if constexpr (kMany > 1)
        for (; t + kMany <= a.tokens; t += kMany) float_block<Values, RT, kMany>(a, tile, t);
    for (; t < a.tokens; t++) float_block<Values, RT, 1>(a, tile, t);
}

template <class Values>
static void linear_float(const Linear& a, int64_t tile_begin, int64_t tile_end) {
    for (int64_t tile = tile_begin; tile < tile_end;) {
        const bool four_tiles = kMaxRowTiles == 2 && !a.up && tile + 4 <= tile_end && tile + 4 <= a.rows / kTileRows;
        if (a.up) float_tokens<Values, 2>(a, tile);
        else if (four_tiles) float_tokens<Values, 4>(a, tile);
        else float_tokens<Values, 1>(a, tile);
        tile += four_tiles ? 4 : 1;
    }
}

static void linear(const Linear& a, int64_t begin, int64_t end) {
    switch (a.format) {
        case Format::F32: return linear_float<PlainF32>(a, begin, end);
        case Format::F16: return linear_float<PlainF16>(a, begin, end);
        case Format::BF16: return linear_float<PlainBF16>(a, begin, end);
        case Format::E4M3: return linear_float<CodedE4M3>(a, begin, end);
        case Format::NF4: return linear_float<CodedNF4>(a, begin, end);
        case Format::Q8_0: return linear_quantised<Q8_0>(a, begin, end);
        case Format::Q4_0: return linear_quantised<Q4_0>(a, begin, end);
        case Format::Q4_1: return linear_quantised<Q4_1>(a, begin, end);
        case Format::Q4_K: return linear_quantised<Q4_K>(a, begin, end);
        case Format::Q5_K: return linear_quantised<Q5_K>(a, begin, end);
        case Format::Q6_K: return linear_quantised<Q6_K>(a, begin, end);
        case Format::INT4: return linear_quantised<INT4>(a, begin, end);
        case Format::INT8: return linear_quantised<INT8>(a, begin, end);
        case Format::Q5_0: return linear_quantised<Q5_0>(a, begin, end);
        case Format::Q5_1: return linear_quantised<Q5_1>(a, begin, end);
        case Format::Q2_K: return linear_quantised<Q2_K>(a, begin, end);
        case Format::Q3_K: return linear_quantised<Q3_K>(a, begin, end);
        case Format::IQ4_NL: return linear_quantised<IQ4_NL>(a, begin, end);
        case Format::MXFP4: return linear_quantised<MXFP4>(a, begin, end);
        case Format::IQ4_T32:
        case Format::IQ3_XXS_T32:
        case Format::IQ3_S_T32:
        case Format::IQ2_T32: return linear_quantised<T32>(a, begin, end);
        case Format::IQ2_T16: return linear_quantised<T16>(a, begin, end);
        default: return;
    }
}

// ---- embedding: one row gathered from the head's packed tiles --------------------------------------------------------

template <class Fmt, int J>
static inline void embed_quarter(const typename Fmt::Codes& codes, const uint8_t* v, int lane, float (&q)[32]) {
    Bytes two[2];
    Fmt::template two<J>(v, two[0], two[1]);
    for (int h = 0; h < 2; h++) {
        const Bytes values = codes(two[h]);
        uint8_t raw[64];
        std::memcpy(raw, &values, 64);
        for (int c = 0; c < 4; c++) q[8 * J + 4 * h + c] = Fmt::kWide ? (float)((int)raw[lane * 4 + c] - 128) : (float)raw[lane * 4 + c];
    }
}

template <class Fmt>
static void embed_quantised(Format f, const uint8_t* tile, int64_t k, int lane, float* out) {
    const typename Fmt::Codes codes(f);
    const uint8_t* s = tile + k / 32 * Fmt::kValues;
    for (int64_t g = 0; g < k / 32; g++) {
        float q[32], scale[16], minimum[16], minus_zero[16];
        if constexpr (Fmt::kZero) store(minus_zero, Fmt::minus_zero(s, g));
        embed_quarter<Fmt, 0>(codes, tile + g * Fmt::kValues, lane, q);
        embed_quarter<Fmt, 1>(codes, tile + g * Fmt::kValues, lane, q);
        embed_quarter<Fmt, 2>(codes, tile + g * Fmt::kValues, lane, q);
        embed_quarter<Fmt, 3>(codes, tile + g * Fmt::kValues, lane, q);
        for (int i = 0; i < 32; i++) {
            if (i % 16 == 0) {
                store(scale, scale_of<Fmt>(s, g, i / 16));
                if constexpr (Fmt::kMinimum) store(minimum, minimum_of<Fmt>(s, g, i / 16));
            }
            float centred = Fmt::kWide ? q[i] : q[i] - Fmt::kOffset;
            if constexpr (Fmt::kZero) centred += minus_zero[lane];
            out[g * 32 + i] = scale[lane] * centred;
            if constexpr (Fmt::kMinimum) out[g * 32 + i] += minimum[lane];
        }
    }
}

template <class Values>
static void embed_float(Format f, const uint8_t* tile, int64_t k, int lane, float* out) {
    float values[16];
    if constexpr (Values::kCoded) {
        for (int64_t c = 0; c < k; c += 2) {
            const F32 scale = Values::scale(tile + values_bytes(f, k) + c / Values::kGroup * 64);
            F32 two[2];
            Values::two(tile, c, two[0], two[1]);
            for (int i = 0; i < 2; i++) store(values, mul(two[i], scale)), out[c + i] = values[lane];
        }
    } else {
        for (int64_t c = 0; c < k; c++) store(values, Values::column(tile, c)), out[c] = values[lane];
    }
}

static void embed(Format f, const uint8_t* weight, int64_t k, int64_t row, float* out) {
    const int lane = (int)(row % kTileRows);
    const uint8_t* tile = weight + row / kTileRows * tile_bytes(f, k);
    switch (f) {
        case Format::F32: return embed_float<PlainF32>(f, tile, k, lane, out);
        case Format::F16: return embed_float<PlainF16>(f, tile, k, lane, out);
        case Format::BF16: return embed_float<PlainBF16>(f, tile, k, lane, out);
        case Format::E4M3: return embed_float<CodedE4M3>(f, tile, k, lane, out);
        case Format::NF4: return embed_float<CodedNF4>(f, tile, k, lane, out);
        case Format::INT4: return embed_quantised<INT4>(f, tile, k, lane, out);
        case Format::INT8: return embed_quantised<INT8>(f, tile, k, lane, out);
        case Format::Q8_0: return embed_quantised<Q8_0>(f, tile, k, lane, out);
        case Format::Q4_0: return embed_quantised<Q4_0>(f, tile, k, lane, out);
        case Format::Q4_1: return embed_quantised<Q4_1>(f, tile, k, lane, out);
        case Format::Q4_K: return embed_quantised<Q4_K>(f, tile, k, lane, out);
        case Format::Q5_K: return embed_quantised<Q5_K>(f, tile, k, lane, out);
        case Format::Q6_K: return embed_quantised<Q6_K>(f, tile, k, lane, out);
        case Format::Q5_0: return embed_quantised<Q5_0>(f, tile, k, lane, out);
        case Format::Q5_1: return embed_quantised<Q5_1>(f, tile, k, lane, out);
        case Format::Q2_K: return embed_quantised<Q2_K>(f, tile, k, lane, out);
        case Format::Q3_K: return embed_quantised<Q3_K>(f, tile, k, lane, out);
        case Format::IQ4_NL: return embed_quantised<IQ4_NL>(f, tile, k, lane, out);
        case Format::MXFP4: return embed_quantised<MXFP4>(f, tile, k, lane, out);
        case Format::IQ4_T32:
        case Format::IQ3_XXS_T32:
        case Format::IQ3_S_T32:
        case Format::IQ2_T32: return embed_quantised<T32>(f, tile, k, lane, out);
        case Format::IQ2_T16: return embed_quantised<T16>(f, tile, k, lane, out);
        default: return;
    }
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
