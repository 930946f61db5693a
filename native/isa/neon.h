// Vec16 for aarch64 with dotprod (sdot): sixteen lanes are four 128-bit registers.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace roofline {
namespace ISA_NAMESPACE {

inline constexpr const char* kIsaName = "neon";
// sdot takes signed bytes on both sides: 8-bit weights are used as signed numbers and need no correction.
inline constexpr bool kWideIsBiased = false;
// Blocks that fit 32 registers of 128 bits; planned, not measured.
inline constexpr int kMaxRowTiles = 1;
inline constexpr int kMaxTokens = 4;
inline constexpr int kMaxTokensWide = 2;  // the same where activations have two digits
inline constexpr int kMaxQueries = 2;
inline constexpr int kStateVectors = 1;  // columns of recurrent state that are kept in registers, by sixteen

template <class V>
struct Lanes {
    V v[4];
};
using F32 = Lanes<float32x4_t>;
using I32 = Lanes<int32x4_t>;
using Bytes = Lanes<uint8x16_t>;
using Mask = uint32_t;

// The same expression for each register i. Inlined by force: gcc otherwise calls some of them from the inner loops.
template <class Fn>
__attribute__((always_inline)) static inline auto each(Fn fn) -> Lanes<decltype(fn(0))> {
    return {{fn(0), fn(1), fn(2), fn(3)}};
}
#define ROOFLINE_FOUR(...) each([&](int i) __attribute__((always_inline)) { return __VA_ARGS__; })

static inline F32 load(const float* p) { return ROOFLINE_FOUR(vld1q_f32(p + 4 * i)); }
static inline void store(float* p, F32 v) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.v[i]);
}
static inline void store_masked(float* p, Mask m, F32 v) {
    if (m == 0xffff) return store(p, v);
    float all[16];
    store(all, v);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) p[i] = all[i];
}
static inline F32 load_masked(const float* p, Mask m) {
    if (m == 0xffff) return load(p);
    float all[16];
    for (int i = 0; i < 16; i++) all[i] = m >> i & 1 ? p[i] : 0.0f;
    return load(all);
}
static inline void load_pairs(const float* p, F32& even, F32& odd) {
    for (int i = 0; i < 4; i++) {
        const float32x4x2_t two = vld2q_f32(p + 8 * i);
        even.v[i] = two.val[0];
        odd.v[i] = two.val[1];
    }
}
static inline void store_pairs(float* p, F32 even, F32 odd) {
    for (int i = 0; i < 4; i++) vst2q_f32(p + 8 * i, float32x4x2_t{{even.v[i], odd.v[i]}});
}
static inline F32 set1(float x) { return ROOFLINE_FOUR(vdupq_n_f32(x)); }
static inline F32 zero() { return set1(0.0f); }
static inline F32 add(F32 a, F32 b) { return ROOFLINE_FOUR(vaddq_f32(a.v[i], b.v[i])); }
static inline F32 sub(F32 a, F32 b) { return ROOFLINE_FOUR(vsubq_f32(a.v[i], b.v[i])); }
static inline F32 mul(F32 a, F32 b) { return ROOFLINE_FOUR(vmulq_f32(a.v[i], b.v[i])); }
static inline F32 div(F32 a, F32 b) { return ROOFLINE_FOUR(vdivq_f32(a.v[i], b.v[i])); }
static inline F32 fma(F32 a, F32 b, F32 c) { return ROOFLINE_FOUR(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// The second operand where either is NaN or both are zero, as on x86: fmax and fmaxnm answer otherwise.
static inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline F32 max(F32 a, F32 b) { return ROOFLINE_FOUR(max4(a.v[i], b.v[i])); }
static inline F32 min(F32 a, F32 b) { return ROOFLINE_FOUR(min4(a.v[i], b.v[i])); }
static inline F32 abs(F32 a) { return ROOFLINE_FOUR(vabsq_f32(a.v[i])); }
static inline F32 round_even(F32 a) { return ROOFLINE_FOUR(vrndnq_f32(a.v[i])); }
static inline F32 to_float(I32 a) { return ROOFLINE_FOUR(vcvtq_f32_s32(a.v[i])); }
static inline I32 to_int(F32 a) { return ROOFLINE_FOUR(vcvtnq_s32_f32(a.v[i])); }  // nearest even
static inline F32 as_float(I32 a) { return ROOFLINE_FOUR(vreinterpretq_f32_s32(a.v[i])); }
static inline I32 as_int(F32 a) { return ROOFLINE_FOUR(vreinterpretq_s32_f32(a.v[i])); }

// A mask is sixteen bits; comparisons make lanes of ones, which these two turn into bits and back.
static inline uint32x4_t lanes(Mask m, int i) {
    const uint32x4_t bit = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(m >> (4 * i)), bit);
}
static inline Mask mask_from(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t low = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), high = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
    const uint8x16_t set = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), bit);
    return vaddv_u8(vget_low_u8(set)) | (Mask)vaddv_u8(vget_high_u8(set)) << 8;
}
static inline F32 select(Mask m, F32 yes, F32 no) { return ROOFLINE_FOUR(vbslq_f32(lanes(m, i), yes.v[i], no.v[i])); }
static inline Mask less(F32 a, F32 b) {
    return mask_from(vcltq_f32(a.v[0], b.v[0]), vcltq_f32(a.v[1], b.v[1]), vcltq_f32(a.v[2], b.v[2]),
                     vcltq_f32(a.v[3], b.v[3]));
}
static inline Mask greater_equal(F32 a, F32 b) {
    return mask_from(vcgeq_f32(a.v[0], b.v[0]), vcgeq_f32(a.v[1], b.v[1]), vcgeq_f32(a.v[2], b.v[2]),
                     vcgeq_f32(a.v[3], b.v[3]));
}
static inline uint32_t bits(Mask m) { return m; }
static inline Mask mask_of(uint32_t b) { return b & 0xffff; }

