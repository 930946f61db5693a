// A lowered Program: a flat list of operations over one arena, run by all threads of a pool together.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "code.h"
#include "kernels.h"
#include "pool.h"
#include "variant.h"

namespace roofline {

// Positions of the fields of the batch buffer (ops/batch.py), in its order.
enum BatchField : int { kHeader = 0, kIds, kPositions, kSegStart, kContextLen, kPageStart, kPages, kLogitRows, kAdapters, kStateIn, kStateOut, kSaveAt, kSaveTo, kFieldCount };

struct Segment {
    Format format;
    const uint8_t* weight;
    int64_t rows, k, column;
};

struct Op {  // a Record, its places resolved: the fields are described there
    Base base;
    unsigned flags = kPlain;
    bool over_rows = false;
    Ref x, y, residual;
    int digits = 1;
    int64_t width = 0, stride = 0;
    const float *weight = nullptr, *bias = nullptr;
    float eps = 0;
    int layer = 0;
    int plan = 0;                    // of Attend: which of plans_
    float cap = 0;                   // of Attend, in units of log2; 0: none
    const float* rope = nullptr;     // of RopeWrite: its table
    const float *q_norm = nullptr, *k_norm = nullptr;
    std::vector<Segment> segments;
    Variant variants[kRegimes];  // by rows of the step
    Ref second{-1, 0, 0, 0};     // of DeltaRule: b
    ScanLimits limits{0, 0};     // of SelectiveScan

    bool quantises() const { return flags & kQuantises; }
    int ranks() const { return layer; }                                      // of the operations of experts
    int key_heads() const { return digits >> 16; }                           // of DeltaRule, as the next two
    int value_heads() const { return digits & 0xffff; }
    int64_t key_dim() const { return (stride - width) / 2 / key_heads(); }
    int scan_heads() const { return digits >> 16; }                          // of SelectiveScan, as the next two
    int groups() const { return digits & 0xffff; }
    int64_t states() const { return (stride - width) / 2 / groups(); }
    int64_t experts() const { return (int64_t)segments.size() / (flags & kSiluMul ? 2 : 1); }
};

// A LoRA adapter. A part is one matrix of the model: A [rank][inputs] makes `rank` values from `first` on, from which B
// [rank][columns] makes columns of the result, from `column` on. Groups are the parts that read one value together.
// gain: of DoRA, what each column is multiplied by in the end, then what is added to each; null: it stays as it is.
struct AdapterPart {
    int64_t group, first, column, columns, rank;
    const float *a, *b, *gain;
    float scale;
};
using Adapter = std::vector<AdapterPart>;

struct Attention {  // shared by all layers of the KV group
    int heads = 0, kv_heads = 0, head_dim = 0, rotated = 0;
    bool interleaved = false;
    float q_scale = 0, eps = 0;
    uint8_t* cache = nullptr;
    bool int8 = false;  // format of the cache; otherwise bf16
    int64_t page_stride = 0, layer_stride = 0;
    int stored() const { return stored_dim(head_dim); }
};

// The largest step: tokens, segments, logit rows, entries of all page tables; the pages of the cache; the positions
// that may be served, for which the rope table has its rows; and the slots of recurrent state.
struct StepSizes {
    int64_t tokens = 0, segments = 0, rows = 0, pages = 0, cache_pages = 0, positions = 0, state_slots = 0;
};

// What an Executable works on, in sizes that its code and the step's sizes ask for.
struct Places {
    const uint8_t* image = nullptr;
    const float* table = nullptr;  // the image's or the caller's, one behind the other; null where nothing is rotated
    int64_t table_positions = 0;   // rows of each of these tables
    const float* factors = nullptr;  // the caller's by position, one for each that is served; null: the image's
    uint8_t *arena = nullptr, *cache = nullptr;
    float* state = nullptr;          // slots of recurrent state, `Code::state_values` each; null: the model keeps none
    bool int8 = false;               // format of the cache; otherwise bf16
    const int32_t* batch = nullptr;  // the step's buffer
    std::vector<int64_t> fields;     // where each BatchField begins in it
};

class Executable {
   public:
    Executable(const Kernels* kernels, int threads, const Code& code, const Places& places, const StepSizes& sizes);
    // Runs the step in the batch from op `from` up to the next Exchange, or the end: the index of where it stopped.
    // Throws std::invalid_argument for a step that is larger than `sizes`, or names a page or position that is not there.
    size_t forward(size_t from = 0);
    // Chooses an id for each of the rows, on all threads; they need no `scratch` and no `order`.
    void sample(std::vector<SampleRow>& rows);
    // How op `index` is computed from the next step on, in steps of that regime. Throws std::invalid_argument for a
    // variant that the op has not. They are no part of `code`: that says what is computed, on any machine.
    void choose(size_t index, int regime, const std::string& variant);
    // Adapter `slot`, from 1 on, of the rows whose field `adapters` names it; no parts: none any more. Its memory is
    // the caller's. Throws std::invalid_argument where a part does not fit its group.
    void set_adapter(size_t slot, const Adapter& parts);
    // Inputs of the matrices of a group; -1: there is no such group.
    int64_t group_width(int64_t group) const;
    // Which experts the steps' rows went to, since the start, all layers together.
    struct ExpertCounts {
        std::vector<int64_t> rows;  // of each expert
        // Distinct experts that a layer sent the rows of a step to, added up over so many layers of steps.
        int64_t read = 0, layers = 0;
    };
    const ExpertCounts& expert_counts() const { return expert_counts_; }
    float* logits() const { return (float*)at(logits_); }
    int rows() const { return rows_; }
    int vocab() const { return vocab_; }
    Pool& pool() { return pool_; }
    const Kernels* kernels() const { return kernels_; }
    // Seconds a forward spends in each op, waiting for its slowest thread included; filled while `timing` is on.
    bool timing = false;
    std::vector<double> op_seconds;

