#include "executable.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace roofline {

namespace {

Attention attention_of(const Code& code, const Places& places, int64_t cache_pages) {
    const ModelShape& s = code.shape();
    const int64_t page = code.page_bytes(places.int8);
    return {(int)s.heads, (int)s.kv_heads, (int)s.head_dim, (int)s.rotated, s.interleaved, (float)s.q_scale, (float)s.eps,
            places.cache, places.int8, page, page * cache_pages};
}

}  // namespace

Executable::Executable(const Kernels* kernels, int threads, const Code& code, const Places& places, const StepSizes& sizes)
    : kernels_(kernels), pool_(threads), attention_(attention_of(code, places, sizes.cache_pages)), sizes_(sizes), batch_(places.batch),
      fields_(places.fields), arena_(places.arena), state_(places.state), state_values_(code.state_values()), logits_(code.shape().logits), vocab_((int)code.shape().vocab) {
    resolve(code, places);
    counters_.reset(new Counter[ops_.size() * threads]);
    op_seconds.assign(ops_.size(), 0.0);
    workers_.resize(threads);
    for (auto& w : workers_) {
        w.private_rows.resize(kMostPrivateRows * Quantised::row_bytes(widest_, 2) + 64);
        w.scratch.resize(widest_ + 64);
    }
    size_attention_scratch();
    size_expert_scratch();
    size_state_scratch();
}

int Executable::plan_of(int window, bool both_ways) {
    for (size_t i = 0; i < plans_.size(); i++)
        if (plans_[i].window == window && plans_[i].both_ways == both_ways) return (int)i;
    plans_.push_back({window, both_ways, {}});
    return (int)plans_.size() - 1;
}

void Executable::resolve(const Code& code, const Places& places) {
    const uint8_t* image = places.image;
    const auto vector = [image](int64_t place) { return place < 0 ? nullptr : (const float*)(image + place); };
    for (const Code::Entry& entry : code.entries()) {
        const Record& r = entry.record;
        const Operation& known = *entry.operation;
        Op op{known.base, known.flags, r.over_rows != 0, r.x, r.y, r.residual, (int)r.digits, r.width, r.stride,
              vector(r.weight), vector(r.bias), (float)r.eps, (int)r.layer, 0, 0, nullptr, vector(r.q_norm), vector(r.k_norm), {}, {}};
        if (op.base == Base::Attend) op.plan = op.flags & kBothWays ? plan_of(0, true) : plan_of((int)r.width, false), op.cap = (float)(r.eps * 1.4426950408889634);
        if (known.uses.weight == uses::of_positions) {
            if (places.factors) op.weight = places.factors;
            else if (sizes_.positions > code.shape().positions) throw std::invalid_argument("there are factors of fewer positions than are served");
        }
        if (op.base == Base::DeltaRule) op.q_norm = op.k_norm = nullptr, op.second = Ref{0, r.q_norm, r.k_norm, 0};
        if (op.base == Base::SelectiveScan) op.k_norm = nullptr, op.limits = scan_limits(r.k_norm);
        if (op.base == Base::RopeWrite && r.width >= 0)
            op.rope = places.table + r.width * places.table_positions * attention_.rotated;
        for (const Piece& p : entry.pieces) op.segments.push_back({(Format)p.format, image + p.address, p.rows, p.columns, p.start});
        if (op.base == Base::Route && op.width > (int64_t)expert_counts_.rows.size()) expert_counts_.rows.resize(op.width);
        if (known.uses.width == uses::count) widest_ = std::max(widest_, op.width);
        adapts_ = adapts_ || op.base == Base::AdapterDown;
        if (op.base == Base::Attend && !attend_) attend_ = ops_.size();
        ops_.push_back(std::move(op));
    }
}

