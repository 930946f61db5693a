// Small programs of two layers through Executable on pools of one to four threads: prompts, decodes, both together. One
// is a Llama; the other has what MPT has, both ways it knows positions at once.
// The records are those that backends/cpu/lower.py writes and Code checks.
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "executable.h"

namespace check {
using namespace roofline;
namespace {

constexpr int kWidth = 256, kHeads = 4, kKvHeads = 2, kDim = 64, kFfn = 512, kVocab = 300, kLayers = 2;
constexpr Ref kNone{-1, 0, 0, 0};
constexpr int64_t kLine = 64;  // bytes: of a cache line
constexpr int kQkv = (kHeads + 2 * kKvHeads) * kDim, kTokens = 64, kCachePages = 80, kTablePositions = 640;

class Model {
  public:
    explicit Model(bool mpt = false)
        : random_(500), mpt_(mpt) {
        const std::vector<float> table = random_.reals(kTablePositions * kDim, 0.7f);
        if (!mpt) table_ = place(table.data(), table.size() * 4);
        const float slopes[kHeads] = {0.7213475f, 0.36067376f, 0.18033688f, 0.09016844f};
        const int64_t of_heads = place(slopes, sizeof slopes);
        const Ref x = value(kWidth * 4), normed = value(kWidth * 4), quantised = value(kFfn * 4),
                  qkv = value(kQkv * 4), q = value(kHeads * kDim * 2), attended = value(kWidth * 4),
                  middle = value(2 * kFfn * 4), gated = value(kFfn * 4);
        const Ref taken = row_value(kWidth * 4), digits = row_value(kWidth * 4);
        logits_ = row_value(kVocab * 4);
        const int64_t head = matrix(Format::Q8_0, kVocab, kWidth);
        record("embed", kNone, x, kWidth, kWidth, {{Format::Q8_0, head, kVocab, kWidth, 0}});
        if (mpt) {
            record("embed_positions", kNone, normed, kWidth, kWidth,
                   {{Format::F16, matrix(Format::F16, kTablePositions, kWidth), kTablePositions, kWidth, 0}});
            residual_ = normed;
            record("add", x, x, kWidth, kWidth, {});
        }
        for (int layer = 0; layer < kLayers; layer++) {
            const bool first = layer == 0;
            norm(x, first ? quantised : normed, first);
            bias_ = vector(kQkv);
            const Format qk = first ? Format::Q4_K : Format::F16, v = first ? Format::Q6_K : Format::BF16;
            record("linear", first ? quantised : normed, qkv, kWidth, kQkv,
                   {{qk, matrix(qk, kHeads * kDim, kWidth), kHeads * kDim, kWidth, 0},
                    {qk, matrix(qk, kKvHeads * kDim, kWidth), kKvHeads * kDim, kWidth, kHeads * kDim},
                    {v, matrix(v, kKvHeads * kDim, kWidth), kKvHeads * kDim, kWidth, (kHeads + kKvHeads) * kDim}});
            layer_ = layer;
            q_norm_ = first ? -1 : vector(kDim);
            record("rope_write", qkv, q, mpt ? -1 : 0, kQkv, {});  // its width is the number of the rope table
            if (mpt) norm_weight_ = of_heads;
            eps_ = 0.0;  // attention has no cap
            windows_.push_back(code_.size() + offsetof(Record, width) / 8);
            record("attend", q, attended, 0, kWidth, {});
            eps_ = 1e-5;
            record("quantise", attended, quantised, kWidth, kWidth, {});
            residual_ = x;
            record("linear", quantised, x, kWidth, kWidth,
                   {{Format::Q4_1, matrix(Format::Q4_1, kWidth, kWidth), kWidth, kWidth, 0}});
            norm(x, quantised, true);
            if (mpt) mlp(first, quantised, middle, gated);
            else gated_mlp(first, quantised, middle, gated);
            bias_ = mpt ? vector(kWidth) : -1;
            residual_ = x;
            record("linear", quantised, x, kFfn, kWidth,
                   {{Format::Q5_K, matrix(Format::Q5_K, kWidth, kFfn), kWidth, kFfn, 0}});
        }
        record("take_rows", x, taken, kWidth, kWidth, {}, true);
        norm_weight_ = vector(kWidth);
        record("norm_quantise", taken, digits, kWidth, kWidth, {}, true, 2);
        record("linear", digits, logits_, kWidth, kVocab, {{Format::Q8_0, head, kVocab, kWidth, 0}}, true, 2);
        image_.resize(bytes_.size() + kLine);
        std::memcpy(aligned(image_), bytes_.data(), bytes_.size());
    }