   private:
    struct Item {  // attention: one kv head of a split for one or a few rows, or (splits 0) of a block of prefill rows
        int segment, kv_head, row, count, split, splits, slot, first_slot, merge;
    };
    struct alignas(64) Counter {
        std::atomic<int32_t> next{0};
    };
    struct Plan {  // the items of all attentions with one window
        int window;
        bool both_ways;
        std::vector<Item> items;
    };
    // Chunks of an op's work. Each thread has its own even share and takes from the others when that is done: step after
    // step a thread reads the same weights and the same pages, which stay in the caches next to its core.
    class Claims {
       public:
        Claims(Counter* counters, int threads, int worker, int64_t total, int64_t chunk)
            : counters_(counters), threads_(threads), worker_(worker), total_(total), chunk_(chunk), chunks_((total + chunk - 1) / chunk) {}
        bool next(int64_t& begin, int64_t& end) {
            for (; tried_ < threads_; tried_++) {
                const int owner = (worker_ + tried_) % threads_;
                const int64_t first = chunks_ * owner / threads_, limit = chunks_ * (owner + 1) / threads_;
                const int64_t at = first + counters_[owner].next.fetch_add(1, std::memory_order_relaxed);
                if (at >= limit) continue;
                begin = at * chunk_;
                end = begin + chunk_ < total_ ? begin + chunk_ : total_;
                return true;
            }
            return false;
        }

        // Whether a chunk is of this thread's own share: it takes it next, if nobody else does.
        bool own(int64_t chunk) const { return chunk >= chunks_ * worker_ / threads_ && chunk < chunks_ * (worker_ + 1) / threads_; }

       private:
        Counter* counters_;
        int threads_, worker_, tried_ = 0;
        int64_t total_, chunk_, chunks_;
    };
    struct Slots {  // the (row, rank) pairs of a step, sorted by expert; a slot is row * ranks + rank
        int64_t id = -1;              // the value that the experts are in
        std::vector<int32_t> order;   // slots by expert, those of one ascending
        std::vector<int32_t> starts;  // [experts + 1]: where an expert's begin in `order`
        std::vector<int32_t> hit;     // experts that have a slot
        int count(int expert) const { return starts[expert + 1] - starts[expert]; }
    };
    struct Worker {
        std::vector<uint8_t> private_rows;  // a few quantised rows that this thread made for itself
        int64_t private_id = -1;
        std::vector<float> scratch;
        std::vector<uint16_t> halves;
        std::vector<int32_t> positions;   // of the queries in hand
        std::vector<float> slopes;        // the same, where attention has slopes
        std::vector<AttendState> states;
        std::vector<uint16_t> wide;  // a block of an 8-bit cache
        Slots slots;                      // of the last Route
        std::vector<uint8_t> gathered;    // rows of one expert, as its matrix takes them
        int64_t gathered_id = -1;         // which they are
        std::vector<float> products;      // of several such rows, before each goes to its place
        std::vector<float> delta;         // scratch of DeltaRule and SelectiveScan
    };
    struct FirstPages {
        const int32_t* pages;
        int count, kv_head;
    };

