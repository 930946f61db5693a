// The table of kernels that each instruction set fills, and the arguments they take. All kernels of one name are of one
// order: bit-equal across instruction sets, thread counts, row counts and tile choices.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "formats.h"

namespace roofline {

// Activations as integers by (token, group of 32). One digit is an 8-bit q; with two digits q = 128 * high + low has 15
// bits. Tokens lie in panels of up to kPanel, and inside a panel by group: a block of neighbouring tokens is then read
// through one pointer a plane, at constant distances.
struct Panel {
    int8_t* q;       // [groups][tokens][32]: q, or its high digit
    int8_t* low;     // the same, or null
    float* scale;    // [groups][tokens]
    float* sum;      // [groups][tokens]: scale * sum of the group's q, for minima
    int32_t* isum;   // [groups][tokens][2]: sums of q over half groups, for offsets (both digits)
    int64_t tokens;
};
struct Quantised {
    static constexpr int64_t kPanel = 160;  // such a panel of activations stays in the second-level cache
    uint8_t* base = nullptr;
    int64_t rows = 0, k = 0;
    int digits = 1;
    static int64_t row_bytes(int64_t k, int digits) { return digits * k + k / 32 * 16; }
    Panel panel(int64_t index) const {
        const int64_t first = index * kPanel, n = rows - first < kPanel ? rows - first : kPanel, groups = k / 32;
        Panel p;
        p.q = (int8_t*)base + first * row_bytes(k, digits);
        p.low = digits == 2 ? p.q + n * k : nullptr;
        p.scale = (float*)(p.q + digits * n * k);
        p.sum = p.scale + n * groups;
        p.isum = (int32_t*)(p.sum + n * groups);
        p.tokens = n;
        return p;
    }
};

// How a linear layer cuts its work; see variant.h. No choice here changes a bit.
struct Blocks {
    static constexpr int64_t kFetchNext = -1, kFetchByCount = -2;
    int tiles = 0, tokens = 0;      // most row tiles and tokens of a block; 0: the instruction set's own
    bool greedy = false;            // full blocks of tokens first, instead of even shares
    int64_t fetch = kFetchByCount;  // bytes ahead (0: none), the next block, or what suits the number of tokens
};

struct Linear {
    Format format;
    const uint8_t* weight;  // packed tiles
    const uint8_t* up;      // packed tiles of a second weight, or null: y = silu(weight x) * (up x)
    int64_t rows, k;        // outputs (unpadded) and inputs
    int64_t tokens;
    Quantised x;            // quantised formats
    const float* xf;        // float formats: [tokens][k]
    float* y;               // [tokens][ldy], already at this segment's first column
    int64_t ldy;
    const float* bias;      // [rows] or null
    const float* residual;  // [tokens][ldr] or null, already at the first column
    int64_t ldr;
    Blocks blocks;
};

struct Rope {              // what turns a row of q|k|v into a query and cache entries
    const float* table;    // [positions][2][rotated / 2]: cosines, then sines; null: nothing is rotated
    const float* q_norm;   // [head_dim] or null
    const float* k_norm;
    float eps;
    bool interleaved;
    int head_dim;
    int rotated;           // the first dimensions of a head, which are turned; the others pass through
    float q_scale;         // softmax scale * log2(e)
    float q_factor = 1;    // of a query's position: it is multiplied by this first
    bool norm_last = false;  // heads are normed behind their rotation, not before it
};

constexpr int kPageTokens = 16, kMostHeadDim = 512;
// Elements that a head takes where attention reads it: whole vectors, filled up with zeros.
constexpr int stored_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }
// Bytes of K (or V) of one kv head in a page: bf16, or one byte an element and then a float scale a token.
constexpr int64_t page_head_bytes(int head_dim, bool int8) {
    return (int64_t)kPageTokens * (int8 ? stored_dim(head_dim) + 4 : 2 * stored_dim(head_dim));
}

struct Attend {
    int head_dim;                 // as stored: a multiple of 16
    int64_t page_stride;          // bytes from a page to the next in this layer
    const uint8_t* cache;         // this layer's pages: K of all kv heads, then V of all kv heads
    int kv_heads, kv_head;
    const int32_t* pages;         // page table of the segment
    int32_t window;               // 0: none
    const int32_t* next_pages;    // what this thread will read after this: fetched while the last block is used
    int next_count, next_kv_head;
    uint16_t* wide = nullptr;     // [2][64 keys][head_dim]: where a block of an 8-bit cache is widened; null: bf16 cache
    float cap = 0;  // scores become cap * tanh(score / cap), in units of log2; 0: none. Not beside slopes
    const float* slopes = nullptr;  // [queries] ALiBi: score += slope * (key - position), in units of log2; null: none
};

