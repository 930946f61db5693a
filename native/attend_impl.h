// Paged attention for one query and for many.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// ---- attention: order "pages64": blocks of 64 absolute positions ascend within a split -------------------------------

static constexpr int kBlock = 64, kPage = kPageTokens;
static constexpr bool kManyRegisters = kMaxQueries > 4;         // what attend_overlap_impl.h takes, too
static constexpr int kKeyVectors = kManyRegisters ? 4 : 1;   // pages whose scores are in registers together
static constexpr int kValueVectors = kManyRegisters ? 4 : 1;  // sixteen-wide slices of V in registers together

// Int8: the format of the cache, and Bend: whether scores fall with distance or are capped, are known when compiling, so
// that the bf16 cache and models that do neither pay nothing for the others.
enum class Bend { None, Leans, Capped };
template <Bend> struct TileSlopes {};
template <> struct TileSlopes<Bend::Leans> {
    const float* slopes;  // of the tile's queries, in units of log2
};
template <bool Int8, Bend B = Bend::None> struct BlockPages : TileSlopes<B> {
    static constexpr bool kInt8 = Int8, kLeans = B == Bend::Leans, kCapped = B == Bend::Capped;
    static constexpr int kBytes = Int8 ? 1 : 2;  // of an element in the cache
    const uint16_t *k[4], *v[4];
    const char *next_k[4], *next_v[4];  // what is fetched while a page is used, from the pages four further on; null: nothing
    const float *k_scale[Int8 ? 4 : 1], *v_scale[Int8 ? 4 : 1];  // [16 tokens], of an 8-bit cache
};

// The pages that hold the block at `begin`. Behind the last page of this item come those of the thread's next one.
template <bool Int8, Bend B = Bend::None>
static inline BlockPages<Int8, B> block_pages(const Attend& a, int32_t begin, int32_t end) {
    BlockPages<Int8, B> b;
    const int64_t head = page_head_bytes(a.head_dim, Int8);
    const int first = begin / kPage, pages = (end + kPage - 1) / kPage;
    for (int i = 0; i < kBlock / kPage && first + i < pages; i++) {
        const uint8_t* page = a.cache + a.pages[first + i] * a.page_stride;
        b.k[i] = (const uint16_t*)(page + a.kv_head * head);
        if (!a.value_dim) b.v[i] = (const uint16_t*)(page + (a.kv_heads + a.kv_head) * head);
        const int further = first + i + kBlock / kPage;
        b.next_k[i] = b.next_v[i] = nullptr;
        const bool own = further < pages;
        if (!own && further - pages >= a.next_count) continue;
        const uint8_t* next = a.cache + (own ? a.pages[further] : a.next_pages[further - pages]) * a.page_stride;
        const int kv_head = own ? a.kv_head : a.next_kv_head;
        b.next_k[i] = (const char*)(next + kv_head * head);
        if (!a.value_dim) b.next_v[i] = (const char*)(next + (a.kv_heads + kv_head) * head);
    }
    return b;
}

// Widens the block of an 8-bit cache at `begin`, once for all its queries: the integers become bf16 without rounding, in the
// order of a bf16 page. Their scales stay apart: K's is multiplied into scores, V's into weights.
template <Bend B>
static void widen_block(const Attend& a, int32_t begin, int32_t end, BlockPages<true, B>& b) {
    const int64_t head = (int64_t)a.head_dim * kPage;
    const int pages = (std::min(kBlock, end - begin) + kPage - 1) / kPage;
    for (int i = 0; i < pages; i++) {
        const int8_t *k = (const int8_t*)b.k[i], *v = (const int8_t*)b.v[i];
        uint16_t *wide_k = a.wide + i * head, *wide_v = wide_k + kBlock / kPage * head;
        for (int64_t at = 0; at < head; at += 32) widen32(k + at, wide_k + at);
        b.k[i] = wide_k, b.k_scale[i] = (const float*)(k + head);
        if (b.next_k[i]) prefetch(b.next_k[i] + head);
        if (a.value_dim) continue;
        for (int64_t at = 0; at < head; at += 32) widen32(v + at, wide_v + at);
        b.v[i] = wide_v, b.v_scale[i] = (const float*)(v + head);
        if (b.next_v[i]) prefetch(b.next_v[i] + head);
    }
}

// Keys of a page that a query at `position` may see, as bits.
static inline uint32_t visible_keys(const Attend& a, int32_t position, int32_t first_key) {
    const int32_t upto = std::min(16, std::max(0, position - first_key + 1));
    uint32_t m = (1u << upto) - 1;
    if (a.window > 0) {
        const int32_t hidden = std::min(16, std::max(0, position - a.window + 1 - first_key));
        m &= ~((1u << hidden) - 1);
    }
    return m;
}

