#include "roofs.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace roofline {
namespace {

using Loop = void (*)(std::int64_t rounds);

// A loop and the operations one round of it performs.
struct OpLoop {
    Loop run = nullptr;
    double ops_per_round = 0;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The compiler must believe that a register changed (no hoisting, no folding) or is read (no deletion).
// Neither emits an instruction.
#if defined(__x86_64__)
#define OPAQUE(reg) asm volatile("" : "+x"(reg))
#define OPAQUE_ZMM(reg) asm volatile("" : "+v"(reg))
#elif defined(__aarch64__)
#define OPAQUE(reg) asm volatile("" : "+w"(reg))
#else
#define OPAQUE(reg) asm volatile("" : "+m"(reg))
#endif

// ---------------------------------------------------------------- instruction loops
// Two pipes of four cycles' latency need 8 independent chains; 12 leave room for longer latencies and fit 16 registers
// together with the operands. The sums are named one by one: an array of them would live in memory.
constexpr int kChains = 12;
#define EACH_CHAIN(X) X(s0) X(s1) X(s2) X(s3) X(s4) X(s5) X(s6) X(s7) X(s8) X(s9) X(s10) X(s11)

// `rounds` rounds of STEP(sum) over twelve sums of type Vector that start at `zero`.
#define OP_LOOP(Vector, zero, STEP)                                                           \
    Vector s0 = zero, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0; \
    Vector s9 = s0, s10 = s0, s11 = s0;                                                       \
    for (std::int64_t r = 0; r < rounds; ++r) {                                               \
        EACH_CHAIN(STEP)                                                                      \
    }

#if defined(__x86_64__)

#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vnni,avx512bf16")))
#define TARGET_AVX2 __attribute__((target("avx2,fma")))

TARGET_AVX512 void int8_avx512(std::int64_t rounds) {
    const __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
#define STEP(sum)                         \
    sum = _mm512_dpbusd_epi32(sum, a, b); \
    OPAQUE_ZMM(sum);
    OP_LOOP(__m512i, _mm512_setzero_si512(), STEP)
#undef STEP
}

TARGET_AVX512 void bf16_avx512(std::int64_t rounds) {
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = a;  // 1.0
#define STEP(sum)                      \
    sum = _mm512_dpbf16_ps(sum, a, b); \
    OPAQUE_ZMM(sum);
    OP_LOOP(__m512, _mm512_setzero_ps(), STEP)
#undef STEP
}

TARGET_AVX512 void f32_avx512(std::int64_t rounds) {
    const __m512 a = _mm512_set1_ps(0.5f), b = a;
#define STEP(sum)                     \
    sum = _mm512_fmadd_ps(a, b, sum); \
    OPAQUE_ZMM(sum);
    OP_LOOP(__m512, _mm512_setzero_ps(), STEP)
#undef STEP
}

// 32 products of bytes summed in pairs to 16 bits, then in pairs to 32 bits, then added: three instructions.
// `a` is made opaque each time, else the product, always the same, would leave the loop.
TARGET_AVX2 void int8_avx2(std::int64_t rounds) {
    __m256i a = _mm256_set1_epi8(1);
    const __m256i b = _mm256_set1_epi8(2), ones = _mm256_set1_epi16(1);
#define STEP(sum)                                                                     \
    OPAQUE(a);                                                                        \
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones)); \
    OPAQUE(sum);
    OP_LOOP(__m256i, _mm256_setzero_si256(), STEP)
#undef STEP
}

TARGET_AVX2 void f32_avx2(std::int64_t rounds) {
    const __m256 a = _mm256_set1_ps(0.5f), b = a;
#define STEP(sum)                     \
    sum = _mm256_fmadd_ps(a, b, sum); \
    OPAQUE(sum);
    OP_LOOP(__m256, _mm256_setzero_ps(), STEP)
#undef STEP
}

// SSE2, which every x86-64 has: bytes already widened to 16 bits, summed in pairs, added.
void int8_portable(std::int64_t rounds) {
    __m128i a = _mm_set1_epi16(1);
    const __m128i b = _mm_set1_epi16(2);
#define STEP(sum)                                   \
    OPAQUE(a);                                      \
    sum = _mm_add_epi32(sum, _mm_madd_epi16(a, b)); \
    OPAQUE(sum);
    OP_LOOP(__m128i, _mm_setzero_si128(), STEP)
#undef STEP
}

