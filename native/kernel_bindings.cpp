// Single kernels for differential tests and tuning: each takes the instruction set by name.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "executable.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace roofline {
namespace {

template <class T> using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <class T> using Output = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// x float [tokens][k] -> y float [tokens][rows]; quantised formats quantise x by (token, group of 32) first.
void linear(const std::string& isa, int format, uintptr_t weight, int64_t rows, int64_t k, Array<float> x, Output<float> y,
            int digits, const std::string& variant) {
    const Kernels* kernels = kernels_named(isa);
    const int64_t tokens = (int64_t)x.size() / k;
    std::vector<uint8_t> buffer(tokens * Quantised::row_bytes(k, digits) + 64);
    Linear a{};  // no bias, no residual, no second weight
    a.format = (Format)format;
    a.weight = (const uint8_t*)weight;
    a.rows = rows;
    a.k = k;
    a.tokens = tokens;
    a.y = y.data();
    a.ldy = rows;
    const VariantKind kind = is_float(a.format) ? VariantKind::FloatLinear : VariantKind::Linear;
    a.blocks = variant_named(kind, variant, kernels, digits).blocks;
    FloatMode mode;
    if (is_float(a.format)) {
        a.xf = x.data();
    } else {
        a.x = Quantised{buffer.data(), tokens, k, digits};
        for (int64_t t = 0; t < tokens; t++) kernels->quantise(x.data() + t * k, a.x, t);
    }
    kernels->linear(a, 0, (rows + kTileRows - 1) / kTileRows);
}

// q: the digits, [digits][tokens][k].
void quantise(const std::string& isa, Array<float> x, int64_t k, Output<int8_t> q, Output<float> scale, Output<float> sum, int digits) {
    const Kernels* kernels = kernels_named(isa);
    const int64_t tokens = (int64_t)x.size() / k;
    std::vector<uint8_t> buffer(tokens * Quantised::row_bytes(k, digits) + 64);
    const Quantised out{buffer.data(), tokens, k, digits};
    {
        FloatMode mode;
        for (int64_t t = 0; t < tokens; t++) kernels->quantise(x.data() + t * k, out, t);
    }
    for (int64_t t = 0; t < tokens; t++) {
        const Panel p = out.panel(t / Quantised::kPanel);
        for (int64_t g = 0, at = t % Quantised::kPanel; g < k / 32; g++, at += p.tokens) {
            std::copy(p.q + at * 32, p.q + at * 32 + 32, q.data() + t * k + g * 32);
            if (p.low) std::copy(p.low + at * 32, p.low + at * 32 + 32, q.data() + (tokens + t) * k + g * 32);
            scale.data()[t * (k / 32) + g] = p.scale[at];
            sum.data()[t * (k / 32) + g] = p.sum[at];
        }
    }
}

// weight: one for each element of a row; none: x is one row.
void rms_norm(const std::string& isa, Array<float> x, Array<float> weight, float eps, Output<float> out) {
    const Kernels* kernels = kernels_named(isa);
    const int64_t n = (int64_t)(weight.size() ? weight.size() : x.size());
    const float* const w = weight.size() ? weight.data() : nullptr;
    FloatMode mode;
    for (int64_t t = 0; t < (int64_t)x.size() / n; t++) kernels->rms_norm(x.data() + t * n, w, n, eps, out.data() + t * n);
}

// bias: none, or one for each element.
void layer_norm(const std::string& isa, Array<float> x, Array<float> weight, Array<float> bias, float eps, Output<float> out) {
    const Kernels* kernels = kernels_named(isa);
    const int64_t n = (int64_t)weight.size();
    const float* shift = bias.size() ? bias.data() : nullptr;
    FloatMode mode;
    for (int64_t t = 0; t < (int64_t)x.size() / n; t++) kernels->layer_norm(x.data() + t * n, weight.data(), shift, n, eps, out.data() + t * n);
}

// Heads of K or V as an 8-bit cache keeps them: x [heads][n] -> q [heads][stored_dim of n], scale [heads].
void to_int8(const std::string& isa, Array<float> x, int64_t n, Output<int8_t> q, Output<float> scale) {
    FloatMode mode;
    for (int64_t h = 0; h < (int64_t)scale.size(); h++)
        scale.data()[h] = kernels_named(isa)->to_int8(x.data() + h * n, n, q.data() + h * stored_dim((int)n));
}

// kind: an Activation, by its number.
void activate(const std::string& isa, int kind, Array<float> x, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->activate((Activation)kind, x.data(), nullptr, (int64_t)x.size(), out.data());
}

void gated(const std::string& isa, int kind, Array<float> gate, Array<float> up, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->activate((Activation)kind, gate.data(), up.data(), (int64_t)gate.size(), out.data());
}

void clamped_swiglu(const std::string& isa, Array<float> gate, Array<float> up, float limit, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->clamped_swiglu(gate.data(), up.data(), limit, (int64_t)gate.size(), out.data());
}

void mul(const std::string& isa, Array<float> x, Array<float> y, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->mul(x.data(), y.data(), (int64_t)x.size(), out.data());
}

void above_spread(const std::string& isa, Array<float> x, float z, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->above_spread(x.data(), z, (int64_t)x.size(), out.data());
}

void like_norm(const std::string& isa, Array<float> x, Array<float> y, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->like_norm(x.data(), y.data(), (int64_t)x.size(), out.data());
}

void sigmoid_mul(const std::string& isa, Array<float> gate, Array<float> up, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->sigmoid_mul(gate.data(), up.data(), (int64_t)gate.size(), out.data());
}

// x, y [tokens][channels]; weight [taps][channels]; before [taps - 1][channels] or nothing.
void causal_conv(const std::string& isa, Array<float> x, Array<float> weight, Array<float> bias, Array<float> before, bool silu, Output<float> y,
                 int64_t channels) {
    FloatMode mode;
    for (int64_t at = 0; at < channels; at += kConvChannels)
        kernels_named(isa)->causal_conv({x.data() + at, weight.data() + at, bias.size() ? bias.data() + at : nullptr,
                                         before.size() ? before.data() + at : nullptr, y.data() + at, channels, (int64_t)x.size() / channels,
                                         std::min<int64_t>(kConvChannels, channels - at), (int)(weight.size() / channels), silu});
}

// q, k [tokens][key_dim], v, y [tokens][columns], a, b [tokens]; source [heads][key_dim][columns], or nothing for one head.
// All heads have the same q, k and v, and y is that of the last: more than one are for timing.
void delta_rule(const std::string& isa, Array<float> q, Array<float> k, Array<float> v, Array<float> a, Array<float> b, float a_log, float dt_bias,
                float eps, Array<float> source, Output<float> target, Output<float> save, int64_t save_after, Output<float> y) {
    const int64_t tokens = (int64_t)a.size(), key_dim = (int64_t)q.size() / tokens, columns = (int64_t)v.size() / tokens;
    // q, k and v as they lie in a model: side by side
    const int64_t width = 2 * key_dim + columns, size = key_dim * columns, heads = source.size() ? (int64_t)source.size() / size : 1;
    if (heads < 1 || (target.size() && (int64_t)target.size() != heads * size) || (save.size() && (int64_t)save.size() != heads * size))
        throw std::invalid_argument("the states do not have the sizes of q, k and v");
    std::vector<float> qkv(tokens * width), scratch(delta_scratch(key_dim, columns));
    for (int64_t t = 0; t < tokens; t++) {
        std::copy_n(q.data() + t * key_dim, key_dim, qkv.data() + t * width);
        std::copy_n(k.data() + t * key_dim, key_dim, qkv.data() + t * width + key_dim);
        std::copy_n(v.data() + t * columns, columns, qkv.data() + t * width + 2 * key_dim);
    }
    DeltaRule r{qkv.data(), qkv.data() + key_dim, qkv.data() + 2 * key_dim, width, a.data(), b.data(), 1, a_log, dt_bias, eps,
                (float)(1.0 / std::sqrt((double)key_dim)), tokens, key_dim, columns, nullptr, nullptr, nullptr, save_after, columns, y.data(),
                columns, scratch.data()};
    FloatMode mode;
    for (int64_t h = 0; h < heads; h++) {
        r.source = source.size() ? source.data() + h * size : nullptr;
        r.target = target.size() ? target.data() + h * size : nullptr;
        r.save = save.size() ? save.data() + h * size : nullptr;
        kernels_named(isa)->delta_rule(r);
    }
}

// x, y [tokens][columns], b, c [tokens][states]; of one head dt [tokens] and one a_log, dt_bias, d; of heads of one column
// dt [tokens][columns], a_log [states][columns] and dt_bias, d [columns]. States [states][columns], or nothing.
void selective_scan(const std::string& isa, Array<float> x, Array<float> b, Array<float> c, Array<float> dt, Array<float> a_log,
                    Array<float> dt_bias, Array<float> d, float least, float most, Array<float> source, Output<float> target,
                    Output<float> save, int64_t save_after, Output<float> y, int64_t states) {
    const int64_t tokens = (int64_t)b.size() / states, columns = (int64_t)x.size() / tokens, heads = (int64_t)d.size();
    const int64_t width = columns + 2 * states, size = states * columns;
    for (const int64_t kept : {(int64_t)source.size(), (int64_t)target.size(), (int64_t)save.size()})
        if (kept && kept != size) throw std::invalid_argument("the states do not have the sizes of x and B");
    std::vector<float> xbc(tokens * width), scratch(scan_scratch(states));
    for (int64_t t = 0; t < tokens; t++) {
        std::copy_n(x.data() + t * columns, columns, xbc.data() + t * width);
        std::copy_n(b.data() + t * states, states, xbc.data() + t * width + columns);
        std::copy_n(c.data() + t * states, states, xbc.data() + t * width + columns + states);
    }
    SelectiveScan r{};
    r.x = xbc.data(), r.b = r.x + columns, r.c = r.b + states, r.ld = width;
    r.dt = dt.data(), r.ldt = heads;
    r.a_log = a_log.data(), r.lda = columns, r.dt_bias = dt_bias.data(), r.d = d.data(), r.rates = a_log.size() != 1;
    r.least = least, r.most = most;
    r.tokens = tokens, r.states = states, r.columns = columns, r.lds = columns;
    r.source = source.size() ? source.data() : nullptr;
    r.target = target.size() ? target.data() : nullptr;
    r.save = save.size() ? save.data() : nullptr, r.save_after = save_after;
    r.y = y.data(), r.ldy = columns, r.scratch = scratch.data();
    FloatMode mode;
    kernels_named(isa)->selective_scan(r);
}

void embed(const std::string& isa, int format, uintptr_t weight, int64_t k, Array<int32_t> ids, Output<float> out) {
    const Kernels* kernels = kernels_named(isa);
    FloatMode mode;
    for (int64_t t = 0; t < (int64_t)ids.size(); t++) kernels->embed((Format)format, (const uint8_t*)weight, k, ids.data()[t], out.data() + t * k);
}

void exp2_many(const std::string& isa, Array<float> x, Output<float> out) {
    FloatMode mode;
    kernels_named(isa)->exp2_many(x.data(), (int64_t)x.size(), out.data());
}

}  // namespace

