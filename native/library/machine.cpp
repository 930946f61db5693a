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

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turn(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

void sha_block(uint32_t state[8], const uint8_t* block) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
               (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    std::copy(state, state + 8, v);
    for (int i = 0; i < 64; i++) {
        const uint32_t first = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) +
                               ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRounds[i] + w[i];
        const uint32_t second =
            (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        std::copy_backward(v, v + 7, v + 8);
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
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

std::string sha256(const std::string& data) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::string padded = data + '\x80';
    padded.append((120 - padded.size() % 64) % 64, '\0');
    for (int byte = 7; byte >= 0; byte--) padded += (char)((uint64_t)data.size() * 8 >> (8 * byte));
    for (size_t at = 0; at < padded.size(); at += 64) sha_block(state, (const uint8_t*)padded.data() + at);
    std::string out;
    for (const uint32_t word : state)
        for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
    return out;
}

std::string fingerprint(const std::string& weights_hash, const std::string& program_hash, const std::string& isa) {
    utsname machine{};
    uname(&machine);
    const std::string parts = weights_hash + "\n" + program_hash + "\ncpu\n" + machine.machine + "\n" + isa + "\n" +
                              ROOFLINE_BUILD_ID + "\nkv:bf16\ntp:1";
    return sha256(parts).substr(0, 32);
}

}  // namespace roofline
