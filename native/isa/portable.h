// Vec16 in plain C++: sixteen floats. The definition that every other header must equal bit for bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace roofline {
namespace ISA_NAMESPACE {

inline constexpr const char* kIsaName = "portable";
inline constexpr bool kWideIsBiased = false;
inline constexpr int kMaxRowTiles = 1;
inline constexpr int kMaxTokens = 2;  // with more, the portable kernels take twice as long to compile
inline constexpr int kMaxTokensWide = 1;   // the same where activations have two digits
inline constexpr int kMaxQueries = 2;
inline constexpr int kStateVectors = 1;  // columns of recurrent state that are kept in registers, by sixteen

struct F32 { float v[16]; };
struct I32 { int32_t v[16]; };
struct Bytes { uint8_t v[64]; };
using Mask = uint32_t;

// Denormals are zero in every variant: the x86 ones run with DAZ and FTZ set, here the same flags are set by the
// thread; on chips without them (and in software FMA) the flush is explicit.
static inline float flush(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7f800000u) == 0) u &= 0x80000000u;
    std::memcpy(&x, &u, 4);
    return x;
}
template <class Fn> static inline F32 each(Fn fn) {
    F32 r;
    for (int i = 0; i < 16; i++) r.v[i] = fn(i);
    return r;
}
template <class Fn> static inline I32 ieach(Fn fn) {
    I32 r;
    for (int i = 0; i < 16; i++) r.v[i] = fn(i);
    return r;
}
static inline float float_of(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline uint32_t bits_of(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

static inline F32 load(const float* p) { F32 r; std::memcpy(r.v, p, 64); return r; }
static inline void store(float* p, F32 v) { std::memcpy(p, v.v, 64); }
static inline void store_masked(float* p, Mask m, F32 v) { for (int i = 0; i < 16; i++) if (m >> i & 1) p[i] = v.v[i]; }
static inline F32 load_masked(const float* p, Mask m) { return each([&](int i) { return m >> i & 1 ? p[i] : 0.0f; }); }
static inline void load_pairs(const float* p, F32& even, F32& odd) {
    even = each([&](int i) { return p[2 * i]; });
    odd = each([&](int i) { return p[2 * i + 1]; });
}
static inline void store_pairs(float* p, F32 even, F32 odd) {
    for (int i = 0; i < 16; i++) p[2 * i] = even.v[i], p[2 * i + 1] = odd.v[i];
}
static inline F32 set1(float x) { return each([&](int) { return x; }); }
static inline F32 zero() { return set1(0.0f); }
static inline F32 add(F32 a, F32 b) { return each([&](int i) { return flush(a.v[i] + b.v[i]); }); }
static inline F32 sub(F32 a, F32 b) { return each([&](int i) { return flush(a.v[i] - b.v[i]); }); }
static inline F32 mul(F32 a, F32 b) { return each([&](int i) { return flush(a.v[i] * b.v[i]); }); }
static inline F32 div(F32 a, F32 b) { return each([&](int i) { return flush(a.v[i] / b.v[i]); }); }
static inline F32 fma(F32 a, F32 b, F32 c) { return each([&](int i) { return flush(std::fma(flush(a.v[i]), flush(b.v[i]), flush(c.v[i]))); }); }
// As maxps: the second operand where either is NaN or both are zero.
static inline F32 max(F32 a, F32 b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline F32 min(F32 a, F32 b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
static inline F32 abs(F32 a) { return each([&](int i) { return float_of(bits_of(a.v[i]) & 0x7fffffffu); }); }
static inline F32 round_even(F32 a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
static inline F32 to_float(I32 a) { return each([&](int i) { return (float)a.v[i]; }); }
static inline I32 to_int(F32 a) { return ieach([&](int i) { return (int32_t)std::lrint(a.v[i]); }); }
static inline F32 as_float(I32 a) { F32 r; std::memcpy(&r, &a, 64); return r; }
static inline I32 as_int(F32 a) { I32 r; std::memcpy(&r, &a, 64); return r; }
static inline F32 select(Mask m, F32 yes, F32 no) { return each([&](int i) { return m >> i & 1 ? yes.v[i] : no.v[i]; }); }
static inline Mask less(F32 a, F32 b) { Mask m = 0; for (int i = 0; i < 16; i++) m |= (Mask)(a.v[i] < b.v[i]) << i; return m; }
static inline Mask greater_equal(F32 a, F32 b) { Mask m = 0; for (int i = 0; i < 16; i++) m |= (Mask)(a.v[i] >= b.v[i]) << i; return m; }
static inline uint32_t bits(Mask m) { return m; }
static inline Mask mask_of(uint32_t b) { return b & 0xffff; }

static inline I32 izero() { return ieach([](int) { return 0; }); }
static inline I32 iset1(int32_t x) { return ieach([&](int) { return x; }); }
static inline I32 iadd(I32 a, I32 b) { return ieach([&](int i) { return (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]); }); }
static inline I32 isub(I32 a, I32 b) { return ieach([&](int i) { return (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]); }); }
static inline I32 imul(I32 a, I32 b) { return ieach([&](int i) { return (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i]); }); }
static inline I32 ixor(I32 a, I32 b) { return ieach([&](int i) { return a.v[i] ^ b.v[i]; }); }
static inline I32 iand(I32 a, I32 b) { return ieach([&](int i) { return a.v[i] & b.v[i]; }); }
template <int N> static inline I32 ishl(I32 a) { return ieach([&](int i) { return (int32_t)((uint32_t)a.v[i] << N); }); }
template <int N> static inline I32 ishr(I32 a) { return ieach([&](int i) { return (int32_t)((uint32_t)a.v[i] >> N); }); }
template <int N> static inline I32 isra(I32 a) { return ieach([&](int i) { return a.v[i] >> N; }); }
static inline I32 iload(const int32_t* p) { I32 r; std::memcpy(r.v, p, 64); return r; }
static inline F32 unsigned_to_float(I32 a) { return each([&](int i) { return (float)(uint32_t)a.v[i]; }); }

static inline float reduce_add(F32 v) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) v.v[i] = flush(v.v[i] + v.v[i + width]);
    return v.v[0];
}
static inline float reduce_max(F32 v) {
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) v.v[i] = v.v[i] > v.v[i + width] ? v.v[i] : v.v[i + width];
    return v.v[0];
}

