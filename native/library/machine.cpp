#include "machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "sha256.h"

namespace roofline {
namespace {

// Our own cgroup and every one above it, since a parent's limit binds too: version 2, or version 1's `controller`.
std::vector<std::string> cgroups(const std::string& controller) {
    std::vector<std::string> folders;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
        if (names != ",," && names.find("," + controller + ",") == std::string::npos) continue;
        const std::string base = names == ",," ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
        std::string path = line.substr(second + 1);
        for (; !path.empty() && path != "/"; path.erase(path.rfind('/'))) folders.push_back(base + path);
        folders.push_back(base);
    }
    return folders;
}

int64_t number_in(const std::string& file) {  // -1: none
    std::ifstream in(file);
    int64_t value;
    return in >> value ? value : -1;
}

double quota_of(const std::string& folder) {  // cores, 0: no limit
    std::ifstream both(folder + "/cpu.max");
    std::string quota;
    int64_t period = 100000;
    if (both >> quota) {
        both >> period;
        return quota == "max" || period <= 0 ? 0 : std::atof(quota.c_str()) / (double)period;
    }
    const int64_t time = number_in(folder + "/cpu.cfs_quota_us");
    period = number_in(folder + "/cpu.cfs_period_us");
    return time > 0 && period > 0 ? (double)time / (double)period : 0;
}

}  // namespace

int usable_cores() {
    cpu_set_t mask;
    const int allowed = sched_getaffinity(0, sizeof mask, &mask) == 0
                            ? CPU_COUNT(&mask)
                            : (int)sysconf(_SC_NPROCESSORS_ONLN);  // a mask of more than 1024
    double cores = allowed;
    for (const std::string& folder : cgroups("cpu")) {
        const double quota = quota_of(folder);
        if (quota > 0) cores = std::min(cores, quota);
    }
    return std::max(1, (int)cores);
}

int64_t free_memory() {
    int64_t least = -1;
    auto limit = [&least](int64_t bytes) { least = least < 0 ? bytes : std::min(least, bytes); };
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);)
        if (line.compare(0, 13, "MemAvailable:") == 0) limit(std::atoll(line.c_str() + 13) << 10);
    for (const std::string& folder : cgroups("memory"))
        for (const char* const* names : (const char* const[2][2]){
                 {"/memory.max", "/memory.current"}, {"/memory.limit_in_bytes", "/memory.usage_in_bytes"}}) {
            const int64_t most = number_in(folder + names[0]), used = number_in(folder + names[1]);
            if (most >= 0 && most < (int64_t)1 << 60 && used >= 0) limit(std::max<int64_t>(0, most - used));
        }
    return least;
}

std::string fingerprint(const std::string& weights_hash, const std::string& program_hash, const std::string& isa) {
    utsname machine{};
    uname(&machine);
    const std::string parts = weights_hash + "\n" + program_hash + "\ncpu\n" + machine.machine + "\n" + isa + "\n" +
                              ROOFLINE_BUILD_ID + "\nkv:bf16\ntp:1";
    Sha256 hash;
    hash.add((const uint8_t*)parts.data(), parts.size());
    return hash.hex().substr(0, 32);
}

}  // namespace roofline