void bind_kernels(nb::module_& m) {
    auto k = m.def_submodule("kernels", "Single kernels by instruction set");
    k.def("linear", &linear, "isa"_a, "format"_a, "weight"_a, "rows"_a, "k"_a, "x"_a, "y"_a, "digits"_a = 1, "variant"_a = "default");
    // [digits - 1][tiles - 1]: most tokens of a block of linear layers on quantised weights.
    k.def("block_tokens", [](const std::string& isa) {
        const Kernels* t = kernels_named(isa);
        return std::vector<std::vector<int>>{{t->block_tokens[0][0], t->block_tokens[0][1]}, {t->block_tokens[1][0], t->block_tokens[1][1]}};
    }, "isa"_a);
    k.def("quantise", &quantise, "isa"_a, "x"_a, "k"_a, "q"_a, "scale"_a, "sum"_a, "digits"_a = 1);
    k.def("to_int8", &to_int8, "isa"_a, "x"_a, "n"_a, "q"_a, "scale"_a);
    k.def("rms_norm", &rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a, "out"_a);
    k.def("layer_norm", &layer_norm, "isa"_a, "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a);
    k.def("activate", &activate, "isa"_a, "kind"_a, "x"_a, "out"_a);
    k.def("gated", &gated, "isa"_a, "kind"_a, "gate"_a, "up"_a, "out"_a);
    k.def("clamped_swiglu", &clamped_swiglu, "isa"_a, "gate"_a, "up"_a, "limit"_a, "out"_a);
    k.def("mul", &mul, "isa"_a, "x"_a, "y"_a, "out"_a);
    k.def("sigmoid_mul", &sigmoid_mul, "isa"_a, "gate"_a, "up"_a, "out"_a);
    k.def("above_spread", &above_spread, "isa"_a, "x"_a, "z"_a, "out"_a);
    k.def("like_norm", &like_norm, "isa"_a, "x"_a, "y"_a, "out"_a);
    k.def("causal_conv", &causal_conv, "isa"_a, "x"_a, "weight"_a, "bias"_a, "before"_a, "silu"_a, "y"_a, "channels"_a);
    k.def("delta_rule", &delta_rule, "isa"_a, "q"_a, "k"_a, "v"_a, "a"_a, "b"_a, "a_log"_a, "dt_bias"_a, "eps"_a, "source"_a, "target"_a, "save"_a,
          "save_after"_a, "y"_a);
    k.def("selective_scan", &selective_scan, "isa"_a, "x"_a, "b"_a, "c"_a, "dt"_a, "a_log"_a, "dt_bias"_a, "d"_a, "least"_a, "most"_a, "source"_a,
          "target"_a, "save"_a, "save_after"_a, "y"_a, "states"_a);
    k.def("embed", &embed, "isa"_a, "format"_a, "weight"_a, "k"_a, "ids"_a, "out"_a);
    k.def("exp2", &exp2_many, "isa"_a, "x"_a, "out"_a);
}

}  // namespace roofline