template <int Q, int V, bool Ahead, class Pages>
static inline void score_pages(int head_dim, const Pages& b, const uint16_t* q, F32 (*s)[4], int first) {
    F32 acc[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) acc[i][v] = zero();
    for (int d = 0; d < head_dim; d += 2) {
        Pairs keys[V];
        for (int v = 0; v < V; v++) {
            const uint16_t* at = b.k[first + v] + d * kPage;
            keys[v] = pairs(at);
            if (Ahead && b.next_k[first + v]) prefetch(b.next_k[first + v] + d * kPage * Pages::kBytes);
        }
        for (int i = 0; i < Q; i++) {
            const Pair query = pair(q + (int64_t)i * head_dim + d);
            for (int v = 0; v < V; v++) acc[i][v] = dot2(acc[i][v], keys[v], query);
        }
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) s[i][first + v] = acc[i][v];
}

template <int Q, int V, bool Ahead, class Pages>
static inline void add_values(int head_dim, const Pages& b, int seen, const uint16_t (*p)[kBlock], const float* alpha, int slice, float* acc) {
    F32 r[Q][V];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) r[i][v] = load(acc + (int64_t)i * head_dim + slice + 16 * v);
    if (alpha)
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) r[i][v] = mul(r[i][v], set1(alpha[i]));
    const int whole = seen / 2;
    for (int j = 0; j < whole; j++) {
        const int64_t at = (int64_t)(j % 8) * head_dim * 2 + slice * 2;
        const uint16_t* row = b.v[j / 8] + at;
        const char* next = Ahead ? b.next_v[j / 8] : nullptr;
        Pairs values[V];
        for (int v = 0; v < V; v++) {
            values[v] = pairs(row + 32 * v);
            if (Ahead && next) prefetch(next + (at + 32 * v) * Pages::kBytes);
        }
        for (int i = 0; i < Q; i++) {
            const Pair weight = pair(p[i] + 2 * j);
            for (int v = 0; v < V; v++) r[i][v] = dot2(r[i][v], values[v], weight);
        }
    }
    if (seen % 2) {  // the slot after the context's last key is stale and may hold NaN: taken out, not multiplied by 0
        const uint16_t* row = b.v[whole / 8] + (int64_t)(whole % 8) * head_dim * 2 + slice * 2;
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) r[i][v] = dot2(r[i][v], first_of_pairs(pairs(row + 32 * v)), pair(p[i] + 2 * whole));
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) store(acc + (int64_t)i * head_dim + slice + 16 * v, r[i][v]);
}

// Scores of `pages` pages, as many at a time as the registers hold.
template <int Q, bool Ahead, class Pages>
static inline void score_block(int head_dim, const Pages& b, int pages, const uint16_t* q, F32 (*s)[4]) {
    if constexpr (kKeyVectors == 4) {
        if (pages == 4) return score_pages<Q, 4, Ahead>(head_dim, b, q, s, 0);
        if (pages == 3) return score_pages<Q, 3, Ahead>(head_dim, b, q, s, 0);
        if (pages == 2) return score_pages<Q, 2, Ahead>(head_dim, b, q, s, 0);
    }
    for (int page = 0; page < pages; page++) score_pages<Q, 1, Ahead>(head_dim, b, q, s, page);
}

// To new maxima: the sums so far are rescaled, and so must the outputs be, by alpha[query].
template <int Q> static inline void rescale(const float* m_new, AttendState* state, float* alpha) {
    alignas(64) float change[16] = {0};
    for (int i = 0; i < Q; i++) change[i] = m_new[i] == state[i].m ? 0.0f : state[i].m - m_new[i];
    store(alpha, exp2(load(change)));
    for (int i = 0; i < Q; i++) {
        store(state[i].l, mul(load(state[i].l), set1(alpha[i])));
        state[i].m = m_new[i];
    }
}

static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// ALiBi: slope * (key - position), rounded, is added to every score.
template <int Q, class Pages> static inline void lean(const Pages& b, const int32_t* position, int32_t begin, int pages, F32 (*s)[4]) {
    const F32 lanes = load(kLanes);
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < pages; v++) {
            const F32 distance = add(set1((float)(begin + v * kPage - position[i])), lanes);  // exact below 2^24
            s[i][v] = add(s[i][v], mul(set1(b.slopes[i]), distance));
        }
}

