// Linear layers.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is meant.
#pragma once
#include "unpack_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

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

}  // namespace ISA_NAMESPACE
}  // namespace roofline
