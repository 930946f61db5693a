#include "executable.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace roofline {
namespace {

constexpr int kSplit = 512;        // absolute positions of an attention split
constexpr int kPageTokens = 16;
constexpr int kPrivateRows = 2;    // up to here every thread prepares the rows itself: cheaper than a barrier
constexpr int kRopeRows = 16;      // prefill rows of a claim of rope and cache write
constexpr int kQueryRows = 16;     // prefill rows of an attention item
constexpr int kFewRows = 16;       // segments up to here (drafted tokens to verify) share splits out as single rows do

struct Reader {
    const std::vector<int64_t>& code;
    size_t at = 0;
    int64_t next() { return code[at++]; }
    Ref ref() {
        Ref r;
        r.id = next();
        r.base = next();
        r.per_token = next();
        r.per_row = next();
        return r;
    }
    template <class T> const T* pointer() { return (const T*)next(); }
    float real() {
        const int64_t v = next();
        double d;
        std::memcpy(&d, &v, 8);
        return (float)d;
    }
};

}  // namespace

Executable::Executable(const Kernels* kernels, int threads, const std::vector<int64_t>& code, const Attention& attention,
                       const int32_t* batch, const std::vector<int64_t>& fields, uint8_t* arena, const Ref& logits, int vocab)
    : kernels_(kernels), pool_(threads), attention_(attention), batch_(batch), fields_(fields), arena_(arena), logits_(logits), vocab_(vocab) {
    parse(code);
    counters_.reset(new Counter[ops_.size() * threads]);
    op_seconds.assign(ops_.size(), 0.0);
    workers_.resize(threads);
    const int group = attention_.heads / attention_.kv_heads, dim = attention_.head_dim;
    for (auto& w : workers_) {
        w.private_rows.resize(kPrivateRows * Quantised::row_bytes(widest_, 2) + 64);
        w.scratch.resize(std::max<int64_t>(widest_, 2 * (int64_t)kernels_->max_queries * (dim + 32)) + 64);
        w.halves.resize((size_t)std::max(group, kernels_->max_queries) * dim + dim + 64);
    }
}

void Executable::parse(const std::vector<int64_t>& code) {
    Reader r{code};
    while (r.at < code.size()) {
        Op op;
        op.code = (Code)r.next();
        op.over_rows = r.next() != 0;
        op.digits = (int)r.next();
        op.x = r.ref();
        op.y = r.ref();
        op.residual = r.ref();
        op.width = r.next();
        op.stride = r.next();
        op.weight = r.pointer<float>();
        op.bias = r.pointer<float>();
        op.eps = r.real();
        op.layer = (int)r.next();
        op.q_norm = r.pointer<float>();
        op.k_norm = r.pointer<float>();
        for (int64_t n = r.next(); n > 0; n--) {
            Segment s;
            s.format = (Format)r.next();
            s.weight = r.pointer<uint8_t>();
            s.rows = r.next();
            s.k = r.next();
            s.column = r.next();
            op.segments.push_back(s);
        }
        widest_ = std::max(widest_, op.width);
        ops_.push_back(std::move(op));
    }
}

void Executable::forward() {
    const int32_t* header = field(kHeader);
    tokens_ = header[0];
    segments_ = header[1];
    rows_ = header[2];
    plan_items();
    for (size_t i = 0; i < ops_.size() * pool_.threads(); i++) counters_[i].next.store(0, std::memory_order_relaxed);
    if (timing) std::fill(op_seconds.begin(), op_seconds.end(), 0.0);
    pool_.run([this](int worker) { work(worker); });
}

