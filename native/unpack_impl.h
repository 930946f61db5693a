// How packed weights are read: their formats, and the embedding, which gathers a row of them.
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

// ---- float weights ---------------------------------------------------------------------------------------------------

// Sixteen values of input c of a tile.
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
