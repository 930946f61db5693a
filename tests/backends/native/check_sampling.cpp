// Sampling: greedy and with noise, truncated, biased, masked, with -inf and NaN among the logits.
#include "check.h"

namespace check {
using roofline::Kernels;
using roofline::SampleRow;
namespace {

struct Case {
    const char* name;
    float temperature, top_p, min_p;
    int top_k;
    bool adjusted, masked, holes, nan, ties;
};

constexpr Case kCases[] = {
    {"greedy", 0, 1, 0, 0, false, false, false, false, false},
    {"greedy ties", 0, 1, 0, 0, false, false, true, false, true},
    {"greedy adjusted", 0, 1, 0, 0, true, true, false, false, false},
    {"noise", 1, 1, 0, 0, false, false, false, false, false},
    {"noise holes", 0.7f, 1, 0, 0, false, false, true, false, false},
    {"noise adjusted", 1.3f, 1, 0, 0, true, false, false, false, true},
    {"noise masked", 1, 1, 0, 0, false, true, true, false, false},
    {"top-k", 0.8f, 1, 0, 7, false, false, false, false, true},
    {"top-p", 0.9f, 0.8f, 0, 0, false, false, true, false, false},
    {"min-p", 1.1f, 1, 0.05f, 0, true, false, false, false, false},
    {"all", 0.6f, 0.95f, 0.01f, 40, true, true, true, false, true},
    {"nan", 1, 1, 0, 0, false, false, false, true, false},
    {"nan greedy", 0, 1, 0, 0, false, false, false, true, false},
};

void sample(Checker& check, const Case& c, int vocab) {
    Random random(400 + vocab);
    std::vector<float> logits = random.reals(vocab, 6.0f);
    for (int i = 0; i < vocab; i++) {
        if (c.holes && i % 3 == 1) logits[i] = -kInfinity;
        if (c.ties) logits[i] = (float)(int)logits[i];
    }
    if (c.nan) logits[vocab / 2] = kNan;
    const int32_t ids[] = {3, 0, vocab - 1}, counts[] = {2, 0, 1};
    const float bias[] = {1.5f, -kInfinity, 4.0f};
    std::vector<uint32_t> mask((vocab + 31) / 32);
    for (uint32_t& word : mask) word = (uint32_t)random.bits() | 1;
    check("sample " + std::string(c.name) + " of " + std::to_string(vocab), [&](const Kernels& kernels, Output& out) {
        for (int draw = 0; draw < 6; draw++) {
            std::vector<float> scratch(vocab), top(5, 0.0f);
            std::vector<int32_t> order(vocab), top_ids(5, -7);
            SampleRow r{};
            r.logits = logits.data();
            r.scratch = scratch.data();
            r.order = order.data();
            r.vocab = vocab;
            r.temperature = c.temperature, r.top_p = c.top_p, r.min_p = c.min_p, r.top_k = c.top_k;
            r.repetition = c.adjusted ? 1.2f : 1.0f, r.presence = 0.3f, r.frequency = 0.1f;
            r.seed = 1234567 + draw, r.sample_index = draw % 2, r.position = 40 + draw;
            r.hist_ids = ids, r.hist_counts = counts, r.hist = c.adjusted ? 3 : 0;
            r.bias_ids = ids, r.bias_values = bias, r.biases = c.adjusted ? 3 : 0;
            r.mask = c.masked ? mask.data() : nullptr;
            r.logprobs = draw % 3 == 0 ? 5 : -1;
            r.top_ids = top_ids.data(), r.top_logprobs = top.data();
            kernels.sample(r);
            out.integers(&r.id, 1);
            out.floats(&r.logprob, 1);
            out.integers(top_ids.data(), 5);
            out.floats(top.data(), 5);
        }
    });
}

}  // namespace

void sampling(Checker& check) {
    for (const Case& c : kCases)
        for (int vocab : {16, 37, 1000, 4099}) sample(check, c, vocab);
}

}  // namespace check