void Executable::work(int worker) {
    workers_[worker].private_id = -1;
    for (size_t i = 0; i < ops_.size(); i++) {
        const auto start = timing && worker == 0 ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
        if (run(ops_[i], (int)i, worker)) pool_.barrier().wait();
        if (timing && worker == 0) op_seconds[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
}

bool Executable::run(const Op& op, int index, int worker) {
    switch (op.code) {
        case Code::Linear:
        case Code::LinearGated: linear(op, index, worker); return true;
        case Code::RopeWrite: return rope_write(op, index, worker);
        case Code::Attend: attend(op, index, worker); return true;
        default: return row_op(op, index, worker);
    }
}

// ---- rows ------------------------------------------------------------------------------------------------------------

void Executable::one_row(const Op& op, int64_t row, uint8_t* out, int64_t out_rows, int64_t out_row, float* scratch) const {
    const float* x = (const float*)at(op.x);
    switch (op.code) {
        case Code::Embed: {
            const Segment& s = op.segments[0];
            kernels_->embed(s.format, s.weight, s.k, field(kIds)[row], (float*)out + out_row * op.width);
            return;
        }
        case Code::Norm: kernels_->rms_norm(x + row * op.width, op.weight, op.width, op.eps, (float*)out + out_row * op.width); return;
        case Code::NormQuantise:
            kernels_->rms_norm(x + row * op.width, op.weight, op.width, op.eps, scratch);
            kernels_->quantise(scratch, Quantised{out, out_rows, op.width, op.digits}, out_row);
            return;
        case Code::Quantise: kernels_->quantise(x + row * op.width, Quantised{out, out_rows, op.width, op.digits}, out_row); return;
        case Code::Gated:
            kernels_->gated(x + row * 2 * op.width, x + row * 2 * op.width + op.width, op.width, (float*)out + out_row * op.width);
            return;
        case Code::GatedQuantise:
            kernels_->gated(x + row * 2 * op.width, x + row * 2 * op.width + op.width, op.width, scratch);
            kernels_->quantise(scratch, Quantised{out, out_rows, op.width, op.digits}, out_row);
            return;
        case Code::TakeRows: std::memcpy((float*)out + out_row * op.width, x + field(kLogitRows)[row] * op.width, op.width * 4); return;
        default: return;
    }
}

bool Executable::row_op(const Op& op, int index, int worker) {
    Worker& w = workers_[worker];
    const int64_t rows = lead(op);
    const bool quantised = op.code == Code::NormQuantise || op.code == Code::Quantise || op.code == Code::GatedQuantise;
    if (quantised && rows <= kPrivateRows) {
        w.private_id = op.y.id;
        for (int64_t r = 0; r < rows; r++) one_row(op, r, w.private_rows.data(), rows, r, w.scratch.data());
        return false;
    }
    // Neighbouring quantised rows share cache lines: a thread takes sixteen at a time, or its even share of a few.
    const int64_t share = (rows + pool_.threads() - 1) / pool_.threads();
    const int64_t chunk = quantised ? std::min<int64_t>(16, share) : std::max<int64_t>(1, std::min<int64_t>(16, share / 4));
    Claims claim = claims(index, worker, rows, chunk);
    for (int64_t begin, end; claim.next(begin, end);)
        for (int64_t r = begin; r < end; r++) one_row(op, r, at(op.y), rows, r, w.scratch.data());
    return true;
}

// ---- linear ----------------------------------------------------------------------------------------------------------

void Executable::linear(const Op& op, int index, int worker) {
    const int64_t rows = lead(op);
    if (rows == 0) return;
    const Worker& w = workers_[worker];
    const bool gated = op.code == Code::LinearGated;  // a tile of the gate and one of up are computed together
    int64_t tiles = 0, bytes = 0;
    for (const Segment& s : op.segments) {
        const int64_t n = (s.rows + kTileRows - 1) / kTileRows;
        tiles += n;
        bytes += n * (int64_t)tile_bytes(s.format, s.k);
    }
    if (gated) tiles /= 2;
    // About 20 us a claim (25 GB/s or 600 Gop/s a core), yet enough claims that no thread waits long at the end.
    const double tile_seconds = std::max((double)bytes / tiles / 25e9, (gated ? 4.0 : 2.0) * kTileRows * op.width * rows / 600e9);
    int64_t chunk = std::min<int64_t>((int64_t)(20e-6 / tile_seconds), tiles / (4 * pool_.threads()));
    chunk = std::max<int64_t>(2, (chunk + 1) / 2 * 2);
    Linear a;
    a.tokens = rows;
    uint8_t* x = w.private_id == op.x.id ? const_cast<uint8_t*>(w.private_rows.data()) : at(op.x);
    Claims claim = claims(index, worker, tiles, chunk);
    for (int64_t begin, end; claim.next(begin, end);) {
        int64_t base = 0;
        for (const Segment& s : op.segments) {
            const int64_t n = (s.rows + kTileRows - 1) / kTileRows;
            const int64_t from = std::max<int64_t>(0, begin - base), to = std::min(n, end - base);
            base += n;
            if (from >= to) continue;
            a.format = s.format;
            a.weight = s.weight;
            a.up = gated ? op.segments[1].weight : nullptr;
            a.rows = s.rows;
            a.k = s.k;
            if (is_float(s.format)) a.xf = (const float*)x;
            else a.x = Quantised{x, rows, s.k, op.digits};
            a.y = (float*)at(op.y) + s.column;
            a.ldy = op.stride;
            a.bias = op.bias ? op.bias + s.column : nullptr;
            a.residual = op.residual.id >= 0 ? (const float*)at(op.residual) + s.column : nullptr;
            a.ldr = op.stride;
            kernels_->linear(a, from, to);
        }
    }
}

// ---- attention -------------------------------------------------------------------------------------------------------

// Rows whose queries fill the kernel's tiles.
static int rows_of_a_tile(int group, int max_queries) {
    for (int rows = 1; rows <= 3; rows++)
        if (rows * group % max_queries == 0) return rows;
    return std::max(1, max_queries / group);
}

void Executable::plan_items() {
    items_.clear();
    prefill_rows_.clear();
    row_segment_.resize(tokens_);
    const int32_t *start = field(kSegStart), *context = field(kContextLen);
    const int group = attention_.heads / attention_.kv_heads, window = attention_.window;
    const int few = rows_of_a_tile(group, kernels_->max_queries);
    int slots = 0, merges = 0;
    has_prefill_ = false;
    for (int s = 0; s < segments_; s++) {
        const int count = start[s + 1] - start[s];
        for (int r = start[s]; r < start[s + 1]; r++) row_segment_[r] = s;
        if (count > 1) {
            has_prefill_ = true;
            for (int r = start[s]; r < start[s + 1]; r++) prefill_rows_.push_back(r);
        }
        if (count <= kFewRows) {
            for (int r = 0; r < count; r += few) {
                const int rows = std::min(few, count - r), seen = context[s] - count + r + 1;  // keys of the first of them
                const int first = window > 0 ? std::max(0, seen - window) / kSplit : 0;
                const int splits = (seen + rows - 1 + kSplit - 1) / kSplit - first;
                for (int h = 0; h < attention_.kv_heads; h++, merges++) {
                    for (int p = 0; p < splits; p++) items_.push_back({s, h, start[s] + r, rows, first + p, splits, slots + p * rows, slots, merges});
                    slots += splits * rows;
                }
            }
            continue;
        }
        // Late rows see most keys: they go first, so that the last items claimed are short.
        for (int r = (count - 1) / kQueryRows * kQueryRows; r >= 0; r -= kQueryRows)
            for (int h = 0; h < attention_.kv_heads; h++)
                items_.push_back({s, h, start[s] + r, std::min(kQueryRows, count - r), 0, 0, 0, 0, 0});
    }
    if (partial_states_.size() < (size_t)slots * group) {
        partial_states_.resize((size_t)slots * group);
        partials_.resize((size_t)slots * group * attention_.head_dim);
    }
    if (merges_capacity_ < merges) {
        merges_.reset(new Counter[merges]);
        merges_capacity_ = merges;
    }
    for (int i = 0; i < merges; i++) merges_[i].next.store(0, std::memory_order_relaxed);
}

// Starts fetching the first 64 keys of an item; rope and the cache write of the new token pass the time.
static void fetch_block(const Attend& a, int begin) {
    const int64_t head = (int64_t)a.head_dim * kPageTokens * 2;  // bytes of K (or V) of one kv head in a page
    for (int p = begin / kPageTokens; p < begin / kPageTokens + 4 && p * kPageTokens < a.context; p++) {
        const uint8_t* page = a.cache + a.pages[p] * a.page_stride;
        for (int64_t at = 0; at < head; at += 64) {
            __builtin_prefetch(page + a.kv_head * head + at);
            __builtin_prefetch(page + (a.kv_heads + a.kv_head) * head + at);
        }
    }
}

Rope Executable::rope_of(const Op& op) const {
    return {attention_.table, op.q_norm, op.k_norm, attention_.eps, attention_.interleaved, attention_.head_dim, attention_.q_scale};
}

Attend Executable::attend_of(const Op& op, int segment, int kv_head) const {
    return {attention_.head_dim, attention_.page_stride,
            attention_.cache + op.layer * attention_.layer_stride, attention_.kv_heads, kv_head,
            field(kPages) + field(kPageStart)[segment], field(kContextLen)[segment], attention_.window, false};
}

// K pages are [kv_head][dim / 2][16 tokens][2], V pages [kv_head][8 token pairs][dim][2], all of K before all of V.
void Executable::write_cache(const Op& op, int segment, int row, int kv_head, uint16_t* halves) const {
    const int dim = attention_.head_dim, kv_heads = attention_.kv_heads;
    const float* qkv = (const float*)at(op.x) + (int64_t)row * op.stride;
    const int32_t position = field(kPositions)[row];
    const int slot = position % kPageTokens;
    const int32_t page = field(kPages)[field(kPageStart)[segment] + position / kPageTokens];
    uint16_t* base = (uint16_t*)(attention_.cache + op.layer * attention_.layer_stride + page * attention_.page_stride);
    uint16_t* k = base + (int64_t)kv_head * dim * kPageTokens;
    uint16_t* v = base + (int64_t)(kv_heads + kv_head) * dim * kPageTokens;
    kernels_->rope_key(rope_of(op), qkv + (attention_.heads + kv_head) * dim, position, halves);
    for (int i = 0; i < dim / 2; i++) std::memcpy(k + (i * kPageTokens + slot) * 2, halves + 2 * i, 4);
    kernels_->to_bf16(qkv + (attention_.heads + kv_heads + kv_head) * dim, dim, halves);
    uint16_t* pair = v + (slot / 2) * dim * 2 + slot % 2;
    for (int i = 0; i < dim; i++) pair[2 * i] = halves[i];
}

// Rows of longer segments: all keys of the chunk must lie in the cache before any of its queries looks. Rows that are
// alone in their segment are written by the attention item that reads them.
bool Executable::rope_write(const Op& op, int index, int worker) {
    if (!has_prefill_) return false;
    const int dim = attention_.head_dim;
    const Rope rope = rope_of(op);
    std::vector<uint16_t> halves((size_t)kPageTokens * dim + 32);
    Claims claim = claims(index, worker, (int64_t)prefill_rows_.size(), kRopeRows);
    for (int64_t begin, end; claim.next(begin, end);) {
        for (int64_t i = begin; i < end; i++) {
            const int row = prefill_rows_[i];
            const float* qkv = (const float*)at(op.x) + (int64_t)row * op.stride;
            uint16_t* q = (uint16_t*)at(op.y) + (int64_t)row * attention_.heads * dim;
            for (int h = 0; h < attention_.heads; h++) kernels_->rope_query(rope, qkv + h * dim, field(kPositions)[row], q + h * dim);
        }
        write_rows(op, (int)begin, (int)end, halves.data());
    }
    return true;
}

// Keys and values of neighbouring prefill rows, a page at a time: the rows of a page are turned into the page's own order
// here, and written in whole lines.
void Executable::write_rows(const Op& op, int begin, int end, uint16_t* halves) const {
    const int dim = attention_.head_dim, kv_heads = attention_.kv_heads;
    const int32_t* positions = field(kPositions);
    for (int first = begin; first < end;) {
        const int row = prefill_rows_[first], segment = row_segment_[row], slot = positions[row] % kPageTokens;
        int count = 1;
        while (first + count < end && slot + count < kPageTokens && prefill_rows_[first + count] == row + count && row_segment_[row + count] == segment) count++;
        const int32_t page = field(kPages)[field(kPageStart)[segment] + positions[row] / kPageTokens];
        uint16_t* base = (uint16_t*)(attention_.cache + op.layer * attention_.layer_stride + page * attention_.page_stride);
        for (int h = 0; h < kv_heads; h++) {
            uint32_t* k = (uint32_t*)(base + (int64_t)h * dim * kPageTokens);
            uint16_t* v = base + (int64_t)(kv_heads + h) * dim * kPageTokens;
            for (int t = 0; t < count; t++) {
                const float* qkv = (const float*)at(op.x) + (int64_t)(row + t) * op.stride;
                kernels_->rope_key(rope_of(op), qkv + (attention_.heads + h) * dim, positions[row + t], halves + t * dim);
            }
            const uint32_t* pairs = (const uint32_t*)halves;  // [count][dim / 2] of two dimensions
            for (int i = 0; i < dim / 2; i++)
                for (int t = 0; t < count; t++) k[i * kPageTokens + slot + t] = pairs[t * (dim / 2) + i];
            for (int t = 0; t < count; t++) {
                const float* qkv = (const float*)at(op.x) + (int64_t)(row + t) * op.stride;
                kernels_->to_bf16(qkv + (attention_.heads + kv_heads + h) * dim, dim, halves + t * dim);
            }
            for (int t = 0; t < count; t++) {
                uint16_t* pair = v + ((slot + t) / 2) * dim * 2;
                if ((slot + t) % 2 == 0 && t + 1 < count) {
                    for (int i = 0; i < dim; i++) ((uint32_t*)pair)[i] = (uint32_t)halves[t * dim + i] | (uint32_t)halves[(t + 1) * dim + i] << 16;
                    t++;
                } else {
                    for (int i = 0; i < dim; i++) pair[2 * i + (slot + t) % 2] = halves[t * dim + i];
                }
            }
        }
        first += count;
    }
}

void Executable::attend(const Op& op, int index, int worker) {
    Worker& w = workers_[worker];
    Claims claim = claims(index, worker, (int64_t)items_.size(), 1);
    for (int64_t i, end; claim.next(i, end);) {
        const Item& item = items_[i];
        if (item.splits == 0) attend_rows(op, item, w);
        else if (segment_rows(item.segment) == 1) attend_decode(op, item, w);
        else attend_few(op, item, w);
    }
}

void Executable::attend_decode(const Op& op, const Item& item, Worker& w) {
    const int dim = attention_.head_dim, group = attention_.heads / attention_.kv_heads;
    const Op& rope_op = ops_[&op - ops_.data() - 1];  // the lowering places RopeWrite right before Attend
    const int32_t position = field(kPositions)[item.row], context = field(kContextLen)[item.segment];
    const float* qkv = (const float*)at(rope_op.x) + (int64_t)item.row * rope_op.stride;
    const Rope rope = rope_of(rope_op);
    uint16_t* q = w.halves.data();
    Attend a = attend_of(op, item.segment, item.kv_head);
    a.fetch_ahead = true;
    const int begin = std::max(item.split * kSplit, attention_.window > 0 ? context - attention_.window : 0);
    const int end = std::min((item.split + 1) * kSplit, context);
    fetch_block(a, begin);
    if ((item.split + 1) * kSplit >= context) write_cache(rope_op, item.segment, item.row, item.kv_head, q);
    for (int h = 0; h < group; h++) kernels_->rope_query(rope, qkv + (item.kv_head * group + h) * dim, position, q + h * dim);
    AttendState* state = partial_states_.data() + (size_t)item.slot * group;
    float* acc = partials_.data() + (size_t)item.slot * group * dim;
    int32_t positions[16];
    std::fill(positions, positions + 16, position);
    for (int h = 0; h < group; h += kernels_->max_queries)
        kernels_->attend_split(a, q + h * dim, positions, std::min(kernels_->max_queries, group - h), begin, end, state + h, acc + h * dim);
    merge_splits(op, item);
}

// A few rows of a segment, one split of their keys. Keys and values are in the cache already.
void Executable::attend_few(const Op& op, const Item& item, Worker& w) {
    const int dim = attention_.head_dim, group = attention_.heads / attention_.kv_heads, heads = attention_.heads;
    Attend a = attend_of(op, item.segment, item.kv_head);
    a.fetch_ahead = true;
    const uint16_t* q_rows = (const uint16_t*)at(op.x);
    AttendState* state = partial_states_.data() + (size_t)item.slot * group;
    float* acc = partials_.data() + (size_t)item.slot * group * dim;
    uint16_t* q = w.halves.data();
    int32_t position[16];
    for (int first = 0; first < item.count * group; first += kernels_->max_queries) {
        const int n = std::min(kernels_->max_queries, item.count * group - first);
        for (int i = 0; i < n; i++) {
            const int row = item.row + (first + i) / group, head = item.kv_head * group + (first + i) % group;
            position[i] = field(kPositions)[row];
            std::memcpy(q + (size_t)i * dim, q_rows + ((int64_t)row * heads + head) * dim, dim * 2);
        }
        a.context = position[n - 1] + 1;
        const int begin = std::max(item.split * kSplit, a.window > 0 ? position[0] - a.window + 1 : 0);
        const int end = std::min((item.split + 1) * kSplit, a.context);
        kernels_->attend_split(a, q, position, n, begin, end, state + first, acc + (size_t)first * dim);
    }
    merge_splits(op, item);
}

// The last of an item's splits to arrive merges them all, in their order.
void Executable::merge_splits(const Op& op, const Item& item) {
    const int dim = attention_.head_dim, group = attention_.heads / attention_.kv_heads, queries = item.count * group;
    Counter& arrived = merges_[item.merge];
    if (item.splits > 1 && arrived.next.fetch_add(1, std::memory_order_acq_rel) + 1 < item.splits) return;
    if (item.splits > 1) arrived.next.store(0, std::memory_order_relaxed);  // ready for the next layer
    AttendState* total = partial_states_.data() + (size_t)item.first_slot * group;
    float* total_acc = partials_.data() + (size_t)item.first_slot * group * dim;
    for (int i = 0; i < queries; i++) {
        float* out = (float*)at(op.y) + (int64_t)(item.row + i / group) * op.stride + (item.kv_head * group + i % group) * dim;
        for (int s = 1; s < item.splits; s++)
            kernels_->attend_merge(dim, total[i], total_acc + (size_t)i * dim, total[s * queries + i], total_acc + (size_t)(s * queries + i) * dim);
        kernels_->attend_finish(dim, total[i], total_acc + (size_t)i * dim, out);
    }
}

void Executable::attend_rows(const Op& op, const Item& item, Worker& w) {
    const int dim = attention_.head_dim, group = attention_.heads / attention_.kv_heads, heads = attention_.heads;
    Attend a = attend_of(op, item.segment, item.kv_head);
    const uint16_t* q_rows = (const uint16_t*)at(op.x);
    const int32_t* positions = field(kPositions);
    const int most = kernels_->max_queries;
    AttendState total[16], part[16];
    float *total_acc = w.scratch.data(), *part_acc = total_acc + (size_t)most * dim;
    uint16_t* q = w.halves.data();
    int32_t position[16];
    float* out[16];
    // Queries are (row, head of the group) in row order, so that a tile's positions stay close together.
    for (int first = 0; first < item.count * group; first += most) {
        const int n = std::min(most, item.count * group - first);
        for (int i = 0; i < n; i++) {
            const int row = item.row + (first + i) / group, head = item.kv_head * group + (first + i) % group;
            position[i] = positions[row];
            std::memcpy(q + (size_t)i * dim, q_rows + ((int64_t)row * heads + head) * dim, dim * 2);
            out[i] = (float*)at(op.y) + (int64_t)row * op.stride + head * dim;
        }
        const int32_t last = position[n - 1] + 1;
        a.context = last;  // keys after the tile's last query would only add zeros
        int32_t begin = a.window > 0 ? std::max(0, position[0] - a.window + 1) : 0;
        bool merged = false;
        while (begin < last) {
            const int32_t end = std::min(last, (begin / kSplit + 1) * kSplit);
            kernels_->attend_split(a, q, position, n, begin, end, merged ? part : total, merged ? part_acc : total_acc);
            if (merged)
                for (int i = 0; i < n; i++) kernels_->attend_merge(dim, total[i], total_acc + (size_t)i * dim, part[i], part_acc + (size_t)i * dim);
            merged = true;
            begin = end;
        }
        for (int i = 0; i < n; i++) kernels_->attend_finish(dim, total[i], total_acc + (size_t)i * dim, out[i]);
    }
}

}  // namespace roofline
