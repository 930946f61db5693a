// Prefill attention over whole blocks of keys that all queries see: the weights of a tile of queries are computed between
// the products of the next tile's scores, so that exp2 and the maxima wait for nothing.
// Included by attend_impl.h. The bits are those of attend_block: every query's operations and their order are the same.
#pragma once

namespace roofline {
namespace ISA_NAMESPACE {

static constexpr int kTiles = kBlock / kPage;  // tiles that take turns: each fetches one page of the next block

struct OverlapTile {
    const uint16_t *k[kTiles], *v[kTiles], *q;
    const char *next_k, *next_v;  // what is fetched meanwhile
    AttendState* state;
    float* acc;
    bool moved;
    alignas(64) float alpha[16];
};

// One tile's scores on the way to weights. One is enough: a tile's scores are written after those before it were read.
template <int Q> struct OverlapScores {
    alignas(64) float s[Q * kTiles * 16];  // [query][page][16 keys]
    alignas(64) uint16_t p[Q][kBlock];
    float m[Q];
};

// Sixteen weights: number `at` of a tile's Q * kTiles.
template <int Q> __attribute__((always_inline)) static inline void weigh_sixteen(OverlapScores<Q>& scores, AttendState* state, int at) {
    const F32 e = exp2(sub(load(scores.s + 16 * at), set1(scores.m[at / kTiles])));
    float* l = state[at / kTiles].l;
    store(l, add(load(l), e));
    store_bf16(scores.p[0] + 16 * at, e);
}

// The scores of `now` and their maxima, between them the weights of `before`, if there is one.
template <int Q, int Dim, bool Before>
__attribute__((noinline)) static void score_tile(OverlapScores<Q>& scores, OverlapTile& now, const OverlapTile& before) {
    F32 acc[Q][kTiles];
    for (auto& row : acc)
        for (F32& r : row) r = zero();
    // Copies: the stores between might alias what is read through references.
    const uint16_t *const q = now.q, *const k[kTiles] = {now.k[0], now.k[1], now.k[2], now.k[3]};
    const char *const next_k = now.next_k, *const next_v = now.next_v;
    AttendState* const weighed = before.state;
#pragma GCC unroll 1
    for (int step = 0; step < Dim / 2; step++) {
        const int64_t at = (int64_t)step * 2 * kPage;
        Pairs keys[kTiles];
        for (int v = 0; v < kTiles; v++) keys[v] = pairs(k[v] + at);
        prefetch(next_k + at * 2);
        prefetch(next_v + at * 2);
        for (int i = 0; i < Q; i++) {
            const Pair query = pair(q + (int64_t)i * Dim + 2 * step);
            for (int v = 0; v < kTiles; v++) acc[i][v] = dot2(acc[i][v], keys[v], query);
        }
        if (Before && step < Q * kTiles) weigh_sixteen<Q>(scores, weighed, step);
    }
    if (Before)
        for (int at = Dim / 2; at < Q * kTiles; at++) weigh_sixteen<Q>(scores, weighed, at);
    AttendState* state = now.state;
    now.moved = false;
    float m_new[Q];
    for (int i = 0; i < Q; i++) {
        for (int v = 0; v < kTiles; v++) store(scores.s + (i * kTiles + v) * 16, acc[i][v]);
        F32 top = acc[i][0];
        for (int v = 1; v < kTiles; v++) top = max(top, acc[i][v]);
        m_new[i] = reduce_max(top);
        if (m_new[i] > state[i].m) now.moved = true;
        else m_new[i] = state[i].m;
        scores.m[i] = m_new[i] == -infinity() ? 0.0f : m_new[i];
    }
    if (now.moved) rescale<Q>(m_new, state, now.alpha);
}

template <int Q, int Dim> __attribute__((noinline)) static void add_tile(const OverlapScores<Q>& scores, const OverlapTile& tile) {
    BlockPages<false> b;
    std::copy(tile.v, tile.v + kTiles, b.v);
    for (int slice = 0; slice < Dim; slice += 16 * kValueVectors)
        add_values<Q, kValueVectors, false>(Dim, b, kBlock, scores.p, tile.moved ? tile.alpha : nullptr, slice, tile.acc);
}

// kTiles tiles of Q queries and the whole blocks from `begin` to `end`, none of whose keys is hidden from any of them.
template <int Q, int Dim>
static void attend_overlapped(const Attend& a, const uint16_t* q, int32_t begin, int32_t end, int32_t last, AttendState* state, float* acc) {
    OverlapScores<Q> scores;
    OverlapTile tiles[2], *before = nullptr;
    int turn = 0;
    for (int32_t at = begin; at < end; at += kBlock) {
        const BlockPages<false> b = block_pages<false>(a, at, last);
        for (int t = 0; t < kTiles; t++, turn ^= 1) {
            OverlapTile& now = tiles[turn];
            std::copy(b.k, b.k + kTiles, now.k);
            std::copy(b.v, b.v + kTiles, now.v);
            now.next_k = b.next_k[t] ? b.next_k[t] : (const char*)b.k[t];
            now.next_v = b.next_v[t] ? b.next_v[t] : (const char*)b.v[t];
            now.q = q + (int64_t)t * Q * Dim, now.state = state + t * Q, now.acc = acc + (int64_t)t * Q * Dim;
            if (before) {
                score_tile<Q, Dim, true>(scores, now, *before);
                add_tile<Q, Dim>(scores, *before);
            } else {
                score_tile<Q, Dim, false>(scores, now, now);
            }
            before = &now;
        }
    }
    if (!before) return;
    for (int i = 0; i < Q * kTiles; i++) weigh_sixteen<Q>(scores, before->state, i);
    add_tile<Q, Dim>(scores, *before);
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
