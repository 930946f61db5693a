// The operations of the core and their records: the one place that says which number an operation has and how a record's
// fields lie. The core and libroofline read records by it, Python writes them by it (`_native.operations`,
// `_native.record_fields`). Bundles hold records: what is here already never changes, see docs/reference/bundle.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace roofline {

// Version of the operations' records and meaning, as bundles keep them: raise it when either changes
// (docs/reference/bundle.md). A new operation alone needs no new version: readers refuse
// operations that they do not know.
inline constexpr int kCodeVersion = 1;

// What an operation computes; its flags say in which form.
enum class Base {
    Embed, Norm, Quantise, Linear, RopeWrite, Attend, Gated, TakeRows, Add, LayerNorm, Gelu,
    Exchange,  // with other ranks: `forward` stops before it, and who calls it makes its result
};
enum Flags : unsigned {
    kPlain = 0,
    kQuantises = 1,    // the result are rows of integers
    kSiluMul = 2,      // of Linear: gate and up, two pieces, and the activation between them
    kTanh = 4,         // of Gelu
    kOfPositions = 8,  // of Embed: looks up positions instead of ids
};
struct Operation {
    const char* name;
    Base base;
    unsigned flags;
};
inline constexpr Operation kOperations[] = {  // by number
    {"embed", Base::Embed, kPlain},
    {"norm", Base::Norm, kPlain},
    {"norm_quantise", Base::Norm, kQuantises},
    {"quantise", Base::Quantise, kQuantises},
    {"linear", Base::Linear, kPlain},
    {"rope_write", Base::RopeWrite, kPlain},
    {"attend", Base::Attend, kPlain},
    {"gated", Base::Gated, kPlain},
    {"gated_quantise", Base::Gated, kQuantises},
    {"take_rows", Base::TakeRows, kPlain},
    {"linear_gated", Base::Linear, kSiluMul},
    {"embed_positions", Base::Embed, kOfPositions},
    {"add", Base::Add, kPlain},
    {"layer_norm", Base::LayerNorm, kPlain},
    {"layer_norm_quantise", Base::LayerNorm, kQuantises},
    {"gelu", Base::Gelu, kPlain},
    {"gelu_quantise", Base::Gelu, kQuantises},
    {"gelu_tanh", Base::Gelu, kTanh},
    {"gelu_tanh_quantise", Base::Gelu, kTanh | kQuantises},
    {"exchange", Base::Exchange, kPlain},
};
inline const Operation* operation(int64_t number) {  // nullptr: not known
    return number >= 0 && number < (int64_t)(sizeof(kOperations) / sizeof(Operation)) ? &kOperations[number] : nullptr;
}

// A value in the arena: byte offset = base + per_token * tokens + per_row * rows. `id` names the value; -1: none.
struct Ref {
    int64_t id, base, per_token, per_row;
};

// A record in the order of its numbers, 8 bytes each; places are bytes from the start of the image, -1: none.
#define ROOFLINE_RECORD(FIELD)                                                                                          \
    FIELD(int64_t, operation) /* index in kOperations */                                                                \
    FIELD(int64_t, over_rows) /* leading symbol: logit rows instead of tokens */                                        \
    FIELD(int64_t, digits)    /* bytes of an integer that the operation makes or reads */                               \
    FIELD(Ref, x)                                                                                                       \
    FIELD(Ref, y)                                                                                                       \
    FIELD(Ref, residual)     /* what a linear layer or Add adds */                                                      \
    FIELD(int64_t, width)    /* inputs of a row */                                                                      \
    FIELD(int64_t, stride)   /* columns of y, or of q|k|v */                                                            \
    FIELD(int64_t, weight)   /* place of a norm's weight, or of the slopes of attention's heads in units of log2 */     \
    FIELD(int64_t, bias)     /* place */                                                                                \
    FIELD(double, eps)                                                                                                  \
    FIELD(int64_t, layer)    /* of Embed the first id of its rows; others give zeros */                                 \
    FIELD(int64_t, q_norm)   /* place */                                                                                \
    FIELD(int64_t, k_norm)   /* place */                                                                                \
    FIELD(int64_t, pieces)   /* of a matrix: so many pieces follow */
#define ROOFLINE_PIECE(FIELD)                                                                                           \
    FIELD(int64_t, format)  /* number of a Format */                                                                    \
    FIELD(int64_t, address) /* place of its first tile */                                                               \
    FIELD(int64_t, rows)                                                                                                \
    FIELD(int64_t, columns) /* inputs */                                                                                \
    FIELD(int64_t, start)   /* first column of the result */

#define ROOFLINE_MEMBER(type, name) type name;
struct Record {
    ROOFLINE_RECORD(ROOFLINE_MEMBER)
};
struct Piece {
    ROOFLINE_PIECE(ROOFLINE_MEMBER)
};
#undef ROOFLINE_MEMBER

// Reads the record at code[at] and its pieces, and moves `at` behind them; false where the code ends before they do.
inline bool read_record(const std::vector<int64_t>& code, size_t& at, Record& record, std::vector<Piece>& pieces) {
    constexpr size_t kRecord = sizeof(Record) / 8, kPiece = sizeof(Piece) / 8;
    if (code.size() - at < kRecord) return false;
    std::memcpy(&record, code.data() + at, sizeof(Record));
    at += kRecord;
    if (record.pieces < 0 || (uint64_t)record.pieces > (code.size() - at) / kPiece) return false;
    pieces.resize((size_t)record.pieces);
    if (record.pieces > 0) std::memcpy(pieces.data(), code.data() + at, pieces.size() * sizeof(Piece));
    at += pieces.size() * kPiece;
    return true;
}

}  // namespace roofline
