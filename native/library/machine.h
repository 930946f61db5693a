// What of this machine a start may use, and names for what it computes.
#pragma once
#include <cstdint>
#include <string>

namespace roofline {

// Cores of the affinity mask, or the whole cores of the cgroup's quota where those are fewer.
int usable_cores();
// Bytes of memory that are free now, within the cgroup's limit; -1 where nothing says so.
int64_t free_memory();
// The fingerprint that backends/cpu/executable.py gives the same run.
std::string fingerprint(const std::string& weights_hash, const std::string& program_hash, const std::string& isa);

}  // namespace roofline