    // Logits of every step, from a cache whose pages hold a prefix of sequence 2 and otherwise NaN.
    void run(const Kernels& kernels, int threads, int window, bool interleaved, bool int8, Output& out) {
        const int64_t head_bytes = page_head_bytes(kDim, int8), page_bytes = 2 * kKvHeads * head_bytes;
        std::vector<uint8_t> cache(kCachePages * kLayers * page_bytes, 0xff);
        Random random(600);
        // 530 keys are there before its first step, and a few that are not read.
        for (int page = 40; page < 40 + 34; page++)
            for (int64_t i = 0; i < kLayers * 2 * kKvHeads; i++) {
                const int64_t layer = i / (2 * kKvHeads), at = layer * kCachePages + page;
                uint8_t* head = cache.data() + at * page_bytes + i % (2 * kKvHeads) * head_bytes;
                for (int64_t j = 0; j < kDim * 16; j++) {
                    const uint16_t half = (uint16_t)(bits_of(random.real()) >> 16);
                    if (int8)
                        head[j] = (uint8_t)half;
                    else
                        std::memcpy(head + 2 * j, &half, 2);
                }
                for (int slot = 0; slot < 16 && int8; slot++) {
                    const float scale = (random.real() + 2.0f) / 127.0f;
                    std::memcpy(head + kDim * 16 + slot * 4, &scale, 4);
                }
            }
        ModelShape shape;
        shape.image_bytes = (int64_t)bytes_.size(), shape.table = table_, shape.positions = kTablePositions;
        shape.vocab = kVocab, shape.logits = logits_, shape.arena[1] = token_bytes_, shape.arena[2] = row_bytes_;
        shape.attentions = {{0, kLayers, kHeads, kKvHeads, kDim, 0, 0.18033688, 1e-6}};
        if (!mpt_) shape.tables = {{kDim, interleaved}};
        for (const size_t at : windows_) code_[at] = window;
        const Code code(code_, shape, false);
        std::vector<int32_t> batch(kFieldCount * 128);
        std::vector<uint8_t> arena(code.arena_bytes(kTokens, kTokens) + kLine);
        Places places{aligned(image_), nullptr, kTablePositions, nullptr, aligned(arena), cache.data(), nullptr, int8, batch.data(), {}};
        if (!mpt_) places.table = (const float*)(places.image + table_);
        for (int f = 0; f < kFieldCount; f++) places.fields.push_back(f * 128);
        Executable executable(&kernels, threads, code, places,
                              {kTokens, 127, kTokens, 128, kCachePages, kTablePositions});
        struct Part {
            int sequence, first, count;
        };
        const std::vector<std::vector<Part>> script = {{{0, 0, 37}, {1, 0, 5}},
                                                       {{0, 37, 1}, {1, 5, 21}, {2, 530, 1}},
                                                       {{0, 38, 1}, {1, 26, 1}, {2, 531, 1}},
                                                       {{2, 532, 3}, {0, 39, 8}},
                                                       {{2, 535, 1}}};
        for (const auto& step : script) {
            int32_t *b = batch.data(), tokens = 0, pages = 0, rows = 0;
            b[kSegStart * 128] = b[kPageStart * 128] = 0;
            for (size_t s = 0; s < step.size(); s++) {
                const Part& p = step[s];
                for (int t = 0; t < p.count; t++, tokens++) {
                    b[kIds * 128 + tokens] = (p.sequence * 131 + (p.first + t) * 17) % kVocab;
                    b[kPositions * 128 + tokens] = p.first + t;
                    if (t % 4 == 0 || t + 1 == p.count) b[kLogitRows * 128 + rows++] = tokens;
                }
                const int count = (p.first + p.count + 15) / 16;
                for (int i = 0; i < count; i++)
                    b[kPages * 128 + pages++] = p.sequence == 2 ? 40 + i : p.sequence * 20 + 19 - i;
                b[kContextLen * 128 + s] = p.first + p.count;
                b[kSegStart * 128 + s + 1] = tokens;
                b[kPageStart * 128 + s + 1] = pages;
            }
            b[0] = tokens, b[1] = (int)step.size(), b[2] = rows, b[3] = pages;
            executable.forward();
            out.floats(executable.logits(), (size_t)rows * kVocab);
        }
    }

  private:
    struct Piece {
        Format format;
        int64_t weight;
        int64_t rows, k, column;
    };
    using Segments = std::vector<Piece>;

