// Mixtures of experts, a row at a time: which experts it goes to, and the sum over them. Their matrices are multiplied by
// the kernels of linear layers.
// Compiled with -ffp-contract=off, over the Vec16 of the instruction set whose header was included first: each FMA is
// meant.
#pragma once
#include "elementary_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// 2^((x - most) log2(e)) of n values, the lanes behind the end 0; room for the last sixteen in `out`.
static void exp_below(const float* x, int64_t n, float most, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const Mask mask = mask_of(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        const F32 power = mul(sub(load_masked(x + i, mask), set1(most)), set1(0x1.715476p+0f));
        store(out + i, select(mask, exp2(power), zero()));
    }
}

// The largest of n values that are not taken yet, the first of equal ones; it is taken then. A NaN is above nothing.
static int64_t take_largest(const float* x, int64_t n, uint8_t* taken) {
    int64_t best = 0;
    while (taken[best]) best++;
    for (int64_t i = best + 1; i < n; i++)
        if (!taken[i] && x[i] > x[best]) best = i;
    taken[best] = 1;
    return best;
}

// Order "exp2": p = 2^((x - max) log2(e)), weight = p / total; the total over the chosen ascends by rank, over all it is
// added in sixteen lanes (index mod 16) and then as the fixed tree.
static void route(const float* x, int64_t experts, int top, bool over_all, float* weights, int32_t* ids) {
    uint8_t taken[kMostExperts];
    float values[kMostExperts + 16];
    std::memset(taken, 0, experts);
    for (int rank = 0; rank < top; rank++) {
        ids[rank] = (int32_t)take_largest(x, experts, taken);
        weights[rank] = x[ids[rank]];  // the logit, for now
    }
    float total = 0.0f;
    if (over_all) {
        exp_below(x, experts, weights[0], values);
        F32 sum = zero();
        for (int64_t i = 0; i < experts; i += 16) sum = add(sum, load(values + i));
        total = reduce_add(sum);
    }
    exp_below(weights, top, weights[0], values);
    for (int rank = 0; rank < top && !over_all; rank++) total = total + values[rank];
    for (int rank = 0; rank < top; rank++) weights[rank] = values[rank] / total;
}

// 1 / (1 + 2^(-x log2(e))) of n values; room for the last sixteen in `out`.
static void sigmoids(const float* x, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const Mask mask = mask_of(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        F32 t = mul(sub(zero(), load_masked(x + i, mask)), set1(0x1.715476p+0f));
        t = min(max(t, set1(-126.0f)), set1(126.0f));
        store(out + i, div(set1(1.0f), add(set1(1.0f), exp2(t))));
    }
}

// Takes all experts of the groups that are not among the best.
static void drop_groups(const float* scores, const Routing& how, uint8_t* taken) {
    float of_group[kMostExperts];
    uint8_t kept[kMostExperts];
    const int64_t size = how.experts / how.groups;
    for (int64_t g = 0; g < how.groups; g++) {
        const float* const part = scores + g * size;
        float first = part[0], second = -std::numeric_limits<float>::infinity();
        for (int64_t i = 1; i < size; i++) {
            if (part[i] > first) second = first, first = part[i];
            else if (part[i] > second) second = part[i];
        }
        of_group[g] = how.by_best ? first : first + second;
    }
    std::memset(kept, 0, how.groups);
    for (int64_t n = 0; n < how.kept; n++) take_largest(of_group, how.groups, kept);
    for (int64_t g = 0; g < how.groups; g++) std::memset(taken + g * size, !kept[g], size);
}

// Order "exp2": a softmax is that over all experts, as of `route`; the total of the chosen scores ascends by rank, then
// 1e-20 is added.
static void route_scores(const float* x, const Routing& how, float* weights, int32_t* ids) {
    uint8_t taken[kMostExperts];
    float scores[kMostExperts + 16], biased[kMostExperts + 16];
    const int64_t experts = how.experts;
    if (how.sigmoid) {
        sigmoids(x, experts, scores);
    } else {
        float most = x[0];
        for (int64_t i = 1; i < experts; i++)
            if (x[i] > most) most = x[i];
        exp_below(x, experts, most, scores);
        F32 sum = zero();
        for (int64_t i = 0; i < experts; i += 16) sum = add(sum, load(scores + i));
        const float total = reduce_add(sum);
        for (int64_t i = 0; i < experts; i++) scores[i] = scores[i] / total;
    }
    for (int64_t i = 0; i < experts; i++) biased[i] = how.bias ? scores[i] + how.bias[i] : scores[i];
    std::memset(taken, 0, experts);
    if (how.groups > 1) drop_groups(biased, how, taken);
    float total = 0.0f;
    for (int rank = 0; rank < how.top; rank++) {
        ids[rank] = (int32_t)take_largest(biased, experts, taken);
        weights[rank] = scores[ids[rank]];
        total = rank ? total + weights[rank] : weights[rank];
    }
    for (int rank = 0; rank < how.top; rank++) {
        if (!how.over_all) weights[rank] = weights[rank] / (total + 1e-20f);
        if (how.scale != 1.0f) weights[rank] = weights[rank] * how.scale;
    }
}

static void combine(const float* x, const float* weights, int top, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const bool whole = n - i >= 16;
        const Mask mask = mask_of(whole ? 0xffffu : (1u << (n - i)) - 1);
        F32 sum = zero();
        for (int rank = 0; rank < top; rank++) {
            const float* const row = x + rank * n + i;
            const F32 part = mul(whole ? load(row) : load_masked(row, mask), set1(weights[rank]));
            sum = rank ? add(sum, part) : part;
        }
        if (whole) store(out + i, sum);
        else store_masked(out + i, mask, sum);
    }
}

// Order "exp2": x * (1 / (1 + 2^(-gate log2(e)))).
static void sigmoid_scale(const float* x, float gate, int64_t n, float* out) {
    const F32 factor = sigmoid(set1(gate));
    for (int64_t i = 0; i < n; i += 16) {
        const Mask mask = mask_of(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        store_masked(out + i, mask, mul(load_masked(x + i, mask), factor));
    }
}

// Order "exp2": g / (1 + 2^(-g * 1.702 log2(e))) * (u + 1) of what is left within the limit; a NaN stays one.
static void clamped_swiglu(const float* gate, const float* up, float limit, int64_t n, float* out) {
    const F32 top = set1(limit), bottom = set1(-limit), one = set1(1.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const Mask mask = mask_of(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1);
        F32 g = load_masked(gate + i, mask), u = load_masked(up + i, mask);
        g = select(less(top, g), top, g);
        u = select(less(top, u), top, u);
        u = select(less(u, bottom), bottom, u);
        F32 t = mul(sub(zero(), g), set1(0x1.3a4cbep+1f));
        t = min(max(t, set1(-126.0f)), set1(126.0f));
        store_masked(out + i, mask, mul(div(g, add(one, exp2(t))), add(u, one)));
    }
}

}  // namespace ISA_NAMESPACE
}  // namespace roofline
