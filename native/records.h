// The operations of the core and their records: the one place that says which number an operation has and how a record's
// fields lie. The core and libroofline read records by it, Python writes them by it (`_native.operations`,
// `_native.record_fields`). Bundles hold records: what is here already never changes, see docs/reference/bundle.md.
#pragma once
#include <cstdint>
#include <cstring>

namespace roofline {

// Version of the operations' records and meaning, as bundles keep them: raise it when either changes
// (docs/reference/bundle.md). A new operation alone needs no new version: readers refuse
// operations that they do not know.
inline constexpr int kCodeVersion = 2;

// What an operation computes; its flags say in which form.
enum class Base {
    Embed, Norm, Quantise, Linear, RopeWrite, Attend, Activate, TakeRows, Add, LayerNorm, Scale, SoftCap,
    QkNorm,  // of q and of k, which lie side by side with v, each over all its heads
    Exchange,  // with other ranks: `forward` stops before it, and who calls it makes its result
    AdapterDown,
    AdapterUp,  // the two products of LoRA, of each row's own adapter, which is given when it is loaded
    Route,      // which experts a row goes to, and their weights
    Experts,    // products with the matrices of these experts
    Combine,    // the sum over a row's experts
    SigmoidScale,
    ExpertBias,     // of each of a row's experts, added to its part of the row
    ClampedSwiglu,
    CutHeads,   // some columns of each head of a row, zeros behind its end
    JoinHeads,  // each head of one value, and the same head of another behind it
    ScaleByPosition,  // a factor for each position, by which the row of a token there is multiplied
    Mul,
    SigmoidMul,
    CausalConv,  // over the last tokens of each channel, whose inputs are recurrent state
    DeltaRule,   // the gated delta rule, whose matrices are recurrent state
    SelectiveScan,  // of Mamba and Mamba-2, whose states are recurrent state
    AboveSpread,  // what of each element lies above the row's mean and some of its standard deviations, else 0
    LikeNorm,     // a row made as long as another one
};
enum Flags : unsigned {
    kPlain = 0,
    kQuantises = 1,    // the result are rows of integers
    kSiluMul = 2,      // of Linear: gate and up, two pieces, and the activation between them
    kTanh = 4,         // of Activate: gelu's tanh form
    kOfPositions = 8,  // of Embed: looks up positions instead of ids
    kGelu = 16,        // of Activate: gelu instead of silu
    kGated = 32,       // of Activate: of the gate, and times up, which lie side by side
    kOfAll = 64,       // of Route: weights are the softmax over all experts instead of the chosen ones
    kOfRanks = 128,    // of Experts: another input for each of a row's experts, side by side
    kSinks = 256,      // of Attend: each head has a score beside those of the keys, which no value belongs to
    kRelu = 512,       // of Activate: relu instead of silu
    kOneHead = 1024,   // of JoinHeads: the first value has one head, which stands before each of the other's
    kBothWays = 2048,  // of Attend: a token sees all of its sequence, not only what precedes it
    kOneRow = 4096,    // of Embed: every token has the table's first row
    kByScores = 8192,  // of Route: experts are chosen by scores and a bias, within groups
    kSigmoid = 16384,  // of Route: scores are sigmoids instead of the softmax over all
    kByBest = 32768,   // of Route: a group's score is its best one instead of the sum of its best two
    kByPosition = 65536,  // of RopeWrite: queries are then multiplied by the factor of their position
    kSquared = 131072,  // of Activate: relu's square
    kSilu = 262144,      // of CausalConv: silu of the result
    kTiled = 524288,    // of DeltaRule: value heads go round the key heads, instead of neighbours sharing one
    kByHead = 1048576,   // of Norm: each head by itself
    kApart = 2097152,    // of Activate: of the gate, and times up, which is another value
    kNormLast = 4194304,  // of RopeWrite: heads are normed behind their rotation, not before it
    kOfRow = 67108864,    // of Norm by head: each has weights of its own
    kRates = 134217728,   // of SelectiveScan: each channel has a rate for each of its states
    kWeight = 8388608,    // of Mul: by a weight, one number for each column; of Scale: by a weight of one number
    kBare = 33554432,     // of Norm: there is no weight
    kScales = 16777216,   // of ExpertBias: numbers of experts multiply what they belong to, instead of being added
};

// What an operation does with each field of its record. `Code` (code.h) checks a record by these before it may run, so
// they must say all that the operation reads and writes. 0 means that nothing was said, which does not compile.
namespace uses {
enum Number {  // of a plain number
    number = 1,
    unread,
    tokens,         // the operation is over the step's tokens
    rows,           // over its logit rows
    tokens_or_rows,
    digits,
    count,
    qkv_columns,    // at least those of q, k and v
    head_columns,   // at least those of all heads of q
    layer,          // of the cache
    window,         // keys that a token sees, 0: all
    rope_table,     // one of the model's, -1: nothing is rotated
    not_negative,   // a real number of at least 0
    first_id,
    group,  // of an adapter: its matrices that read one value
    heads_cut,      // heads of x, which has `stride` columns, and of y
    heads_joined,   // the same, where a part of each head of y comes from elsewhere
    heads_sharing,  // the same, where x has one head for all of them
    first_column,   // of a head of x
    router_columns,  // one for each expert
    ranks,           // experts of a row
    ranks_of_router,  // the same, no more than there are
    router_groups,    // equal parts of a router's columns
    kept_groups,      // how many of them may be chosen from
    ranks_of_groups,  // experts of a row, no more than the kept groups have
    real,
    no_matrix,
    table,          // one piece, whose rows are looked up
    matrix,         // pieces beside each other
    gate_and_up,    // two pieces of one shape and format
    expert_matrices,          // a piece for each expert, all of one shape and format
    expert_gates_and_ups,     // two for each, its gate and its up
    heads_of_row,     // that divide `width`
    taps,             // tokens that a convolution reads
    state_heads,      // key heads * 2^16 + value heads
    state_columns,    // of q, k and v of these heads, where v has `width`
    scan_heads,       // heads * 2^16 + groups
    scan_rate_heads,  // the same, where each column is a head and all are one group
    scan_columns,     // those of x, which has `width`, and of B and C of these groups
    state_place,      // floats from the begin of a slot of recurrent state
};
enum Value {  // of a reference to a value in the arena: the bytes of one of its rows, and which rows it has
    no_value = 1,
    row,            // `width` floats
    row_of_tokens,  // the same, a row for each token whatever the operation is over
    two_rows,       // gate and up side by side
    integers,       // `width` of them, quantised
    operand,        // floats or integers, as the matrix takes them
    columns,        // `stride` floats
    maybe_columns,  // the same, or no value
    other_heads,    // the floats of y that are not those of x
    heads_of_their_own,  // the same, where those of x are repeated before each head
    queries,        // bf16, of all heads
    of_ranks,       // a number of 4 bytes for each expert of the row
    ranked_rows,    // a row for each of them, side by side
    ranked_operand,  // the same, as the matrices take them
    one_number,     // a float
    of_value_heads,  // a float for each
    of_scan_heads,   // a float for each
};
enum Vector {  // of a place of floats in the image
    no_place = 1,
    of_width,
    maybe_of_width,
    maybe_of_stride,
    maybe_of_head,   // head_dim of them
    maybe_of_heads,  // one a head
    of_heads,        // the same, which must be there
    of_experts,      // `width` for each of `stride` experts
    of_queries,      // one for each column of q
    of_keys,         // one for each column of k
    of_positions,    // one for each position that can be served
    of_one_head,     // one for each column of a head of the row
    of_taps,         // `width` for each of `stride` taps
    of_state_heads,  // one for each value head
    of_steps,        // one for each head of a scan
    of_rates,        // a row of these for each state
    step_limits,     // no place in the image: the bits of two floats, of which the upper is not more than the lower
    of_one,          // one number
    of_stride,       // `stride` floats
    second_base,     // no place in the image: bytes of the arena before a second value, a float for each value head
    second_step,     // and more of them for each token
};
}  // namespace uses

// A value in the arena: byte offset = base + per_token * tokens + per_row * rows. `id` names the value; -1: none.
struct Ref {
    int64_t id, base, per_token, per_row;
};

// A record in the order of its numbers, 8 bytes each, with the kind of use that operations have for a field; places are
// bytes from the start of the image, -1: none.
#define ROOFLINE_RECORD(FIELD)                                                                                          \
    FIELD(int64_t, operation, Number) /* index in kOperations */                                                        \
    FIELD(int64_t, over_rows, Number) /* leading symbol: logit rows instead of tokens */                                \
    FIELD(int64_t, digits, Number)    /* bytes of an integer that the operation makes or reads; of CutHeads the first column; of Route the kept groups; of DeltaRule and SelectiveScan its heads */ \
    FIELD(Ref, x, Value)                                                                                                \
    FIELD(Ref, y, Value)                                                                                                \
    FIELD(Ref, residual, Value)      /* what a linear layer or Add adds; ids or weights of experts; the sigmoid's operand; ClampedSwiglu's up; JoinHeads' and SigmoidMul's second value, Activate's up; DeltaRule's a, SelectiveScan's dt */ \
    FIELD(int64_t, width, Number)    /* inputs of a row; of Attend its window, of RopeWrite its rope table */           \
    FIELD(int64_t, stride, Number)   /* columns of y, or of q|k|v; of ExpertBias how many experts there are; of Route how many groups; of CutHeads and JoinHeads columns of x; of CausalConv its taps */ \
    FIELD(int64_t, weight, Vector)   /* of a norm, of experts; Route's bias; the slopes of attention's heads in units of log2; factors by position */ \
    FIELD(int64_t, bias, Vector)     /* or the sinks of attention's heads */                                             \
    FIELD(double, eps, Number)       /* of a norm; what Scale and Route multiply by; the cap of SoftCap and, 0: none, Attend; ClampedSwiglu's limit */ \
    FIELD(int64_t, layer, Number)    /* of Embed the first id of its rows, others give zeros; of adapters the group; of experts how many a row goes to; of CutHeads and JoinHeads how many heads; of Norm how many that are normed by themselves; of operations with state where their part of a slot begins, in floats */  \
    FIELD(int64_t, q_norm, Vector)   /* of DeltaRule no place: b lies so many bytes behind the arena's begin; of SelectiveScan d */ \
    FIELD(int64_t, k_norm, Vector)   /* of DeltaRule no place: and so many more a token; of SelectiveScan none: bounds of a step */ \
    FIELD(int64_t, pieces, Number)   /* of a matrix: so many pieces follow */
#define ROOFLINE_PIECE(FIELD)                                                                                           \
    FIELD(int64_t, format, Number)  /* number of a Format */                                                            \
    FIELD(int64_t, address, Number) /* place of its first tile */                                                       \
    FIELD(int64_t, rows, Number)                                                                                        \
    FIELD(int64_t, columns, Number) /* inputs */                                                                        \
    FIELD(int64_t, start, Number)   /* first column of the result */

#define ROOFLINE_MEMBER(type, name, kind) type name;
struct Record {
    ROOFLINE_RECORD(ROOFLINE_MEMBER)
};
struct Piece {
    ROOFLINE_PIECE(ROOFLINE_MEMBER)
};
#undef ROOFLINE_MEMBER
// What the record of a SelectiveScan says in other words: states of a channel, and the bounds of a step.
constexpr int64_t scan_states(const Record& r) { return (r.stride - r.width) / 2 / (r.digits & 0xffff); }
struct ScanLimits {
    float least, most;
};
inline ScanLimits scan_limits(int64_t bits) {
    const uint32_t halves[2] = {(uint32_t)(bits >> 32), (uint32_t)bits};
    ScanLimits limits;
    std::memcpy(&limits, halves, sizeof(limits));
    return limits;
}
#define ROOFLINE_USE(type, name, kind) uses::kind name;
struct Uses {
    ROOFLINE_RECORD(ROOFLINE_USE)
};
#undef ROOFLINE_USE

struct Operation {
    const char* name;
    Base base;
    unsigned flags;
    Uses uses;
};

namespace uses {
// clang-format off
//                             operation over_rows   digits   x              y         residual       width   stride        weight          bias             eps     layer     q_norm         k_norm         pieces
inline constexpr Uses kLookUp{  number, tokens,         unread, no_value,      row,      no_value,      count,  unread,       no_place,       no_place,        unread, first_id, no_place,      no_place,      table};
inline constexpr Uses kNorm{    number, tokens_or_rows, unread, row,           row,      no_value,      count,  unread,       of_width,       no_place,        real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kBare{    number, tokens_or_rows, unread, row,           row,      no_value,      count,  unread,       no_place,       no_place,        real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kNormQ{   number, tokens_or_rows, digits, row,           integers, no_value,      count,  unread,       of_width,       no_place,        real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kBareQ{   number, tokens_or_rows, digits, row,           integers, no_value,      count,  unread,       no_place,       no_place,        real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kNormHeads{number, tokens_or_rows, unread, row,          row,      no_value,      count,  unread,       of_one_head,    no_place,        real,   heads_of_row, no_place,  no_place,      no_matrix};
inline constexpr Uses kBareHeads{number, tokens_or_rows, unread, row,          row,      no_value,      count,  unread,       no_place,       no_place,        real,   heads_of_row, no_place,  no_place,      no_matrix};
inline constexpr Uses kNormHeadsQ{number, tokens_or_rows, digits, row,         integers, no_value,      count,  unread,       of_one_head,    no_place,        real,   heads_of_row, no_place,  no_place,      no_matrix};
inline constexpr Uses kBareHeadsQ{number, tokens_or_rows, digits, row,         integers, no_value,      count,  unread,       no_place,       no_place,        real,   heads_of_row, no_place,  no_place,      no_matrix};
inline constexpr Uses kShifted{ number, tokens_or_rows, unread, row,           row,      no_value,      count,  unread,       of_width,       maybe_of_width,  real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kShiftedQ{number, tokens_or_rows, digits, row,           integers, no_value,      count,  unread,       of_width,       maybe_of_width,  real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kPlainRow{number, tokens_or_rows, unread, row,           row,      no_value,      count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kRowQ{    number, tokens_or_rows, digits, row,           integers, no_value,      count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kQkNorm{  number, tokens,         unread, row,           row,      no_value,      qkv_columns, unread,  of_queries,     of_keys,         real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kTimes{   number, tokens_or_rows, unread, row,           row,      no_value,      count,  unread,       no_place,       no_place,        real,   unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kTimesRow{ number, tokens_or_rows, unread, row,          row,      no_value,      count,  unread,       of_width,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kTimesOne{ number, tokens_or_rows, unread, row,          row,      no_value,      count,  unread,       of_one,         no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kGated{   number, tokens_or_rows, unread, two_rows,      row,      no_value,      count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kGatedQ{  number, tokens_or_rows, digits, two_rows,      integers, no_value,      count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kSum{     number, tokens_or_rows, unread, row,           row,      row,           count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kTaken{   number, rows,           unread, row_of_tokens, row,      no_value,      count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kProduct{ number, tokens_or_rows, digits, operand,       columns,  maybe_columns, count,  count,        no_place,       maybe_of_stride, unread, unread,   no_place,      no_place,      matrix};
inline constexpr Uses kProducts{number, tokens_or_rows, digits, operand,       columns,  maybe_columns, count,  count,        no_place,       maybe_of_stride, unread, unread,   no_place,      no_place,      gate_and_up};
inline constexpr Uses kWrite{   number, tokens,         unread, columns,       queries,  no_value,      rope_table, qkv_columns, no_place,    no_place,        unread, layer,    maybe_of_head, maybe_of_head, no_matrix};
inline constexpr Uses kWriteScaled{number, tokens,      unread, columns,       queries,  no_value,      rope_table, qkv_columns, of_positions, no_place,       unread, layer,    maybe_of_head, maybe_of_head, no_matrix};
inline constexpr Uses kFactors{ number, tokens,         unread, row,           row,      no_value,      count,  unread,       of_positions,   no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kAttend{  number, tokens,         unread, queries,       columns,  no_value,      window, head_columns, maybe_of_heads, no_place,        not_negative, layer,    no_place,      no_place,      no_matrix};
inline constexpr Uses kAttendBothWays{number, tokens,   unread, queries,       columns,  no_value,      unread, head_columns, no_place,     no_place,        not_negative, layer,    no_place,      no_place,      no_matrix};
inline constexpr Uses kAttendSinks{number, tokens,      unread, queries,       columns,  no_value,      window, head_columns, maybe_of_heads, of_heads,        not_negative, layer,    no_place,      no_place,      no_matrix};
inline constexpr Uses kDown{    number, tokens_or_rows, unread, row,           columns,  no_value,      count,  count,        no_place,       no_place,        unread, group,    no_place,      no_place,      no_matrix};
inline constexpr Uses kUp{      number, tokens_or_rows, unread, row,           columns,  columns,       count,  count,        no_place,       no_place,        unread, group,    no_place,      no_place,      no_matrix};
inline constexpr Uses kRoute{   number, tokens_or_rows, unread, row,           of_ranks, of_ranks,      router_columns, unread, no_place,    no_place,        unread, ranks_of_router, no_place, no_place,   no_matrix};
inline constexpr Uses kExperts{ number, tokens_or_rows, digits, operand,       columns,  of_ranks,      count,  count,        no_place,       no_place,        unread, ranks,    no_place,      no_place,      expert_matrices};
inline constexpr Uses kRanked{  number, tokens_or_rows, digits, ranked_operand, columns, of_ranks,      count,  count,        no_place,       no_place,        unread, ranks,    no_place,      no_place,      expert_matrices};
inline constexpr Uses kExpertsGated{number, tokens_or_rows, digits, operand,   columns,  of_ranks,      count,  count,        no_place,       no_place,        unread, ranks,    no_place,      no_place,      expert_gates_and_ups};
inline constexpr Uses kCombine{ number, tokens_or_rows, unread, ranked_rows,   row,      of_ranks,      count,  unread,       no_place,       no_place,        unread, ranks,    no_place,      no_place,      no_matrix};
inline constexpr Uses kSigmoid{ number, tokens_or_rows, unread, row,           row,      one_number,    count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kScored{  number, tokens_or_rows, kept_groups, row,      of_ranks, of_ranks,      router_columns, router_groups, maybe_of_width, no_place, real,  ranks_of_groups, no_place, no_place,   no_matrix};
inline constexpr Uses kExpertBias{number, tokens_or_rows, unread, ranked_rows, ranked_rows, of_ranks,   count,  router_columns, of_experts,   no_place,        unread, ranks,    no_place,      no_place,      no_matrix};
inline constexpr Uses kExpertScale{number, tokens_or_rows, unread, of_ranks,   of_ranks, of_ranks,      unread, router_columns, of_stride,    no_place,        unread, ranks,    no_place,      no_place,      no_matrix};
inline constexpr Uses kClamped{ number, tokens_or_rows, unread, row,           row,      row,           count,  unread,       no_place,       no_place,        not_negative, unread, no_place,    no_place,      no_matrix};
inline constexpr Uses kCutHeads{number, tokens_or_rows, first_column, columns, row,      no_value,      count,  count,        no_place,       no_place,        unread, heads_cut, no_place,     no_place,      no_matrix};
inline constexpr Uses kJoinHeads{number, tokens_or_rows, unread, columns,      row,      other_heads,   count,  count,        no_place,       no_place,        unread, heads_joined, no_place,  no_place,      no_matrix};
inline constexpr Uses kShareHead{number, tokens_or_rows, unread, columns,      row,      heads_of_their_own, count, count,    no_place,       no_place,        unread, heads_sharing, no_place, no_place,      no_matrix};
inline constexpr Uses kSumQ{    number, tokens_or_rows, digits, row,           integers, row,           count,  unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
inline constexpr Uses kConv{    number, tokens,         unread, row,           row,      no_value,      count,  taps,         of_taps,        maybe_of_width,  unread, state_place, no_place,   no_place,      no_matrix};
inline constexpr Uses kDelta{   number, tokens,         state_heads, columns,  row,      of_value_heads, count, state_columns, of_state_heads, of_state_heads, not_negative, state_place, second_base, second_step, no_matrix};
inline constexpr Uses kScan{    number, tokens,         scan_heads, columns,   row,      of_scan_heads, count,  scan_columns, of_steps,      of_steps,        unread, state_place, of_steps,    step_limits,   no_matrix};
inline constexpr Uses kScanRates{number, tokens,        scan_rate_heads, columns, row,   of_scan_heads, count,  scan_columns, of_rates,      of_steps,        unread, state_place, of_steps,    step_limits,   no_matrix};
inline constexpr Uses kNormParts{number, tokens_or_rows, unread, row,          row,      no_value,      count,  unread,       of_width,       no_place,        real,   heads_of_row, no_place,  no_place,      no_matrix};
inline constexpr Uses kNormPartsQ{number, tokens_or_rows, digits, row,         integers, no_value,      count,  unread,       of_width,       no_place,        real,   heads_of_row, no_place,  no_place,      no_matrix};
inline constexpr Uses kOutside{ number, unread,         unread, no_value,      no_value, no_value,      unread, unread,       no_place,       no_place,        unread, unread,   no_place,      no_place,      no_matrix};
// clang-format on
}  // namespace uses

inline constexpr Operation kOperations[] = {  // by number
    {"embed", Base::Embed, kPlain, uses::kLookUp},
    {"norm", Base::Norm, kPlain, uses::kNorm},
    {"norm_quantise", Base::Norm, kQuantises, uses::kNormQ},
    {"quantise", Base::Quantise, kQuantises, uses::kRowQ},
    {"linear", Base::Linear, kPlain, uses::kProduct},
    {"rope_write", Base::RopeWrite, kPlain, uses::kWrite},
    {"attend", Base::Attend, kPlain, uses::kAttend},
    {"gated", Base::Activate, kGated, uses::kGated},
    {"gated_quantise", Base::Activate, kGated | kQuantises, uses::kGatedQ},
    {"take_rows", Base::TakeRows, kPlain, uses::kTaken},
    {"linear_gated", Base::Linear, kSiluMul, uses::kProducts},
    {"embed_positions", Base::Embed, kOfPositions, uses::kLookUp},
    {"add", Base::Add, kPlain, uses::kSum},
    {"layer_norm", Base::LayerNorm, kPlain, uses::kShifted},
    {"layer_norm_quantise", Base::LayerNorm, kQuantises, uses::kShiftedQ},
    {"gelu", Base::Activate, kGelu, uses::kPlainRow},
    {"gelu_quantise", Base::Activate, kGelu | kQuantises, uses::kRowQ},
    {"gelu_tanh", Base::Activate, kGelu | kTanh, uses::kPlainRow},
    {"gelu_tanh_quantise", Base::Activate, kGelu | kTanh | kQuantises, uses::kRowQ},
    {"exchange", Base::Exchange, kPlain, uses::kOutside},
    {"gelu_gated", Base::Activate, kGelu | kGated, uses::kGated},
    {"gelu_gated_quantise", Base::Activate, kGelu | kGated | kQuantises, uses::kGatedQ},
    {"gelu_tanh_gated", Base::Activate, kGelu | kTanh | kGated, uses::kGated},
    {"gelu_tanh_gated_quantise", Base::Activate, kGelu | kTanh | kGated | kQuantises, uses::kGatedQ},
    {"silu", Base::Activate, kPlain, uses::kPlainRow},
    {"silu_quantise", Base::Activate, kQuantises, uses::kRowQ},
    {"adapter_down", Base::AdapterDown, kPlain, uses::kDown},
    {"adapter_up", Base::AdapterUp, kPlain, uses::kUp},
    {"route", Base::Route, kPlain, uses::kRoute},
    {"route_all", Base::Route, kOfAll, uses::kRoute},
    {"expert_linear", Base::Experts, kPlain, uses::kExperts},
    {"expert_linear_ranked", Base::Experts, kOfRanks, uses::kRanked},
    {"expert_linear_gated", Base::Experts, kSiluMul, uses::kExpertsGated},
    {"combine", Base::Combine, kPlain, uses::kCombine},
    {"sigmoid_scale", Base::SigmoidScale, kPlain, uses::kSigmoid},
    {"scale", Base::Scale, kPlain, uses::kTimes},
    {"soft_cap", Base::SoftCap, kPlain, uses::kTimes},
    {"qk_norm", Base::QkNorm, kPlain, uses::kQkNorm},
    {"attend_sinks", Base::Attend, kSinks, uses::kAttendSinks},
    {"expert_bias", Base::ExpertBias, kPlain, uses::kExpertBias},
    {"clamped_swiglu", Base::ClampedSwiglu, kPlain, uses::kClamped},
    {"relu", Base::Activate, kRelu, uses::kPlainRow},
    {"relu_quantise", Base::Activate, kRelu | kQuantises, uses::kRowQ},
    {"cut_heads", Base::CutHeads, kPlain, uses::kCutHeads},
    {"join_heads", Base::JoinHeads, kPlain, uses::kJoinHeads},
    {"join_heads_sharing", Base::JoinHeads, kOneHead, uses::kShareHead},
    {"attend_both_ways", Base::Attend, kBothWays, uses::kAttendBothWays},
    {"embed_one_row", Base::Embed, kOneRow, uses::kLookUp},
    {"route_scores", Base::Route, kByScores, uses::kScored},
    {"route_scores_all", Base::Route, kByScores | kOfAll, uses::kScored},
    {"route_scores_best", Base::Route, kByScores | kByBest, uses::kScored},
    {"route_scores_best_all", Base::Route, kByScores | kByBest | kOfAll, uses::kScored},
    {"route_sigmoid", Base::Route, kByScores | kSigmoid, uses::kScored},
    {"route_sigmoid_all", Base::Route, kByScores | kSigmoid | kOfAll, uses::kScored},
    {"scale_by_position", Base::ScaleByPosition, kPlain, uses::kFactors},
    {"rope_write_scaled", Base::RopeWrite, kByPosition, uses::kWriteScaled},
    {"relu_squared", Base::Activate, kRelu | kSquared, uses::kPlainRow},
    {"relu_squared_quantise", Base::Activate, kRelu | kSquared | kQuantises, uses::kRowQ},
    {"norm_heads", Base::Norm, kByHead, uses::kNormHeads},
    {"norm_heads_quantise", Base::Norm, kByHead | kQuantises, uses::kNormHeadsQ},
    {"silu_apart", Base::Activate, kApart, uses::kSum},
    {"silu_apart_quantise", Base::Activate, kApart | kQuantises, uses::kSumQ},
    {"mul", Base::Mul, kPlain, uses::kSum},
    {"mul_quantise", Base::Mul, kQuantises, uses::kSumQ},
    {"sigmoid_mul", Base::SigmoidMul, kPlain, uses::kSum},
    {"sigmoid_mul_quantise", Base::SigmoidMul, kQuantises, uses::kSumQ},
    {"sigmoid_gated", Base::SigmoidMul, kGated, uses::kGated},
    {"sigmoid_gated_quantise", Base::SigmoidMul, kGated | kQuantises, uses::kGatedQ},
    {"causal_conv", Base::CausalConv, kPlain, uses::kConv},
    {"causal_conv_silu", Base::CausalConv, kSilu, uses::kConv},
    {"delta_rule", Base::DeltaRule, kPlain, uses::kDelta},
    {"delta_rule_tiled", Base::DeltaRule, kTiled, uses::kDelta},
    {"rope_write_normed", Base::RopeWrite, kNormLast, uses::kWrite},
    {"norm_parts", Base::Norm, kByHead | kOfRow, uses::kNormParts},
    {"norm_parts_quantise", Base::Norm, kByHead | kOfRow | kQuantises, uses::kNormPartsQ},
    {"selective_scan", Base::SelectiveScan, kPlain, uses::kScan},
    {"selective_scan_rates", Base::SelectiveScan, kRates, uses::kScanRates},
    {"norm_bare", Base::Norm, kBare, uses::kBare},
    {"norm_bare_quantise", Base::Norm, kBare | kQuantises, uses::kBareQ},
    {"norm_heads_bare", Base::Norm, kByHead | kBare, uses::kBareHeads},
    {"norm_heads_bare_quantise", Base::Norm, kByHead | kBare | kQuantises, uses::kBareHeadsQ},
    {"gelu_apart", Base::Activate, kGelu | kApart, uses::kSum},
    {"gelu_apart_quantise", Base::Activate, kGelu | kApart | kQuantises, uses::kSumQ},
    {"gelu_tanh_apart", Base::Activate, kGelu | kTanh | kApart, uses::kSum},
    {"gelu_tanh_apart_quantise", Base::Activate, kGelu | kTanh | kApart | kQuantises, uses::kSumQ},
    {"scale_columns", Base::Mul, kWeight, uses::kTimesRow},
    {"scale_weight", Base::Scale, kWeight, uses::kTimesOne},
    {"expert_scale", Base::ExpertBias, kScales, uses::kExpertScale},
    {"above_spread", Base::AboveSpread, kPlain, uses::kTimes},
    {"like_norm", Base::LikeNorm, kPlain, uses::kSum},
};
constexpr bool all_uses_said() {
    for (const Operation& each : kOperations) {
        const Uses& u = each.uses;
#define ROOFLINE_SAID(type, name, kind) \
    if (u.name == 0) return false;
        ROOFLINE_RECORD(ROOFLINE_SAID)
#undef ROOFLINE_SAID
    }
    return true;
}
static_assert(all_uses_said(), "an operation does not say what it does with every field of its record");
inline const Operation* operation(int64_t number) {  // nullptr: not known
    return number >= 0 && number < (int64_t)(sizeof(kOperations) / sizeof(Operation)) ? &kOperations[number] : nullptr;
}

}  // namespace roofline
