#include "code.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace roofline {
namespace {

// So large that no model comes near, so small that sums of a few products of them stay in 64 bits.
constexpr int64_t kMostImage = (int64_t)1 << 46, kMostArena = (int64_t)1 << 40, kMostColumns = 1 << 24,
                  kMostRows = 1 << 28, kMostStateHeads = 1 << 14, kMostScanHeads = (1 << 15) - 1, kMostState = 1 << 30;
constexpr int64_t kAlign = 64;  // bytes: of every value in the arena and everything in the image

void demand(bool holds, const char* reason) {
    if (!holds) throw std::invalid_argument(reason);
}

void between(int64_t value, int64_t least, int64_t most, const char* reason) {
    demand(value >= least && value <= most, reason);
}

void inside_image(const ModelShape& shape, int64_t place, int64_t bytes) {
    demand(place >= 0 && place % kAlign == 0 && bytes >= 0 && bytes <= shape.image_bytes &&
               place <= shape.image_bytes - bytes,
           "is a place outside weights.bin");
}

// `bytes` for each token or logit row from the reference on. For every step at once: an arena that holds the sum holds
// it coefficient by coefficient, as the values of tokens lie before those of rows.
void inside_arena(const ModelShape& shape, const Ref& r, int64_t bytes, bool of_rows) {
    const int64_t* arena = shape.arena;
    demand(r.id >= 0, "is no value");
    demand(r.base >= 0 && r.per_token >= 0 && r.per_row >= 0 && r.base <= arena[0] && r.per_token <= arena[1] &&
               r.per_row <= arena[2] && (of_rows ? bytes <= arena[2] - r.per_row : bytes <= arena[1] - r.per_token),
           "is a place outside the arena");
    demand((r.base | r.per_token | r.per_row) % kAlign == 0, "is no multiple of 64 bytes");
}

void check_shape(const ModelShape& s) {
    constexpr const char* kNumber = "a size of the model cannot be";
    between(s.image_bytes, 1, kMostImage, kNumber);
    between(s.matrix_bytes, 0, s.image_bytes, kNumber);
    between(s.vocab, 1, kMostColumns, kNumber);
    between(s.positions, 1, 1 << 30, kNumber);
    for (const int64_t bytes : s.arena) between(bytes, 0, kMostArena, kNumber);
    between(s.layers, 0, 1 << 16, kNumber);
    const int64_t least = s.layers > 0;  // a model without attention has no heads
    between(s.heads, least, least << 16, kNumber);
    between(s.kv_heads, least, s.heads, kNumber);
    demand(s.heads == 0 || s.heads % s.kv_heads == 0, "the heads cannot be shared out among the key-value heads");
    between(s.head_dim, least, least * kMostHeadDim, kNumber);
    between(s.tables, 0, 1 << 16, kNumber);
    demand((s.tables == 0) == (s.table == -1), kNumber);
    between(s.rotated, s.tables ? 2 : 0, s.head_dim, kNumber);
    demand(s.rotated % 2 == 0, kNumber);
    demand(std::isfinite(s.q_scale) && std::isfinite(s.eps), kNumber);
    try {
        inside_arena(s, s.logits, 4 * s.vocab, true);
    } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(std::string("the reference to the logits ") + error.what());
    }
    try {
        if (s.table != -1) inside_image(s, s.table, s.tables * s.positions * s.rotated * 4);
    } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(std::string("the rope table ") + error.what());
    }
}

// Checks one record against what its operation does with each field.
class RecordCheck {
  public:
    RecordCheck(const ModelShape& shape, const Code::Entry& entry, const char*& field)
        : shape_(shape), r_(entry.record), pieces_(entry.pieces), uses_(entry.operation->uses), field_(field) {}

    void run() {
        // Plain numbers first: the bytes of values and of places are products of them.
#define ROOFLINE_CHECK(type, name, kind) field_ = #name, check_number(uses_.name, r_.name);
        ROOFLINE_RECORD(ROOFLINE_CHECK)
#undef ROOFLINE_CHECK
        field_ = "pieces";
        for (const Piece& piece : pieces_) check_piece(piece);
#define ROOFLINE_CHECK(type, name, kind) field_ = #name, check_place(uses_.name, r_.name);
        ROOFLINE_RECORD(ROOFLINE_CHECK)
#undef ROOFLINE_CHECK
    }