static inline I32 iset1(int32_t x) { return ROOFLINE_FOUR(vdupq_n_s32(x)); }
static inline I32 izero() { return iset1(0); }
static inline I32 iadd(I32 a, I32 b) { return ROOFLINE_FOUR(vaddq_s32(a.v[i], b.v[i])); }
static inline I32 isub(I32 a, I32 b) { return ROOFLINE_FOUR(vsubq_s32(a.v[i], b.v[i])); }
static inline I32 imul(I32 a, I32 b) { return ROOFLINE_FOUR(vmulq_s32(a.v[i], b.v[i])); }
static inline I32 ixor(I32 a, I32 b) { return ROOFLINE_FOUR(veorq_s32(a.v[i], b.v[i])); }
static inline I32 iand(I32 a, I32 b) { return ROOFLINE_FOUR(vandq_s32(a.v[i], b.v[i])); }
template <int N>
static inline I32 ishl(I32 a) {
    return ROOFLINE_FOUR(vshlq_n_s32(a.v[i], N));
}
template <int N>
static inline I32 ishr(I32 a) {
    return ROOFLINE_FOUR(vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N)));
}
template <int N>
static inline I32 isra(I32 a) {
    return ROOFLINE_FOUR(vshrq_n_s32(a.v[i], N));
}
static inline I32 iload(const int32_t* p) { return ROOFLINE_FOUR(vld1q_s32(p + 4 * i)); }
static inline F32 unsigned_to_float(I32 a) { return ROOFLINE_FOUR(vcvtq_f32_u32(vreinterpretq_u32_s32(a.v[i]))); }

