// Prefill attention over whole blocks of keys that all queries see: the weights of a tile of queries are computed between
// the products of the next tile's scores, so that exp2 and the maxima wait for nothing.
// Included by attend_impl.h. The bits are those of attend_block: every query's operations and their order are the same.
#pragma once

namespace roofline {
namespace ISA_NAMESPACE {

static constexpr int kTiles = kBlock / kPage;  // tiles that take turns: each fetches one page of the next block

struct OverlapTile {
    const BlockPages<false>* pages;
    int next;  // which of the next block's pages is fetched meanwhile
    const uint16_t* q;
    AttendState* state;
    float *acc, *m;            // m: the maxima so far, [16] of which Q count
    alignas(64) float alpha[16];  // by which sums and outputs so far are rescaled; mostly not 1, so no branch asks
};

// One tile's scores on the way to weights. One is enough: a tile's scores are written after those before it were read.
template <int Q> struct OverlapScores {
    alignas(64) float s[Q * kTiles * 16];  // [query][page][16 keys]
    alignas(64) uint16_t p[Q][kBlock];
    alignas(64) float m[16];
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
    const BlockPages<false>& b = *now.pages;
    const uint16_t *const q = now.q, *const k[kTiles] = {b.k[0], b.k[1], b.k[2], b.k[3]};
    const char* const next_k = b.next_k[now.next] ? b.next_k[now.next] : (const char*)k[0];
    const char* const next_v = b.next_v[now.next] ? b.next_v[now.next] : (const char*)k[0];
    AttendState *const weighed = before.state, *const state = now.state;
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
    F32 top[Q];
    for (int i = 0; i < Q; i++) {
        for (int v = 0; v < kTiles; v++) store(scores.s + (i * kTiles + v) * 16, acc[i][v]);
        top[i] = max(max(acc[i][0], acc[i][1]), max(acc[i][2], acc[i][3]));
    }
    const F32 old = load(now.m), m = max(row_maxima(top), old);
    const F32 alpha = exp2(select(less(old, m), sub(old, m), zero()));
    store(now.m, m);
    store(now.alpha, alpha);
    store(scores.m, select(less(set1(-infinity()), m), m, zero()));  // nothing seen yet: every weight is 0
    for (int i = 0; i < Q; i++) store(state[i].l, mul(load(state[i].l), set1(now.alpha[i])));
}

template <int Q, int Dim> __attribute__((noinline)) static void add_tile(const OverlapScores<Q>& scores, const OverlapTile& tile) {
    for (int slice = 0; slice < Dim; slice += 16 * kValueVectors)
        add_values<Q, kValueVectors, false>(Dim, *tile.pages, kBlock, scores.p, tile.alpha, slice, tile.acc);
}

// kTiles tiles of Q queries and the whole blocks from `begin` to `end`, none of whose keys is hidden from any of them.
template <int Q, int Dim>
static void attend_overlapped(const Attend& a, const uint16_t* q, int32_t begin, int32_t end, int32_t last, AttendState* state, float* acc) {
    OverlapScores<Q> scores;
    OverlapTile tiles[2], *before = nullptr;
    BlockPages<false> blocks[2];  // a block's last tile is added while the next block's first is scored
    alignas(64) float m[kTiles][16] = {};
    for (int i = 0; i < Q * kTiles; i++) m[i / Q][i % Q] = state[i].m;
    int turn = 0;
    for (int32_t at = begin; at < end; at += kBlock) {
        BlockPages<false>& pages = blocks[at / kBlock % 2];
        pages = block_pages<false>(a, at, last);
        for (int t = 0; t < kTiles; t++, turn ^= 1) {
            OverlapTile& now = tiles[turn];
            now.pages = &pages, now.next = t;
            now.q = q + (int64_t)t * Q * Dim, now.state = state + t * Q, now.acc = acc + (int64_t)t * Q * Dim, now.m = m[t];
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
    for (int i = 0; i < Q * kTiles; i++) state[i].m = m[i / Q][i % Q];
    for (int i = 0; i < Q * kTiles; i++) weigh_sixteen<Q>(scores, before->state, i);
    add_tile<Q, Dim>(scores, *before);
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
