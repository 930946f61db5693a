// Recurrent state: which slots a step may name, and the ops that read and write them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "executable.h"

namespace roofline {
namespace {

constexpr int64_t kDeltaColumns = 64;  // of a head that is divided among threads
constexpr int64_t kScanColumns = 64;   // of heads of one channel

}  // namespace

// The scheduler's word is not taken: two segments that shared a slot would compute with each other's texts.
void Executable::check_state() {
    if (state_values_ == 0) return;
    const int32_t *in = field(kStateIn), *out = field(kStateOut), *at = field(kSaveAt), *to = field(kSaveTo);
    const int32_t segments = field(kHeader)[1], slots = (int32_t)sizes_.state_slots;
    const auto demand = [](bool holds, const char* reason) {
        if (!holds) throw std::invalid_argument(reason);
    };
    const auto write = [&](int32_t segment, int32_t slot) {
        if (slot < 0) return;
        demand(slot_writers_[slot] < 0, "two segments of the step write one slot of state, or one writes it twice");
        slot_writers_[slot] = segment;
    };
    slot_writers_.assign((size_t)slots, -1);
    for (int32_t s = 0; s < segments; s++) {
        for (const int32_t slot : {in[s], out[s], to[s]})
            demand(slot >= -1 && slot < slots, "the step names a slot of state that there is not");
        const int32_t context = field(kContextLen)[s], first = context - segment_rows(s);
        demand((in[s] < 0) == (first == 0), "a segment with tokens before it reads no state, or one without them does");
        demand(to[s] < 0 || (at[s] > first && at[s] <= context), "the step saves state at a position that it does not pass");
        write(s, out[s]);
        write(s, to[s]);
    }
    for (int32_t s = 0; s < segments; s++)
        demand(in[s] < 0 || slot_writers_[in[s]] < 0 || (slot_writers_[in[s]] == s && in[s] == out[s]),
               "the step reads a slot of state that it writes");
}

void Executable::size_state_scratch() {
    int64_t floats = 0;
    for (const Op& op : ops_)
        if (op.base == Base::SelectiveScan) floats = std::max(floats, scan_scratch(op.states()));
        else if (op.base == Base::DeltaRule) floats = std::max(floats, delta_scratch(op.key_dim(), op.width / op.value_heads()));
    for (Worker& w : workers_) w.delta.resize((size_t)floats);
}

// The last taps - 1 rows of those before a segment (null: zeros) and its first `tokens`, which may go where those before
// it are. Rows are `stride` floats apart.
static void keep_rows(const CausalConv& c, int64_t tokens, float* to) {
    const int64_t kept = c.taps - 1;
    for (int64_t i = 0; i < kept; i++) {
        const int64_t row = tokens - kept + i;
        float* const out = to + i * c.stride;
        if (row >= 0) std::memcpy(out, c.x + row * c.stride, c.channels * 4);
        else if (!c.before) std::memset(out, 0, c.channels * 4);
        else std::memmove(out, c.before + (kept + row) * c.stride, c.channels * 4);
    }
}

void Executable::causal_conv(const Op& op, int index, int worker) {
    const int64_t blocks = (op.width + kConvChannels - 1) / kConvChannels, units = segments_ * blocks;
    const int32_t *in = field(kStateIn), *out = field(kStateOut), *at_position = field(kSaveAt), *to = field(kSaveTo);
    Claims claim = claims(index, worker, units, std::max<int64_t>(1, std::min<int64_t>(16, units / (8 * pool_.threads()))));
    for (int64_t unit, end; claim.next(unit, end);)
        for (; unit < end; unit++) {
            const int segment = (int)(unit / blocks);
            const int64_t channel = unit % blocks * kConvChannels, row = field(kSegStart)[segment] * op.width + channel;
            const auto part = [&](int32_t slot) { return slot < 0 ? nullptr : part_of(op, slot) + channel; };
            CausalConv c;
            c.x = (const float*)at(op.x) + row;
            c.weight = op.weight + channel;
            c.bias = op.bias ? op.bias + channel : nullptr;
            c.before = part(in[segment]);
            c.y = (float*)at(op.y) + row;
            c.stride = op.width;
            c.tokens = segment_rows(segment);
            c.channels = std::min<int64_t>(kConvChannels, op.width - channel);
            c.taps = (int)op.stride;
            c.silu = op.flags & kSilu;
            kernels_->causal_conv(c);
            const int64_t first = field(kContextLen)[segment] - c.tokens;
            if (to[segment] >= 0) keep_rows(c, at_position[segment] - first, part(to[segment]));
            if (out[segment] >= 0) keep_rows(c, c.tokens, part(out[segment]));
        }
}

void Executable::delta_rule(const Op& op, int index, int worker) {
    const int64_t heads = op.value_heads(), key_dim = op.key_dim(), value_dim = op.width / heads, keys = op.key_heads() * key_dim;
    // A head's keys are made ready by whoever computes columns of it: it is divided where heads alone would leave threads idle.
    const bool whole = segments_ * heads >= 4 * pool_.threads();
    const int64_t parts = whole ? 1 : (value_dim + kDeltaColumns - 1) / kDeltaColumns, units = segments_ * heads * parts;
    const int32_t *in = field(kStateIn), *out = field(kStateOut), *at_position = field(kSaveAt), *to = field(kSaveTo);
    Claims claim = claims(index, worker, units, std::max<int64_t>(1, std::min<int64_t>(8, units / (16 * pool_.threads()))));
    for (int64_t unit, end; claim.next(unit, end);)
        for (; unit < end; unit++) {
            const int segment = (int)(unit / (heads * parts));
            const int64_t head = unit / parts % heads, column = unit % parts * kDeltaColumns, row = field(kSegStart)[segment];
            const auto part = [&](int32_t slot) {
                return slot < 0 ? nullptr : part_of(op, slot) + head * key_dim * value_dim + column;
            };
            const float* const qkv = (const float*)at(op.x) + row * op.stride;
            DeltaRule r;
            r.q = qkv + (op.flags & kTiled ? head % op.key_heads() : head / (heads / op.key_heads())) * key_dim;
            r.k = r.q + keys;
            r.v = qkv + 2 * keys + head * value_dim + column;
            r.ld = op.stride;
            r.a = (const float*)at(op.residual) + row * heads + head;
            r.b = (const float*)at(op.second) + row * heads + head;
            r.ldg = heads;
            r.a_log = op.weight[head], r.dt_bias = op.bias[head], r.eps = op.eps;
            r.q_factor = (float)(1.0 / std::sqrt((double)key_dim));
            r.tokens = segment_rows(segment);
            r.key_dim = key_dim;
            r.columns = whole ? value_dim : std::min(kDeltaColumns, value_dim - column);
            r.source = part(in[segment]);
            r.target = part(out[segment]);
            r.save = part(to[segment]);
            r.save_after = at_position[segment] - (field(kContextLen)[segment] - r.tokens);
            r.lds = value_dim;
            r.y = (float*)at(op.y) + row * op.width + head * value_dim + column;
            r.ldy = op.width;
            r.scratch = workers_[worker].delta.data();
            kernels_->delta_rule(r);
        }
}

void Executable::selective_scan(const Op& op, int index, int worker) {
    const bool rates = op.flags & kRates;
    const int64_t heads = op.scan_heads(), columns = rates ? kScanColumns : op.width / heads, states = op.states();
    const int64_t blocks = (op.width + columns - 1) / columns, units = segments_ * blocks;
    const int32_t *in = field(kStateIn), *out = field(kStateOut), *at_position = field(kSaveAt), *to = field(kSaveTo);
    Claims claim = claims(index, worker, units, std::max<int64_t>(1, std::min<int64_t>(8, units / (16 * pool_.threads()))));
    for (int64_t unit, end; claim.next(unit, end);)
        for (; unit < end; unit++) {
            const int segment = (int)(unit / blocks);
            const int64_t block = unit % blocks, column = block * columns, row = field(kSegStart)[segment];
            const int64_t head = rates ? column : block, group = rates ? 0 : head / (heads / op.groups());
            // One row of all columns a state, or a matrix a head.
            const auto part = [&](int32_t slot) { return slot < 0 ? nullptr : part_of(op, slot) + (rates ? column : column * states); };
            SelectiveScan r;
            const float* const xbc = (const float*)at(op.x) + row * op.stride;
            r.x = xbc + column;
            r.b = xbc + op.width + group * states;
            r.c = r.b + op.groups() * states;
            r.ld = op.stride;
            r.dt = (const float*)at(op.residual) + row * heads + head;
            r.ldt = heads;
            r.a_log = op.weight + head, r.lda = op.width;
            r.dt_bias = op.bias + head, r.d = op.q_norm + head;
            r.rates = rates;
            r.least = op.limits.least, r.most = op.limits.most;
            r.tokens = segment_rows(segment);
            r.states = states;
            r.columns = std::min(columns, op.width - column);
            r.source = part(in[segment]);
            r.target = part(out[segment]);
            r.save = part(to[segment]);
            r.save_after = at_position[segment] - (field(kContextLen)[segment] - r.tokens);
            r.lds = rates ? op.width : columns;
            r.y = (float*)at(op.y) + row * op.width + column;
            r.ldy = op.width;
            r.scratch = workers_[worker].delta.data();
            kernels_->selective_scan(r);
        }
}

}  // namespace roofline