struct alignas(64) AttendState {  // one query's running softmax; its lanes in one cache line
    float l[16];
    float m;
};

struct SampleRow {
    const float* logits;  // [vocab], read only
    float* scratch;       // [vocab]
    int32_t* order;       // [vocab] candidates
    int vocab;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int top_k;
    uint64_t seed;
    int32_t sample_index, position;
    const int32_t *hist_ids, *hist_counts;
    int hist;
    const int32_t* bias_ids;
    const float* bias_values;
    int biases;
    const uint32_t* mask;
    int logprobs;
    int32_t id;           // results
    float logprob;
    int32_t* top_ids;
    float* top_logprobs;
};

enum class Activation { Silu, Gelu, GeluTanh, Relu, ReluSquared };  // Gelu: exact

// A convolution over the last tokens of some channels. Rows of all of these are `stride` floats apart.
constexpr int kMostTaps = 16, kConvChannels = 128;
struct CausalConv {
    const float* x;       // [tokens]
    const float* weight;  // [taps], the oldest token's first
    const float* bias;    // or null
    const float* before;  // [taps - 1]: rows of x before the first, the oldest first; null: zeros
    float* y;             // [tokens], not x
    int64_t stride, tokens, channels;  // at most kConvChannels of these
    int taps;
    bool silu;
};

// The gated delta rule for some columns of one value head, over the tokens of one sequence.
constexpr int64_t kDeltaTokens = 128;  // whose keys are made ready at once
struct DeltaRule {
    const float *q, *k, *v;  // rows `ld` floats apart, as of all pointers here that of the first token
    int64_t ld;
    const float *a, *b;      // one number a token, `ldg` floats apart
    int64_t ldg;
    float a_log, dt_bias, eps, q_factor;  // q_factor: 1 / sqrt(key_dim)
    int64_t tokens, key_dim, columns;
    // State, a row of columns a key, `lds` floats apart. source: before the first token, null: zeros; target: gets it
    // behind the last, save: behind `save_after` tokens; null: nobody wants it. target may be source, save neither.
    const float* source;
    float *target, *save;
    int64_t save_after, lds;
    float* y;
    int64_t ldy;
    float* scratch;  // delta_scratch floats
};
constexpr int64_t delta_scratch(int64_t key_dim, int64_t columns) {
    const int64_t keys = (key_dim + 15) / 16 * 16, padded = (columns + 15) / 16 * 16;
    return (2 * kDeltaTokens + 1) * keys + 2 * kDeltaTokens + padded + padded * key_dim;
}

// The selective scan for the columns of one head, or for some where each column is a head, over the tokens of one sequence.
constexpr int64_t kMostStateVectors = 4;
struct SelectiveScan {
    const float *x, *b, *c;  // rows `ld` floats apart, as of all pointers here that of the first token
    int64_t ld;
    const float* dt;         // of the head, or of each column; rows `ldt` floats apart
    int64_t ldt;
    const float *a_log, *dt_bias, *d;  // of the head; or of each column, a_log a row of them a state, `lda` floats apart
    int64_t lda;
    bool rates;              // each column is a head
    float least, most;       // bounds of a step
    int64_t tokens, states, columns;
    // State, a row of columns a state, `lds` floats apart; otherwise as of DeltaRule.
    const float* source;
    float *target, *save;
    int64_t save_after, lds;
    float* y;
    int64_t ldy;
    float* scratch;  // scan_scratch floats
};
constexpr int64_t scan_scratch(int64_t states) { return 2 * 16 * kMostStateVectors * states; }

constexpr int kMostExperts = 4096, kMostRanks = 256;  // of a router; that a row goes to

struct Routing {  // groups: equal parts of the experts, of which the best `kept` count; bias: may be null
    int64_t experts, groups, kept;
    int top;
    bool sigmoid, over_all, by_best;  // weights are not divided by their sum; a group is scored by its best one
    const float* bias;
    float scale;
};

