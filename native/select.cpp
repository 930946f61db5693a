// Which instruction sets this chip and build have, and the kernels of each.
#include <stdexcept>

#include "kernels.h"
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace roofline {

std::vector<std::string> isas() {
    std::vector<std::string> names;
#if defined(ROOFLINE_HAS_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16"))
        names.push_back("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        names.push_back("avx2");
#elif defined(ROOFLINE_HAS_NEON)
    constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
    if (getauxval(AT_HWCAP) & kDotProduct) names.push_back("neon");
#endif
    names.push_back("portable");
    return names;
}

const Kernels* kernels_named(const std::string& isa) {
    for (const std::string& name : isas())
        if (name == isa) {
#if defined(ROOFLINE_HAS_X86)
            if (isa == "avx512") return avx512_kernels();
            if (isa == "avx2") return avx2_kernels();
#elif defined(ROOFLINE_HAS_NEON)
            if (isa == "neon") return neon_kernels();
#endif
            return portable_kernels();
        }
    throw std::invalid_argument("instruction set " + isa + " is not available here");
}

}  // namespace roofline