static inline void sums(I32 x, I32 y, int32_t& sx, int32_t& sy) {
    sx = sy = 0;
    for (int i = 0; i < 16; i++) sx += x.v[i], sy += y.v[i];
}

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 1023;
    if (exp == 0) return float_of(sign | bits_of((float)man * 0x1p-24f));
    if (exp == 31) return float_of(sign | 0x7f800000u | man << 13);
    return float_of(sign | (exp + 112) << 23 | man << 13);
}
static inline F32 load_f16(const uint16_t* p) { return each([&](int i) { return half_to_float(p[i]); }); }
static inline F32 load_bf16(const uint16_t* p) { return each([&](int i) { return float_of((uint32_t)p[i] << 16); }); }
static inline void store_bf16(uint16_t* p, F32 v) {
    for (int i = 0; i < 16; i++) {
        uint32_t u = bits_of(v.v[i]);
        if ((u & 0x7fffffffu) > 0x7f800000u) p[i] = (uint16_t)(u >> 16 | 0x40);
        else if ((u & 0x7f800000u) == 0) p[i] = (uint16_t)(u >> 16 & 0x8000);
        else p[i] = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
}
static inline I32 iload_u8(const uint8_t* p) { return ieach([&](int i) { return (int32_t)p[i]; }); }
static inline F32 load_u8(const uint8_t* p) { return each([&](int i) { return (float)p[i]; }); }
// Sixteen e4m3 codes as a 256th of their values: sign and magnitude moved into a float16, whose exponent is biased by 8 more.
static inline F32 load_e4m3(const uint8_t* p) {
    return each([&](int i) { return half_to_float((uint16_t)(((uint32_t)(int32_t)(int8_t)p[i] << 7) & 0xbfff)); });
}
// Lane i: value[index[i] mod 16].
static inline F32 lookup16(const float* value, I32 index) { return each([&](int i) { return value[index.v[i] & 15]; }); }
static inline F32 load_s8(const int8_t* p) { return each([&](int i) { return (float)p[i]; }); }
static inline void store_s8(int8_t* p, I32 v) { for (int i = 0; i < 16; i++) p[i] = (int8_t)v.v[i]; }

// 32 integers as bf16, which holds them exactly.
static inline void widen32(const int8_t* p, uint16_t* out) {
    for (int i = 0; i < 32; i++) out[i] = (uint16_t)(bits_of((float)p[i]) >> 16);
}

static inline Bytes bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, 64); return r; }
static inline Bytes low_nibbles(Bytes v) { for (auto& b : v.v) b &= 15; return v; }
static inline Bytes high_nibbles(Bytes v) { for (auto& b : v.v) b >>= 4; return v; }
template <int N> static inline Bytes add_where(Bytes v, const uint8_t* bit64) {
    for (int i = 0; i < 64; i++) v.v[i] = (uint8_t)(v.v[i] + (bit64[i / 8] >> (i % 8) & 1) * N);
    return v;
}
template <int S> static inline Bytes two_bits(Bytes v) {
    for (auto& b : v.v) b = b >> (2 * S) & 3;
    return v;
}
struct Table { uint8_t v[16]; };
static inline Table table16(const uint8_t* p) { Table r; std::memcpy(r.v, p, 16); return r; }
static inline Bytes look_up(const Table& t, Bytes v) {
    for (auto& b : v.v) b = t.v[b & 15];
    return v;
}
template <int S> static inline Bytes add_two_bits(Bytes v, Bytes plane) {
    for (int i = 0; i < 64; i++) v.v[i] |= (uint8_t)((plane.v[i] >> (2 * S) & 3) << 4);
    return v;
}
struct Four { int8_t v[4]; };
static inline Four four(const int8_t* p) { Four r; std::memcpy(r.v, p, 4); return r; }
static inline I32 dot4(I32 acc, const Bytes& w, Four x) {
    for (int i = 0; i < 16; i++)
        for (int c = 0; c < 4; c++) acc.v[i] += (int32_t)w.v[4 * i + c] * x.v[c];
    return acc;
}
static inline I32 dot4_wide(I32 acc, const Bytes& w, Four x) {
    for (int i = 0; i < 16; i++)
        for (int c = 0; c < 4; c++) acc.v[i] += ((int32_t)w.v[4 * i + c] - 128) * x.v[c];
    return acc;
}

struct Pair { float even, odd; };
static inline Pair pair(const uint16_t* p) { return {float_of((uint32_t)p[0] << 16), float_of((uint32_t)p[1] << 16)}; }
struct Pairs { uint16_t v[32]; };
static inline Pairs pairs(const uint16_t* p) { Pairs r; std::memcpy(r.v, p, 64); return r; }
static inline Pairs first_of_pairs(Pairs v) { for (int i = 1; i < 32; i += 2) v.v[i] = 0; return v; }
static inline F32 dot2(F32 acc, const Pairs& a, Pair b) {
    F32 even = each([&](int i) { return float_of((uint32_t)a.v[2 * i] << 16); });
    F32 odd = each([&](int i) { return float_of((uint32_t)a.v[2 * i + 1] << 16); });
    return fma(even, set1(b.even), fma(odd, set1(b.odd), acc));
}

static inline void prefetch(const void*) {}
static inline void prefetch_far(const void*) {}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
