// Runs a case on every instruction set of this chip, compares the bytes with the portable kernels', and prints a digest
// that must be the same on every architecture.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

namespace check {

// Numbers from integer arithmetic alone: no library of mathematics takes part in the inputs.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
    uint64_t bits() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    int below(int n) { return (int)(bits() % (uint64_t)n); }
    float real() {  // in [-2, 2), densest around 0
        const int64_t a = (int64_t)(bits() & 0xffffff) - 0x800000, b = (int64_t)(bits() & 0xffffff) - 0x800000;
        return (float)((a + b) / 2) * 0x1p-22f;
    }
    std::vector<float> reals(size_t n, float scale = 1.0f) {
        std::vector<float> v(n);
        for (float& x : v) x = real() * scale;
        return v;
    }

  private:
    uint64_t state_;
};

inline float float_of(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline uint32_t bits_of(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}
inline const float kNan = float_of(0x7fc00000u), kInfinity = float_of(0x7f800000u);

// A case's results: as they are, and with one pattern for all NaNs (chips differ in a NaN's sign and payload).
class Output {
  public:
    void floats(const float* p, size_t n) {
        append(raw_, p, n * 4);
        for (size_t i = 0; i < n; i++) {
            const uint32_t u = bits_of(p[i]), same = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u;
            append(plain_, &same, 4);
        }
    }
    void halves(const uint16_t* p, size_t n) {  // bf16
        append(raw_, p, n * 2);
        for (size_t i = 0; i < n; i++) {
            const uint16_t same = (p[i] & 0x7fff) > 0x7f80 ? 0x7fc0 : p[i];
            append(plain_, &same, 2);
        }
    }
    template <class T>
    void integers(const T* p, size_t n) {
        append(raw_, p, n * sizeof(T));
        append(plain_, p, n * sizeof(T));
    }
    // On aarch64 our mode gives all NaNs the same bits, so there nothing may differ at all.
#if defined(__aarch64__)
    const std::vector<uint8_t>& compared() const { return raw_; }
#else
    const std::vector<uint8_t>& compared() const { return plain_; }
#endif
    bool finite_floats() const {
        for (size_t i = 0; i + 4 <= plain_.size(); i += 4)
            if ((plain_[i + 3] & 0x7f) == 0x7f && plain_[i + 2] & 0x80) return false;
        return true;
    }
    uint64_t digest() const {  // FNV-1a
        uint64_t h = 0xcbf29ce484222325ull;
        for (uint8_t b : plain_) h = (h ^ b) * 0x100000001b3ull;
        return h;
    }

  private:
    static void append(std::vector<uint8_t>& to, const void* p, size_t n) {
        to.insert(to.end(), (const uint8_t*)p, (const uint8_t*)p + n);
    }
    std::vector<uint8_t> raw_, plain_;
};

class Checker {
  public:
    // Portable comes first: what the others are compared with. `wrong` replaces the table of `broken` (a planted
    // fault).
    Checker(const std::string& broken, const roofline::Kernels* wrong) {
        tables_.push_back(roofline::portable_kernels());
        for (const std::string& isa : roofline::isas())
            if (isa != "portable") tables_.push_back(isa == broken ? wrong : roofline::kernels_named(isa));
        std::fprintf(stderr, "instruction sets:");
        for (const roofline::Kernels* k : tables_) std::fprintf(stderr, " %s", k->isa);
        std::fprintf(stderr, "\n");
    }
    // run(kernels, output), once an instruction set.
    template <class Run>
    void operator()(const std::string& name, Run run) {
        Output first;
        run(*tables_[0], first);
        for (size_t i = 1; i < tables_.size(); i++) {
            Output other;
            run(*tables_[i], other);
            compare(name + " " + tables_[i]->isa, first, other);
        }
        std::printf("%s %016llx\n", name.c_str(), (unsigned long long)first.digest());
    }
    void compare(const std::string& what, const Output& wanted, const Output& got) {
        const auto &a = wanted.compared(), &b = got.compared();
        if (a == b) return;
        size_t at = 0;
        while (at < a.size() && at < b.size() && a[at] == b[at]) at++;
        std::fprintf(stderr, "DIFFERENT: %s at byte %zu of %zu\n", what.c_str(), at, a.size());
        failures_++;
    }
    void require(const std::string& what, bool holds) {
        if (holds) return;
        std::fprintf(stderr, "NOT SO: %s\n", what.c_str());
        failures_++;
    }
    const std::vector<const roofline::Kernels*>& tables() const { return tables_; }
    int failures() const { return failures_; }

  private:
    std::vector<const roofline::Kernels*> tables_;
    int failures_ = 0;
};

// A weight in a file's blocks, random within sensible scales, packed into tiles.
class Matrix {
  public:
    Matrix(roofline::Format format, int64_t rows, int64_t k, Random& random);
    const uint8_t* tiles() const { return packed_.data() + skip_; }

  private:
    std::vector<uint8_t> packed_;
    size_t skip_;  // to a cache line
};

void rows(Checker&);       // norm, quantisation, gate, rope, conversions, exp2
void linears(Checker&);    // linear and embed in every format
void attention(Checker&);  // one query and many
void sampling(Checker&);
void states(Checker&);  // ops with recurrent state
void steps(Checker&, bool brief);  // whole programs on pools of threads; brief: one of each model

}  // namespace check
