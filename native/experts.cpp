// Products with the matrices of experts: the rows of a step are sorted by expert, and an expert's matrix meets all of its
// rows together, as a linear layer does. Experts that no row goes to are not read.
#include <algorithm>
#include <cstring>

#include "executable.h"

namespace roofline {

constexpr int64_t kMostTiles = 32;  // of a claim: its results wait in a thread's own memory

void Executable::size_expert_scratch() {
    int64_t most = 0, slots = 0;
    for (const Op& op : ops_) {
        if (op.base != Base::Experts) continue;
        const bool floats = is_float(op.segments[0].format);
        slots = std::max(slots, std::max(sizes_.tokens, sizes_.rows) * op.ranks());
        most = std::max<int64_t>(most, floats ? 4 * op.width : Quantised::row_bytes(op.width, op.digits));
    }
    if (most == 0) return;
    const int64_t rows = std::min<int64_t>(Quantised::kPanel, slots);
    for (Worker& w : workers_) {
        w.gathered.resize(rows * most + 64);
        w.products.resize(rows * kMostTiles * kTileRows);
    }
}

// Each thread sorts for itself, once for each Route: that is shorter than a barrier. Whatever lies where the experts
// should be, no slot goes to one that is not there.
void Executable::sort_slots(const Op& op, int worker) {
    Slots& s = workers_[worker].slots;
    if (s.id == op.residual.id) return;
    s.id = op.residual.id;
    const int64_t slots = lead(op) * op.ranks();
    const int32_t* const ids = (const int32_t*)at(op.residual);
    const auto expert_of = [ids, experts = (uint32_t)op.experts()](int64_t slot) {
        return (uint32_t)ids[slot] < experts ? ids[slot] : 0;
    };
    s.starts.assign(op.experts() + 2, 0);
    for (int64_t i = 0; i < slots; i++) s.starts[expert_of(i) + 2]++;
    s.hit.clear();
    for (int64_t e = 0; e < op.experts(); e++) {
        if (s.starts[e + 2]) s.hit.push_back((int32_t)e);
        s.starts[e + 2] += s.starts[e + 1];
    }
    s.order.resize(slots);
    for (int64_t i = 0; i < slots; i++) s.order[s.starts[expert_of(i) + 1]++] = (int32_t)i;
    if (worker > 0) return;
    for (const int32_t e : s.hit) expert_counts_.rows[e] += s.count(e);
    expert_counts_.read += (int64_t)s.hit.size();
    expert_counts_.layers++;
}

void Executable::experts(const Op& op, int index, int worker) {
    const int64_t rows = lead(op);
    if (rows == 0) return;
    sort_slots(op, worker);
    Worker& w = workers_[worker];
    const Slots& slots = w.slots;
    const Segment& first = op.segments[0];
    const int64_t tiles = (first.rows + kTileRows - 1) / kTileRows, hit = (int64_t)slots.hit.size();
    const int matrices = op.flags & kSiluMul ? 2 : 1;
    const double bytes = (double)matrices * tile_bytes(first.format, first.k);
    const double products = 2.0 * matrices * kTileRows * op.width * rows * op.ranks() / hit;
    // As long as a claim of a linear layer; but an expert with more rows than are gathered at once gathers them anew in
    // each claim, which must be worth it.
    const double tile_seconds = std::max(bytes / 25e9, products / 600e9);
    int64_t chunk = std::min<int64_t>((int64_t)(variant(op).claim_us * 1e-6 / tile_seconds), hit * tiles / (4 * pool_.threads()));
    chunk = std::clamp<int64_t>(chunk, rows > Quantised::kPanel ? 16 : 2, kMostTiles);
    Claims claim = claims(index, worker, hit * tiles, chunk);
    for (int64_t begin, end; claim.next(begin, end);)
        for (int64_t from = begin; from < end;) {
            const int64_t at = from / tiles, next = std::min(end, (at + 1) * tiles);
            expert_tiles(op, index, slots.hit[at], from - at * tiles, next - at * tiles, w);
            from = next;
        }
}

// Tiles from..to of an expert's matrix against all its rows.
void Executable::expert_tiles(const Op& op, int index, int expert, int64_t from, int64_t to, Worker& w) {
    const bool gated = op.flags & kSiluMul;
    const Segment& s = op.segments[gated ? 2 * expert : expert];
    const int64_t skipped = from * (int64_t)tile_bytes(s.format, s.k), column = from * kTileRows;
    const int64_t columns = std::min(s.rows, to * kTileRows) - column, count = w.slots.count(expert);
    Linear a{};
    a.format = s.format;
    a.weight = s.weight + skipped;
    a.up = gated ? op.segments[2 * expert + 1].weight + skipped : nullptr;
    a.rows = columns;
    a.k = s.k;
    for (int64_t begin = 0; begin < count; begin += Quantised::kPanel) {
        const int32_t* const slots = w.slots.order.data() + w.slots.starts[expert] + begin;
        a.tokens = std::min(Quantised::kPanel, count - begin);
        uint8_t* const x = gather(op, slots, a.tokens, ((int64_t)index * kMostExperts + expert) * (1 << 20) + begin, w);
        if (is_float(s.format)) a.xf = (const float*)x;
        else a.x = Quantised{x, a.tokens, s.k, op.digits};
        const auto place = [&](int64_t i) {
            const int64_t row = slots[i] / op.ranks(), rank = slots[i] % op.ranks();
            return (float*)at(op.y) + row * op.stride + rank * s.rows + column;
        };
        const bool alone = a.tokens == 1;
        a.y = alone ? place(0) : w.products.data();
        a.ldy = columns;
        a.blocks = op.variants[regime_of(a.tokens)].blocks;
        kernels_->linear(a, 0, to - from);
        for (int64_t i = 0; i < a.tokens && !alone; i++) std::memcpy(place(i), w.products.data() + i * columns, columns * 4);
    }
}

// The rows of some slots side by side, in the thread's own memory, where they stay until others are asked for (`id`).
uint8_t* Executable::gather(const Op& op, const int32_t* slots, int64_t count, int64_t id, Worker& w) const {
    uint8_t* const out = w.gathered.data();
    if (w.gathered_id == id) return out;
    w.gathered_id = id;
    const int64_t inputs = op.flags & kOfRanks ? op.ranks() : 1;  // rows of a token
    const uint8_t* const x = w.private_id == op.x.id ? w.private_rows.data() : at(op.x);
    const auto rank_of = [&](int64_t i) { return inputs == 1 ? 0 : slots[i] % op.ranks(); };
    if (is_float(op.segments[0].format)) {
        for (int64_t i = 0; i < count; i++)
            std::memcpy(out + i * op.width * 4, x + (slots[i] / op.ranks() * inputs + rank_of(i)) * op.width * 4, op.width * 4);
        return out;
    }
    const Quantised source{const_cast<uint8_t*>(x), lead(op), inputs * op.width, op.digits};
    const Panel to = Quantised{out, count, op.width, op.digits}.panel(0);
    const int64_t groups = op.width / 32;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = slots[i] / op.ranks();
        const Panel p = source.panel(row / Quantised::kPanel);
        int64_t from = rank_of(i) * groups * p.tokens + row % Quantised::kPanel;
        for (int64_t g = 0, put = i; g < groups; g++, from += p.tokens, put += count) {
            std::memcpy(to.q + put * 32, p.q + from * 32, 32);
            if (to.low) std::memcpy(to.low + put * 32, p.low + from * 32, 32);
            to.scale[put] = p.scale[from];
            to.sum[put] = p.sum[from];
            std::memcpy(to.isum + put * 2, p.isum + from * 2, 8);
        }
    }
    return out;
}

