// Vec16 for AVX-512 (F, BW, DQ, VL, VNNI, BF16): one 512-bit register is sixteen lanes.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace roofline {
namespace ISA_NAMESPACE {

inline constexpr const char* kIsaName = "avx512";
// A product of unsigned 8-bit weights with signed 8-bit activations is exact here, so 8-bit weights stay
// biased by 128 and the caller takes 128 * sum(x) off.
inline constexpr bool kWideIsBiased = true;
inline constexpr int kMaxRowTiles = 2;   // row tiles a matrix block holds in registers
inline constexpr int kMaxTokens = 5;     // tokens a matrix block holds in registers
inline constexpr int kMaxTokensWide = 3;   // the same where activations have two digits
inline constexpr int kMaxQueries = 6;    // queries an attention block holds in registers
inline constexpr int kStateVectors = 4;  // columns of recurrent state that are kept in registers, by sixteen

using F32 = __m512;
using I32 = __m512i;
using Bytes = __m512i;  // 64 bytes: sixteen lanes of four
using Mask = __mmask16;

static inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
static inline void store_masked(float* p, Mask m, F32 v) { _mm512_mask_storeu_ps(p, m, v); }
static inline F32 load_masked(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
// Sixteen pairs of neighbours, as two registers, and back.
static inline void load_pairs(const float* p, F32& even, F32& odd) {
    const __m512i e = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i o = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const F32 a = load(p), b = load(p + 16);
    even = _mm512_permutex2var_ps(a, e, b);
    odd = _mm512_permutex2var_ps(a, o, b);
}
static inline void store_pairs(float* p, F32 even, F32 odd) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    store(p, _mm512_permutex2var_ps(even, low, odd));
    store(p + 16, _mm512_permutex2var_ps(even, high, odd));
}
static inline F32 set1(float x) { return _mm512_set1_ps(x); }
static inline F32 zero() { return _mm512_setzero_ps(); }
static inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
static inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
static inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
static inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
static inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
static inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
static inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
static inline F32 abs(F32 a) { return _mm512_abs_ps(a); }
static inline F32 round_even(F32 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
static inline I32 to_int(F32 a) { return _mm512_cvtps_epi32(a); }  // nearest even under our MXCSR
static inline F32 as_float(I32 a) { return _mm512_castsi512_ps(a); }
static inline I32 as_int(F32 a) { return _mm512_castps_si512(a); }
static inline F32 select(Mask m, F32 yes, F32 no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline Mask less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline Mask greater_equal(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline uint32_t bits(Mask m) { return m; }
static inline Mask mask_of(uint32_t b) { return (Mask)b; }

static inline I32 izero() { return _mm512_setzero_si512(); }
static inline I32 iset1(int32_t x) { return _mm512_set1_epi32(x); }
static inline I32 iadd(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
static inline I32 isub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
static inline I32 imul(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
static inline I32 ixor(I32 a, I32 b) { return _mm512_xor_si512(a, b); }
static inline I32 iand(I32 a, I32 b) { return _mm512_and_si512(a, b); }
template <int N> static inline I32 ishl(I32 a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline I32 ishr(I32 a) { return _mm512_srli_epi32(a, N); }
template <int N> static inline I32 isra(I32 a) { return _mm512_srai_epi32(a, N); }
static inline I32 iload(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline F32 unsigned_to_float(I32 a) { return _mm512_cvtepu32_ps(a); }

// Lane i += lane i+8, then +4, +2, +1: the fixed tree of every norm and softmax sum.
static inline float reduce_add(F32 v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
static inline float reduce_max(F32 v) {
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

// Sums of sixteen integers each, exact.
static inline void sums(I32 x, I32 y, int32_t& sx, int32_t& sy) {
    __m256i a = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti32x8_epi32(x, 1));
    __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(y), _mm512_extracti32x8_epi32(y, 1));
    a = _mm256_hadd_epi32(a, b);
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1));
    sx = _mm_cvtsi128_si32(c);
    sy = _mm_extract_epi32(c, 2);
}
static inline F32 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline F32 load_bf16(const uint16_t* p) {
    return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// Lane i: the largest lane of v[i].
static inline F32 row_maxima(const F32 (&v)[6]) {
    F32 pair[3];  // in every four lanes: two rows, twice
    for (int i = 0; i < 3; i++) pair[i] = max(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    const __m512d a = _mm512_castps_pd(pair[0]), b = _mm512_castps_pd(pair[1]), c = _mm512_castps_pd(pair[2]);
    const F32 four = max(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    const F32 two = max(_mm512_castpd_ps(_mm512_unpacklo_pd(c, c)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, c)));
    const F32 half = max(_mm512_shuffle_f32x4(four, two, 0x44), _mm512_shuffle_f32x4(four, two, 0xee));
    const F32 all = max(half, _mm512_shuffle_f32x4(half, half, 0xb1));  // four rows twice, then two rows four times
    return _mm512_shuffle_f32x4(all, all, 0xe8);
}

static inline void store_bf16(uint16_t* p, F32 v) {
    __m256bh h = _mm512_cvtneps_pbh(v);
    std::memcpy(p, &h, 32);
}
static inline I32 iload_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline F32 load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(iload_u8(p)); }
// Sixteen e4m3 codes as a 256th of their values: sign and magnitude moved into a float16, whose exponent is biased by 8 more.
static inline F32 load_e4m3(const uint8_t* p) {
    const __m256i code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(code, _mm256_set1_epi16((short)0xbfff)));
}
// Lane i: value[index[i] mod 16].
static inline F32 lookup16(const float* value, I32 index) { return _mm512_permutexvar_ps(index, load(value)); }
static inline F32 load_s8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline void store_s8(int8_t* p, I32 v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
// 32 integers as bf16, which holds them exactly.
static inline void widen32(const int8_t* p, uint16_t* out) {
    const __m512bh v = _mm512_cvtne2ps_pbh(load_s8(p + 16), load_s8(p));
    std::memcpy(out, &v, 64);
}

static inline Bytes bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline Bytes high_nibbles(Bytes v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
template <int N> static inline Bytes add_where(Bytes v, const uint8_t* bit64) {  // bit i of 64 adds N to byte i
    uint64_t m;
    std::memcpy(&m, bit64, 8);
    return _mm512_mask_add_epi8(v, (__mmask64)m, v, _mm512_set1_epi8(N));
}
template <int S> static inline Bytes two_bits(Bytes v) {  // those at bit position 2 * S of each byte
    return _mm512_and_si512(_mm512_srli_epi16(v, 2 * S), _mm512_set1_epi8(3));
}
using Table = __m512i;  // sixteen bytes, in each quarter
static inline Table table16(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
static inline Bytes look_up(Table t, Bytes v) { return _mm512_shuffle_epi8(t, v); }
// Adds 16 * (two bits of `plane` at bit position 2 * S of each byte).
template <int S> static inline Bytes add_two_bits(Bytes v, Bytes plane) {
    const __m512i m = _mm512_set1_epi8(0x30);
    if constexpr (S == 2) return _mm512_or_si512(v, _mm512_and_si512(plane, m));
    if constexpr (S < 2) return _mm512_or_si512(v, _mm512_and_si512(_mm512_slli_epi16(plane, 4 - 2 * S), m));
    return _mm512_or_si512(v, _mm512_and_si512(_mm512_srli_epi16(plane, 2), m));
}
using Four = __m512i;  // the same four signed bytes in every lane
static inline Four four(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}
static inline I32 dot4(I32 acc, Bytes w, Four x) { return _mm512_dpbusd_epi32(acc, w, x); }
static inline I32 dot4_wide(I32 acc, Bytes w, Four x) { return _mm512_dpbusd_epi32(acc, w, x); }

using Pair = __m512i;  // the same two bf16 in every lane
static inline Pair pair(const uint16_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}
using Pairs = __m512i;  // sixteen lanes of two bf16
static inline Pairs pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
static inline Pairs first_of_pairs(Pairs v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); }
// acc = fma(even, fma(odd, acc)) a lane: checked against two chained FMAs over 32 million random operands.
static inline F32 dot2(F32 acc, Pairs a, Pair b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

// Inlined always: gcc takes a function that only prefetches for one without effects, and drops calls that it does not
// inline at once. As volatile assembler, blocks of many tokens and prefill attention took a third longer.
__attribute__((always_inline)) static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
__attribute__((always_inline)) static inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace ISA_NAMESPACE
}  // namespace roofline
