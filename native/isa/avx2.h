// Vec16 for AVX2 + FMA + F16C: sixteen lanes are two 256-bit registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace roofline {
namespace ISA_NAMESPACE {

inline constexpr const char* kIsaName = "avx2";
// maddubs saturates at 16 bits, so 8-bit weights are used as signed numbers (|w| * sign(x, w)) and need no correction.
inline constexpr bool kWideIsBiased = false;
inline constexpr int kMaxRowTiles = 1;
inline constexpr int kMaxTokens = 2;
inline constexpr int kMaxTokensWide = 1;   // the same where activations have two digits
inline constexpr int kMaxQueries = 4;
inline constexpr int kStateVectors = 1;  // columns of recurrent state that are kept in registers, by sixteen

struct F32 { __m256 a, b; };
struct I32 { __m256i a, b; };
using Bytes = I32;
using Mask = uint32_t;

static inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F32 v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
static inline __m256i lanes(uint32_t m) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)m), bit), bit);
}
static inline void store_masked(float* p, Mask m, F32 v) {
    _mm256_maskstore_ps(p, lanes(m & 255), v.a);
    _mm256_maskstore_ps(p + 8, lanes(m >> 8), v.b);
}
static inline F32 load_masked(const float* p, Mask m) {
    return {_mm256_maskload_ps(p, lanes(m & 255)), _mm256_maskload_ps(p + 8, lanes(m >> 8))};
}
static inline __m256 evens(__m256 a, __m256 b) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), 0xd8));
}
static inline __m256 odds(__m256 a, __m256 b) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8));
}
static inline void load_pairs(const float* p, F32& even, F32& odd) {
    const F32 x = load(p), y = load(p + 16);
    even = {evens(x.a, x.b), evens(y.a, y.b)};
    odd = {odds(x.a, x.b), odds(y.a, y.b)};
}
static inline void store_eight(float* p, __m256 even, __m256 odd) {
    const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
static inline void store_pairs(float* p, F32 even, F32 odd) {
    store_eight(p, even.a, odd.a);
    store_eight(p + 16, even.b, odd.b);
}
static inline F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
#define ROOFLINE_BOTH(name, op) \
    static inline F32 name(F32 x, F32 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
ROOFLINE_BOTH(add, _mm256_add_ps)
ROOFLINE_BOTH(sub, _mm256_sub_ps)
ROOFLINE_BOTH(mul, _mm256_mul_ps)
ROOFLINE_BOTH(div, _mm256_div_ps)
ROOFLINE_BOTH(max, _mm256_max_ps)
ROOFLINE_BOTH(min, _mm256_min_ps)
#undef ROOFLINE_BOTH
static inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F32 abs(F32 v) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(v.a, m), _mm256_and_ps(v.b, m)};
}
static inline F32 round_even(F32 v) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.a, mode), _mm256_round_ps(v.b, mode)};
}
static inline F32 to_float(I32 v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
static inline I32 to_int(F32 v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
static inline F32 as_float(I32 v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
static inline I32 as_int(F32 v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }
static inline F32 select(Mask m, F32 yes, F32 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(lanes(m & 255))),
            _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(lanes(m >> 8)))};
}
static inline Mask less(F32 x, F32 y) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)) | _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)) << 8;
}
static inline Mask greater_equal(F32 x, F32 y) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) | _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
static inline uint32_t bits(Mask m) { return m; }
static inline Mask mask_of(uint32_t b) { return b & 0xffff; }

static inline I32 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I32 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
#define ROOFLINE_BOTH(name, op) \
    static inline I32 name(I32 x, I32 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
ROOFLINE_BOTH(iadd, _mm256_add_epi32)
ROOFLINE_BOTH(isub, _mm256_sub_epi32)
ROOFLINE_BOTH(imul, _mm256_mullo_epi32)
ROOFLINE_BOTH(ixor, _mm256_xor_si256)
ROOFLINE_BOTH(iand, _mm256_and_si256)
#undef ROOFLINE_BOTH
template <int N> static inline I32 ishl(I32 v) { return {_mm256_slli_epi32(v.a, N), _mm256_slli_epi32(v.b, N)}; }
template <int N> static inline I32 ishr(I32 v) { return {_mm256_srli_epi32(v.a, N), _mm256_srli_epi32(v.b, N)}; }
template <int N> static inline I32 isra(I32 v) { return {_mm256_srai_epi32(v.a, N), _mm256_srai_epi32(v.b, N)}; }
static inline I32 iload(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
// Exact for 16-bit halves, one rounding in the last add: the same value as a direct unsigned conversion.
static inline __m256 unsigned_half(__m256i v) {
    __m256 hi = _mm256_cvtepi32_ps(_mm256_srli_epi32(v, 16));
    __m256 lo = _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(hi, _mm256_set1_ps(65536.0f), lo);
}
static inline F32 unsigned_to_float(I32 v) { return {unsigned_half(v.a), unsigned_half(v.b)}; }

static inline float reduce_add(F32 v) {
    __m256 a = _mm256_add_ps(v.a, v.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
static inline float reduce_max(F32 v) {
    __m256 a = _mm256_max_ps(v.a, v.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

static inline void sums(I32 x, I32 y, int32_t& sx, int32_t& sy) {
    __m256i a = _mm256_hadd_epi32(_mm256_add_epi32(x.a, x.b), _mm256_add_epi32(y.a, y.b));
    __m128i c = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1));
    sx = _mm_cvtsi128_si32(c);
    sy = _mm_extract_epi32(c, 2);
}
static inline F32 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m256 bf16_half(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F32 load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
// Nearest even; NaN stays NaN; a denormal becomes a signed zero, as vcvtneps2bf16 does.
static inline __m128i to_bf16_half(__m256 v) {
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i exp = _mm256_and_si256(u, _mm256_set1_epi32(0x7f800000));
    __m256i tiny = _mm256_cmpeq_epi32(exp, _mm256_setzero_si256());
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x8000));
    r = _mm256_blendv_epi8(r, nan, is_nan);
    r = _mm256_blendv_epi8(r, sign, tiny);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
static inline void store_bf16(uint16_t* p, F32 v) {
    _mm_storeu_si128((__m128i*)p, to_bf16_half(v.a));
    _mm_storeu_si128((__m128i*)(p + 8), to_bf16_half(v.b));
}
static inline I32 iload_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
static inline F32 load_u8(const uint8_t* p) { return to_float(iload_u8(p)); }
// Sixteen e4m3 codes as a 256th of their values: sign and magnitude moved into a float16, whose exponent is biased by 8 more.
static inline F32 load_e4m3(const uint8_t* p) {
    __m256i code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    code = _mm256_and_si256(code, _mm256_set1_epi16((short)0xbfff));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(code)), _mm256_cvtph_ps(_mm256_extracti128_si256(code, 1))};
}
static inline __m256 lookup8_of16(F32 value, __m256i index) {  // bit 3 of the index, moved to the sign, chooses the half
    const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(value.a, index), _mm256_permutevar8x32_ps(value.b, index), high);
}
// Lane i: value[index[i] mod 16].
static inline F32 lookup16(const float* value, I32 index) {
    const F32 all = load(value);
    return {lookup8_of16(all, index.a), lookup8_of16(all, index.b)};
}
static inline F32 load_s8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline void store_s8(int8_t* p, I32 v) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

static inline __m256i widen_half(const int8_t* p) {  // eight bf16 values in dwords
    const __m256i v = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(v)), 16);
}
// 32 integers as bf16, which holds them exactly.
static inline void widen32(const int8_t* p, uint16_t* out) {
    for (int i = 0; i < 32; i += 16) {
        const __m256i v = _mm256_packus_epi32(widen_half(p + i), widen_half(p + i + 8));
        _mm256_storeu_si256((__m256i*)(out + i), _mm256_permute4x64_epi64(v, 0xd8));
    }
}

