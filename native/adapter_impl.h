// LoRA: y += scale * B (A x), for a block of rows that share an adapter.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is
// meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// Order "lanes16": products go to lane (index mod 16) by FMA, the lanes are added as the fixed tree. A block of R rows
// and N ranks shares its loads; every sum has lanes of its own, so no bit depends on the block.
template <int R, int N>
static void adapter_down_block(const float* x, int64_t ldx, const float* a, int64_t k, float* out, int64_t ldo) {
    F32 sum[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sum[r][n] = zero();
    const int64_t whole = k / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) {
        F32 w[N];
        for (int n = 0; n < N; n++) w[n] = load(a + n * k + i);
        for (int r = 0; r < R; r++) {
            const F32 v = load(x + r * ldx + i);
            for (int n = 0; n < N; n++) sum[r][n] = fma(w[n], v, sum[r][n]);
        }
    }
    if (whole < k) {
        const Mask tail = mask_of((1u << (k - whole)) - 1);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++)
                sum[r][n] =
                    fma(load_masked(a + n * k + whole, tail), load_masked(x + r * ldx + whole, tail), sum[r][n]);
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) out[r * ldo + n] = reduce_add(sum[r][n]);
}

template <int R>
static void adapter_down_rows(const float* x, int64_t ldx, const float* a, int64_t k, int64_t ranks, float* out,
                              int64_t ldo) {
    int64_t n = 0;
    for (; n + 4 <= ranks; n += 4) adapter_down_block<R, 4>(x, ldx, a + n * k, k, out + n, ldo);
    for (; n < ranks; n++) adapter_down_block<R, 1>(x, ldx, a + n * k, k, out + n, ldo);
}

static void adapter_down(const float* x, int64_t ldx, int64_t rows, const float* a, int64_t k, int64_t ranks,
                         float* out, int64_t ldo) {
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) adapter_down_rows<2>(x + r * ldx, ldx, a, k, ranks, out + r * ldo, ldo);
    if (r < rows) adapter_down_rows<1>(x + r * ldx, ldx, a, k, ranks, out + r * ldo, ldo);
}

// Order "ranks": acc = fma(B[rank], t[rank], acc) for ascending ranks, then y = fma(scale, acc, y).
template <int R>
static void adapter_up_rows(const float* t, int64_t ldt, const float* b, int64_t ldb, int64_t ranks, float scale,
                            float* y, int64_t ldy, int64_t n) {
    const F32 factor = set1(scale);
    for (int64_t c = 0; c < n; c += 16) {
        const bool whole = c + 16 <= n;
        const Mask mask = mask_of(whole ? 0xffffu : (1u << (n - c)) - 1);
        F32 acc[R];
        for (int r = 0; r < R; r++) acc[r] = zero();
        for (int64_t k = 0; k < ranks; k++) {
            const F32 w = whole ? load(b + k * ldb + c) : load_masked(b + k * ldb + c, mask);
            for (int r = 0; r < R; r++) acc[r] = fma(w, set1(t[r * ldt + k]), acc[r]);
        }
        for (int r = 0; r < R; r++) {
            float* const out = y + r * ldy + c;
            if (whole)
                store(out, fma(factor, acc[r], load(out)));
            else
                store_masked(out, mask, fma(factor, acc[r], load_masked(out, mask)));
        }
    }
}

static void adapter_up(const float* t, int64_t ldt, int64_t rows, const float* b, int64_t ldb, int64_t ranks,
                       float scale, float* y, int64_t ldy, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) adapter_up_rows<4>(t + r * ldt, ldt, b, ldb, ranks, scale, y + r * ldy, ldy, n);
    for (; r < rows; r++) adapter_up_rows<1>(t + r * ldt, ldt, b, ldb, ranks, scale, y + r * ldy, ldy, n);
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
