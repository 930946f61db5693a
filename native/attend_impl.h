// Paged attention for one query and for many.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// ---- attention: order "pages64": blocks of 64 absolute positions ascend within a split -------------------------------

static constexpr int kBlock = 64, kPage = 16;
static constexpr int kKeyVectors = kMaxQueries > 2 ? 4 : 1;   // pages whose scores are in registers together
static constexpr int kValueVectors = kMaxQueries > 2 ? 4 : 1;  // sixteen-wide slices of V in registers together

struct BlockPages {
    const uint16_t *k[4], *v[4];
    int pages, keys;   // pages present, keys of the context in this block
    int64_t next[4];   // bytes from each page to the one four further, fetched while this one is used; 0: none
};

static inline BlockPages block_pages(const Attend& a, int32_t begin) {
    BlockPages b;
    const int64_t head = (int64_t)a.head_dim * kPage;  // elements of K (or V) of one kv head in a page
    b.keys = std::min(kBlock, a.context - begin);
    b.pages = (b.keys + kPage - 1) / kPage;
    for (int i = 0; i < b.pages; i++) {
        const uint16_t* page = (const uint16_t*)(a.cache + a.pages[begin / kPage + i] * a.page_stride);
        b.k[i] = page + a.kv_head * head;
        b.v[i] = page + (a.kv_heads + a.kv_head) * head;
        const int further = begin / kPage + i + 4;
        b.next[i] = a.fetch_ahead && further * kPage < a.context ? (a.pages[further] - a.pages[further - 4]) * a.page_stride : 0;
    }
    return b;
}

// Keys of a page that a query at `position` may see, as bits.
static inline uint32_t visible(const Attend& a, int32_t position, int32_t first_key) {
    const int32_t upto = std::min(16, std::max(0, position - first_key + 1));
    uint32_t m = (1u << upto) - 1;
    if (a.window > 0) {
        const int32_t hidden = std::min(16, std::max(0, position - a.window + 1 - first_key));
        m &= ~((1u << hidden) - 1);
    }
    return m;
}

template <int Q, int V, bool Ahead>
static inline void score_pages(int head_dim, const BlockPages& b, const uint16_t* q, F32 (*s)[4], int first) {
    F32 acc[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) acc[i][v] = zero();
    for (int d = 0; d < head_dim; d += 2) {
        Pairs keys[V];
        for (int v = 0; v < V; v++) {
            const uint16_t* at = b.k[first + v] + d * kPage;
            keys[v] = pairs(at);
            if (Ahead && b.next[first + v]) prefetch((const char*)at + b.next[first + v]);
        }
        for (int i = 0; i < Q; i++) {
            const Pair query = pair(q + (int64_t)i * head_dim + d);
            for (int v = 0; v < V; v++) acc[i][v] = dot2(acc[i][v], keys[v], query);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) s[i][first + v] = acc[i][v];
}

template <int Q, int V, bool Ahead>
static inline void add_values(int head_dim, const BlockPages& b, const uint16_t (*p)[kBlock], const float* alpha, int slice, float* acc) {
    F32 r[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) r[i][v] = mul(load(acc + (int64_t)i * head_dim + slice + 16 * v), set1(alpha[i]));
    const int whole = b.keys / 2;
    for (int j = 0; j < whole; j++) {
        const uint16_t* row = b.v[j / 8] + (int64_t)(j % 8) * head_dim * 2 + slice * 2;
        const int64_t next = b.next[j / 8];
        Pairs values[V];
        for (int v = 0; v < V; v++) {
            values[v] = pairs(row + 32 * v);
            if (Ahead && next) prefetch((const char*)(row + 32 * v) + next);
        }
        for (int i = 0; i < Q; i++) {
            const Pair weight = pair(p[i] + 2 * j);
            for (int v = 0; v < V; v++) r[i][v] = dot2(r[i][v], values[v], weight);
        }
    }
    if (b.keys % 2) {  // the slot after the context's last key is stale and may hold NaN: taken out, not multiplied by 0
        const uint16_t* row = b.v[whole / 8] + (int64_t)(whole % 8) * head_dim * 2 + slice * 2;
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) r[i][v] = dot2(r[i][v], first_of_pairs(pairs(row + 32 * v)), pair(p[i] + 2 * whole));
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) store(acc + (int64_t)i * head_dim + slice + 16 * v, r[i][v]);
}

