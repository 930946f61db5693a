#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "failure.h"
#include "kernels.h"
#include "machine.h"
#include "sampling.h"

namespace roofline {
namespace {

constexpr int64_t kDefaultCacheTokens = 16384, kDefaultStepTokens = 512, kDefaultSequences = 64;
constexpr int64_t kMostThreads = 1024, kMostSequences = 65536, kMostTokens = (int64_t)1 << 30;
constexpr int kHeaderSize = 16;  // numbers of the batch's header

int64_t option(const char* name, int64_t value, int64_t fallback, int64_t most) {
    if (value < 0 || value > most)
        throw Failure(RL_ERROR_INVALID, std::string("options: ") + name + "=" + std::to_string(value) +
                                            " must be from 1 to " + std::to_string(most) + ", or 0 for the default");
    return value == 0 ? fallback : value;
}

std::string chosen_isa(const char* wanted) {
    const char* set = std::getenv("ROOFLINE_ISA");
    const std::string name = wanted ? wanted : set ? set : "";
    const std::vector<std::string> here = isas();
    if (name.empty()) return here[0];
    if (std::find(here.begin(), here.end(), name) != here.end()) return name;
    std::string list;
    for (const std::string& each : here) list += (list.empty() ? "" : ", ") + each;
    throw Failure(RL_ERROR_UNSUPPORTED,
                  "instruction set '" + name +
                      "' is not supported: this chip or this build does not have it. Use instead: " + list + ".");
}

int chosen_threads(int32_t wanted) {
    const char* set = std::getenv("ROOFLINE_THREADS");
    const int64_t fallback =
        set && std::atoi(set) > 0 ? std::min<int64_t>(std::atoi(set), kMostThreads) : usable_cores();
    return (int)option("threads", wanted, fallback, kMostThreads);
}

}  // namespace

Engine::Engine(const std::string& path, const rl_options& options) : bundle_(open_bundle(path)) {
    if (bundle_.code->code.both_ways())
        throw Failure(RL_ERROR_UNSUPPORTED, path + " is an encoder model, which gives vectors of texts and generates none: "
                                                   "use roofline serve or LLM.embed.");
    isa_ = chosen_isa(options.isa);
    threads_ = chosen_threads(options.threads);
    image_ = std::make_unique<Image>(
        path, (size_t)bundle_.code->shape().image_bytes);  // read by a thread of its own meanwhile
    fingerprint_ = fingerprint(bundle_.code->weights_hash, bundle_.code->program_hash, isa_);
    size_step(options);
    const uint8_t* image = image_->settle();
    check_truth(bundle_, image, kernels_named(isa_));
    bind(isa_, threads_, image);
    scheduler_ = std::make_unique<Scheduler>(limits_);
}

// Chooses the limits; allocates batch, arena and cache.
void Engine::size_step(const rl_options& options) {
    const Code& code = bundle_.code->code;
    const ModelShape& shape = code.shape();
    const int64_t layer_page = code.page_bytes(false);
    const int64_t token_bytes = layer_page * shape.layers / kPageTokens, known = free_memory(),
                  free = known < 0 ? kMostTokens : known;
    const int64_t fitting = std::max<int64_t>(free / 4 / std::max<int64_t>(token_bytes, 1), kPageTokens);
    const int64_t tokens =
        option("cache_tokens", options.cache_tokens, std::min(kDefaultCacheTokens, fitting), kMostTokens);
    if (options.cache_tokens > 0 && tokens * token_bytes > free)
        throw Failure(RL_ERROR_CAPACITY, "the KV cache needs " + std::to_string(tokens * token_bytes) + " bytes, " +
                                             std::to_string(free) +
                                             " are available. Lower cache_tokens: a token takes " +
                                             std::to_string(token_bytes) + " bytes.");
    limits_.pages = options.cache_tokens > 0 ? (tokens + kPageTokens - 1) / kPageTokens : tokens / kPageTokens;
    limits_.sequences = option("max_sequences", options.max_sequences, kDefaultSequences, kMostSequences);
    limits_.tokens =
        std::max(option("max_step_tokens", options.max_step_tokens, kDefaultStepTokens, 1 << 20), limits_.sequences);
    const int64_t room = limits_.pages * kPageTokens;
    max_length_ = option("max_length", options.max_length, std::min(shape.positions, room), shape.positions);
    if (max_length_ > room)
        throw Failure(RL_ERROR_CAPACITY, "a context of " + std::to_string(max_length_) +
                                             " tokens needs as many cache tokens, " + std::to_string(room) +
                                             " are available. Raise cache_tokens or lower max_length.");
    const int64_t sequences = limits_.sequences,
                  table = std::min(sequences * ((max_length_ + kPageTokens - 1) / kPageTokens), limits_.pages);
    int64_t at = 0;
    for (const int64_t size : {(int64_t)kHeaderSize, limits_.tokens, limits_.tokens, sequences + 1, sequences,
                               sequences + 1, table, sequences, limits_.tokens, sequences, sequences, sequences,
                               sequences}) {
        fields_.push_back(at);
        at += (size + 15) / 16 * 16;
    }
    batch_.assign((size_t)at, 0);
    const int64_t arena = code.arena_bytes(limits_.tokens, sequences);
    if (known >= 0 && arena > known)
        throw Failure(RL_ERROR_CAPACITY, "a step needs " + std::to_string(arena) + " bytes, " + std::to_string(known) +
                                             " are available. Lower max_step_tokens or max_sequences.");
    arena_ = std::make_unique<Memory>((size_t)arena + 64);
    cache_ = std::make_unique<Memory>((size_t)(layer_page * shape.layers * limits_.pages));
    const int64_t slots = 4 * code.state_values() * sequences;  // of recurrent state: one for each sequence
    if (known >= 0 && slots > known)
        throw Failure(RL_ERROR_CAPACITY, "the recurrent state of " + std::to_string(sequences) + " sequences needs " +
                                             std::to_string(slots) + " bytes, " + std::to_string(known) +
                                             " are available. Lower max_sequences.");
    if (slots > 0) state_ = std::make_unique<Memory>((size_t)slots);
    sizes_ = {limits_.tokens, sequences, sequences, table, limits_.pages, max_length_, slots > 0 ? sequences : 0};
}

void Engine::bind(const std::string& isa, int threads, const uint8_t* image) {
    const Code& code = bundle_.code->code;
    const int64_t table = code.shape().table;
    core_ = std::make_unique<Executable>(kernels_named(isa), threads, code,
                                         Places{image, table < 0 ? nullptr : (const float*)(image + table),
                                                code.shape().positions, nullptr, arena_->data(), cache_->data(),
                                                state_ ? (float*)state_->data() : nullptr, false, batch_.data(), fields_},
                                         sizes_);
}

void Engine::describe(rl_model_info& info) const {
    info.name = bundle_.name.c_str();
    info.bundle = bundle_.id.c_str();
    info.fingerprint = fingerprint_.c_str();
    info.isa = isa_.c_str();
    info.threads = threads_;
    info.vocab_size = (int32_t)bundle_.code->shape().vocab;
    info.max_length = (int32_t)max_length_;
    info.bos_id = bundle_.code->bos_id;
    info.add_bos = bundle_.add_bos;
    info.max_sequences = (int32_t)limits_.sequences;
    info.cache_tokens = limits_.pages * kPageTokens;
    info.eos_ids = bundle_.code->eos_ids.data();
    info.eos_count = bundle_.code->eos_ids.size();
}

rl_request Engine::submit(const int32_t* ids, size_t count, const rl_sampling& sampling) {
    auto sequence =
        make_sequence(ids, count, sampling, {bundle_.code->eos_ids, (int32_t)bundle_.code->shape().vocab, max_length_});
    const std::lock_guard<std::mutex> hold(inbox_lock_);
    sequence->request = last_request_ + 1;
    inbox_.push_back({sequence, 0});
    return ++last_request_;
}

void Engine::abort(rl_request request) {
    const std::lock_guard<std::mutex> hold(inbox_lock_);
    if (request == 0 || request > last_request_)
        throw Failure(RL_ERROR_INVALID,
                      "request " + std::to_string(request) + " was never given by rl_submit of this engine");
    inbox_.push_back({nullptr, request});
}

rl_status Engine::step(rl_event* events, size_t capacity, size_t* count) {
    const std::lock_guard<std::mutex> hold(stepping_);
    bool idle = false;
    if (events_.empty()) {
        take_inbox();
        const StepPlan plan = scheduler_->schedule();
        if (!plan.sequences.empty()) compute(plan);
        idle = plan.sequences.empty() && events_.empty();
    }
    for (*count = 0; *count < capacity && !events_.empty(); events_.pop_front()) events[(*count)++] = events_.front();
    return idle ? RL_IDLE : RL_OK;
}

void Engine::take_inbox() {
    std::vector<Command> commands;
    {
        const std::lock_guard<std::mutex> hold(inbox_lock_);
        commands.swap(inbox_);
    }
    for (Command& command : commands) {
        if (command.sequence)
            scheduler_->submit(std::move(command.sequence));
        else if (const auto ended = scheduler_->end(command.ended, RL_ABORT))
            end(ended);
    }
}

// A step that fails ends its own sequences, and says why; the others live on.
void Engine::compute(const StepPlan& plan) {
    std::vector<int32_t> ids;
    try {
        fill(plan);
        core_->forward();
        ids = sample(plan);
    } catch (...) {
        for (const auto& sequence : plan.sequences)
            if (scheduler_->end(sequence->request, RL_FAILED)) end(sequence);
        throw;
    }
    scheduler_->commit(plan, ids);
    for (size_t i = 0; i < plan.sampled.size(); i++) {
        const Sequence& s = *plan.sampled[i];
        if (s.finish == RL_FAILED)
            end(plan.sampled[i]);
        else
            events_.push_back({s.request, ids[i], s.finish, logprobs_[i], (int32_t)s.generated() - 1});
    }
}

void Engine::end(const std::shared_ptr<Sequence>& sequence) {
    events_.push_back({sequence->request, -1, sequence->finish, std::numeric_limits<float>::quiet_NaN(),
                       (int32_t)sequence->generated()});
}

void Engine::fill(const StepPlan& plan) {
    int32_t* field[kFieldCount];
    for (int i = 0; i < kFieldCount; i++) field[i] = batch_.data() + fields_[(size_t)i];
    int32_t token = 0, page = 0, row = 0, segment = 0;
    field[kSegStart][0] = field[kPageStart][0] = 0;
    for (const auto& s : plan.sequences) {
        const int64_t count = plan.counts[(size_t)segment];
        for (int64_t i = s->computed; i < s->computed + count; i++, token++) {
            field[kIds][token] = s->ids[(size_t)i];
            field[kPositions][token] = (int32_t)i;
            field[kAdapters][token] = 0;
        }
        std::copy(s->pages.begin(), s->pages.end(), field[kPages] + page);
        page += (int32_t)s->pages.size();
        if (s->computed + count == s->length()) field[kLogitRows][row++] = token - 1;
        field[kStateIn][segment] = s->computed > 0 ? s->slot : -1;
        field[kStateOut][segment] = s->slot;
        field[kSaveAt][segment] = 0;
        field[kSaveTo][segment] = -1;
        field[kContextLen][segment++] = (int32_t)(s->computed + count);
        field[kSegStart][segment] = token;
        field[kPageStart][segment] = page;
    }
    const int32_t header[] = {token, segment, row, page};
    std::copy(std::begin(header), std::end(header), field[kHeader]);
}

std::vector<int32_t> Engine::sample(const StepPlan& plan) {
    std::vector<SampleRow> rows;
    for (const auto& sequence : plan.sampled)
        rows.push_back(sample_row(*sequence, core_->logits() + rows.size() * (size_t)core_->vocab(), core_->vocab()));
    if (!rows.empty()) core_->sample(rows);
    std::vector<int32_t> ids;
    logprobs_.clear();
    for (const SampleRow& row : rows) {
        ids.push_back(row.id >= 0 && row.id < row.vocab ? row.id : kFailed);
        logprobs_.push_back(row.logprobs >= 0 ? row.logprob : std::numeric_limits<float>::quiet_NaN());
    }
    return ids;
}

std::string Engine::decode(const int32_t* ids, size_t count) {
    const std::lock_guard<std::mutex> hold(words_lock_);
    if (!bundle_.has_tokenizer)
        throw Failure(RL_ERROR_UNSUPPORTED,
                      bundle_.path + " has no tokenizer: " + bundle_.no_tokenizer + ". Decode with one of your own.");
    if (!words_) try {
            words_ = std::make_unique<Vocabulary>(read_file(bundle_.path, "tokenizer.bin"));
        } catch (const std::invalid_argument& error) {
            throw bundle_failure(bundle_.path, std::string("tokenizer.bin: ") + error.what());
        }
    std::string out;
    for (size_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= bundle_.code->shape().vocab)
            throw Failure(RL_ERROR_INVALID, "id " + std::to_string(ids[i]) + " is not in the vocabulary of " +
                                                std::to_string(bundle_.code->shape().vocab));
        words_->append(ids[i], out);
    }
    return out;
}

}  // namespace roofline