struct Kernels {
    const char* isa;
    void (*linear)(const Linear&, int64_t tile_begin, int64_t tile_end);
    void (*embed)(Format, const uint8_t* weight, int64_t k, int64_t row, float* out);
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);  // weight: may be null
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out);  // bias: may be null
    void (*quantise)(const float* x, const Quantised& out, int64_t row);
    void (*activate)(Activation, const float* x, const float* up, int64_t n, float* out);  // of x, times up unless that is null; out may be x
    void (*add)(const float* x, const float* y, int64_t n, float* out);                    // out may be x or y
    void (*scale)(const float* x, float factor, int64_t n, float* out);                    // out may be x, as of the next
    void (*soft_cap)(const float* x, float cap, int64_t n, float* out);                    // cap * tanh(x / cap)
    // A head, read as it is, to stored_dim of it: zeros stand behind its end.
    void (*rope_query)(const Rope&, const float* head, int32_t position, uint16_t* out);
    void (*rope_key)(const Rope&, const float* head, int32_t position, uint16_t* out);
    void (*to_bf16)(const float* x, int64_t n, uint16_t* out);
    // The same for an 8-bit cache; each returns the scale of its integers, NaN where the head holds NaN or infinity.
    float (*rope_key_int8)(const Rope&, const float* head, int32_t position, int8_t* out);
    float (*to_int8)(const float* x, int64_t n, int8_t* out);
    // Any number of queries of one kv head over keys [begin, end) inside one split; position[queries] ascends and reaches
    // end - 1. Keys after a query's position, and those its window has left, are not seen.
    // q: [queries][stored_dim] bf16; acc: [queries][stored_dim].
    void (*attend_split)(const Attend&, const uint16_t* q, const int32_t* position, int queries, int32_t begin, int32_t end,
                         AttendState* state, float* acc);
    void (*attend_merge)(int stored_dim, AttendState& into, float* acc, const AttendState& part, const float* part_acc);
    void (*attend_finish)(int head_dim, const AttendState& state, const float* acc, float* out);  // out: as the head is
    // LoRA for `rows` rows of one adapter: out [rows][ldo] = x [rows][ldx] times A [ranks][k]; y [rows][ldy], n columns of it,
    // += scale * t [rows][ldt] times B [ranks][ldb].
    void (*adapter_down)(const float* x, int64_t ldx, int64_t rows, const float* a, int64_t k, int64_t ranks,
                         float* out, int64_t ldo);
    void (*adapter_up)(const float* t, int64_t ldt, int64_t rows, const float* b, int64_t ldb, int64_t ranks,
                       float scale, float* y, int64_t ldy, int64_t n);
    // Of a row's router logits x [experts] the `top` largest, equal ones by number, and their softmax: over these, or
    // over all. Ids are distinct and within the experts whatever x holds.
    void (*route)(const float* x, int64_t experts, int top, bool over_all, float* weights, int32_t* ids);
    // The same of scores, the softmax over all or the sigmoid of each, that are chosen by themselves and a bias.
    void (*route_scores)(const float* x, const Routing& how, float* weights, int32_t* ids);
    // out [n] = the sum over ranks of weight * row, in their order; x [top][n].
    void (*combine)(const float* x, const float* weights, int top, int64_t n, float* out);
    void (*sigmoid_scale)(const float* x, float gate, int64_t n, float* out);  // x times the sigmoid of `gate`; out may be x
    // out = g * sigmoid(1.702 g) * (u + 1), g = gate up to `limit`, u = up within +-limit; out may be gate or up.
    void (*clamped_swiglu)(const float* gate, const float* up, float limit, int64_t n, float* out);
    void (*mul)(const float* x, const float* y, int64_t n, float* out);             // out may be x or y, as of the next
    void (*sigmoid_mul)(const float* gate, const float* up, int64_t n, float* out);
    void (*above_spread)(const float* x, float z, int64_t n, float* out);  // max(0, x - mean - z * standard deviation); out may be x
    void (*like_norm)(const float* x, const float* y, int64_t n, float* out);  // x at the length of y; out may be x or y
    void (*causal_conv)(const CausalConv&);
    void (*delta_rule)(const DeltaRule&);
    void (*selective_scan)(const SelectiveScan&);
    void (*sample)(SampleRow&);
    void (*exp2_many)(const float* x, int64_t n, float* out);  // tests
    int max_queries;
    int block_tokens[2][2];  // [digits - 1][tiles - 1]: most tokens of a block of linear layers
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();  // on x86-64 only, as the next
const Kernels* avx512_kernels();
const Kernels* neon_kernels();  // on aarch64 only

// Instruction sets that this chip and this build have, best first; "portable" is always there.
std::vector<std::string> isas();
// The kernels of one of them; throws std::invalid_argument on any other.
const Kernels* kernels_named(const std::string& isa);

}  // namespace roofline
