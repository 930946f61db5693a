// Sampling one row: penalties, truncation and Gumbel-max, with noise that depends on (seed, sample, position, id) alone.
#pragma once
#include <algorithm>
#include <numeric>

#include "adapter_impl.h"
#include "attend_impl.h"
#include "experts_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"
#include "scan_impl.h"
#include "state_impl.h"

namespace roofline {
namespace ISA_NAMESPACE {

// No score can gain more than this from noise: -log(2^-33).
static constexpr float kMaxNoise = 22.9f;

static inline uint64_t splitmix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline I32 mix(I32 h) {
    h = imul(ixor(h, ishr<16>(h)), iset1(0x21f0aaad));
    h = imul(ixor(h, ishr<15>(h)), iset1(0x735a2d97));
    return ixor(h, ishr<15>(h));
}

struct Noise {
    I32 k0, k1;
    Noise(uint64_t seed, int32_t sample, int32_t position) {
        const uint64_t counter = (uint64_t)(uint32_t)sample << 32 | (uint32_t)position;
        const uint64_t k = splitmix64(seed + 0x9E3779B97F4A7C15ull * (1 + counter));
        k0 = iset1((int32_t)(uint32_t)k);
        k1 = iset1((int32_t)(uint32_t)(k >> 32));
    }
    // Standard Gumbel noise of sixteen ids: -log(E) with E = -log(1 - u), kept accurate for the small u that win.
    F32 operator()(I32 ids) const {
        F32 u = fma(unsigned_to_float(mix(iadd(mix(ixor(ids, k0)), k1))), set1(0x1p-32f), set1(0x1p-33f));
        F32 y = max(sub(set1(1.0f), u), set1(0x1p-25f));
        F32 e = add(log(y), div(sub(sub(set1(1.0f), y), u), y));
        return sub(zero(), log(sub(zero(), e)));
    }
};

static inline I32 lane_ids(int first) {
    static const int32_t ramp[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return iadd(iload(ramp), iset1(first));
}

static int32_t argmax(const float* x, int n) {  // lowest id among equals; -1 where nothing compares (NaN)
    F32 best = set1(-infinity());
    int i = 0;
    for (; i + 16 <= n; i += 16) best = max(load(x + i), best);
    float top = reduce_max(best);
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (int id = 0; id < n; id++)
        if (x[id] == top) return id;
    return -1;
}

static void log_probabilities(SampleRow& r) {
    F32 sum = zero(), top = set1(-infinity());
    const int whole = r.vocab / 16 * 16;
    const Mask tail = mask_of((1u << (r.vocab - whole)) - 1);
    for (int i = 0; i < whole; i += 16) top = max(load(r.logits + i), top);
    float m = reduce_max(top);
    for (int i = whole; i < r.vocab; i++) m = std::max(m, r.logits[i]);
    const F32 log2e = set1(0x1.715476p+0f), vm = set1(m);
    for (int i = 0; i < whole; i += 16) sum = add(sum, exp2(mul(sub(load(r.logits + i), vm), log2e)));
    if (whole < r.vocab) sum = add(sum, select(tail, exp2(mul(sub(load_masked(r.logits + whole, tail), vm), log2e)), zero()));
    float lanes[16];
    store(lanes, log(set1(reduce_add(sum))));
    const float norm = m + lanes[0];
    r.logprob = r.logits[r.id] - norm;
    int32_t* ids = r.order;
    std::iota(ids, ids + r.vocab, 0);
    std::partial_sort(ids, ids + r.logprobs, ids + r.vocab, [&](int32_t a, int32_t b) {
        return r.logits[a] != r.logits[b] ? r.logits[a] > r.logits[b] : a < b;
    });
    for (int i = 0; i < r.logprobs; i++) {
        r.top_ids[i] = ids[i];
        r.top_logprobs[i] = r.logits[ids[i]] - norm;
    }
}

static void adjust(SampleRow& r, float* x) {
    std::copy(r.logits, r.logits + r.vocab, x);
    for (int i = 0; i < r.biases; i++) x[r.bias_ids[i]] += r.bias_values[i];
    if (r.mask)
        for (int i = 0; i < r.vocab; i += 32) {  // most words allow nothing, or everything
            const uint32_t word = r.mask[i / 32];
            const int end = std::min(i + 32, r.vocab);
            if (word == 0) std::fill(x + i, x + end, -infinity());
            if (word == 0 || word == ~0u) continue;
            for (int j = i; j < end; j++)
                if (!(word >> (j - i) & 1)) x[j] = -infinity();
        }
    for (int i = 0; i < r.hist; i++) {
        float& v = x[r.hist_ids[i]];
        v = v > 0.0f ? v / r.repetition : v * r.repetition;
        if (r.hist_counts[i] > 0) v -= r.frequency * (float)r.hist_counts[i] + r.presence;
    }
}

static int32_t noisy_argmax(const float* x, int n, const Noise& noise) {
    float best = -infinity();
    int32_t id = -1;
    for (int i = 0; i < n; i += 16) {
        const Mask m = mask_of(i + 16 <= n ? 0xffffu : (1u << (n - i)) - 1);
        F32 v = select(m, load_masked(x + i, m), set1(-infinity()));
        if (reduce_max(v) + kMaxNoise < best) continue;
        float scores[16];
        store(scores, add(v, noise(lane_ids(i))));
        for (int j = 0; j < 16 && i + j < n; j++)
            if (scores[j] > best) best = scores[j], id = i + j;
    }
    return id;
}

// Sorts the largest `want` of the candidates (logit descending, then id ascending) to the front.
static void sort_front(const float* x, int32_t* ids, int count, int want) {
    auto before = [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    if (want < count) std::nth_element(ids, ids + want, ids + count, before);
    std::sort(ids, ids + std::min(want, count), before);
}

// Keeps the candidates that top-k, top-p and min-p leave; they end up sorted in r.order. Returns how many.
static int truncate(SampleRow& r, const float* x) {
    float top = -infinity();
    for (int i = 0; i < r.vocab; i++) top = std::max(top, x[i]);
    const F32 log2e = set1(0x1.715476p+0f), vtop = set1(top);
    int count = 0;
    for (int i = 0; i < r.vocab; i++)
        if (x[i] > -infinity()) r.order[count++] = i;
    int sorted = 0;
    if (r.top_k > 0 && r.top_k < count) {
        sort_front(x, r.order, count, r.top_k);
        count = sorted = r.top_k;
    }
    auto weight = [&](int32_t id) {
        float lanes[16];
        store(lanes, exp2(mul(sub(set1(x[id]), vtop), log2e)));
        return lanes[0];
    };
    if (r.top_p < 1.0f) {
        double total = 0;
        for (int i = 0; i < count; i += 16) {
            float lanes[16];
            for (int j = 0; j < 16; j++) lanes[j] = i + j < count ? x[r.order[i + j]] : -infinity();
            store(lanes, exp2(mul(sub(load(lanes), vtop), log2e)));
            for (int j = 0; j < 16; j++) total += lanes[j];
        }
        const double wanted = (double)r.top_p * total;
        double sum = 0;
        int kept = 0;
        while (kept < count && (kept == 0 || sum < wanted)) {
            if (kept == sorted) {  // sort a further, larger front
                const int more = std::min(count, std::max(64, sorted * 4));
                sort_front(x, r.order + sorted, count - sorted, more - sorted);
                sorted = more;
            }
            sum += weight(r.order[kept++]);
        }
        count = kept;
    }
    if (r.min_p > 0.0f) {
        int kept = 0;
        for (int i = 0; i < count; i++)
            if (weight(r.order[i]) >= r.min_p) r.order[kept++] = r.order[i];
        count = kept;
    }
    return count;
}

static void sample(SampleRow& r) {
    const bool adjusted = r.biases > 0 || r.mask || r.hist > 0;
    const float* x = r.logits;
    if (adjusted || r.temperature > 0.0f) {
        adjust(r, r.scratch);
        x = r.scratch;
    }
    if (r.temperature <= 0.0f) {
        r.id = argmax(x, r.vocab);
    } else {
        int i = 0;
        const F32 t = set1(r.temperature);
        for (; i + 16 <= r.vocab; i += 16) store(r.scratch + i, div(load(r.scratch + i), t));
        for (; i < r.vocab; i++) r.scratch[i] /= r.temperature;
        const Noise noise(r.seed, r.sample_index, r.position);
        if (r.top_k <= 0 && r.top_p >= 1.0f && r.min_p <= 0.0f) {
            r.id = noisy_argmax(x, r.vocab, noise);
        } else {
            const int count = truncate(r, x);
            float best = -infinity();
            r.id = -1;
            for (int i = 0; i < count; i += 16) {
                int32_t ids[16] = {0};
                float v[16];
                for (int j = 0; j < 16; j++) ids[j] = i + j < count ? r.order[i + j] : 0;
                for (int j = 0; j < 16; j++) v[j] = x[ids[j]];
                store(v, add(load(v), noise(iload(ids))));
                for (int j = 0; j < 16 && i + j < count; j++)
                    if (v[j] > best || (v[j] == best && ids[j] < r.id)) best = v[j], r.id = ids[j];
            }
        }
    }
    // A NaN anywhere makes the row meaningless: id -1 tells the engine to fail this request and no other.
    for (int i = 0; i < r.vocab && r.id >= 0; i++)
        if (r.logits[i] != r.logits[i]) r.id = -1;
    if (r.logprobs >= 0 && r.id >= 0) log_probabilities(r);
}

static const Kernels kTable = {
    kIsaName,  linear,       embed,        rms_norm,      layer_norm, quantise,   activate,     add,
    scale,     soft_cap,
    rope_query, rope_key,    to_bf16,      rope_key_int8, to_int8,    attend_split, attend_merge, attend_finish,
    adapter_down, adapter_up, route, route_scores, combine, sigmoid_scale, clamped_swiglu,
    mul, sigmoid_mul, above_spread, like_norm, causal_conv, delta_rule, selective_scan, sample, exp2_many, kMaxQueries,
    {{kMostTokens<1, 1>, kMostTokens<1, 2>}, {kMostTokens<2, 1>, kMostTokens<2, 2>}},
};

}  // namespace ISA_NAMESPACE
}  // namespace roofline