// The scheduler keeps to the sizes. That is not believed either: a step beyond them would write outside the cache.
void Executable::check_step() const {
    const int32_t *header = field(kHeader), *start = field(kSegStart), *first_page = field(kPageStart), *rows = field(kLogitRows);
    const auto demand = [](bool holds) {
        if (!holds) throw std::invalid_argument("the step is larger than this executable's limits, or its segments do not fit together");
    };
    demand(header[0] >= 0 && header[0] <= sizes_.tokens && header[1] >= 0 && header[1] <= sizes_.segments && header[2] >= 0 &&
           header[2] <= sizes_.rows);
    const int32_t tokens = header[0], segments = header[1];
    demand(start[0] == 0 && first_page[0] == 0);
    for (int32_t s = 0; s < segments; s++) demand(start[s] <= start[s + 1] && first_page[s] <= first_page[s + 1]);
    demand(start[segments] == tokens && first_page[segments] <= sizes_.pages);
    for (int32_t i = 0; i < header[2]; i++) demand(rows[i] >= 0 && rows[i] < tokens);
    for (int32_t s = 0; s < segments; s++) check_segment(s);
}

void Executable::check_segment(int segment) const {
    const int32_t context = field(kContextLen)[segment], first = field(kSegStart)[segment], count = segment_rows(segment);
    const int32_t page = field(kPageStart)[segment], pages = field(kPageStart)[segment + 1] - page;
    const int32_t *positions = field(kPositions), *table = field(kPages) + page;
    bool fits = context >= count && context <= sizes_.positions && (context + (int64_t)kPageTokens - 1) / kPageTokens <= pages;
    for (int32_t i = 0; fits && i < count; i++) fits = positions[first + i] == context - count + i;
    if (!fits) throw std::invalid_argument("the step has a position that its sequence has no page for, or that is not served");
    for (int32_t i = 0; i < (context + kPageTokens - 1) / kPageTokens; i++)
        if (table[i] < 0 || table[i] >= sizes_.cache_pages) throw std::invalid_argument("the step names a page that the cache does not have");
}

void Executable::choose(size_t index, int regime, const std::string& variant) {
    if (index >= ops_.size() || regime < 0 || regime >= kRegimes) throw std::invalid_argument("there is no such op or regime");
    Op& op = ops_[index];
    VariantKind kind;
    if (op.base == Base::Linear) kind = is_float(op.segments[0].format) ? VariantKind::FloatLinear : VariantKind::Linear;
    else if (op.quantises()) kind = VariantKind::Rows;
    else if (op.base == Base::Attend) kind = VariantKind::Attend;
    else throw std::invalid_argument("this op has no variants");
    op.variants[regime] = variant_named(kind, variant, kernels_, op.digits);
}

void Executable::begin_step() {
    check_step();
    check_state();
    check_adapters();
    const int32_t* header = field(kHeader);
    tokens_ = header[0];
    segments_ = header[1];
    rows_ = header[2];
    plan_items();
    for (size_t i = 0; i < ops_.size() * pool_.threads(); i++) counters_[i].next.store(0, std::memory_order_relaxed);
    for (Worker& w : workers_) w.private_id = w.slots.id = w.gathered_id = -1;
    if (timing) {
        stamps_.resize((size_t)pool_.threads() * (ops_.size() + 1));
        meets_.resize(ops_.size());
    }
}

size_t Executable::forward(size_t from) {
    if (from == 0) begin_step();
    size_t end = from;
    while (end < ops_.size() && ops_[end].base != Base::Exchange) end++;
    pool_.run([this, from, end](int worker) { work(worker, from, end); });
    if (timing) read_stamps(from, end);
    return end;
}

void Executable::sample(std::vector<SampleRow>& rows) {
    sample_scratch_.resize((size_t)pool_.threads() * vocab_);
    sample_order_.resize((size_t)pool_.threads() * vocab_);
    std::atomic<size_t> next{0};
    auto job = [&](int worker) {
        for (size_t i; (i = next.fetch_add(1)) < rows.size();) {
            rows[i].scratch = sample_scratch_.data() + (size_t)worker * vocab_;
            rows[i].order = sample_order_.data() + (size_t)worker * vocab_;
            kernels_->sample(rows[i]);
        }
    };
    if (rows.size() == 1) {
        FloatMode mode;
        job(0);
    } else {
        pool_.run(job);
    }
}