// Lane i += lane i+8, then +4, +2, +1. vaddvq would add neighbours first: another order.
static inline float reduce_add(F32 v) {
    const float32x4_t four = vaddq_f32(vaddq_f32(v.v[0], v.v[2]), vaddq_f32(v.v[1], v.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float reduce_max(F32 v) {
    const float32x4_t four = max4(max4(v.v[0], v.v[2]), max4(v.v[1], v.v[3]));
    const float32x4_t two = max4(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max4(two, vextq_f32(two, two, 1)), 0);
}
static inline void sums(I32 x, I32 y, int32_t& sx, int32_t& sy) {
    sx = vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
    sy = vaddvq_s32(vaddq_s32(vaddq_s32(y.v[0], y.v[1]), vaddq_s32(y.v[2], y.v[3])));
}

// Halves widen exactly, their denormals too: flush-to-zero does not touch this conversion.
static inline F32 load_f16(const uint16_t* p) {
    return ROOFLINE_FOUR(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
static inline F32 load_bf16(const uint16_t* p) {
    return ROOFLINE_FOUR(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
// Nearest even; NaN stays NaN; a denormal becomes a signed zero, as on x86.
static inline uint16x4_t to_bf16_4(float32x4_t v) {
    const uint32x4_t u = vreinterpretq_u32_f32(v), top = vshrq_n_u32(u, 16);
    const uint32x4_t round = vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(top, vdupq_n_u32(1)));
    const uint32x4_t magnitude = vandq_u32(u, vdupq_n_u32(0x7fffffff));
    const uint32x4_t is_nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000)),
                     tiny = vcltq_u32(magnitude, vdupq_n_u32(0x00800000));
    uint32x4_t r = vshrq_n_u32(vaddq_u32(u, round), 16);
    r = vbslq_u32(is_nan, vorrq_u32(top, vdupq_n_u32(0x40)), r);
    r = vbslq_u32(tiny, vandq_u32(top, vdupq_n_u32(0x8000)), r);
    return vmovn_u32(r);
}
static inline void store_bf16(uint16_t* p, F32 v) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, to_bf16_4(v.v[i]));
}
static inline int32x4_t widen4(uint16x4_t v) { return vreinterpretq_s32_u32(vmovl_u16(v)); }
static inline I32 iload_u8(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_high_u8(b);
    return {{widen4(vget_low_u16(low)), widen4(vget_high_u16(low)), widen4(vget_low_u16(high)),
             widen4(vget_high_u16(high))}};
}
static inline F32 load_u8(const uint8_t* p) { return to_float(iload_u8(p)); }
// Sixteen e4m3 codes as a 256th of their values: sign and magnitude moved into a float16, whose exponent is biased by 8 more.
static inline F32 load_e4m3(const uint8_t* p) {
    const int8x16_t code = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t keep = vdupq_n_s16((int16_t)0xbfff);
    const int16x8_t a = vandq_s16(vshll_n_s8(vget_low_s8(code), 7), keep), b = vandq_s16(vshll_n_s8(vget_high_s8(code), 7), keep);
    return {{vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(a))), vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(a))),
             vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(b))), vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(b)))}};
}
// Lane i: value[index[i] mod 16]. A float is four bytes of a table of 64.
static inline F32 lookup16(const float* value, I32 index) {
    const uint8_t* p = (const uint8_t*)value;
    const uint8x16x4_t table = {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
    const int32x4_t low = vdupq_n_s32(15), first = vdupq_n_s32(0x03020100), times = vdupq_n_s32(0x04040404);
    return ROOFLINE_FOUR(vreinterpretq_f32_u8(
        vqtbl4q_u8(table, vreinterpretq_u8_s32(vmlaq_s32(first, vandq_s32(index.v[i], low), times)))));
}
static inline F32 load_s8(const int8_t* p) {
    const int8x16_t b = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_high_s8(b);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
static inline void store_s8(int8_t* p, I32 v) {
    const int16x8_t low = vcombine_s16(vmovn_s32(v.v[0]), vmovn_s32(v.v[1])),
                    high = vcombine_s16(vmovn_s32(v.v[2]), vmovn_s32(v.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
// 32 integers as bf16, which holds them exactly.
static inline void widen32(const int8_t* p, uint16_t* out) {
    for (int i = 0; i < 32; i += 16) {
        const F32 v = load_s8(p + i);
        for (int j = 0; j < 4; j++) vst1_u16(out + i + 4 * j, vshrn_n_u32(vreinterpretq_u32_f32(v.v[j]), 16));
    }
}

static inline Bytes bytes(const uint8_t* p) { return ROOFLINE_FOUR(vld1q_u8(p + 16 * i)); }
static inline Bytes low_nibbles(Bytes v) { return ROOFLINE_FOUR(vandq_u8(v.v[i], vdupq_n_u8(15))); }
static inline Bytes high_nibbles(Bytes v) { return ROOFLINE_FOUR(vshrq_n_u8(v.v[i], 4)); }
template <int N>
static inline Bytes add_where(Bytes v, const uint8_t* bit64) {  // bit i of 64 adds N to byte i
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return each([&](int i) __attribute__((always_inline)) {
        const uint8x16_t spread = vcombine_u8(vld1_dup_u8(bit64 + 2 * i), vld1_dup_u8(bit64 + 2 * i + 1));
        return vaddq_u8(v.v[i], vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(N)));
    });
}
template <int S>
static inline Bytes two_bits(Bytes v) {  // those at bit position 2 * S of each byte
    return each([&](int i) __attribute__((always_inline)) {
        uint8x16_t two = v.v[i];
        if constexpr (S > 0) two = vshrq_n_u8(two, 2 * S);
        return vandq_u8(two, vdupq_n_u8(3));
    });
}
using Table = uint8x16_t;
static inline Table table16(const uint8_t* p) { return vld1q_u8(p); }
static inline Bytes look_up(Table t, Bytes v) { return ROOFLINE_FOUR(vqtbl1q_u8(t, v.v[i])); }
// Adds 16 * (two bits of `plane` at bit position 2 * S of each byte).
template <int S>
static inline Bytes add_two_bits(Bytes v, Bytes plane) {
    return each([&](int i) __attribute__((always_inline)) {
        uint8x16_t two = plane.v[i];
        if constexpr (S < 2) two = vshlq_n_u8(two, 4 - 2 * S);
        if constexpr (S > 2) two = vshrq_n_u8(two, 2 * S - 4);
        return vorrq_u8(v.v[i], vandq_u8(two, vdupq_n_u8(0x30)));
    });
}
using Four = int8x16_t;  // the same four signed bytes in every lane
static inline Four four(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
static inline I32 dot4(I32 acc, Bytes w, Four x) {  // weights below 128: signed bytes as they are
    return ROOFLINE_FOUR(vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), x));
}
static inline I32 dot4_wide(I32 acc, Bytes w, Four x) {  // biased by 128: the top bit turned makes them signed
    return ROOFLINE_FOUR(vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], vdupq_n_u8(0x80))), x));
}

