// The physical limits of this chip, measured without any of our kernels: registers only, and plain wide reads.
#pragma once

#include <cstddef>
#include <string>

namespace roofline {

// Operations a second (a multiply and an add count as two) that `threads` threads reach together in a loop that touches
// registers only. kind: "int8", "bf16" or "f32"; isa: "avx512", "avx2", "neon" or "portable". Best of short repeats
// that take about `seconds` together. Throws std::invalid_argument on a kind or isa this build or chip does not have.
double roof_ops(const std::string& kind, const std::string& isa, int threads, double seconds);

// Bytes a second that `threads` threads read together, over and over, from one buffer of `bytes` bytes (each thread its
// own part). Best of several access patterns and repeats that take about `seconds` together.
double roof_read(std::size_t bytes, int threads, double seconds);

}  // namespace roofline