void Executable::work(int worker, size_t from, size_t end) {
    Stamp* stamp = timing ? stamps_.data() + (size_t)worker * (ops_.size() + 1) + from : nullptr;
    if (stamp) *stamp++ = std::chrono::steady_clock::now();
    for (size_t i = from; i < end; i++) {
        const bool meet = run(ops_[i], (int)i, worker);
        if (stamp) {
            *stamp++ = std::chrono::steady_clock::now();  // before the barrier, see read_stamps
            if (worker == 0) meets_[i] = meet;
        }
        if (meet && i + 1 < end && ops_[i + 1].base == Base::RopeWrite) fetch_first(ops_[i + 2], worker);
        if (meet) pool_.barrier().wait();
    }
}

// An op with a barrier ends when the last thread is done with it, one without when the first is: the next begins there. One
// thread's own clock would be wrong on a busy machine: while it waits for a core, the others do its share of the next op too,
// which would then seem to take no time. An exchange lasts from where the threads stopped to where the first goes on.
void Executable::read_stamps(size_t from, size_t end_op) {
    const size_t row = ops_.size() + 1;
    Stamp before = stamps_[from];
    for (int worker = 1; worker < pool_.threads(); worker++) before = std::min(before, stamps_[worker * row + from]);
    if (from > 0) op_seconds[from - 1] = std::chrono::duration<double>(before - stopped_).count();
    for (size_t i = from; i < end_op; i++) {
        Stamp first = stamps_[i + 1], last = first;
        for (int worker = 1; worker < pool_.threads(); worker++) {
            first = std::min(first, stamps_[worker * row + i + 1]);
            last = std::max(last, stamps_[worker * row + i + 1]);
        }
        const Stamp end = meets_[i] ? last : first;
        op_seconds[i] = std::chrono::duration<double>(end - before).count();
        before = end;
    }
    stopped_ = before;
}

bool Executable::run(const Op& op, int index, int worker) {
    switch (op.base) {
        case Base::Linear: linear(op, index, worker); return true;
        case Base::Experts: experts(op, index, worker); return true;
        case Base::RopeWrite: return rope_write(op, index, worker);
        case Base::Attend: attend(op, index, worker); return true;
        case Base::CausalConv: causal_conv(op, index, worker); return true;
        case Base::DeltaRule: delta_rule(op, index, worker); return true;
        case Base::SelectiveScan: selective_scan(op, index, worker); return true;
        case Base::AdapterDown:
        case Base::AdapterUp: return adapter(op, index, worker);
        default: return row_op(op, index, worker);
    }
}

// ---- rows ------------------------------------------------------------------------------------------------------------

static Activation activation(const Op& op) {
    if (op.flags & kRelu) return op.flags & kSquared ? Activation::ReluSquared : Activation::Relu;
    if (!(op.flags & kGelu)) return Activation::Silu;
    return op.flags & kTanh ? Activation::GeluTanh : Activation::Gelu;
}

// Columns of each head from `op.digits` on; where its end comes first, zeros.
static void cut_heads(const Op& op, const float* x, float* y) {
    const int64_t heads = op.layer, from = op.stride / heads, to = op.width / heads, copied = std::min(from - op.digits, to);
    for (int64_t h = 0; h < heads; h++) {
        std::memcpy(y + h * to, x + h * from + op.digits, copied * 4);
        std::fill(y + h * to + copied, y + (h + 1) * to, 0.0f);
    }
}

void Executable::join_heads(const Op& op, int64_t row, float* y) const {
    const int64_t heads = op.layer, to = op.width / heads, first = op.flags & kOneHead ? op.stride : op.stride / heads, second = to - first;
    const float *x = (const float*)at(op.x) + row * op.stride, *z = (const float*)at(op.residual) + row * heads * second;
    for (int64_t h = 0; h < heads; h++) {
        std::memcpy(y + h * to, x + (op.flags & kOneHead ? 0 : h * first), first * 4);
        std::memcpy(y + h * to + first, z + h * second, second * 4);
    }
}