    const int32_t* field(BatchField f) const { return batch_ + fields_[f]; }
    uint8_t* at(const Ref& r) const { return arena_ + r.base + r.per_token * tokens_ + r.per_row * rows_; }
    int64_t lead(const Op& op) const { return op.over_rows ? rows_ : tokens_; }
    const Variant& variant(const Op& op) const { return op.variants[regime_of(lead(op))]; }
    void resolve(const Code& code, const Places& places);
    int plan_of(int window, bool both_ways);
    void check_step() const;
    void check_segment(int segment) const;
    void check_state();
    void plan_items();
    void plan_window(Plan& plan, int& slots, int& merges);
    void begin_step();
    void work(int worker, size_t from, size_t end);
    void read_stamps(size_t from, size_t end_op);
    bool run(const Op& op, int index, int worker);  // true: a barrier must follow
    bool row_op(const Op& op, int index, int worker);
    void linear(const Op& op, int index, int worker);
    void experts(const Op& op, int index, int worker);
    void sort_slots(const Op& op, int worker);
    void expert_tiles(const Op& op, int index, int expert, int64_t from, int64_t to, Worker& w);
    void add_expert_biases(const Op& op, int64_t row) const;
    void scale_by_expert(const Op& op, int64_t row) const;
    uint8_t* gather(const Op& op, const int32_t* slots, int64_t count, int64_t id, Worker& w) const;
    void size_expert_scratch();
    void causal_conv(const Op& op, int index, int worker);
    void delta_rule(const Op& op, int index, int worker);
    void selective_scan(const Op& op, int index, int worker);
    void size_state_scratch();
    // Where an operation's part of a slot begins; null for the slot -1.
    float* part_of(const Op& op, int32_t slot) const { return slot < 0 ? nullptr : state_ + slot * state_values_ + op.layer; }
    bool rope_write(const Op& op, int index, int worker);
    bool adapter(const Op& op, int index, int worker);
    void adapt_rows(const Op& op, const Adapter& parts, int64_t begin, int64_t end, int64_t from, int64_t to);
    int32_t adapter_of(const Op& op, int64_t row) const {
        return field(kAdapters)[op.over_rows ? field(kLogitRows)[row] : row];
    }
    void check_adapters();
    Claims claims(int index, int worker, int64_t total, int64_t chunk) {
        return Claims(&counters_[(size_t)index * pool_.threads()], pool_.threads(), worker, total, chunk);
    }
    void attend(const Op& op, int index, int worker);
    FirstPages first_pages(const Op& op, const Item& item) const;
    void fetch_first(const Op& op, int worker) const;
    void attend_few(const Op& op, const Item& item, const Item* next, Worker& w);
    int32_t last_seen(const Op& op, const Item& item, int row) const;
    void gather_queries(const Op& op, const Item& item, int first, int queries, Worker& w) const;
    int most_queries() const;
    void size_attention_scratch();
    void attend_rows(const Op& op, const Item& item, Worker& w);
    void merge_splits(const Op& op, const Item& item);
    void finish(const Op& op, int head, AttendState& state, float* acc, float* out) const;
    int segment_rows(int segment) const { return field(kSegStart)[segment + 1] - field(kSegStart)[segment]; }
    uint8_t* page_of(const Op& op, int segment, int32_t position) const;
    int64_t head_bytes() const { return page_head_bytes(attention_.head_dim, attention_.int8); }
    template <class E> void write_cache(const Op& op, int segment, int row, int kv_head, E* head) const;
    template <class E> void write_rows(const Op& op, int begin, int end, E* heads) const;
    Rope rope_of(const Op& op, int32_t position) const;
    Attend attend_of(const Op& op, const Item& item, const Item* next, Worker& w) const;
    void join_heads(const Op& op, int64_t row, float* y) const;
    void one_row(const Op& op, int64_t row, uint8_t* out, int64_t out_rows, int64_t out_row, float* scratch) const;

    const Kernels* kernels_;
    Pool pool_;
    std::vector<Op> ops_;
    Attention attention_;
    StepSizes sizes_;
    const int32_t* batch_;
    std::vector<int64_t> fields_;
    uint8_t* arena_;
    float* state_;
    int64_t state_values_;                // floats of a slot
    std::vector<int32_t> slot_writers_;   // by slot: the segment of the step that writes it, -1: none
    Ref logits_;
    int vocab_, tokens_ = 0, rows_ = 0, segments_ = 0;
    bool has_prefill_ = false, adapts_ = false, adapted_ = false;  // it has adapters; the step has rows of one
    std::vector<Adapter> adapters_;  // by slot
    size_t attend_ = 0;  // index of the first Attend
    int64_t widest_ = 0;
    ExpertCounts expert_counts_;
    std::unique_ptr<Counter[]> counters_;
    std::vector<Plan> plans_;
    std::vector<int> prefill_rows_;   // rows of segments longer than one token
    std::vector<int> row_segment_;
    std::unique_ptr<Counter[]> merges_;  // splits arrived, for each group of items that are merged
    int merges_capacity_ = 0;
    std::vector<float> partials_;     // split results: [slot][group][stored_dim], a slot a row
    std::vector<AttendState> partial_states_;
    std::vector<Worker> workers_;
    std::vector<float> sample_scratch_;  // [thread][vocab]
    std::vector<int32_t> sample_order_;
    using Stamp = std::chrono::steady_clock::time_point;
    std::vector<Stamp> stamps_;       // with timing on: for each thread its start and its end of every op
    Stamp stopped_;                   // the end of the op before an Exchange
    std::vector<char> meets_;         // whether a barrier followed an op
};

}  // namespace roofline
