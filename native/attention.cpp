// The attention of an Executable: which items a step has, rope and cache writes, and how splits are merged.
#include <algorithm>
#include <cstring>

#include "executable.h"

namespace roofline {
namespace {

constexpr int kSplit = 512;    // absolute positions of an attention split
constexpr int kBlockPages = 4; // pages a kernel has in hand, and fetches ahead
constexpr int kRopeRows = 16;  // prefill rows of a claim of rope and cache write
constexpr int kFewRows = 16;   // segments up to here (drafted tokens to verify) share splits out as single rows do
constexpr int kQueries = 24;   // prefill queries that look at a block of keys together: with it and the next, a first cache full

// How a head gets into the cache, by its elements there; a scale is returned where there is one.
template <class E> struct Written;
template <> struct Written<uint16_t> {
    using Two = uint32_t;
    static float key(const Kernels* kernels, const Rope& rope, const float* head, int32_t position, uint16_t* out) {
        kernels->rope_key(rope, head, position, out);
        return 1.0f;
    }
    static float value(const Kernels* kernels, const float* head, int dim, uint16_t* out) {
        kernels->to_bf16(head, dim, out);
        return 1.0f;
    }
};
template <> struct Written<uint8_t> {
    using Two = uint16_t;
    static float key(const Kernels* kernels, const Rope& rope, const float* head, int32_t position, uint8_t* out) {
        return kernels->rope_key_int8(rope, head, position, (int8_t*)out);
    }
    static float value(const Kernels* kernels, const float* head, int dim, uint8_t* out) {
        return kernels->to_int8(head, dim, (int8_t*)out);
    }
};

float* scales_at(uint8_t* head, int stored) { return (float*)(head + stored * kPageTokens); }

}  // namespace

// Rows whose queries fill the kernel's tiles.
static int rows_of_a_tile(int group, int max_queries) {
    for (int rows = 1; rows <= 3; rows++)
        if (rows * group % max_queries == 0) return rows;
    return std::max(1, max_queries / group);
}

void Executable::plan_items() {
    prefill_rows_.clear();
    row_segment_.resize(tokens_);
    const int32_t* start = field(kSegStart);
    has_prefill_ = false;
    for (int s = 0; s < segments_; s++) {
        const int count = start[s + 1] - start[s];
        for (int r = start[s]; r < start[s + 1]; r++) row_segment_[r] = s;
        if (count == 1) continue;
        has_prefill_ = true;
        for (int r = start[s]; r < start[s + 1]; r++) prefill_rows_.push_back(r);
    }
    if (plans_.empty()) return;
    int slots = 0, merges = 0;
    for (Plan& plan : plans_) plan_window(plan, slots, merges);
    const int group = attention_.heads / attention_.kv_heads;
    if (partial_states_.size() < (size_t)slots * group) {
        partial_states_.resize((size_t)slots * group);
        partials_.resize((size_t)slots * group * attention_.stored());
    }
    if (merges_capacity_ < merges) {
        merges_.reset(new Counter[merges]);
        merges_capacity_ = merges;
    }
    for (int i = 0; i < merges; i++) merges_[i].next.store(0, std::memory_order_relaxed);
}

// The items of the attentions with one window. Slots and merges of different windows are the same places: all threads
// are done with one attention before the next. `most_slots` and `most_merges` grow to what any of them needs.
void Executable::plan_window(Plan& plan, int& most_slots, int& most_merges) {
    std::vector<Item>& items = plan.items;
    items.clear();
    const int32_t *start = field(kSegStart), *context = field(kContextLen);
    const int group = attention_.heads / attention_.kv_heads, window = plan.window;
    const int few = rows_of_a_tile(group, kernels_->max_queries);
    const int query_rows = variant(ops_[attend_]).query_rows;  // all layers attend alike
    int slots = 0, merges = 0;
    for (int s = 0; s < segments_; s++) {
        const int count = start[s + 1] - start[s];
        if (count <= kFewRows) {
            for (int r = 0; r < count; r += few) {
                const int rows = std::min(few, count - r), seen = context[s] - count + r + 1;  // keys of the first of them
                const int first = window > 0 ? std::max(0, seen - window) / kSplit : 0;
                const int last = plan.both_ways ? context[s] : seen + rows - 1, splits = (last + kSplit - 1) / kSplit - first;
                for (int h = 0; h < attention_.kv_heads; h++, merges++) {
                    for (int p = 0; p < splits; p++) items.push_back({s, h, start[s] + r, rows, first + p, splits, slots + p * rows, slots, merges});
                    slots += splits * rows;
                }
            }
            continue;
        }
        // Late rows see most keys: they go first, so that the last items claimed are short.
        for (int r = (count - 1) / query_rows * query_rows; r >= 0; r -= query_rows)
            for (int h = 0; h < attention_.kv_heads; h++)
                items.push_back({s, h, start[s] + r, std::min(query_rows, count - r), 0, 0, 0, 0, 0});
    }
    most_slots = std::max(most_slots, slots);
    most_merges = std::max(most_merges, merges);
}

// The position of the last key that a row of an item sees; row 0 is its first.
int32_t Executable::last_seen(const Op& op, const Item& item, int row) const {
    return op.flags & kBothWays ? field(kContextLen)[item.segment] - 1 : field(kPositions)[item.row + row];
}

// The pages an item reads first.
Executable::FirstPages Executable::first_pages(const Op& op, const Item& item) const {
    const int window = plans_[op.plan].window;
    const int32_t* pages = field(kPages) + field(kPageStart)[item.segment];
    const int seen = last_seen(op, item, 0) + 1, last = last_seen(op, item, item.count - 1) + 1;
    const int begin = std::max(item.split * kSplit, window > 0 ? seen - window : 0);
    const int end = item.splits > 0 ? std::min((item.split + 1) * kSplit, last) : last;
    const int first = begin / (kBlockPages * kPageTokens) * kBlockPages;
    return {pages + first, std::min(kBlockPages, (end + kPageTokens - 1) / kPageTokens - first), item.kv_head};
}

// Starts fetching the first keys and values of a thread's first item, while it would only wait for the others.
void Executable::fetch_first(const Op& op, int worker) const {
    const std::vector<Item>& all = plans_[op.plan].items;
    const int64_t items = (int64_t)all.size(), at = items * worker / pool_.threads();
    if (at >= items * (worker + 1) / pool_.threads() || all[at].splits == 0) return;
    const FirstPages first = first_pages(op, all[at]);
    const int64_t head = head_bytes();
    const uint8_t* cache = attention_.cache + op.layer * attention_.layer_stride;
    for (int p = 0; p < first.count; p++) {
        const uint8_t* page = cache + first.pages[p] * attention_.page_stride;
        for (int64_t line = 0; line < head; line += 64) {
            __builtin_prefetch(page + first.kv_head * head + line);
            __builtin_prefetch(page + (attention_.kv_heads + first.kv_head) * head + line);
        }
    }
}

Rope Executable::rope_of(const Op& op, int32_t position) const {
    const float factor = op.flags & kByPosition ? op.weight[position] : 1.0f;
    return {op.rope, op.q_norm, op.k_norm, attention_.eps, attention_.interleaved, attention_.head_dim, attention_.rotated, attention_.q_scale, factor,
            (op.flags & kNormLast) != 0};
}

// `next`: the item this thread takes afterwards, or null.
Attend Executable::attend_of(const Op& op, const Item& item, const Item* next, Worker& w) const {
    Attend a{attention_.stored(), attention_.page_stride, attention_.cache + op.layer * attention_.layer_stride, attention_.kv_heads, item.kv_head,
             field(kPages) + field(kPageStart)[item.segment], plans_[op.plan].window, nullptr, 0, 0};
    a.cap = op.cap;
    if (attention_.int8) a.wide = (uint16_t*)(((uintptr_t)w.wide.data() + 63) & ~(uintptr_t)63);  // whole cache lines
    if (op.weight) {  // query i of any call is of head i % group
        const int group = attention_.heads / attention_.kv_heads;
        for (size_t i = 0; i < w.slopes.size(); i++) w.slopes[i] = op.weight[item.kv_head * group + i % group];
        a.slopes = w.slopes.data();
    }
    if (next && next->splits > 0) {
        const FirstPages first = first_pages(op, *next);
        a.next_pages = first.pages, a.next_count = first.count, a.next_kv_head = first.kv_head;
    }
    return a;
}

uint8_t* Executable::page_of(const Op& op, int segment, int32_t position) const {
    const int32_t page = field(kPages)[field(kPageStart)[segment] + position / kPageTokens];
    return attention_.cache + op.layer * attention_.layer_stride + page * attention_.page_stride;
}

// K pages are [kv_head][stored / 2][16 tokens][2], V pages [kv_head][8 token pairs][stored][2], all of K before all of V.
// In an 8-bit cache (E: a byte) the elements of a head are followed by its scales, [16 tokens].
template <class E>
void Executable::write_cache(const Op& op, int segment, int row, int kv_head, E* head) const {
    using Two = typename Written<E>::Two;
    const int dim = attention_.head_dim, stored = attention_.stored(), kv_heads = attention_.kv_heads;
    const float* qkv = (const float*)at(op.x) + (int64_t)row * op.stride;
    const int32_t position = field(kPositions)[row];
    const int slot = position % kPageTokens;
    uint8_t* page = page_of(op, segment, position);
    uint8_t *k = page + kv_head * head_bytes(), *v = page + (kv_heads + kv_head) * head_bytes();
    const float k_scale = Written<E>::key(kernels_, rope_of(op, position), qkv + (attention_.heads + kv_head) * dim, position, head);
    for (int i = 0; i < stored / 2; i++) std::memcpy((Two*)k + i * kPageTokens + slot, head + 2 * i, sizeof(Two));
    const float v_scale = Written<E>::value(kernels_, qkv + (attention_.heads + kv_heads + kv_head) * dim, dim, head);
    E* pair = (E*)v + (slot / 2) * stored * 2 + slot % 2;
    for (int i = 0; i < stored; i++) pair[2 * i] = head[i];
    if (attention_.int8) scales_at(k, stored)[slot] = k_scale, scales_at(v, stored)[slot] = v_scale;
}

// Rows of longer segments: all keys of the chunk must lie in the cache before any of its queries looks. Rows that are
// alone in their segment are written by the attention item that reads them.
bool Executable::rope_write(const Op& op, int index, int worker) {
    if (!has_prefill_) return false;
    const int dim = attention_.head_dim, stored = attention_.stored();
    std::vector<uint16_t> halves((size_t)kPageTokens * stored + 32);
    Claims claim = claims(index, worker, (int64_t)prefill_rows_.size(), kRopeRows);
    for (int64_t begin, end; claim.next(begin, end);) {
        for (int64_t i = begin; i < end; i++) {
            const int row = prefill_rows_[i];
            const float* qkv = (const float*)at(op.x) + (int64_t)row * op.stride;
            uint16_t* q = (uint16_t*)at(op.y) + (int64_t)row * attention_.heads * stored;
            const int32_t position = field(kPositions)[row];
            const Rope rope = rope_of(op, position);
            for (int h = 0; h < attention_.heads; h++) kernels_->rope_query(rope, qkv + h * dim, position, q + h * stored);
        }
        if (attention_.int8) write_rows(op, (int)begin, (int)end, (uint8_t*)halves.data());
        else write_rows(op, (int)begin, (int)end, halves.data());
    }
    return true;
}

// Keys and values of neighbouring prefill rows, a page at a time: the rows of a page are turned into the page's own order
// here, and written in whole lines.
template <class E>
void Executable::write_rows(const Op& op, int begin, int end, E* heads) const {
    using Two = typename Written<E>::Two;
    const int dim = attention_.head_dim, stored = attention_.stored(), kv_heads = attention_.kv_heads;
    const int32_t* positions = field(kPositions);
    for (int first = begin; first < end;) {
        const int row = prefill_rows_[first], segment = row_segment_[row], slot = positions[row] % kPageTokens;
        int count = 1;
        while (first + count < end && slot + count < kPageTokens && prefill_rows_[first + count] == row + count && row_segment_[row + count] == segment) count++;
        uint8_t* page = page_of(op, segment, positions[row]);
        for (int h = 0; h < kv_heads; h++) {
            uint8_t *k = page + h * head_bytes(), *v = page + (kv_heads + h) * head_bytes();
            for (int t = 0; t < count; t++) {
                const float* qkv = (const float*)at(op.x) + (int64_t)(row + t) * op.stride;
                const float scale = Written<E>::key(kernels_, rope_of(op, positions[row + t]), qkv + (attention_.heads + h) * dim, positions[row + t], heads + t * stored);
                if (attention_.int8) scales_at(k, stored)[slot + t] = scale;
            }
            const Two* pairs = (const Two*)heads;  // [count][stored / 2] of two dimensions
            for (int i = 0; i < stored / 2; i++)
                for (int t = 0; t < count; t++) ((Two*)k)[i * kPageTokens + slot + t] = pairs[t * (stored / 2) + i];
            for (int t = 0; t < count; t++) {
                const float* qkv = (const float*)at(op.x) + (int64_t)(row + t) * op.stride;
                const float scale = Written<E>::value(kernels_, qkv + (attention_.heads + kv_heads + h) * dim, dim, heads + t * stored);
                if (attention_.int8) scales_at(v, stored)[slot + t] = scale;
            }
            for (int t = 0; t < count; t++) {
                E* pair = (E*)v + ((slot + t) / 2) * stored * 2;
                if ((slot + t) % 2 == 0 && t + 1 < count) {
                    for (int i = 0; i < stored; i++) ((Two*)pair)[i] = (Two)((Two)heads[t * stored + i] | (Two)heads[(t + 1) * stored + i] << 8 * sizeof(E));
                    t++;
                } else {
                    for (int i = 0; i < stored; i++) pair[2 * i + (slot + t) % 2] = heads[t * stored + i];
                }
            }
        }
        first += count;
    }
}

void Executable::attend(const Op& op, int index, int worker) {
    Worker& w = workers_[worker];
    const std::vector<Item>& items = plans_[op.plan].items;
    Claims claim = claims(index, worker, (int64_t)items.size(), 1);
    for (int64_t i, end; claim.next(i, end);) {
        const Item& item = items[i];
        const Item* next = claim.own(i + 1) ? &items[i + 1] : nullptr;
        if (item.splits == 0) attend_rows(op, item, w);
        else attend_few(op, item, next, w);
    }
}

// One split of the keys of one row, or of a few. A row alone in its segment is rotated, and its key and value written, here;
// those of a few rows are in the cache already.
void Executable::attend_few(const Op& op, const Item& item, const Item* next, Worker& w) {
    const int dim = attention_.head_dim, stored = attention_.stored();
    const int group = attention_.heads / attention_.kv_heads, queries = item.count * group;
    const Attend a = attend_of(op, item, next, w);
    const int last = last_seen(op, item, item.count - 1) + 1;
    const int begin = std::max(item.split * kSplit, a.window > 0 ? last_seen(op, item, 0) - a.window + 1 : 0);
    const int end = std::min((item.split + 1) * kSplit, last);
    uint16_t* q = w.halves.data();
    if (segment_rows(item.segment) == 1) {
        const Op& rope_op = ops_[&op - ops_.data() - 1];  // the lowering places RopeWrite right before Attend
        const float* qkv = (const float*)at(rope_op.x) + (int64_t)item.row * rope_op.stride;
        if ((item.split + 1) * kSplit >= last) {
            if (attention_.int8) write_cache(rope_op, item.segment, item.row, item.kv_head, (uint8_t*)q);
            else write_cache(rope_op, item.segment, item.row, item.kv_head, q);
        }
        const int32_t position = field(kPositions)[item.row];
        const Rope rope = rope_of(rope_op, position);
        for (int h = 0; h < group; h++) kernels_->rope_query(rope, qkv + (item.kv_head * group + h) * dim, position, q + h * stored);
        std::fill(w.positions.begin(), w.positions.begin() + group, last_seen(op, item, 0));
    } else {
        gather_queries(op, item, 0, queries, w);
    }
    kernels_->attend_split(a, q, w.positions.data(), queries, begin, end, partial_states_.data() + (size_t)item.slot * group,
                           partials_.data() + (size_t)item.slot * group * stored);
    merge_splits(op, item);
}

// The rotated queries of an item's kv head, from its row `first` on: (row, head of the group) in row order, so that a
// tile's positions stay close together.
void Executable::gather_queries(const Op& op, const Item& item, int first, int queries, Worker& w) const {
    const int stored = attention_.stored(), group = attention_.heads / attention_.kv_heads;
    const uint16_t* rows = (const uint16_t*)at(op.x);
    for (int i = 0; i < queries; i++) {
        const int row = first + i / group;
        w.positions[i] = last_seen(op, item, row);
        std::memcpy(w.halves.data() + (size_t)i * stored, rows + ((int64_t)(item.row + row) * attention_.heads + item.kv_head * group + i % group) * stored, stored * 2);
    }
}

// The last of an item's splits to arrive merges them all, in their order.
void Executable::merge_splits(const Op& op, const Item& item) {
    const int dim = attention_.head_dim, stored = attention_.stored();
    const int group = attention_.heads / attention_.kv_heads, queries = item.count * group;
    Counter& arrived = merges_[item.merge];
    if (item.splits > 1 && arrived.next.fetch_add(1, std::memory_order_acq_rel) + 1 < item.splits) return;
    if (item.splits > 1) arrived.next.store(0, std::memory_order_relaxed);  // ready for the next layer
    AttendState* total = partial_states_.data() + (size_t)item.first_slot * group;
    float* total_acc = partials_.data() + (size_t)item.first_slot * group * stored;
    for (int i = 0; i < queries; i++) {
        float* out = (float*)at(op.y) + (int64_t)(item.row + i / group) * op.stride + (item.kv_head * group + i % group) * dim;
        for (int s = 1; s < item.splits; s++)
            kernels_->attend_merge(stored, total[i], total_acc + (size_t)i * stored, total[s * queries + i], total_acc + (size_t)(s * queries + i) * stored);
        finish(op, item.kv_head * group + i % group, total[i], total_acc + (size_t)i * stored, out);
    }
}

// One query's result. The sink of its head is a key without a value, alone in a split that is merged last.
void Executable::finish(const Op& op, int head, AttendState& state, float* acc, float* out) const {
    alignas(64) static constexpr float kNoValue[kMostHeadDim] = {};
    if (op.flags & kSinks) {
        AttendState sink{};
        sink.l[0] = 1.0f;
        sink.m = op.bias[head] * 0x1.715476p+0f;  // in units of log2, as scores are
        kernels_->attend_merge(attention_.stored(), state, acc, sink, kNoValue);
    }
    kernels_->attend_finish(attention_.head_dim, state, acc, out);
}

void Executable::attend_rows(const Op& op, const Item& item, Worker& w) {
    const int dim = attention_.head_dim, stored = attention_.stored(), group = attention_.heads / attention_.kv_heads;
    const int most = most_queries(), at_once = most / group;
    const Attend a = attend_of(op, item, nullptr, w);
    AttendState *total = w.states.data(), *part = total + most;
    float *total_acc = w.scratch.data(), *part_acc = total_acc + (size_t)most * stored;
    for (int r = 0; r < item.count; r += at_once) {
        const int row = item.row + r, n = std::min(at_once, item.count - r) * group;
        gather_queries(op, item, r, n, w);
        const int32_t last = w.positions[n - 1] + 1;
        int32_t begin = a.window > 0 ? std::max(0, w.positions[0] - a.window + 1) : 0;
        bool merged = false;
        while (begin < last) {
            const int32_t end = std::min(last, (begin / kSplit + 1) * kSplit);
            kernels_->attend_split(a, w.halves.data(), w.positions.data(), n, begin, end, merged ? part : total, merged ? part_acc : total_acc);
            if (merged)
                for (int i = 0; i < n; i++) kernels_->attend_merge(stored, total[i], total_acc + (size_t)i * stored, part[i], part_acc + (size_t)i * stored);
            merged = true;
            begin = end;
        }
        for (int i = 0; i < n; i++) {
            float* out = (float*)at(op.y) + (int64_t)(row + i / group) * op.stride + (item.kv_head * group + i % group) * dim;
            finish(op, item.kv_head * group + i % group, total[i], total_acc + (size_t)i * stored, out);
        }
    }
}

// Prefill queries that go through a split together.
int Executable::most_queries() const {
    const int group = attention_.heads / attention_.kv_heads;
    return std::max(1, kQueries / group) * group;
}

void Executable::size_attention_scratch() {
    if (plans_.empty()) return;
    const int group = attention_.heads / attention_.kv_heads, stored = attention_.stored(), most = most_queries();
    const int queries = std::max(most, rows_of_a_tile(group, kernels_->max_queries) * group);
    for (auto& w : workers_) {
        w.scratch.resize(std::max<size_t>(w.scratch.size(), 2 * (size_t)most * stored));
        w.halves.resize((size_t)queries * stored + stored + 64);
        w.positions.resize(queries);
        w.slopes.resize(queries);
        w.states.resize(2 * most);
        if (attention_.int8) w.wide.resize((size_t)2 * kBlockPages * kPageTokens * stored + 32);
    }
}

}  // namespace roofline