// From scores to weights in bf16, for queries whose positions ascend. P: the pages, where the number is known; 0: `pages`.
// The weights of an 8-bit cache have V's scales in them, the sums have not.
// Returns whether a maximum moved: only then are sums and outputs so far rescaled, by alpha[query].
template <int Q, int P, class Pages>
static inline bool weigh(const Attend& a, const Pages& b, const int32_t* position, int32_t begin, int pages, F32 (*s)[4], AttendState* state, uint16_t (*p)[kBlock], float* alpha) {
    const F32 none = set1(-infinity());
    if (P) pages = P;
    const bool hides = begin + pages * kPage - 1 > position[0] || (a.window > 0 && position[Q - 1] - a.window >= begin);
    if constexpr (Pages::kInt8)
        for (int v = 0; v < pages; v++) {
            const F32 scale = load(b.k_scale[v]);
            for (int i = 0; i < Q; i++) s[i][v] = mul(s[i][v], scale);
        }
    if constexpr (Pages::kLeans) lean<Q>(b, position, begin, pages, s);
    if constexpr (Pages::kCapped)
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < pages; v++) s[i][v] = capped(s[i][v], set1(a.cap));
    if (hides)
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < pages; v++) s[i][v] = select(mask_of(visible_keys(a, position[i], begin + v * kPage)), s[i][v], none);
    float m_new[Q];
    bool moved = false;
    for (int i = 0; i < Q; i++) {
        F32 top = s[i][0];
        for (int v = 1; v < pages; v++) top = max(top, s[i][v]);
        m_new[i] = reduce_max(top);
        if (m_new[i] > state[i].m) moved = true;
        else m_new[i] = state[i].m;
    }
    if (moved) rescale<Q>(m_new, state, alpha);
    for (int i = 0; i < Q; i++) {
        const F32 m = set1(m_new[i] == -infinity() ? 0.0f : m_new[i]);  // nothing seen yet: every p is 0
        F32 l = load(state[i].l);
        for (int v = 0; v < pages; v++) {
            F32 e = exp2(sub(s[i][v], m));
            l = add(l, e);
            if constexpr (Pages::kInt8) {  // of keys not seen the scale may be stale, and NaN
                const F32 scale = load(b.v_scale[v]);
                e = mul(e, hides ? select(mask_of(visible_keys(a, position[i], begin + v * kPage)), scale, zero()) : scale);
            }
            store_bf16(p[i] + v * kPage, e);
        }
        store(state[i].l, l);
    }
    return moved;
}

// Q queries and the keys of one block up to the last query's position.
template <int Q, bool Ahead, class Pages>
static inline void attend_block(const Attend& a, const Pages& b, const uint16_t* q, const int32_t* position, int32_t begin, AttendState* state, float* acc) {
    const int seen = std::min(kBlock, position[Q - 1] + 1 - begin), pages = (seen + kPage - 1) / kPage;
    F32 s[Q][4];
    alignas(64) uint16_t p[Q][kBlock];
    alignas(64) float alpha[16];
    score_block<Q, Ahead>(a.head_dim, b, pages, q, s);
    const bool moved = pages == 4 ? weigh<Q, 4>(a, b, position, begin, pages, s, state, p, alpha) : weigh<Q, 0>(a, b, position, begin, pages, s, state, p, alpha);
    const float* scale = moved ? alpha : nullptr;
    int slice = 0;
    const int dim = a.acc_dim();
    for (; slice + 16 * kValueVectors <= dim; slice += 16 * kValueVectors)
        add_values<Q, kValueVectors, Ahead>(dim, b, seen, p, scale, slice, acc);
    for (; slice < dim; slice += 16) add_values<Q, 1, Ahead>(dim, b, seen, p, scale, slice, acc);
}