template <int Q, bool Ahead>
static inline void attend_block(const Attend& a, const uint16_t* q, const int32_t* position, int32_t begin, AttendState* state, float* acc) {
    const BlockPages b = block_pages(a, begin);
    const F32 none = set1(-infinity());
    F32 s[Q][4];
    int page = 0;
    for (; page + kKeyVectors <= b.pages; page += kKeyVectors) score_pages<Q, kKeyVectors, Ahead>(a.head_dim, b, q, s, page);
    for (; page < b.pages; page++) score_pages<Q, 1, Ahead>(a.head_dim, b, q, s, page);
    alignas(64) uint16_t p[Q][kBlock];
    alignas(64) float change[16] = {0}, alpha[16];
    float m_new[Q];
    for (int i = 0; i < Q; i++) {
        F32 top = none;
        for (int v = 0; v < b.pages; v++) {
            const uint32_t seen = visible(a, position[i], begin + v * kPage);
            if (seen != 0xffffu) s[i][v] = select(mask_of(seen), s[i][v], none);
            top = max(top, s[i][v]);
        }
        m_new[i] = std::max(state[i].m, reduce_max(top));
        change[i] = m_new[i] == -infinity() ? 0.0f : state[i].m - m_new[i];
    }
    store(alpha, exp2(load(change)));
    for (int i = 0; i < Q; i++) {
        const F32 m = set1(m_new[i] == -infinity() ? 0.0f : m_new[i]);  // nothing seen yet: every p is 0
        F32 l = mul(load(state[i].l), set1(alpha[i]));
        for (int v = 0; v < b.pages; v++) {
            F32 e = exp2(sub(s[i][v], m));
            l = add(l, e);
            store_bf16(p[i] + v * kPage, e);
        }
        store(state[i].l, l);
        state[i].m = m_new[i];
    }
    int slice = 0;
    for (; slice + 16 * kValueVectors <= a.head_dim; slice += 16 * kValueVectors)
        add_values<Q, kValueVectors, Ahead>(a.head_dim, b, p, alpha, slice, acc);
    for (; slice < a.head_dim; slice += 16) add_values<Q, 1, Ahead>(a.head_dim, b, p, alpha, slice, acc);
}

template <int Q>
static void attend_queries(const Attend& a, const uint16_t* q, const int32_t* position, int32_t begin, int32_t end, AttendState* state, float* acc) {
    for (int i = 0; i < Q; i++) {
        state[i].m = -infinity();
        store(state[i].l, zero());
        for (int d = 0; d < a.head_dim; d += 16) store(acc + (int64_t)i * a.head_dim + d, zero());
    }
    for (int32_t at = begin / kBlock * kBlock; at < end; at += kBlock) {
        if (a.fetch_ahead) attend_block<Q, true>(a, q, position, at, state, acc);
        else attend_block<Q, false>(a, q, position, at, state, acc);
    }
}

static void attend_split(const Attend& a, const uint16_t* q, const int32_t* position, int queries, int32_t begin, int32_t end, AttendState* state, float* acc) {
    switch (queries) {
        case 1: return attend_queries<1>(a, q, position, begin, end, state, acc);
        case 2: return attend_queries<2>(a, q, position, begin, end, state, acc);
        case 3: if constexpr (kMaxQueries >= 3) return attend_queries<3>(a, q, position, begin, end, state, acc); break;
        case 4: if constexpr (kMaxQueries >= 4) return attend_queries<4>(a, q, position, begin, end, state, acc); break;
        case 5: if constexpr (kMaxQueries >= 5) return attend_queries<5>(a, q, position, begin, end, state, acc); break;
        case 6: if constexpr (kMaxQueries >= 6) return attend_queries<6>(a, q, position, begin, end, state, acc); break;
    }
}

// Merges a later split into an earlier total. A split in which a query saw nothing changes nothing.
static void attend_merge(int head_dim, AttendState& into, float* acc, const AttendState& part, const float* part_acc) {
    if (part.m == -infinity()) return;
    if (into.m == -infinity()) {
        into = part;
        std::copy(part_acc, part_acc + head_dim, acc);
        return;
    }
    const float m = std::max(into.m, part.m);
    alignas(64) float change[16] = {into.m - m, part.m - m}, factor[16];
    store(factor, exp2(load(change)));
    const F32 f1 = set1(factor[0]), f2 = set1(factor[1]);
    store(into.l, add(mul(load(into.l), f1), mul(load(part.l), f2)));
    for (int d = 0; d < head_dim; d += 16) store(acc + d, add(mul(load(acc + d), f1), mul(load(part_acc + d), f2)));
    into.m = m;
}

static void attend_finish(int head_dim, const AttendState& state, const float* acc, float* out) {
    const F32 inv = set1(1.0f / reduce_add(load(state.l)));
    for (int d = 0; d < head_dim; d += 16) store(out + d, add(mul(load(acc + d), inv), zero()));  // + 0: no negative zero
}

static void exp2_many(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i + 16 <= n; i += 16) store(out + i, exp2(load(x + i)));
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
