// What is done to a row at a time.
#include <algorithm>
#include <cmath>

#include "check.h"

namespace check {
using roofline::Kernels;
using roofline::Quantised;
namespace {

float power(int exponent) { return float_of((uint32_t)(127 + exponent) << 23); }

void quantise(Checker& check, const std::string& name, const std::vector<float>& x, int64_t k, int digits) {
    const int64_t tokens = (int64_t)x.size() / k;
    check(name, [&](const Kernels& kernels, Output& out) {
        const size_t bytes = tokens * Quantised::row_bytes(k, digits);
        std::vector<float> memory(bytes / 4 + 16);
        const Quantised q{(uint8_t*)memory.data(), tokens, k, digits};
        for (int64_t t = 0; t < tokens; t++) kernels.quantise(x.data() + t * k, q, t);
        for (int64_t i = 0; i * Quantised::kPanel < tokens; i++) {
            const roofline::Panel p = q.panel(i);
            out.integers(p.q, p.tokens * k);
            if (p.low) out.integers(p.low, p.tokens * k);
            out.floats(p.scale, p.tokens * k / 32);
            out.floats(p.sum, p.tokens * k / 32);
            out.integers(p.isum, p.tokens * k / 16);
        }
    });
}

void quantises(Checker& check) {
    Random random(1);
    for (int digits = 1; digits <= 2; digits++)
        for (int64_t k : {32, 96, 576})
            for (int64_t tokens : {1, 5, 33, 165}) {
                std::vector<float> x = random.reals(tokens * k);
                for (float& v : x) v *= power(random.below(60) - 30);
                const std::string name = "quantise " + std::to_string(k) + " x " + std::to_string(tokens) + " digits " +
                                         std::to_string(digits);
                quantise(check, name, x, k, digits);
                std::fill(x.begin(), x.begin() + 32, 0.0f);
                if (tokens > 1) x[k + 7] = kNan, x[k + 31] = -1.0f;
                if (tokens > 2) x[2 * k + 3] = kInfinity, x[3 * k + 20] = -kInfinity;
                quantise(check, name + " bad", x, k, digits);
                x = random.reals(tokens * k);
                for (float& v : x) v *= power(random.below(16) - 126);  // around the smallest numbers
                quantise(check, name + " tiny", x, k, digits);
            }
    std::vector<float> ties(64);  // n + 1/2: to the even neighbour
    for (int i = 0; i < 64; i++) ties[i] = (float)(i % 32) + 0.5f - (i / 32) * 16.0f;
    ties[0] = ties[32] = 127.0f;
    quantise(check, "quantise ties", ties, 64, 1);
}

void norms(Checker& check) {
    Random random(2);
    for (int64_t n : {1, 15, 16, 17, 31, 64, 100, 576, 2048})
        for (float scale : {1.0f, 1e-18f, 1e18f, 0.0f}) {
            constexpr int kRows = 8;
            const std::vector<float> x = random.reals(kRows * n, scale), weight = random.reals(n);
            check("rms_norm " + std::to_string(n) + " x " + std::to_string(scale),
                  [&](const Kernels& kernels, Output& out) {
                      for (int row = 0; row < kRows; row++) {
                          std::vector<float> y(n + 16, 7.0f);
                          kernels.rms_norm(x.data() + row * n, weight.data(), n, 1e-5f, y.data());
                          out.floats(y.data(), n + 16);  // nothing behind the end is touched
                      }
                  });
            check("rms_norm without a weight " + std::to_string(n) + " x " + std::to_string(scale),
                  [&](const Kernels& kernels, Output& out) {
                      std::vector<float> y(n + 16, 7.0f);
                      kernels.rms_norm(x.data(), nullptr, n, 1e-5f, y.data());
                      out.floats(y.data(), n + 16);
                  });
            check("like_norm " + std::to_string(n) + " x " + std::to_string(scale),
                  [&](const Kernels& kernels, Output& out) {
                      for (int row = 0; row < kRows - 1; row++) {
                          std::vector<float> y(n + 16, 7.0f);
                          kernels.like_norm(x.data() + row * n, x.data() + (row + 1) * n, n, y.data());
                          out.floats(y.data(), n + 16);
                      }
                  });
            const std::string size = scale == 0.0f ? "nothing" : "2^" + std::to_string(std::ilogb(scale));
            check("above_spread " + std::to_string(n) + " x " + size,
                  [&](const Kernels& kernels, Output& out) {
                      for (float z : {-1.0f, 0.3f, 1.6448536f}) {
                          std::vector<float> y(n + 16, 7.0f);
                          kernels.above_spread(x.data(), z, n, y.data());
                          out.floats(y.data(), n + 16);
                      }
                  });
        }
}

void layer_norms(Checker& check) {
    Random random(7);
    for (int64_t n : {1, 15, 16, 17, 31, 64, 100, 576, 2048})
        for (float scale : {1.0f, 1e-18f, 1e18f, 0.0f})
            for (bool biased : {false, true}) {
                constexpr int kRows = 4;
                std::vector<float> x = random.reals(kRows * n, scale);
                for (int64_t i = 0; i < n; i++) x[n + i] += 100.0f * scale;  // far from zero, as outlier channels are
                x[2 * n] = kNan;
                const std::vector<float> weight = random.reals(n), bias = random.reals(n);
                check("layer_norm " + std::to_string(n) + " x " + std::to_string(scale) + (biased ? " biased" : ""),
                      [&](const Kernels& kernels, Output& out) {
                          for (int row = 0; row < kRows; row++) {
                              std::vector<float> y(n + 16, 7.0f);
                              kernels.layer_norm(x.data() + row * n, weight.data(), biased ? bias.data() : nullptr, n,
                                                 1e-5f, y.data());
                              out.floats(y.data(), n + 16);
                          }
                      });
            }
}

void activations(Checker& check) {
    using roofline::Activation;
    Random random(8);
    const std::pair<Activation, const char*> kinds[] = {
        {Activation::Silu, "silu "},
        {Activation::Gelu, "gelu "},
        {Activation::GeluTanh, "gelu tanh "},
        {Activation::Relu, "relu "},
        {Activation::ReluSquared, "relu squared "}};
    for (int64_t n : {1, 16, 31, 3000})
        for (const auto& [kind, name] : kinds) {
            std::vector<float> x = random.reals(n, kind == Activation::Silu ? 50.0f : 7.0f);
            const std::vector<float> up = random.reals(n);
            const float special[] = {0.0f,   -0.0f,  200.0f, -200.0f, kInfinity, -kInfinity, kNan,    1e-30f, -1e-39f,
                                     1e-39f, 1e30f,  -1e30f, -13.1f,  6.0f,      -6.0f,      -87.34f, 126.0f};
            for (int64_t i = 0; i < std::min<int64_t>(n, 17); i++) x[i] = special[i];
            const Activation activation = kind;
            check(name + std::to_string(n), [&](const Kernels& kernels, Output& out) {
                std::vector<float> y(n + 16, 7.0f);
                kernels.activate(activation, x.data(), nullptr, n, y.data());
                out.floats(y.data(), n + 16);
                std::vector<float> own = x;
                kernels.activate(activation, own.data(), nullptr, n, own.data());
                out.floats(own.data(), n);
            });
            check(std::string("gated by ") + name + std::to_string(n), [&](const Kernels& kernels, Output& out) {
                std::vector<float> y(n + 16, 7.0f);
                kernels.activate(activation, x.data(), up.data(), n, y.data());
                out.floats(y.data(), n + 16);
            });
        }
}

void sums(Checker& check) {
    Random random(3);
    for (int64_t n : {1, 16, 31, 1000}) {
        const std::vector<float> x = random.reals(n, 50.0f), other = random.reals(n);
        check("add " + std::to_string(n), [&](const Kernels& kernels, Output& out) {
            std::vector<float> y(n + 16, 7.0f);
            kernels.add(x.data(), other.data(), n, y.data());
            out.floats(y.data(), n + 16);
        });
    }
}

void ropes(Checker& check) {
    Random random(4);
    for (int dim : {12, 16, 20, 32, 36, 64, 80, 96, 128, 256})
        for (int form = 0; form < 6; form++) {
            const int stored = roofline::stored_dim(dim);
            const std::vector<float> table = random.reals(5 * dim, 0.5f), head = random.reals(dim, 3.0f),
                                     norm = random.reals(dim);
            const roofline::Rope rope{form < 4 ? table.data() : nullptr,
                                      form & 1 ? norm.data() : nullptr,
                                      form & 1 ? norm.data() : nullptr,
                                      1e-6f,
                                      (form & 2) != 0,
                                      dim,
                                      dim,
                                      0.180336880f,
                                      form & 1 ? 1.138629436f : 1.0f};
            check("rope " + std::to_string(dim) + " form " + std::to_string(form),
                  [&](const Kernels& kernels, Output& out) {
                      for (int32_t position = 0; position < 5; position++) {
                          std::vector<uint16_t> y(stored);
                          kernels.rope_query(rope, head.data(), position, y.data());
                          out.halves(y.data(), stored);
                          kernels.rope_key(rope, head.data(), position, y.data());
                          out.halves(y.data(), stored);
                      }
                  });
            check("rope int8 " + std::to_string(dim) + " form " + std::to_string(form),
                  [&](const Kernels& kernels, Output& out) {
                      for (int32_t position = 0; position < 5; position++) {
                          std::vector<int8_t> y(stored);
                          const float scale = kernels.rope_key_int8(rope, head.data(), position, y.data());
                          out.floats(&scale, 1);
                          out.integers(y.data(), stored);
                      }
                  });
        }
}

void heads_in_bytes(Checker& check) {
    Random random(6);
    for (int dim : {10, 16, 64, 80, 90, 512}) {
        constexpr int kHeads = 40;
        const int stored = roofline::stored_dim(dim);
        std::vector<float> x = random.reals(kHeads * dim);
        for (int h = 0; h < kHeads; h++)
            for (int i = 0; i < dim; i++) x[h * dim + i] *= power(h * 6 - 126);  // from the smallest numbers on
        x[5 * dim + 3] = kNan, x[6 * dim + dim - 1] = kInfinity, x[7 * dim] = -kInfinity;
        for (int i = 0; i < dim; i++) x[8 * dim + i] = 0.0f, x[9 * dim + i] = (float)(i % 254) + 0.5f - 127.0f;
        x[9 * dim] = 127.0f;
        check("to_int8 " + std::to_string(dim), [&](const Kernels& kernels, Output& out) {
            for (int h = 0; h < kHeads; h++) {
                std::vector<int8_t> y(stored);
                const float scale = kernels.to_int8(x.data() + h * dim, dim, y.data());
                out.floats(&scale, 1);
                out.integers(y.data(), stored);
            }
        });
    }
}

// Behind a head's end stand zeros, whatever lies behind what it is made from.
void ends_of_heads(Checker& check) {
    Random random(7);
    for (int dim : {9, 20, 36}) {
        const int stored = roofline::stored_dim(dim);
        std::vector<float> head = random.reals(dim);
        head.resize(stored, kNan);
        const roofline::Rope rope{nullptr, nullptr, nullptr, 0.0f, false, dim, 0, 0.18f};
        for (const Kernels* kernels : check.tables()) {
            std::vector<uint16_t> q(stored, 0x7fc0), k = q, v = q;
            std::vector<int8_t> bytes(stored, 77);
            kernels->rope_query(rope, head.data(), 0, q.data());
            kernels->rope_key(rope, head.data(), 0, k.data());
            kernels->to_bf16(head.data(), dim, v.data());
            const float scale = kernels->to_int8(head.data(), dim, bytes.data());
            bool zeros = scale > 0;
            for (int i = dim; i < stored; i++) zeros = zeros && !(q[i] | k[i] | v[i] | bytes[i]);
            check.require("zeros behind a head of " + std::to_string(dim) + " " + kernels->isa, zeros);
        }
    }
}

void conversions(Checker& check) {
    Random random(5);
    std::vector<float> any(4096);
    for (float& v : any) v = float_of((uint32_t)random.bits());
    const uint32_t special[] = {0,           0x80000000u, 1,           0x807fffffu, 0x00800000u, 0x7f7fffffu,
                                0x7f800000u, 0xff800000u, 0x7f800001u, 0xffc12345u, 0x3f808000u, 0x3f818000u,
                                0x3f807fffu, 0x3f808001u, 0x7f7f8000u, 0x007fffffu};
    for (int i = 0; i < 16; i++) any[i] = float_of(special[i]);
    for (int missing : {0, 5})
        check("to_bf16 without " + std::to_string(missing), [&](const Kernels& kernels, Output& out) {
            std::vector<uint16_t> y(any.size());
            kernels.to_bf16(any.data(), (int64_t)any.size() - missing, y.data());
            out.halves(y.data(), y.size());
        });
    std::vector<float> x;
    for (int i = -150 * 64; i <= 127 * 64; i++) x.push_back((float)i / 64.0f);
    for (int i = 0; i < 2000; i++) x.push_back(random.real() * 60.0f);
    for (float v : {-kInfinity, kNan, -0.0f, -126.0f, -125.99999f, -126.00001f, 0.5f, 1.5f, -0.5f, -1e30f})
        x.push_back(v);
    x.resize(x.size() / 16 * 16 + 16);
    check("exp2", [&](const Kernels& kernels, Output& out) {
        std::vector<float> y(x.size());
        kernels.exp2_many(x.data(), (int64_t)x.size(), y.data());
        out.floats(y.data(), y.size());
    });
}

}  // namespace

void rows(Checker& check) {
    quantises(check);
    norms(check);
    layer_norms(check);
    activations(check);
    sums(check);
    ropes(check);
    heads_in_bytes(check);
    ends_of_heads(check);
    conversions(check);
}

}  // namespace check
