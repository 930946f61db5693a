// Values that are the last dimensions of keys, as a cache of compressed rows has them: those of a block, put once for all
// its queries into the order in which a page of values has them.
// Included by attend_impl.h.
#pragma once

namespace roofline {
namespace ISA_NAMESPACE {

using Quad [[gnu::vector_size(32)]] = uint64_t;      // of four rows of a page: two tokens, two dimensions of each
using Halves [[gnu::vector_size(32)]] = uint16_t;

// Two tokens and two dimensions of each, which lie token by token, read dimension by dimension.
static inline void read_quad(const uint16_t* at, Quad& q) {
    Halves h;
    std::memcpy(&h, at, sizeof h);
    q = (Quad)__builtin_shufflevector(h, h, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}

// Four rows of a page of keys, [two dimensions][16 tokens][2], as columns of its values, [8 token pairs][stored][2].
static inline void four_rows(const uint16_t* k, uint16_t* v, int stored) {
    for (int half = 0; half < 2; half++, k += 16, v += (int64_t)8 * stored) {
        Quad a, b, c, d;
        read_quad(k, a), read_quad(k + 32, b), read_quad(k + 64, c), read_quad(k + 96, d);
        const Quad ab = __builtin_shufflevector(a, b, 0, 4, 2, 6), ab2 = __builtin_shufflevector(a, b, 1, 5, 3, 7);
        const Quad cd = __builtin_shufflevector(c, d, 0, 4, 2, 6), cd2 = __builtin_shufflevector(c, d, 1, 5, 3, 7);
        const Quad rows[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5),
                              __builtin_shufflevector(ab, cd, 2, 3, 6, 7), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
        for (int pair = 0; pair < 4; pair++) std::memcpy(v + (int64_t)pair * stored * 2, &rows[pair], sizeof rows[pair]);
    }
}

// The values of the block at `begin` from its keys, which are bf16 by now; those of an 8-bit cache have the keys' scales.
template <class Pages> static void values_of_block(const Attend& a, int32_t begin, int32_t end, Pages& b) {
    const int pages = (std::min(kBlock, end - begin) + kPage - 1) / kPage;
    for (int i = 0; i < pages; i++) {
        uint16_t* const v = a.values + (int64_t)i * a.value_dim * kPage;
        const uint16_t* const k = b.k[i] + a.first_value * kPage;
        const int rows = std::min(a.value_dim, a.head_dim - a.first_value) / 2;  // of two dimensions; zeros fill up
        int row = 0;
        for (; row + 4 <= rows; row += 4) four_rows(k + row * 2 * kPage, v + row * 4, a.value_dim);
        for (; row < a.value_dim / 2; row++)
            for (int t = 0; t < kPage; t++)
                for (int d = 0; d < 2; d++)
                    v[(int64_t)(t / 2) * a.value_dim * 2 + (2 * row + d) * 2 + t % 2] = row < rows ? k[(row * kPage + t) * 2 + d] : 0;
        b.v[i] = v;
        if constexpr (Pages::kInt8) b.v_scale[i] = b.k_scale[i];
    }
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