    // Whether a product takes integers; its pieces agree on it.
    bool takes_integers() const { return !pieces_.empty() && !is_float((Format)pieces_[0].format); }

  private:
    template <class Use, class T>
    void check_number(Use, const T&) {}
    void check_number(uses::Number use, double value) {
        if (use == uses::real || use == uses::not_negative) demand(std::isfinite(value), "is no number");
        if (use == uses::not_negative) demand(value >= 0, "is below 0");
    }
    void check_number(uses::Number use, int64_t value) {
        constexpr const char* kNumber = "is a number that cannot be";
        const ModelShape& s = shape_;
        switch (use) {
            case uses::number:  // of the operation: it was looked up
            case uses::unread:
            case uses::real:
            case uses::not_negative:
                return;
            case uses::tokens:
                return demand(value == 0, "is over logit rows, which this operation cannot be");
            case uses::rows:
                return demand(value == 1, "is over tokens, which this operation cannot be");
            case uses::tokens_or_rows:
                return between(value, 0, 1, kNumber);
            case uses::digits:
                return between(value, 1, 2, kNumber);
            case uses::count:
                return between(value, 1, kMostColumns, kNumber);
            case uses::qkv_columns:
                return between(value, (s.heads + 2 * s.kv_heads) * s.head_dim, kMostColumns, kNumber);
            case uses::head_columns:
                return between(value, s.heads * s.head_dim, kMostColumns, kNumber);
            case uses::layer:
                return between(value, 0, s.layers - 1, "is a layer that is not there");
            case uses::window:
                return between(value, 0, 1 << 30, kNumber);
            case uses::rope_table:
                return between(value, -1, s.tables - 1, "is a rope table that is not there");
            case uses::first_id:  // below 0: so many rows of the table lie before that of id 0
                return between(value, -(1 << 16), (int64_t)1 << 30, kNumber);
            case uses::group:
                return between(value, 0, 1 << 16, "is a group of matrices that cannot be");
            case uses::heads_cut:
                between(value, 1, std::min(r_.width, r_.stride), kNumber);
                return demand(r_.width % value == 0 && r_.stride % value == 0, "do not divide the columns");
            case uses::heads_joined:
                between(value, 1, r_.width, kNumber);
                demand(r_.width % value == 0 && r_.stride % value == 0, "do not divide the columns");
                return demand(r_.stride < r_.width, "leave no column for the second value");
            case uses::heads_sharing:
                between(value, 1, r_.width, kNumber);
                demand(r_.width % value == 0, "do not divide the columns");
                return demand(r_.stride < r_.width / value, "leave no column for the second value");
            case uses::first_column:
                return demand(r_.layer > 0 && value >= 0 && value < r_.stride / r_.layer, kNumber);
            case uses::router_columns:
                return between(value, 1, kMostExperts, kNumber);
            case uses::ranks:
                return between(value, 1, kMostRanks, kNumber);
            case uses::ranks_of_router:
                return between(value, 1, std::min<int64_t>(r_.width, kMostRanks), kNumber);
            case uses::router_groups:
                between(value, 1, r_.width, kNumber);
                return demand(r_.width % value == 0, "do not divide the experts");
            case uses::kept_groups:
                return between(value, 1, kMostExperts, kNumber);
            case uses::ranks_of_groups:
                between(value, 1, std::min<int64_t>(r_.width, kMostRanks), kNumber);
                demand(r_.digits <= r_.stride, "are more groups than there are");
                return demand(value <= r_.digits * (r_.width / r_.stride), "are more than the kept groups have");
            case uses::heads_of_row:
                between(value, 1, r_.width, kNumber);
                return demand(r_.width % value == 0, "do not divide the columns");
            case uses::taps:
                return between(value, 2, kMostTaps, kNumber);
            case uses::state_heads:
                between(value >> 16, 1, kMostStateHeads, kNumber);
                between(value & 0xffff, 1, kMostStateHeads, kNumber);
                demand((value & 0xffff) % (value >> 16) == 0 && r_.width % (value & 0xffff) == 0,
                       "cannot be shared out among the heads");
                return;
            case uses::state_columns: {
                between(value, 1, kMostColumns, kNumber);
                const int64_t keys = value - r_.width, heads = r_.digits >> 16;
                return demand(heads > 0 && keys > 0 && keys % (2 * heads) == 0, "are not those of q, k and v");
            }
            case uses::scan_heads:
            case uses::scan_rate_heads: {
                const int64_t heads = value >> 16, groups = value & 0xffff;
                between(heads, 1, std::min<int64_t>(r_.width, kMostScanHeads), kNumber);
                between(groups, 1, heads, kNumber);
                if (use == uses::scan_rate_heads) return demand(heads == r_.width && groups == 1, "are not heads of one channel");
                return demand(heads % groups == 0 && r_.width % heads == 0, "cannot be shared out among the heads");
            }
            case uses::scan_columns: {
                between(value, 1, kMostColumns, kNumber);
                const int64_t both = value - r_.width, groups = r_.digits & 0xffff;
                return demand(groups > 0 && both > 0 && both % (2 * groups) == 0, "are not those of x, B and C");
            }
            case uses::state_place:
                return between(value, 0, kMostState, kNumber);
            case uses::no_matrix:
                return demand(value == 0, "are a matrix too many");
            case uses::table:
                return demand(value == 1, "are not one table");
            case uses::matrix:
                return between(value, 1, 1 << 12, "are no matrix");
            case uses::gate_and_up:
                return demand(value == 2, "are not those of gate and up");
            case uses::expert_matrices:
                return between(value, 1, kMostExperts, "are no matrices of experts");
            case uses::expert_gates_and_ups:
                between(value, 2, 2 * kMostExperts, "are no matrices of experts");
                return demand(value % 2 == 0, "are not those of gate and up");
        }
        throw std::invalid_argument("is used in a way that nobody checks");
    }