void Executable::one_row(const Op& op, int64_t row, uint8_t* out, int64_t out_rows, int64_t out_row, float* scratch) const {
    const bool quantised = op.quantises(), gated = op.flags & kGated;
    const float* x = (const float*)at(op.x) + row * op.width * (gated ? 2 : 1);
    float* y = quantised ? scratch : (float*)out + out_row * op.width;
    switch (op.base) {
        case Base::Embed: {
            const Segment& s = op.segments[0];
            const int64_t at = op.flags & kOneRow ? 0 : field(op.flags & kOfPositions ? kPositions : kIds)[row] - op.layer;
            if (at < 0 || at >= s.rows) std::memset(y, 0, op.width * 4);
            else kernels_->embed(s.format, s.weight, s.k, at, y);
            return;
        }
        case Base::Norm: {
            const int64_t heads = op.flags & kByHead ? op.layer : 1, n = op.width / heads;
            const float* const weight = op.flags & kBare ? nullptr : op.weight;
            const int64_t apart = op.flags & kOfRow ? n : 0;
            for (int64_t h = 0; h < heads; h++) kernels_->rms_norm(x + h * n, weight + h * apart, n, op.eps, y + h * n);
            break;
        }
        case Base::LayerNorm: kernels_->layer_norm(x, op.weight, op.bias, op.width, op.eps, y); break;
        case Base::Activate: {
            const float* const apart = op.flags & kApart ? (const float*)at(op.residual) + row * op.width : nullptr;
            kernels_->activate(activation(op), x, gated ? x + op.width : apart, op.width, y);
            break;
        }
        case Base::QkNorm: {
            const int64_t q = (int64_t)attention_.heads * attention_.head_dim, k = (int64_t)attention_.kv_heads * attention_.head_dim;
            kernels_->rms_norm(x, op.weight, q, op.eps, y);
            kernels_->rms_norm(x + q, op.bias, k, op.eps, y + q);
            if (y != x) std::memcpy(y + q + k, x + q + k, (op.width - q - k) * 4);
            return;
        }
        case Base::Scale: kernels_->scale(x, op.flags & kWeight ? *op.weight : op.eps, op.width, y); return;
        case Base::AboveSpread: kernels_->above_spread(x, op.eps, op.width, y); return;
        case Base::LikeNorm: kernels_->like_norm(x, (const float*)at(op.residual) + row * op.width, op.width, y); return;
        case Base::ScaleByPosition: kernels_->scale(x, op.weight[field(kPositions)[row]], op.width, y); return;
        case Base::SoftCap: kernels_->soft_cap(x, op.eps, op.width, y); return;
        case Base::Add: kernels_->add(x, (const float*)at(op.residual) + row * op.width, op.width, y); return;
        case Base::Mul: kernels_->mul(x, op.flags & kWeight ? op.weight : (const float*)at(op.residual) + row * op.width, op.width, y); break;
        case Base::SigmoidMul:
            kernels_->sigmoid_mul(x, gated ? x + op.width : (const float*)at(op.residual) + row * op.width, op.width, y);
            break;
        case Base::Route:
            if (op.flags & kByScores) {
                const Routing how{op.width,  op.stride, op.digits, op.ranks(), (op.flags & kSigmoid) != 0,
                                  (op.flags & kOfAll) != 0, (op.flags & kByBest) != 0, op.weight, op.eps};
                kernels_->route_scores((const float*)at(op.x) + row * op.width, how, (float*)at(op.y) + row * op.ranks(),
                                       (int32_t*)at(op.residual) + row * op.ranks());
                return;
            }
            kernels_->route((const float*)at(op.x) + row * op.width, op.width, op.ranks(), op.flags & kOfAll,
                            (float*)at(op.y) + row * op.ranks(), (int32_t*)at(op.residual) + row * op.ranks());
            return;
        case Base::Combine:
            kernels_->combine((const float*)at(op.x) + row * op.width * op.ranks(),
                              (const float*)at(op.residual) + row * op.ranks(), op.ranks(), op.width, y);
            return;
        case Base::SigmoidScale: kernels_->sigmoid_scale(x, ((const float*)at(op.residual))[row], op.width, y); return;
        case Base::ExpertBias: op.flags & kScales ? scale_by_expert(op, row) : add_expert_biases(op, row); return;
        case Base::ClampedSwiglu:
            kernels_->clamped_swiglu(x, (const float*)at(op.residual) + row * op.width, op.eps, op.width, y);
            return;
        case Base::CutHeads: cut_heads(op, (const float*)at(op.x) + row * op.stride, y); return;
        case Base::JoinHeads: join_heads(op, row, y); return;
        case Base::TakeRows: std::memcpy(y, (const float*)at(op.x) + field(kLogitRows)[row] * op.width, op.width * 4); return;
        case Base::Quantise: kernels_->quantise(x, Quantised{out, out_rows, op.width, op.digits}, out_row); return;
        default: return;
    }
    if (quantised) kernels_->quantise(scratch, Quantised{out, out_rows, op.width, op.digits}, out_row);
}