static inline Bytes bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline Bytes low_nibbles(Bytes v) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(v.a, m), _mm256_and_si256(v.b, m)};
}
static inline Bytes high_nibbles(Bytes v) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(v.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(v.b, 4), m)};
}
template <int N> static inline __m256i spread(const uint8_t* bits32) {  // N in every byte whose bit is set
    int32_t m;
    std::memcpy(&m, bits32, 4);
    const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(m), places), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(v, bit), _mm256_set1_epi8(N));
}
template <int N> static inline Bytes add_where(Bytes v, const uint8_t* bit64) {
    return {_mm256_add_epi8(v.a, spread<N>(bit64)), _mm256_add_epi8(v.b, spread<N>(bit64 + 4))};
}
template <int S> static inline Bytes two_bits(Bytes v) {
    const __m256i m = _mm256_set1_epi8(3);
    return {_mm256_and_si256(_mm256_srli_epi16(v.a, 2 * S), m), _mm256_and_si256(_mm256_srli_epi16(v.b, 2 * S), m)};
}
using Table = __m256i;
static inline Table table16(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
static inline Bytes look_up(Table t, Bytes v) { return {_mm256_shuffle_epi8(t, v.a), _mm256_shuffle_epi8(t, v.b)}; }
template <int S> static inline __m256i two_bits_half(__m256i v, __m256i plane) {
    const __m256i m = _mm256_set1_epi8(0x30);
    if constexpr (S == 2) return _mm256_or_si256(v, _mm256_and_si256(plane, m));
    if constexpr (S < 2) return _mm256_or_si256(v, _mm256_and_si256(_mm256_slli_epi16(plane, 4 - 2 * S), m));
    return _mm256_or_si256(v, _mm256_and_si256(_mm256_srli_epi16(plane, 2), m));
}
template <int S> static inline Bytes add_two_bits(Bytes v, Bytes plane) {
    return {two_bits_half<S>(v.a, plane.a), two_bits_half<S>(v.b, plane.b)};
}
using Four = __m256i;
static inline Four four(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}
static inline I32 dot4(I32 acc, Bytes w, Four x) {  // weights below 64: pairs cannot saturate
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, x), one)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, x), one))};
}
static inline __m256i wide_half(__m256i w, __m256i x) {
    __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x, s)), _mm256_set1_epi16(1));
}
static inline I32 dot4_wide(I32 acc, Bytes w, Four x) {
    return {_mm256_add_epi32(acc.a, wide_half(w.a, x)), _mm256_add_epi32(acc.b, wide_half(w.b, x))};
}

struct Pair { __m256 even, odd; };
static inline Pair pair(const uint16_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    const __m256i both = _mm256_set1_epi32(x);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u)))};
}
using Pairs = I32;
static inline Pairs pairs(const uint16_t* p) { return bytes((const uint8_t*)p); }
static inline Pairs first_of_pairs(Pairs v) {
    const __m256i m = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(v.a, m), _mm256_and_si256(v.b, m)};
}
static inline __m256 dot2_half(__m256 acc, __m256i a, Pair b) {
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000u)));
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    return _mm256_fmadd_ps(even, b.even, _mm256_fmadd_ps(odd, b.odd, acc));
}
static inline F32 dot2(F32 acc, Pairs a, Pair b) { return {dot2_half(acc.a, a.a, b), dot2_half(acc.b, a.b, b)}; }

// Inlined always, and no assembler: see avx512.h.
__attribute__((always_inline)) static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
__attribute__((always_inline)) static inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace ISA_NAMESPACE
}  // namespace roofline