template <bool Ahead, class Pages>
static void attend_tile(const Attend& a, const Pages& b, const uint16_t* q, const int32_t* position, int queries, int32_t begin, AttendState* state, float* acc) {
    switch (queries) {
        case 1: return attend_block<1, Ahead>(a, b, q, position, begin, state, acc);
        case 2: return attend_block<2, Ahead>(a, b, q, position, begin, state, acc);
        case 3: if constexpr (kMaxQueries >= 3) return attend_block<3, Ahead>(a, b, q, position, begin, state, acc); break;
        case 4: if constexpr (kMaxQueries >= 4) return attend_block<4, Ahead>(a, b, q, position, begin, state, acc); break;
        case 5: if constexpr (kMaxQueries >= 5) return attend_block<5, Ahead>(a, b, q, position, begin, state, acc); break;
        case 6: if constexpr (kMaxQueries >= 6) return attend_block<6, Ahead>(a, b, q, position, begin, state, acc); break;
    }
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline

#include "attend_overlap_impl.h"
#include "attend_values_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// As many of the next keys as go the overlapped way: whole blocks that hide nothing, for as many queries as it takes.
template <int Q>
static int32_t overlapped_keys(const Attend& a, const uint16_t* q, const int32_t* position, int queries, int32_t at, int32_t end, AttendState* state, float* acc) {
    if (a.value_dim || queries != kTiles * Q || (a.window > 0 && position[queries - 1] - a.window >= at)) return 0;
    const int32_t stop = std::min(end, position[0] + 1) / kBlock * kBlock;
    if (stop <= at) return 0;
    if (a.head_dim == 64) attend_overlapped<Q, 64>(a, q, at, stop, end, state, acc);
    else if (a.head_dim == 128) attend_overlapped<Q, 128>(a, q, at, stop, end, state, acc);
    else return 0;
    return stop - at;
}

// A block of keys serves all queries before the next is touched: it comes from memory once and then lies in the first
// cache. While the first tile of queries is at it, the next block is fetched.
template <bool Int8, Bend B>
static void attend_keys(const Attend& a, const uint16_t* q, const int32_t* position, int queries, int32_t begin, int32_t end, AttendState* state, float* acc) {
    for (int i = 0; i < queries; i++) {
        state[i].m = -infinity();
        store(state[i].l, zero());
        for (int d = 0; d < a.acc_dim(); d += 16) store(acc + (int64_t)i * a.acc_dim() + d, zero());
    }
    for (int32_t at = begin / kBlock * kBlock; at < end; at += kBlock) {
        if constexpr (kManyRegisters && !Int8 && B == Bend::None) {
            at += overlapped_keys<kMaxQueries>(a, q, position, queries, at, end, state, acc);
            if (at >= end) break;
        }
        BlockPages<Int8, B> b = block_pages<Int8, B>(a, at, end);
        bool ahead = true;
        for (int i = 0; i < queries; i += kMaxQueries) {
            const int n = std::min(kMaxQueries, queries - i);
            const bool passed = a.window > 0 && position[i] - a.window >= at + kBlock - 1;
            if (position[i + n - 1] < at || passed) continue;  // none of them sees any of these keys
            if constexpr (Int8)
                if (ahead) widen_block(a, at, end, b);
            if (ahead && a.value_dim) values_of_block(a, at, end, b);
            if constexpr (B == Bend::Leans) b.slopes = a.slopes + i;
            const int64_t first = (int64_t)i * a.head_dim, result = (int64_t)i * a.acc_dim();
            // A tile that bends fetches even what others have: half the code, and its exponentials hide it.
            if (ahead || B != Bend::None) attend_tile<true>(a, b, q + first, position + i, n, at, state + i, acc + result);
            else if constexpr (B == Bend::None) attend_tile<false>(a, b, q + first, position + i, n, at, state + i, acc + result);
            ahead = false;
        }
    }
}

static void attend_split(const Attend& a, const uint16_t* q, const int32_t* position, int queries, int32_t begin, int32_t end, AttendState* state, float* acc) {
    if (a.wide) {
        if (a.slopes) attend_keys<true, Bend::Leans>(a, q, position, queries, begin, end, state, acc);
        else if (a.cap > 0) attend_keys<true, Bend::Capped>(a, q, position, queries, begin, end, state, acc);
        else attend_keys<true, Bend::None>(a, q, position, queries, begin, end, state, acc);
    } else {
        if (a.slopes) attend_keys<false, Bend::Leans>(a, q, position, queries, begin, end, state, acc);
        else if (a.cap > 0) attend_keys<false, Bend::Capped>(a, q, position, queries, begin, end, state, acc);
        else attend_keys<false, Bend::None>(a, q, position, queries, begin, end, state, acc);
    }
}

// Merges a later split into an earlier total. A split in which a query saw nothing changes nothing.
static void attend_merge(int stored_dim, AttendState& into, float* acc, const AttendState& part, const float* part_acc) {
    if (part.m == -infinity()) return;
    if (into.m == -infinity()) {
        into = part;
        std::copy(part_acc, part_acc + stored_dim, acc);
        return;
    }
    const float m = std::max(into.m, part.m);
    const F32 f1 = exp2(set1(into.m - m)), f2 = exp2(set1(part.m - m));  // both whole: a way through memory takes longer
    store(into.l, add(mul(load(into.l), f1), mul(load(part.l), f2)));
    for (int d = 0; d < stored_dim; d += 16) store(acc + d, add(mul(load(acc + d), f1), mul(load(part_acc + d), f2)));
    into.m = m;
}

static void attend_finish(int head_dim, const AttendState& state, const float* acc, float* out) {
    const F32 inv = set1(1.0f / reduce_add(load(state.l)));
    int d = 0;
    for (; d + 16 <= head_dim; d += 16) store(out + d, add(mul(load(acc + d), inv), zero()));  // + 0: no negative zero
    if (d < head_dim) store_masked(out + d, mask_of((1u << (head_dim - d)) - 1), add(mul(load(acc + d), inv), zero()));
}

static void exp2_many(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i + 16 <= n; i += 16) store(out + i, exp2(load(x + i)));
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
