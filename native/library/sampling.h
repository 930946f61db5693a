// Sampling parameters: checked once (as engine/params.py and engine/checks.py do), and given to the core row by row.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "scheduler.h"

namespace roofline {

struct ModelLimits {
    const std::vector<int32_t>& eos_ids;
    int32_t vocab;
    int64_t max_length;
};

// A sequence of copies. Throws Failure: something that cannot be used, or never fits.
std::shared_ptr<Sequence> make_sequence(const int32_t* ids, size_t count, const rl_sampling& sampling,
                                        const ModelLimits& limits);

// What the core needs to choose a sequence's next id; points into the sequence.
SampleRow sample_row(const Sequence& sequence, const float* logits, int vocab);

}  // namespace roofline