// The same two bf16, widened, in every lane.
struct Pair {
    float32x4_t even, odd;
};
static inline Pair pair(const uint16_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return {vreinterpretq_f32_u32(vdupq_n_u32(x << 16)), vreinterpretq_f32_u32(vdupq_n_u32(x & 0xffff0000u))};
}
using Pairs = Lanes<uint32x4_t>;  // sixteen lanes of two bf16
static inline Pairs pairs(const uint16_t* p) {
    return ROOFLINE_FOUR(vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)(p + 8 * i))));
}
static inline Pairs first_of_pairs(Pairs v) { return ROOFLINE_FOUR(vandq_u32(v.v[i], vdupq_n_u32(0xffff))); }
// Two FMAs, not bfdot: bfdot adds the two products first, and its rounding differs from chip to chip.
static inline F32 dot2(F32 acc, Pairs a, Pair b) {
    return each([&](int i) __attribute__((always_inline)) {
        const float32x4_t even = vreinterpretq_f32_u32(vshlq_n_u32(a.v[i], 16));
        const float32x4_t odd = vreinterpretq_f32_u32(vandq_u32(a.v[i], vdupq_n_u32(0xffff0000u)));
        return vfmaq_f32(vfmaq_f32(acc.v[i], odd, b.odd), even, b.even);
    });
}

// In assembler: gcc drops calls of functions that only prefetch (see avx512.h).
static inline void prefetch(const void* p) { asm volatile("prfm pldl1keep, [%0]" : : "r"(p)); }
static inline void prefetch_far(const void* p) { asm volatile("prfm pldl2keep, [%0]" : : "r"(p)); }

#undef ROOFLINE_FOUR

}  // namespace ISA_NAMESPACE
}  // namespace roofline