    void norm(Ref x, Ref y, bool quantise) {
        norm_weight_ = vector(kWidth);
        bias_ = mpt_ ? vector(kWidth) : -1;
        record(std::string(mpt_ ? "layer_norm" : "norm") + (quantise ? "_quantise" : ""), x, y, kWidth, kWidth, {});
    }
    void gated_mlp(bool first, Ref x, Ref middle, Ref gated) {
        const Segments up = {{Format::Q4_0, matrix(Format::Q4_0, kFfn, kWidth), kFfn, kWidth, 0},
                             {Format::Q4_0, matrix(Format::Q4_0, kFfn, kWidth), kFfn, kWidth, first ? 0 : kFfn}};
        record(first ? "linear_gated" : "linear", x, first ? gated : middle, kWidth, first ? kFfn : 2 * kFfn, up);
        record(first ? "quantise" : "gated_quantise", first ? gated : middle, x, kFfn, kFfn, {});
    }
    void mlp(bool first, Ref x, Ref middle, Ref gated) {
        bias_ = vector(kFfn);
        record("linear", x, middle, kWidth, kFfn,
               {{Format::Q4_0, matrix(Format::Q4_0, kFfn, kWidth), kFfn, kWidth, 0}});
        if (first) return record("gelu_quantise", middle, x, kFfn, kFfn, {});
        record("gelu_tanh", middle, gated, kFfn, kFfn, {});
        record("quantise", gated, x, kFfn, kFfn, {});
    }
    // Room for a row of each token, or of each logit row; digits and scales of a row fit into its floats.
    Ref value(int64_t bytes) {
        token_bytes_ += (bytes + kLine - 1) / kLine * kLine;
        return {next_id_++, 0, token_bytes_ - (bytes + kLine - 1) / kLine * kLine, 0};
    }
    // To be called after all calls of `value`: these lie behind the tokens' values.
    Ref row_value(int64_t bytes) {
        row_bytes_ += (bytes + kLine - 1) / kLine * kLine;
        return {next_id_++, 0, token_bytes_, row_bytes_ - (bytes + kLine - 1) / kLine * kLine};
    }
    int64_t matrix(Format f, int64_t rows, int64_t k) {
        const Matrix packed(f, rows, k, random_);
        return place(packed.tiles(), (rows + kTileRows - 1) / kTileRows * tile_bytes(f, k));
    }
    int64_t vector(int n) { return place(random_.reals(n).data(), n * sizeof(float)); }
    // Where a copy of the data lies in the image.
    int64_t place(const void* data, size_t count) {
        const size_t at = (bytes_.size() + kLine - 1) / kLine * kLine;
        bytes_.resize(at + count);
        std::memcpy(bytes_.data() + at, data, count);
        return (int64_t)at;
    }
    static uint8_t* aligned(std::vector<uint8_t>& memory) {
        return (uint8_t*)(((uintptr_t)memory.data() + kLine - 1) / kLine * kLine);
    }
    static int64_t number(const std::string& name) {
        int64_t n = 0;
        while (kOperations[n].name != name) n++;
        return n;
    }
    // Appends the record of an operation by its name in records.h. Takes the norm weight, bias, q and k norm and
    // residual that were set for it.
    void record(const std::string& name, const Ref& x, const Ref& y, int64_t width, int64_t stride, const Segments& pieces,
                bool over_rows = false, int digits = 1) {
        append(Record{number(name), over_rows, digits, x, y, residual_, width, stride, norm_weight_, bias_, eps_, layer_,
                      q_norm_, q_norm_, (int64_t)pieces.size()});
        for (const Piece& p : pieces)
            append(roofline::Piece{(int64_t)p.format, p.weight, p.rows, p.k, p.column});
        norm_weight_ = bias_ = -1;
        if (name != "rope_write") q_norm_ = -1;
        residual_ = kNone;
    }
    template <class T>
    void append(const T& part) {
        const size_t at = code_.size();
        code_.resize(at + sizeof(T) / 8);
        std::memcpy(code_.data() + at, &part, sizeof(T));
    }

    Random random_;
    const bool mpt_;
    int64_t next_id_ = 0, token_bytes_ = 0, row_bytes_ = 0;  // of the arena
    int64_t table_ = -1, norm_weight_ = -1, bias_ = -1, q_norm_ = -1;
    double eps_ = 1e-5;
    int layer_ = 0;
    std::vector<size_t> windows_;  // where the width of each attend, its window, stands in the code
    Ref residual_ = kNone, logits_ = kNone;
    std::vector<int64_t> code_;
    std::vector<uint8_t> bytes_, image_;  // the same, the second from a cache line on
};

}  // namespace

void steps(Checker& check, bool brief) {
    Model llama, mpt(true);
    for (Model* model : {&llama, &mpt})
        for (int window : {0, 40})
            for (int form = 0; form < 4; form++) {
                const bool interleaved = form & 1, int8 = form & 2;
                if (model == &mpt && interleaved) continue;  // nothing is rotated
                if (brief && !(window && int8 && (interleaved || model == &mpt))) continue;
                const std::string name = "steps" + std::string(model == &mpt ? " mpt" : "") + " window " +
                                         std::to_string(window) + (interleaved ? " interleaved" : "") +
                                         (int8 ? " int8" : "");
                const auto run = [&](const Kernels& kernels, int threads, Output& out) {
                    model->run(kernels, threads, window, interleaved, int8, out);
                };
                check(name, [&](const Kernels& kernels, Output& out) { run(kernels, 1, out); });
                Output alone;
                run(*check.tables()[0], 1, alone);
                check.require(name + ": every logit is finite", alone.finite_floats());
                for (int threads = 2; threads <= 4; threads++) {
                    Output together;
                    run(*check.tables().back(), threads, together);
                    check.compare(name + " on " + std::to_string(threads) + " threads", alone, together);
                }
            }
}

}  // namespace check