    void check_piece(const Piece& p) const {
        demand(p.format >= 0 && p.format < (int64_t)Format::Count,
               "have a weight format that this build does not know");
        const Format f = (Format)p.format;
        between(p.rows, 1, kMostRows, "have rows that cannot be");
        // Of everything that reads a matrix: its inputs are the record's, and its results lie in a row of y.
        demand(p.columns == r_.width, "do not have the inputs of the operation");
        demand(p.columns % info(f).scale_group == 0 && (is_float(f) || p.columns % 32 == 0), "have an odd width");
        inside_image(shape_, p.address, (p.rows + kTileRows - 1) / kTileRows * (int64_t)tile_bytes(f, p.columns));
        if (uses_.pieces == uses::table) return;
        const Piece& first = pieces_[0];
        if (uses_.pieces == uses::expert_matrices || uses_.pieces == uses::expert_gates_and_ups) {  // start is not read
            demand(p.format == first.format && p.rows == first.rows, "are not alike");
            return demand(p.rows * r_.layer == r_.stride, "do not fill a row of the result");
        }
        demand(is_float(f) == is_float((Format)first.format), "are of floats and of integers");
        const bool up = uses_.pieces == uses::gate_and_up && &p != &first;  // where it starts is not read
        demand(up || (p.start >= 0 && p.start <= r_.stride && p.rows <= r_.stride - p.start),
               "write outside a row of the result");
        demand(!up || (p.format == first.format && p.rows == first.rows), "are not those of gate and up");
    }