void f32_portable(std::int64_t rounds) {
    __m128 a = _mm_set1_ps(0.5f);
    const __m128 b = a;
#define STEP(sum)                            \
    OPAQUE(a);                               \
    sum = _mm_add_ps(sum, _mm_mul_ps(a, b)); \
    OPAQUE(sum);
    OP_LOOP(__m128, _mm_setzero_ps(), STEP)
#undef STEP
}

#else

// Lanes of 16 bits hold the byte products.
void int8_portable(std::int64_t rounds) {
    typedef std::int16_t Short8 __attribute__((vector_size(16)));
    Short8 a = Short8{} + std::int16_t{1};
    const Short8 b = a;
#define STEP(sum) \
    OPAQUE(a);    \
    sum += a * b; \
    OPAQUE(sum);
    OP_LOOP(Short8, Short8{}, STEP)
#undef STEP
}

void f32_portable(std::int64_t rounds) {
    typedef float Float4 __attribute__((vector_size(16)));
    Float4 a = Float4{} + 0.5f;
    const Float4 b = a;
#define STEP(sum) \
    OPAQUE(a);    \
    sum += a * b; \
    OPAQUE(sum);
    OP_LOOP(Float4, Float4{}, STEP)
#undef STEP
}

#endif

#if defined(__aarch64__)

__attribute__((target("arch=armv8.2-a+dotprod"))) void int8_neon(std::int64_t rounds) {
    const int8x16_t a = vdupq_n_s8(1), b = vdupq_n_s8(2);
#define STEP(sum)               \
    sum = vdotq_s32(sum, a, b); \
    OPAQUE(sum);
    OP_LOOP(int32x4_t, vdupq_n_s32(0), STEP)
#undef STEP
}

void f32_neon(std::int64_t rounds) {
    const float32x4_t a = vdupq_n_f32(0.5f), b = a;
#define STEP(sum)               \
    sum = vfmaq_f32(sum, a, b); \
    OPAQUE(sum);
    OP_LOOP(float32x4_t, vdupq_n_f32(0.0f), STEP)
#undef STEP
}

bool has_dotprod() { return (getauxval(AT_HWCAP) & (1UL << 20)) != 0; }  // HWCAP_ASIMDDP

#endif

// Where an ISA has no bf16 product, bf16 is widened and multiplied as f32: f32's loop is then its roof.
OpLoop find_loop(const std::string& kind, const std::string& isa) {
    const bool int8 = kind == "int8", bf16 = kind == "bf16";
    if (!int8 && !bf16 && kind != "f32") {
        throw std::invalid_argument("kind of operation must be int8, bf16 or f32, not " + kind);
    }
    const auto ops = [](int lanes_per_chain) { return 2.0 * lanes_per_chain * kChains; };
#if defined(__x86_64__)
    if (isa == "avx512" && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("avx512bw")) {
        if (int8) return {int8_avx512, ops(64)};
        if (bf16) return {bf16_avx512, ops(32)};
        return {f32_avx512, ops(16)};
    }
    if (isa == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return int8 ? OpLoop{int8_avx2, ops(32)} : OpLoop{f32_avx2, ops(8)};
    }
#elif defined(__aarch64__)
    if (isa == "neon" && has_dotprod()) return int8 ? OpLoop{int8_neon, ops(16)} : OpLoop{f32_neon, ops(4)};
#endif
    if (isa == "portable") return int8 ? OpLoop{int8_portable, ops(8)} : OpLoop{f32_portable, ops(4)};
    throw std::invalid_argument("instruction set " + isa + " is not one this chip and build have");
}

// ---------------------------------------------------------------- wide reads
// One pass over `bytes` bytes as `Streams` equal parts read side by side, which keeps several pages and prefetchers
// busy. bytes is a multiple of Streams * 256.
using Pass = void (*)(const char* data, std::size_t bytes);

#if defined(__x86_64__)

