#include "scheduler.h"

#include <algorithm>

#include "kernels.h"

namespace roofline {
namespace {

int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace

Scheduler::Scheduler(const StepLimits& limits) : limits_(limits) {
    for (int64_t page = limits.pages; page-- > 0;) free_.push_back((int32_t)page);
    for (int64_t slot = limits.sequences; slot-- > 0;) free_slots_.push_back((int32_t)slot);
}

StepPlan Scheduler::schedule() {
    StepPlan plan;
    std::vector<std::shared_ptr<Sequence>> chunks;
    bool preempted = false;
    for (size_t i = 0; i < running_.size(); i++) {
        const std::shared_ptr<Sequence> sequence = running_[i];
        if (sequence->length() - sequence->computed > 1) {
            chunks.push_back(sequence);
            continue;
        }
        while (i < running_.size() && !grow(*sequence, sequence->length())) {
            preempt_youngest();  // never one already planned: those are older
            preempted = true;
        }
        if (i < running_.size()) add(plan, sequence, 1);
    }
    for (const auto& sequence : chunks) plan_chunk(plan, sequence);
    if (!preempted) admit(plan);
    return plan;
}

void Scheduler::add(StepPlan& plan, const std::shared_ptr<Sequence>& sequence, int64_t count) const {
    plan.sequences.push_back(sequence);
    plan.counts.push_back(count);
    plan.tokens += count;
    if (sequence->computed + count == sequence->length()) plan.sampled.push_back(sequence);
}

// As much of a prompt as the budget allows; true when all of it.
bool Scheduler::plan_chunk(StepPlan& plan, const std::shared_ptr<Sequence>& sequence) const {
    const int64_t pending = sequence->length() - sequence->computed;
    const int64_t count = std::min(pending, limits_.tokens - plan.tokens);
    if (count > 0) add(plan, sequence, count);
    return count == pending;
}

// Gives pages to waiting sequences in order, until something is short; nobody overtakes the first. A page for each
// running sequence stays free: without it a new one would be pre-empted at once.
void Scheduler::admit(StepPlan& plan) {
    while (!waiting_.empty() && (int64_t)running_.size() < limits_.sequences && plan.tokens < limits_.tokens) {
        const std::shared_ptr<Sequence> sequence = waiting_.front();
        if (pages_for(sequence->length()) + (int64_t)running_.size() > (int64_t)free_.size()) return;
        grow(*sequence, sequence->length());
        sequence->slot = free_slots_.back();  // there are as many as sequences that run
        free_slots_.pop_back();
        waiting_.pop_front();
        running_.push_back(sequence);
        if (!plan_chunk(plan, sequence)) return;
    }
}

bool Scheduler::grow(Sequence& sequence, int64_t length) {
    const int64_t more = pages_for(length) - (int64_t)sequence.pages.size();
    if (more > (int64_t)free_.size()) return false;
    for (int64_t i = 0; i < more; i++) {
        sequence.pages.push_back(free_.back());
        free_.pop_back();
    }
    return true;
}

void Scheduler::release(Sequence& sequence) {
    free_.insert(free_.end(), sequence.pages.begin(), sequence.pages.end());
    sequence.pages.clear();
    free_slots_.push_back(sequence.slot);
    sequence.slot = -1;
}

void Scheduler::preempt_youngest() {
    const std::shared_ptr<Sequence> sequence = running_.back();
    running_.pop_back();
    release(*sequence);
    sequence->computed = 0;
    waiting_.push_front(sequence);
}

void Scheduler::commit(const StepPlan& plan, const std::vector<int32_t>& ids) {
    for (size_t i = 0; i < plan.sequences.size(); i++) plan.sequences[i]->computed += plan.counts[i];
    for (size_t i = 0; i < plan.sampled.size(); i++) {
        Sequence& s = *plan.sampled[i];
        if (ids[i] == kFailed) {
            s.finish = RL_FAILED;
            continue;
        }
        s.ids.push_back(ids[i]);
        if (s.uses_history) {
            const auto [place, fresh] = s.history_places.try_emplace(ids[i], s.history_ids.size());
            if (fresh) {
                s.history_ids.push_back(ids[i]);
                s.history_counts.push_back(0);
            }
            s.history_counts[place->second]++;
        }
        const bool stops = std::binary_search(s.stops.begin(), s.stops.end(), ids[i]);
        if (stops && s.generated() >= s.sampling.min_tokens)
            s.finish = RL_STOP;
        else if (s.length() >= s.end)
            s.finish = RL_LENGTH;
    }
    leave();
}

std::shared_ptr<Sequence> Scheduler::end(rl_request request, rl_finish why) {
    for (const auto& sequence : running_)
        if (sequence->request == request) {
            const std::shared_ptr<Sequence> ended = sequence;
            ended->finish = why;
            leave();
            return ended;
        }
    for (auto at = waiting_.begin(); at != waiting_.end(); ++at)
        if ((*at)->request == request) {
            const std::shared_ptr<Sequence> ended = *at;
            ended->finish = why;
            waiting_.erase(at);
            return ended;
        }
    return nullptr;
}

void Scheduler::leave() {
    auto kept = running_.begin();
    for (auto& sequence : running_) {
        if (sequence->finish != RL_RUNNING)
            release(*sequence);
        else
            *kept++ = std::move(sequence);
    }
    running_.erase(kept, running_.end());
}

}  // namespace roofline