bool Executable::row_op(const Op& op, int index, int worker) {
    Worker& w = workers_[worker];
    const int64_t rows = lead(op);
    const bool quantised = op.quantises();
    if (quantised && rows <= variant(op).private_rows) {
        w.private_id = op.y.id;
        for (int64_t r = 0; r < rows; r++) one_row(op, r, w.private_rows.data(), rows, r, w.scratch.data());
        return false;
    }
    if (quantised) w.private_id = -1;  // what is made now lies in the arena, whatever it is called
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
    const Variant& v = variant(op);
    const bool gated = op.flags & kSiluMul;  // a tile of the gate and one of up are computed together
    int64_t tiles = 0, bytes = 0;
    for (const Segment& s : op.segments) {
        const int64_t n = (s.rows + kTileRows - 1) / kTileRows;
        tiles += n;
        bytes += n * (int64_t)tile_bytes(s.format, s.k);
    }
    if (gated) tiles /= 2;
    // A claim is as long as the variant says (at 25 GB/s or 600 Gop/s a core), yet enough claims that no thread waits long at the end.
    const double tile_seconds = std::max((double)bytes / tiles / 25e9, (gated ? 4.0 : 2.0) * kTileRows * op.width * rows / 600e9);
    int64_t chunk = std::min<int64_t>((int64_t)(v.claim_us * 1e-6 / tile_seconds), tiles / (4 * pool_.threads()));
    chunk = std::max<int64_t>(2, (chunk + 1) / 2 * 2);
    Linear a;
    a.tokens = rows;
    a.blocks = v.blocks;
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

// ---- adapters --------------------------------------------------------------------------------------------------------

int64_t Executable::group_width(int64_t group) const {
    for (const Op& op : ops_)
        if (op.base == Base::AdapterDown && op.layer == group) return op.width;
    return -1;
}

void Executable::set_adapter(size_t slot, const Adapter& parts) {
    if (slot < 1 || slot > 4096) throw std::invalid_argument("there is no such slot for an adapter");
    for (const AdapterPart& p : parts) {
        bool down = false, up = false;
        for (const Op& op : ops_) {
            if ((op.base != Base::AdapterDown && op.base != Base::AdapterUp) || op.layer != p.group) continue;
            const bool is_down = op.base == Base::AdapterDown;
            (is_down ? down : up) = true;
            const int64_t ranks = is_down ? op.stride : op.width;
            if (p.first < 0 || p.rank < 1 || p.first > ranks || p.rank > ranks - p.first ||
                (!is_down &&
                 (p.column < 0 || p.columns < 1 || p.column > op.stride || p.columns > op.stride - p.column)))
                throw std::invalid_argument("a matrix of the adapter does not fit the model");
        }
        if (!down || !up) throw std::invalid_argument("the model has no such matrices for an adapter");
    }
    if (adapters_.size() <= slot) adapters_.resize(slot + 1);
    adapters_[slot] = parts;
    std::stable_sort(adapters_[slot].begin(), adapters_[slot].end(), [](const auto& a, const auto& b) { return a.group < b.group; });
}

void Executable::check_adapters() {
    adapted_ = false;
    if (!adapts_) return;
    const int32_t* slots = field(kAdapters);
    for (int32_t i = 0; i < field(kHeader)[0]; i++) {
        if (slots[i] == 0) continue;
        if (slots[i] < 0 || slots[i] >= (int64_t)adapters_.size() || adapters_[slots[i]].empty())
            throw std::invalid_argument("the step names an adapter that is not loaded");
        adapted_ = true;
    }
}

// One of the two products, for the rows that have an adapter; others stay as they are. Neighbouring rows of one adapter
// are computed together. True: a barrier must follow.
bool Executable::adapter(const Op& op, int index, int worker) {
    const bool moves = op.base == Base::AdapterUp && at(op.residual) != at(op.y);
    if (!adapted_ && !moves) return false;
    const int64_t rows = lead(op);
    const int64_t height = rows >= 4 * pool_.threads() ? 8 : 1, width = op.base == Base::AdapterDown ? 16 : 512;
    const int64_t down = (rows + height - 1) / height, across = (op.stride + width - 1) / width;
    Claims claim = claims(index, worker, down * across, 1);
    for (int64_t unit, end; claim.next(unit, end);) {
        const int64_t first = unit / across * height, last = std::min(rows, first + height);
        const int64_t from = unit % across * width, to = std::min(op.stride, from + width);
        for (int64_t begin = first, next; begin < last; begin = next) {
            const int32_t slot = adapter_of(op, begin);
            for (next = begin + 1; next < last && adapter_of(op, next) == slot;) next++;
            for (int64_t r = begin; moves && r < next; r++)
                std::memcpy((float*)at(op.y) + r * op.stride + from,
                            (const float*)at(op.residual) + r * op.stride + from, (to - from) * 4);
            if (slot) adapt_rows(op, adapters_[slot], begin, next, from, to);
        }
    }
    return true;
}

// Columns from..to of the result for rows begin..end, which share an adapter.
void Executable::adapt_rows(const Op& op, const Adapter& parts, int64_t begin, int64_t end, int64_t from, int64_t to) {
    const float* x = (const float*)at(op.x) + begin * op.width;
    float* y = (float*)at(op.y) + begin * op.stride;
    auto part = std::lower_bound(parts.begin(), parts.end(), op.layer, [](const AdapterPart& p, int64_t group) { return p.group < group; });
    for (; part != parts.end() && part->group == op.layer; part++) {
        const AdapterPart& p = *part;
        const bool is_down = op.base == Base::AdapterDown;
        const int64_t start = is_down ? p.first : p.column, size = is_down ? p.rank : p.columns;
        const int64_t low = std::max(from, start), high = std::min(to, start + size);
        if (low >= high) continue;
        if (is_down) {
            kernels_->adapter_down(x, op.width, end - begin, p.a + (low - start) * op.width, op.width, high - low,
                                   y + low, op.stride);
            continue;
        }
        kernels_->adapter_up(x + p.first, op.width, end - begin, p.b + (low - start), p.columns, p.rank, p.scale,
                             y + low, op.stride, high - low);
        if (!p.gain) continue;
        const float *gain = p.gain + (low - start), *shift = gain + p.columns;
        for (int64_t r = 0; r < end - begin; r++) {
            float* const row = y + r * op.stride + low;
            for (int64_t c = 0; c < high - low; c++) row[c] = row[c] * gain[c] + shift[c];  // rounded twice: no FMA
        }
    }
}

}  // namespace roofline