template <int Streams>
TARGET_AVX512 void read_avx512(const char* data, std::size_t bytes) {
    const std::size_t part = bytes / Streams;
    __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0;
    for (std::size_t at = 0; at < part; at += 256) {
#pragma GCC unroll 8
        for (int s = 0; s < Streams; ++s) {
            const char* from = data + s * part + at;
            s0 = _mm512_or_si512(s0, _mm512_load_si512(from));
            s1 = _mm512_or_si512(s1, _mm512_load_si512(from + 64));
            s2 = _mm512_or_si512(s2, _mm512_load_si512(from + 128));
            s3 = _mm512_or_si512(s3, _mm512_load_si512(from + 192));
        }
    }
    OPAQUE_ZMM(s0);
    OPAQUE_ZMM(s1);
    OPAQUE_ZMM(s2);
    OPAQUE_ZMM(s3);
}

template <int Streams>
TARGET_AVX2 void read_avx2(const char* data, std::size_t bytes) {
    const std::size_t part = bytes / Streams;
    __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
    for (std::size_t at = 0; at < part; at += 128) {
#pragma GCC unroll 8
        for (int s = 0; s < Streams; ++s) {
            const auto* from = reinterpret_cast<const __m256i*>(data + s * part + at);
            s0 = _mm256_or_si256(s0, _mm256_load_si256(from));
            s1 = _mm256_or_si256(s1, _mm256_load_si256(from + 1));
            s2 = _mm256_or_si256(s2, _mm256_load_si256(from + 2));
            s3 = _mm256_or_si256(s3, _mm256_load_si256(from + 3));
        }
    }
    OPAQUE(s0);
    OPAQUE(s1);
    OPAQUE(s2);
    OPAQUE(s3);
}

#endif

template <int Streams>
void read_portable(const char* data, std::size_t bytes) {
    typedef std::uint64_t Word2 __attribute__((vector_size(16)));
    const std::size_t part = bytes / Streams;
    Word2 s0 = {}, s1 = {}, s2 = {}, s3 = {};
    for (std::size_t at = 0; at < part; at += 64) {
#pragma GCC unroll 8
        for (int s = 0; s < Streams; ++s) {
            const auto* from = reinterpret_cast<const Word2*>(data + s * part + at);
            s0 |= from[0];
            s1 |= from[1];
            s2 |= from[2];
            s3 |= from[3];
        }
    }
    OPAQUE(s0);
    OPAQUE(s1);
    OPAQUE(s2);
    OPAQUE(s3);
}

std::vector<Pass> read_passes() {
#if defined(__x86_64__)
    // Zen 4 reads 16 MiB faster with loads of 32 bytes than with loads of 64 (97 and 89 GB/s a core), other chips do
    // not.
    if (__builtin_cpu_supports("avx512bw"))
        return {read_avx512<1>, read_avx512<2>, read_avx512<4>, read_avx512<8>, read_avx2<1>, read_avx2<2>};
    if (__builtin_cpu_supports("avx2")) return {read_avx2<1>, read_avx2<2>, read_avx2<4>, read_avx2<8>};
#endif
    return {read_portable<1>, read_portable<2>, read_portable<4>, read_portable<8>};
}

