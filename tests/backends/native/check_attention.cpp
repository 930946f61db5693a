// Paged attention: pages of NaN around the keys, windows, splits, one query and many.
#include <algorithm>

#include "check.h"

namespace check {
using namespace roofline;
namespace {

constexpr int kKvHeads = 2, kSplit = 512;

uint16_t bf16(float x) { return (uint16_t)(bits_of(x) >> 16); }

struct Cache {
    int dim;
    bool int8;
    std::vector<uint8_t> memory;
    std::vector<int32_t> pages;
    int64_t head_bytes() const { return page_head_bytes(dim, int8); }
    int64_t page_bytes() const { return 2 * kKvHeads * head_bytes(); }

    // Pages lie in reverse order; every slot that is not a key of the context is NaN, or has a scale of NaN.
    Cache(int dim, bool int8, int context, Random& random) : dim(dim), int8(int8) {
        const int count = (context + 15) / 16;
        memory.assign(page_bytes() * count, 0xff);
        for (int p = 0; p < count; p++) pages.push_back(count - 1 - p);
        for (int head = 0; head < kKvHeads; head++)
            for (int t = 0; t < context; t++) {
                uint8_t *k = memory.data() + pages[t / 16] * page_bytes() + head * head_bytes(),
                        *v = k + kKvHeads * head_bytes();
                for (int d = 0; d < dim; d++) {
                    put(k, (d / 2 * 16 + t % 16) * 2 + d % 2, random);
                    put(v, (t % 16 / 2 * dim + d) * 2 + t % 2, random);
                }
                if (int8) {
                    for (uint8_t* head : {k, v}) {
                        const float scale = (random.real() + 2.0f) / 127.0f;
                        std::memcpy(head + dim * 16 + t % 16 * 4, &scale, 4);
                    }
                }
            }
    }
    void put(uint8_t* head, int64_t at, Random& random) const {
        if (int8)
            head[at] = (uint8_t)(random.below(255) - 127);
        else
            ((uint16_t*)head)[at] = bf16(random.real());
    }
};

struct Case {
    int dim, missing;  // of a head as it is stored; how many elements fewer a result has
    int context, window, queries;
    float scale;  // of the queries: large ones drive weights to zero
    bool ahead;   // pages to fetch for what comes next are named
    bool int8;
    bool leans;  // ALiBi: each query has a slope
};

void run(const Case& c, const Cache& cache, const std::vector<uint16_t>& q, const Kernels& kernels, Output& out) {
    const int n = c.queries;
    std::vector<int32_t> position(n);
    for (int i = 0; i < n; i++) position[i] = c.context - n + i;
    std::vector<uint16_t> wide(2 * 64 * c.dim);
    std::vector<float> slopes(n);
    for (int i = 0; i < n; i++) slopes[i] = 1.4426950f / (float)(2 << i % 5);
    for (int kv_head = 0; kv_head < kKvHeads; kv_head++) {
        Attend a{};
        a.head_dim = c.dim, a.page_stride = cache.page_bytes(), a.cache = cache.memory.data();
        if (c.int8) a.wide = wide.data();
        if (c.leans) a.slopes = slopes.data();
        a.kv_heads = kKvHeads, a.kv_head = kv_head, a.pages = cache.pages.data(), a.window = c.window;
        if (c.ahead) a.next_pages = cache.pages.data(), a.next_count = std::min(4, (int)cache.pages.size());
        std::vector<AttendState> total(n), part(n);
        std::vector<float> acc(n * c.dim), part_acc(n * c.dim), y(c.dim - c.missing);
        // From the first key on, also those before the window: blocks in which a query sees nothing.
        for (int begin = 0; begin < c.context; begin += kSplit) {
            const int end = std::min(c.context, begin + kSplit);
            auto& state = begin ? part : total;
            auto& sums = begin ? part_acc : acc;
            kernels.attend_split(a, q.data(), position.data(), n, begin, end, state.data(), sums.data());
            for (int i = 0; i < n && begin; i++)
                kernels.attend_merge(c.dim, total[i], acc.data() + i * c.dim, part[i], part_acc.data() + i * c.dim);
        }
        for (int i = 0; i < n; i++) {
            out.floats(&total[i].m, 1);
            out.floats(total[i].l, 16);
            kernels.attend_finish(c.dim - c.missing, total[i], acc.data() + i * c.dim, y.data());
            out.floats(y.data(), y.size());
        }
    }
}

void attend(Checker& check, const Case& c) {
    Random random(300 + c.dim + c.context);
    const Cache cache(c.dim, c.int8, c.context, random);
    std::vector<uint16_t> q((size_t)c.queries * c.dim);
    for (uint16_t& x : q) x = bf16(random.real() * c.scale);
    const std::string name = "attend dim " + std::to_string(c.dim) + " less " + std::to_string(c.missing) +
                             " context " + std::to_string(c.context) +
                             " window " + std::to_string(c.window) + " queries " + std::to_string(c.queries) + " x " +
                             std::to_string(c.scale) + (c.ahead ? " ahead" : "") + (c.int8 ? " int8" : "") +
                             (c.leans ? " leaning" : "");
    check(name, [&](const Kernels& kernels, Output& out) { run(c, cache, q, kernels, out); });
}

}  // namespace

void attention(Checker& check) {
    for (int dim : {16, 32, 64, 80, 96, 128})
        for (int context : {1, 2, 15, 16, 17, 63, 64, 65, 100, 511, 513, 1030})
            for (int window : {0, 5, 40}) {
                if ((dim == 16 || dim == 96) && context > 100) continue;
                for (bool int8 : {false, true}) {
                    if (int8 && (dim == 32 || dim == 128)) continue;
                    const float scale = context % 2 ? 0.3f : 20.0f;
                    const int missing = dim == 32 ? 12 : dim == 96 ? 7 : 0;
                    attend(check, {dim, missing, context, window, 1, 0.3f, true, int8, false});
                    attend(check, {dim, missing, context, window, std::min(context, 13), scale, false, int8, false});
                    if (dim < 64 || window == 5) continue;
                    attend(check, {dim, missing, context, window, 1, 0.3f, true, int8, true});
                    attend(check, {dim, missing, context, window, std::min(context, 13), scale, false, int8, true});
                }
            }
}

}  // namespace check
