#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>

#include "failure.h"
#include "sha256.h"

namespace roofline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

[[noreturn]] void refuse(const std::string& field, const std::string& problem) {
    throw Failure(RL_ERROR_INVALID, field + ": " + problem);
}

void number(const char* field, float value, float low, float high, bool open_low = false) {
    if (std::isfinite(value) && value <= high && (open_low ? value > low : value >= low)) return;
    char text[128];
    std::snprintf(text, sizeof text, high == kInfinity ? "%g must be %s %g" : "%g must be %s %g and at most %g",
                  (double)value, open_low ? "more than" : "at least", (double)low, (double)high);
    refuse(field, text);
}

void ids_known(const char* field, const int32_t* ids, size_t count, int32_t vocab) {
    if (count > 0 && !ids) refuse(field, "is NULL, but its count is " + std::to_string(count));
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            refuse(field, "id " + std::to_string(ids[i]) + " is not in the vocabulary of " + std::to_string(vocab));
}

void check(const rl_sampling& s, int32_t vocab) {
    number("temperature", s.temperature, 0, kInfinity);
    number("top_p", s.top_p, 0, 1, true);
    number("min_p", s.min_p, 0, 1);
    number("repetition_penalty", s.repetition_penalty, 0, kInfinity, true);
    number("presence_penalty", s.presence_penalty, -2, 2);
    number("frequency_penalty", s.frequency_penalty, -2, 2);
    if (s.top_k < 0) refuse("top_k", std::to_string(s.top_k) + " is less than 0");
    if (s.sample_index < 0) refuse("sample_index", std::to_string(s.sample_index) + " is less than 0");
    if (s.max_tokens < 0) refuse("max_tokens", std::to_string(s.max_tokens) + " is less than 0");
    if (s.min_tokens < 0) refuse("min_tokens", std::to_string(s.min_tokens) + " is less than 0");
    if (s.max_tokens > 0 && s.min_tokens > s.max_tokens)
        refuse("min_tokens",
               std::to_string(s.min_tokens) + " is more than max_tokens, " + std::to_string(s.max_tokens));
    ids_known("stop_ids", s.stop_ids, s.stop_count, vocab);
    ids_known("bias_ids", s.bias_ids, s.bias_count, vocab);
    if (s.bias_count > 0 && !s.bias_values)
        refuse("bias_values", "is NULL, but bias_count is " + std::to_string(s.bias_count));
    for (size_t i = 0; i < s.bias_count; i++) number("bias_values", s.bias_values[i], -100, 100);
}

void keep_biases(Sequence& sequence, const rl_sampling& s) {
    std::map<int32_t, float> values;
    for (size_t i = 0; i < s.bias_count; i++)
        if (!values.emplace(s.bias_ids[i], s.bias_values[i]).second)
            refuse("bias_ids", "id " + std::to_string(s.bias_ids[i]) + " is given twice");
    for (const auto& [id, value] : values) {
        sequence.bias_ids.push_back(id);
        sequence.bias_values.push_back(value);
    }
    if (s.min_tokens > 0)
        for (const int32_t id : sequence.stops) values[id] = -kInfinity;  // an id both biased and banned is banned
    for (const auto& [id, value] : values) {
        sequence.banned_ids.push_back(id);
        sequence.banned_values.push_back(value);
    }
}

void keep_history(Sequence& sequence, const rl_sampling& s) {
    sequence.uses_history = s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
    if (!sequence.uses_history) return;
    for (const int32_t id : sequence.ids)
        if (sequence.history_places.emplace(id, sequence.history_ids.size()).second) sequence.history_ids.push_back(id);
    sequence.history_counts.assign(sequence.history_ids.size(), 0);
}

// What the noise of a prompt's answers is drawn by, so that one seed is another noise for another prompt: the first 8
// bytes of SHA-256 over seed and ids, all little-endian (engine/params.py has the same).
uint64_t noise_seed(uint64_t seed, const int32_t* ids, size_t count) {
    Sha256 hash;
    hash.add(reinterpret_cast<const uint8_t*>(&seed), sizeof seed);
    hash.add(reinterpret_cast<const uint8_t*>(ids), count * sizeof *ids);
    const std::string digits = hash.hex();
    uint64_t noise = 0;
    for (int i = 7; i >= 0; i--) noise = noise << 8 | std::stoul(digits.substr(2 * (size_t)i, 2), nullptr, 16);
    return noise;
}

}  // namespace

std::shared_ptr<Sequence> make_sequence(const int32_t* ids, size_t count, const rl_sampling& s,
                                        const ModelLimits& limits) {
    if (count == 0) refuse("ids", "the prompt has no tokens");
    check(s, limits.vocab);
    const int64_t wanted = s.max_tokens > 0 ? s.max_tokens : std::max(1, s.min_tokens);
    if (count > (size_t)limits.max_length || (int64_t)count + wanted > limits.max_length)
        throw Failure(RL_ERROR_CAPACITY, "A prompt of " + std::to_string(count) + " tokens with an answer of " +
                                             std::to_string(wanted) + " needs " +
                                             std::to_string(count + (size_t)wanted) + " tokens, " +
                                             std::to_string(limits.max_length) +
                                             " are available. Shorten the prompt, lower max_tokens, or open with a "
                                             "larger max_length or cache_tokens.");
    ids_known("ids", ids, count, limits.vocab);
    auto sequence = std::make_shared<Sequence>();
    sequence->ids.assign(ids, ids + count);
    sequence->prompt = (int64_t)count;
    sequence->end = s.max_tokens > 0 ? (int64_t)count + s.max_tokens : limits.max_length;
    sequence->sampling = s;
    sequence->noise = noise_seed(s.seed, ids, count);
    std::vector<int32_t>& stops = sequence->stops;
    if (s.stop_count > 0) stops.assign(s.stop_ids, s.stop_ids + s.stop_count);
    if (!s.ignore_eos) stops.insert(stops.end(), limits.eos_ids.begin(), limits.eos_ids.end());
    std::sort(stops.begin(), stops.end());
    keep_biases(*sequence, s);
    keep_history(*sequence, s);
    return sequence;
}

SampleRow sample_row(const Sequence& q, const float* logits, int vocab) {
    const rl_sampling& s = q.sampling;
    const bool banned = q.generated() < s.min_tokens;
    const auto& biased = banned ? q.banned_ids : q.bias_ids;
    SampleRow row{};
    row.logits = logits;
    row.vocab = vocab;
    row.temperature = s.temperature, row.top_p = s.top_p, row.min_p = s.min_p, row.top_k = s.top_k;
    row.repetition = s.repetition_penalty, row.presence = s.presence_penalty, row.frequency = s.frequency_penalty;
    row.seed = q.noise, row.sample_index = s.sample_index, row.position = (int32_t)q.length();
    row.hist_ids = q.history_ids.data(), row.hist_counts = q.history_counts.data(),
    row.hist = (int)q.history_ids.size();
    row.bias_ids = biased.data(), row.bias_values = (banned ? q.banned_values : q.bias_values).data(),
    row.biases = (int)biased.size();
    row.logprobs = s.logprobs ? 0 : -1;
    row.id = -1;
    return row;
}

}  // namespace roofline