// Anonymous memory on 2 MiB pages where the system has them, so that page walks do not hide the memory's speed.
class Buffer {
  public:
    explicit Buffer(std::size_t bytes) : mapped_(bytes + kHuge) {
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        madvise(base_, mapped_, MADV_HUGEPAGE);
    }
    ~Buffer() { munmap(base_, mapped_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    char* data() const {
        const auto at = reinterpret_cast<std::uintptr_t>(base_);
        return reinterpret_cast<char*>((at + kHuge - 1) / kHuge * kHuge);
    }

  private:
    static constexpr std::size_t kHuge = 2u << 20;
    std::size_t mapped_;
    void* base_;
};

// ---------------------------------------------------------------- timing
// Threads that wait for the others spin for so long before they let other programs run: whoever yields on a busy
// machine comes back milliseconds late, which is longer than a repeat.
constexpr double kSpinSeconds = 0.0005;
// A share of a repeat. Where all threads began within it, each worked beside all others.
constexpr double kTogether = 0.02;

// Seconds of work(thread) on all threads side by side, released at once: of the thread that took longest, from its own
// start. Where one began late, the others worked without it, and it without them, faster than all together can: then
// the time counts from the first start to the last end, which is never too short.
double run_together(int threads, const std::function<void(int)>& work) {
    std::atomic<int> waiting{0};
    std::vector<double> starts(threads), ends(threads);
    const auto body = [&](int t) {
        const double patience = now() + kSpinSeconds;
        waiting.fetch_add(1);
        while (waiting.load() < threads) {
            if (now() > patience) std::this_thread::yield();
        }
        starts[t] = now();
        work(t);
        ends[t] = now();
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(body, t);
    body(0);
    for (auto& other : others) other.join();
    const auto [first, last] = std::minmax_element(starts.begin(), starts.end());
    double longest = 0;
    for (int t = 0; t < threads; ++t) longest = std::max(longest, ends[t] - starts[t]);
    if (*last - *first <= kTogether * longest) return longest;
    return *std::max_element(ends.begin(), ends.end()) - *first;
}

void check_run(int threads, double seconds) {
    if (threads < 1 || threads > 4096) throw std::invalid_argument("threads must be between 1 and 4096");
    if (!(seconds > 0 && seconds <= 60)) throw std::invalid_argument("seconds must be above 0 and at most 60");
}

// One repeat is short: the best of many then falls between the other programs' time slices.
constexpr double kRepeatSeconds = 0.008;
// Caches are shared with other guests of the machine, whose reads come and go faster than time slices.
constexpr double kReadRepeatSeconds = 0.001;

// Rounds of work that fill one repeat; at least one. timed(rounds) returns seconds and has warmed the clocks up.
std::int64_t calibrate(double repeat_seconds, const std::function<double(std::int64_t)>& timed) {
    std::int64_t rounds = 1;
    double took = timed(rounds);
    while (took < repeat_seconds / 4 && rounds < (std::int64_t{1} << 40)) {
        rounds *= 4;
        took = timed(rounds);
    }
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(rounds * repeat_seconds / std::max(took, 1e-9)));
}

double best_rate(double per_round, double seconds, double repeat_seconds,
                 const std::function<double(std::int64_t)>& timed) {
    const std::int64_t rounds = calibrate(repeat_seconds, timed);
    double best = 0;
    for (const double end = now() + seconds; best == 0 || now() < end;) {
        best = std::max(best, per_round * static_cast<double>(rounds) / std::max(timed(rounds), 1e-9));
    }
    return best;
}

}  // namespace

double roof_ops(const std::string& kind, const std::string& isa, int threads, double seconds) {
    check_run(threads, seconds);
    const OpLoop loop = find_loop(kind, isa);
    return best_rate(loop.ops_per_round * threads, seconds, kRepeatSeconds,
                     [&](std::int64_t rounds) { return run_together(threads, [&](int) { loop.run(rounds); }); });
}

double roof_read(std::size_t bytes, int threads, double seconds) {
    check_run(threads, seconds);
    constexpr std::size_t kUnit = 8 * 256;  // divides into the streams of every pass
    const std::size_t share = bytes / static_cast<std::size_t>(threads) / kUnit * kUnit;
    if (share == 0) throw std::invalid_argument("the working set must give each thread at least 2048 bytes");
    if (bytes > (std::size_t{1} << 42)) throw std::invalid_argument("the working set must be at most 4 TiB");
    const Buffer buffer(bytes);
    // Each thread writes its own part first: memory of its own NUMA node, and not the one shared page of zeros.
    run_together(threads, [&](int t) { std::memset(buffer.data() + t * share, t + 1, share); });
    const auto passes = read_passes();
    double best = 0;
    for (const Pass pass : passes) {
        const auto timed = [&](std::int64_t rounds) {
            return run_together(threads, [&](int t) {
                for (std::int64_t r = 0; r < rounds; ++r) pass(buffer.data() + t * share, share);
            });
        };
        best = std::max(
            best, best_rate(static_cast<double>(share) * threads, seconds / passes.size(), kReadRepeatSeconds, timed));
    }
    return best;
}

}  // namespace roofline

// Called from bindings.cpp.
void bind_roofs(nanobind::module_& module) {
    namespace nb = nanobind;
    module.def("roof_ops", &roofline::roof_ops, nb::arg("kind"), nb::arg("isa"), nb::arg("threads"), nb::arg("seconds"),
               nb::call_guard<nb::gil_scoped_release>(),
               "Operations a second of a register-only loop (multiply and add count as two), best of repeats.");
    module.def("roof_read", &roofline::roof_read, nb::arg("bytes"), nb::arg("threads"), nb::arg("seconds"),
               nb::call_guard<nb::gil_scoped_release>(),
               "Bytes a second read from a working set of `bytes` bytes, best of patterns and repeats.");
}