// Whatever lies where the experts should be, only those that are there have a bias.
void Executable::add_expert_biases(const Op& op, int64_t row) const {
    const int32_t* const ids = (const int32_t*)at(op.residual) + row * op.ranks();
    const float* const x = (const float*)at(op.x) + row * op.ranks() * op.width;
    float* const y = (float*)at(op.y) + row * op.ranks() * op.width;
    for (int64_t rank = 0; rank < op.ranks(); rank++) {
        const uint32_t id = ids[rank];  // read once: what lies there may change meanwhile, if code lies
        const int64_t expert = id < (uint64_t)op.stride ? id : 0;
        kernels_->add(x + rank * op.width, op.weight + expert * op.width, op.width, y + rank * op.width);
    }
}

void Executable::scale_by_expert(const Op& op, int64_t row) const {
    const int32_t* const ids = (const int32_t*)at(op.residual) + row * op.ranks();
    const float* const x = (const float*)at(op.x) + row * op.ranks();
    float* const y = (float*)at(op.y) + row * op.ranks();
    for (int64_t rank = 0; rank < op.ranks(); rank++) {
        const uint32_t id = ids[rank];  // read once, as above
        y[rank] = x[rank] * op.weight[id < (uint64_t)op.stride ? id : 0];
    }
}

}  // namespace roofline
