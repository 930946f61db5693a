// Continuous batching: which tokens of which sequences the next step computes (the policy of engine/schedule/continuous.py).
//
// Decodes first, oldest first; then prompt chunks up to the token budget; then new requests, first come first served.
// When pages run out, the youngest sequence gives all of its pages back and is computed again later, so the oldest
// always advances and every request ends. Nothing here but integers.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "roofline.h"

namespace roofline {

constexpr int32_t kFailed = -1;  // in place of a sampled id: the sequence ends with an error

// An answer in the making: what was asked for, checked and copied, and how far it is.
struct Sequence {
    rl_request request = 0;
    std::vector<int32_t> ids;     // prompt, then answer
    int64_t prompt = 0, end = 0;  // lengths: of the prompt, of the longest allowed
    rl_sampling sampling{};       // its pointers are not used
    uint64_t noise = 0;           // what its ids are sampled with: of seed and prompt
    std::vector<int32_t> stops;   // sorted
    // Sorted by id; `banned` is for the first min_tokens.
    std::vector<int32_t> bias_ids, banned_ids;
    std::vector<float> bias_values, banned_values;
    // Ids so far and how often each was generated, kept where a penalty needs them.
    bool uses_history = false;
    std::vector<int32_t> history_ids, history_counts;
    std::unordered_map<int32_t, size_t> history_places;

    int64_t computed = 0;  // ids that lie in pages
    std::vector<int32_t> pages;
    int32_t slot = -1;     // of recurrent state, while it runs
    rl_finish finish = RL_RUNNING;

    int64_t length() const { return (int64_t)ids.size(); }
    int64_t generated() const { return length() - prompt; }
};

struct StepLimits {
    int64_t tokens = 0, sequences = 0, pages = 0;
};

// `counts[i]` tokens of `sequences[i]`, from its `computed` on; `sampled` get new ids, in this order.
struct StepPlan {
    std::vector<std::shared_ptr<Sequence>> sequences, sampled;
    std::vector<int64_t> counts;
    int64_t tokens = 0;
};

class Scheduler {
  public:
    explicit Scheduler(const StepLimits& limits);
    void submit(std::shared_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }
    StepPlan schedule();  // empty when nothing can run
    // Records a step that was computed: an id, or kFailed, for each of `plan.sampled`.
    void commit(const StepPlan& plan, const std::vector<int32_t>& ids);
    // Ends a sequence from outside; null where none of that request is left.
    std::shared_ptr<Sequence> end(rl_request request, rl_finish why);
    bool idle() const { return running_.empty() && waiting_.empty(); }

  private:
    void add(StepPlan& plan, const std::shared_ptr<Sequence>& sequence, int64_t count) const;
    bool plan_chunk(StepPlan& plan, const std::shared_ptr<Sequence>& sequence) const;
    bool grow(Sequence& sequence, int64_t length);
    void release(Sequence& sequence);
    void preempt_youngest();
    void admit(StepPlan& plan);
    void leave();

    StepLimits limits_;
    std::vector<int32_t> free_, free_slots_;
    std::vector<std::shared_ptr<Sequence>> running_;  // hold pages; in order of arrival, as `waiting_`
    std::deque<std::shared_ptr<Sequence>> waiting_;   // hold none; all arrived after those running
};

}  // namespace roofline
