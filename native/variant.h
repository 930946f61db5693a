// How an op is computed, by name: a choice within its order, so it changes time and never a bit.
#pragma once
#include <string>

#include "kernels.h"

namespace roofline {

constexpr int kRegimes = 3;  // 1 row, 2 to 32, more: each has its own choice
constexpr int kMostPrivateRows = 8;

inline int regime_of(int64_t rows) { return rows <= 1 ? 0 : rows <= 32 ? 1 : 2; }

struct Variant {
    Blocks blocks;         // of linear layers
    int claim_us = 20;     // work of a claim of linear layers
    int private_rows = 2;  // up to here every thread prepares quantised rows itself: cheaper than a barrier
    int query_rows = 16;   // prefill rows of an attention item
};

enum class VariantKind { Linear, FloatLinear, Rows, Attend };

// The variant that `name` describes: "default", or words of these kinds, separated by spaces:
//   linear: "2x5" (row tiles x tokens of a block), "greedy" (full blocks first, instead of even shares),
//           "fetch=off", "fetch=next" (the next block's weights), "fetch=4096" (bytes ahead), "claim=40" (microseconds)
//   linear on float weights: "claim=..."      rows: "private=4"      attention: "queries=32"
// Throws std::invalid_argument for anything else, and for blocks that these kernels do not have.
Variant variant_named(VariantKind kind, const std::string& name, const Kernels* kernels, int digits);

}  // namespace roofline
