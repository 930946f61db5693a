// Ops with recurrent state, and the element-wise ones beside them.
#include <algorithm>
#include <string>

#include "check.h"

namespace check {
using roofline::Kernels;
namespace {

void convolutions(Checker& check) {
    Random random(31);
    constexpr int64_t kTokens = 9;
    for (int taps : {2, 4, 16})
        for (int64_t channels : {1, 16, 45, 128})
            for (int form = 0; form < 4; form++) {
                const bool fresh = form & 1, plain = form & 2;
                std::vector<float> x = random.reals(kTokens * channels);
                const std::vector<float> weight = random.reals(taps * channels), bias = random.reals(channels),
                                         before = random.reals((taps - 1) * channels);
                if (!fresh) x[channels] = kNan, x[2 * channels - 1] = kInfinity;
                check("causal_conv " + std::to_string(channels) + " taps " + std::to_string(taps) +
                          (fresh ? " fresh" : "") + (plain ? " plain" : ""),
                      [&](const Kernels& kernels, Output& out) {
                          std::vector<float> y(kTokens * channels + 16, 7.0f);
                          kernels.causal_conv({x.data(), weight.data(), plain ? nullptr : bias.data(),
                                               fresh ? nullptr : before.data(), y.data(), channels, kTokens, channels,
                                               taps, !plain});
                          out.floats(y.data(), y.size());  // nothing behind the end is touched
                      });
            }
}

struct Shape {
    int64_t tokens, key_dim, columns;
};

void delta_rule(Checker& check, const Shape& shape, bool bad) {
    Random random(32);
    const auto [tokens, key_dim, columns] = shape;
    const int64_t ld = 2 * key_dim + columns + 3, lds = columns + 5;  // rows of neighbours lie between
    std::vector<float> qkv = random.reals(tokens * ld), a = random.reals(tokens, 4.0f), b = random.reals(tokens, 4.0f);
    const std::vector<float> source = random.reals(key_dim * lds);
    if (bad) {
        a[0] = kInfinity, b[0] = -kInfinity;
        if (tokens > 1) a[1] = -1e30f, b[1] = 1e30f;
        if (tokens > 2) qkv[2 * ld] = kNan;
        for (int64_t i = 0; i < ld; i++) qkv[i] *= 1e-30f;  // squares of these are no numbers of ours
    }
    check("delta_rule " + std::to_string(tokens) + " x " + std::to_string(key_dim) + " x " + std::to_string(columns) +
              (bad ? " bad" : ""),
          [&](const Kernels& kernels, Output& out) {
              std::vector<float> target(key_dim * lds, 7.0f), save = target, y(tokens * columns + 16, 7.0f),
                                 scratch(roofline::delta_scratch(key_dim, columns), kNan);
              roofline::DeltaRule r{};
              r.q = qkv.data(), r.k = r.q + key_dim, r.v = r.k + key_dim, r.ld = ld;
              r.a = a.data(), r.b = b.data(), r.ldg = 1;
              r.a_log = 0.5f, r.dt_bias = -0.25f, r.eps = 1e-6f, r.q_factor = 0.25f;
              r.tokens = tokens, r.key_dim = key_dim, r.columns = columns, r.lds = lds;
              r.source = source.data(), r.target = target.data(), r.save = save.data(), r.save_after = (tokens + 1) / 2;
              r.y = y.data(), r.ldy = columns, r.scratch = scratch.data();
              kernels.delta_rule(r);
              r.source = nullptr, r.target = nullptr, r.save = nullptr;
              for (const std::vector<float>* part : {&y, &target, &save}) out.floats(part->data(), part->size());
              kernels.delta_rule(r);
              out.floats(y.data(), y.size());
              // In place, and on from there.
              r.source = r.target = target.data();
              kernels.delta_rule(r);
              for (const std::vector<float>* part : {&y, &target}) out.floats(part->data(), part->size());
          });
}

void selective_scan(Checker& check, const Shape& shape, bool rates, bool bad) {
    Random random(34);
    const auto [tokens, states, columns] = shape;
    const int64_t ld = columns + 2 * states + 3, lds = columns + 5, heads = rates ? columns : 1;
    std::vector<float> xbc = random.reals(tokens * ld), dt = random.reals(tokens * heads, 4.0f);
    const std::vector<float> source = random.reals(states * lds), a_log = random.reals(rates ? heads * states : 1),
                             dt_bias = random.reals(heads), d = random.reals(heads);
    if (bad) {
        dt[0] = kInfinity;
        if (tokens > 1) dt[heads] = -1e30f, dt[2 * heads - 1] = 1e30f;
        if (tokens > 2) xbc[2 * ld] = kNan, dt[2 * heads] = kNan;
    }
    check("selective_scan " + std::to_string(tokens) + " x " + std::to_string(states) + " x " + std::to_string(columns) +
              (rates ? " rates" : "") + (bad ? " bad" : ""),
          [&](const Kernels& kernels, Output& out) {
              std::vector<float> target(states * lds, 7.0f), save = target, y(tokens * columns + 16, 7.0f),
                                 scratch(roofline::scan_scratch(states), kNan);
              roofline::SelectiveScan r{};
              r.x = xbc.data(), r.b = r.x + columns, r.c = r.b + states, r.ld = ld;
              r.dt = dt.data(), r.ldt = heads;
              r.a_log = a_log.data(), r.lda = heads, r.dt_bias = dt_bias.data(), r.d = d.data(), r.rates = rates;
              r.least = bad ? 0.5f : 0.0f, r.most = bad ? 2.0f : kInfinity;
              r.tokens = tokens, r.states = states, r.columns = columns, r.lds = lds;
              r.source = source.data(), r.target = target.data(), r.save = save.data(), r.save_after = (tokens + 1) / 2;
              r.y = y.data(), r.ldy = columns, r.scratch = scratch.data();
              kernels.selective_scan(r);
              for (const std::vector<float>* part : {&y, &target, &save}) out.floats(part->data(), part->size());
              r.source = nullptr, r.target = nullptr, r.save = nullptr;
              kernels.selective_scan(r);
              out.floats(y.data(), y.size());
              // In place, and on from there.
              r.source = r.target = target.data();
              kernels.selective_scan(r);
              for (const std::vector<float>* part : {&y, &target}) out.floats(part->data(), part->size());
          });
}

void products(Checker& check) {
    Random random(33);
    for (int64_t n : {1, 16, 37}) {
        std::vector<float> x = random.reals(n, 30.0f), y = random.reals(n);
        x[0] = kNan;
        if (n > 2) x[1] = kInfinity, x[2] = -kInfinity;
        check("mul " + std::to_string(n), [&](const Kernels& kernels, Output& out) {
            std::vector<float> z(n + 16, 7.0f);
            kernels.mul(x.data(), y.data(), n, z.data());
            out.floats(z.data(), z.size());
        });
        check("sigmoid_mul " + std::to_string(n), [&](const Kernels& kernels, Output& out) {
            std::vector<float> z(n + 16, 7.0f);
            kernels.sigmoid_mul(x.data(), y.data(), n, z.data());
            out.floats(z.data(), z.size());
        });
    }
}

}  // namespace

void states(Checker& check) {
    convolutions(check);
    for (const bool bad : {false, true})
        for (const Shape& shape : {Shape{1, 16, 16}, {3, 1, 1}, {5, 20, 45}, {130, 16, 80}, {4, 128, 128}})
            delta_rule(check, shape, bad);
    for (int form = 0; form < 4; form++)
        for (const Shape& shape : {Shape{1, 16, 16}, {3, 1, 1}, {20, 20, 45}, {4, 128, 64}})
            selective_scan(check, shape, form & 1, form & 2);
    products(check);
}

}  // namespace check