    template <class Use, class T>
    void check_place(Use, const T&) const {}
    void check_place(uses::Value use, const Ref& ref) const {
        bool of_rows = uses_.over_rows == uses::rows || (uses_.over_rows == uses::tokens_or_rows && r_.over_rows);
        int64_t bytes = 4 * r_.width;
        const int64_t ranks = use == uses::ranked_operand || use == uses::ranked_rows ? r_.layer : 1;
        switch (use) {
            case uses::no_value:
                return;
            case uses::row:
                break;
            case uses::row_of_tokens:
                of_rows = false;
                break;
            case uses::two_rows:
                bytes = 8 * r_.width;
                break;
            case uses::ranked_rows:
                bytes *= ranks;
                break;
            case uses::of_ranks:
                bytes = 4 * r_.layer;
                break;
            case uses::one_number:
                bytes = 4;
                break;
            case uses::of_value_heads:
                bytes = 4 * (r_.digits & 0xffff);
                break;
            case uses::of_scan_heads:
                bytes = 4 * (r_.digits >> 16);
                break;
            case uses::operand:
            case uses::ranked_operand:
                if (!takes_integers()) {
                    bytes *= ranks;
                    break;
                }
                [[fallthrough]];
            case uses::integers:
                demand(r_.width % 32 == 0, "has rows of an odd width");
                bytes = Quantised::row_bytes(ranks * r_.width, (int)r_.digits);
                break;
            case uses::maybe_columns:
                if (ref.id < 0) return;
                [[fallthrough]];
            case uses::columns:
                bytes = 4 * r_.stride;
                break;
            case uses::other_heads:
                bytes = 4 * (r_.width - r_.stride);
                break;
            case uses::heads_of_their_own:
                bytes = 4 * (r_.width - r_.layer * r_.stride);
                break;
            case uses::queries:
                bytes = 2 * shape_.heads * stored_dim((int)shape_.head_dim);
                break;
            default:
                throw std::invalid_argument("is used in a way that nobody checks");
        }
        inside_arena(shape_, ref, bytes, of_rows);
    }
    void check_place(uses::Vector use, int64_t place) const {
        int64_t floats = 0;
        switch (use) {
            case uses::no_place:
                return;
            case uses::of_width:
                return inside_image(shape_, place, 4 * r_.width);
            case uses::maybe_of_width:
                floats = r_.width;
                break;
            case uses::maybe_of_stride:
                floats = r_.stride;
                break;
            case uses::maybe_of_head:
                floats = shape_.head_dim;
                break;
            case uses::maybe_of_heads:
                floats = shape_.heads;
                break;
            case uses::of_heads:
                return inside_image(shape_, place, 4 * shape_.heads);
            case uses::of_experts:
                return inside_image(shape_, place, 4 * r_.width * r_.stride);
            case uses::of_queries:
                return inside_image(shape_, place, 4 * shape_.heads * shape_.head_dim);
            case uses::of_keys:
                return inside_image(shape_, place, 4 * shape_.kv_heads * shape_.head_dim);
            case uses::of_positions:
                return inside_image(shape_, place, 4 * shape_.positions);
            case uses::of_one_head:
                return inside_image(shape_, place, 4 * (r_.width / r_.layer));
            case uses::of_one:
                return inside_image(shape_, place, 4);
            case uses::of_stride:
                return inside_image(shape_, place, 4 * r_.stride);
            case uses::of_taps:
                return inside_image(shape_, place, 4 * r_.width * r_.stride);
            case uses::of_state_heads:
                return inside_image(shape_, place, 4 * (r_.digits & 0xffff));
            case uses::of_steps:
                return inside_image(shape_, place, 4 * (r_.digits >> 16));
            case uses::of_rates:
                return inside_image(shape_, place, 4 * (r_.digits >> 16) * scan_states(r_));
            case uses::step_limits: {
                const ScanLimits limits = scan_limits(place);
                return demand(limits.least >= 0 && limits.least <= limits.most, "are no bounds of a step");
            }
            case uses::second_base:
                return;  // checked with the bytes a token
            case uses::second_step:
                return inside_arena(shape_, Ref{0, r_.q_norm, place, 0}, 4 * (r_.digits & 0xffff), false);
            default:
                throw std::invalid_argument("is used in a way that nobody checks");
        }
        if (place != -1) inside_image(shape_, place, 4 * floats);
    }

    const ModelShape& shape_;
    const Record& r_;
    const std::vector<Piece>& pieces_;
    const Uses& uses_;
    const char*& field_;  // in hand, for the message
};

// What holds between operations.
class OrderCheck {
  public:
    explicit OrderCheck(const ModelShape& shape) : shape_(shape) {}

    void add(const Code::Entry& entry, bool takes_integers, const char*& field) {
        const Record& r = entry.record;
        field = "operation";
        // A row alone in its segment is written to the cache by the attention that reads it.
        demand(writes_ == (entry.operation->base == Base::Attend), "does not follow what it belongs to");
        writes_ = entry.operation->base == Base::RopeWrite;
        field = "pieces";
        if (entry.operation->flags & kOfPositions)
            demand(entry.pieces[0].rows >= shape_.positions, "have fewer rows than there are positions");
        const Base base = entry.operation->base;
        if (base == Base::Route) routed_ = &r;
        if (base == Base::ExpertBias) sent_there(r, r.stride, field);
        if (base != Base::Linear && base != Base::Experts) {
            if (entry.operation->flags & kQuantises) made_ = &r;
            return;
        }
        if (base == Base::Experts) {
            sent_there(r, r.pieces / (entry.operation->flags & kSiluMul ? 2 : 1), field);
        }
        // Of a few rows of integers each thread makes its own, in one place: the next take it, and only integers find
        // it.
        field = "x";
        const bool last = made_ && made_->y.id == r.x.id;
        demand(last == takes_integers, "is not the rows of integers that were made last");
        const int64_t ranks = entry.operation->flags & kOfRanks ? r.layer : 1;
        if (last)
            demand(made_->width == ranks * r.width && made_->digits == r.digits && made_->over_rows == r.over_rows,
                   "is of another size than was made");
    }
    void end() const { demand(!writes_, "the last operation lacks the attention that belongs to it"); }

  private:
    // That an operation's experts are those that rows were sent to last.
    void sent_there(const Record& r, int64_t experts, const char*& field) const {
        field = "residual";
        demand(routed_ && std::memcmp(&routed_->residual, &r.residual, sizeof(Ref)) == 0,
               "is not the experts that rows were sent to last");
        demand(routed_->layer == r.layer && routed_->over_rows == r.over_rows && routed_->width == experts,
               "is of another size than rows were sent to");
    }

    const ModelShape& shape_;
    bool writes_ = false;  // whether the operation before was RopeWrite
    const Record *made_ = nullptr, *routed_ = nullptr;  // the last that made integers, the last Route
};

}  // namespace

Code::Code(const std::vector<int64_t>& numbers, const ModelShape& shape, bool exchanges) : shape_(shape) {
    check_shape(shape_);
    constexpr size_t kRecord = sizeof(Record) / 8, kPiece = sizeof(Piece) / 8;
    demand(!numbers.empty(), "there are no operations");
    for (size_t at = 0; at < numbers.size();) {
        const std::string which = "operation " + std::to_string(entries_.size());
        Entry entry{};
        const size_t left = numbers.size() - at;
        if (left < kRecord) throw std::invalid_argument(which + " is cut off");
        std::memcpy(&entry.record, numbers.data() + at, sizeof(Record));
        entry.operation = operation(entry.record.operation);
        if (!entry.operation || (entry.operation->base == Base::Exchange && !exchanges))
            throw std::invalid_argument(which + " is an operation that this build does not know");
        at += kRecord;
        if (entry.record.pieces < 0 || (uint64_t)entry.record.pieces > (left - kRecord) / kPiece)
            throw std::invalid_argument(which + " (" + entry.operation->name + "): its pieces are cut off");
        entry.pieces.resize((size_t)entry.record.pieces);
        if (!entry.pieces.empty())
            std::memcpy(entry.pieces.data(), numbers.data() + at, entry.pieces.size() * sizeof(Piece));
        at += entry.pieces.size() * kPiece;
        entries_.push_back(std::move(entry));
    }
    OrderCheck order(shape_);
    const char* field = "";
    for (const Entry& entry : entries_) try {
            RecordCheck check(shape_, entry, field);
            check.run();
            order.add(entry, check.takes_integers(), field);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument("operation " + std::to_string(&entry - entries_.data()) + " (" +
                                        entry.operation->name + "): " + field + " " + error.what());
        }
    order.end();
}

int64_t Code::state_values() const {
    int64_t end = 0;
    for (const Entry& entry : entries_) {
        const Record& r = entry.record;
        if (entry.operation->base == Base::CausalConv) end = std::max(end, r.layer + r.width * (r.stride - 1));
        if (entry.operation->base == Base::SelectiveScan) end = std::max(end, r.layer + r.width * scan_states(r));
        if (entry.operation->base == Base::DeltaRule)
            end = std::max(end, r.layer + r.width * ((r.stride - r.width) / 2 / (r.digits >> 16)));
    }
    return end;
}

int64_t Code::page_bytes(bool int8) const { return 2 * shape_.kv_heads * page_head_bytes((int)shape_.head_dim, int8); }

}  // namespace roofline
