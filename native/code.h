// The code of a model, checked: what a bundle or the lowering says is not believed, whoever wrote it. An Executable
// runs nothing else, so no record can make it touch memory outside the arena, the image, the cache and the step's
// buffer.
#pragma once
#include <cstdint>
#include <vector>

#include "formats.h"
#include "records.h"

namespace roofline {

// What layers that attend alike share. group: of the cache; layers: how many write to it; kv_heads, head_dim: of what
// they write, the same in all attentions of a group. value_dim: 0: there are values, as wide as the keys.
struct AttentionShape {
    int64_t group = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
    double q_scale = 0, eps = 0;
};

struct RopeShape {
    int64_t turned = 0;  // dimensions of a head that a table turns, the first ones
    bool interleaved = false;
};

// What code is told beside its records; bytes and places as in docs/reference/bundle.md.
struct ModelShape {
    int64_t image_bytes = 0, matrix_bytes = 0;
    int64_t table = -1, positions = 0;  // of the rope tables, one behind the other; place -1: none, nothing is rotated
    std::vector<RopeShape> tables;
    int64_t vocab = 0;
    Ref logits{};
    int64_t arena[3] = {};  // bytes: constant, per token, per row
    std::vector<AttentionShape> attentions;  // groups of the cache in the order of their first

    // Dimensions that the first so many tables turn together: floats before the next one, for each position.
    int64_t turned_before(size_t table) const {
        int64_t turned = 0;
        for (size_t i = 0; i < table; i++) turned += tables[i].turned;
        return turned;
    }
    // The first attention of each group of the cache.
    std::vector<const AttentionShape*> groups() const {
        std::vector<const AttentionShape*> firsts;
        for (const AttentionShape& each : attentions)
            if (each.group == (int64_t)firsts.size()) firsts.push_back(&each);
        return firsts;
    }
};

// Bytes of K and V of all heads in a page of one layer.
int64_t layer_page_bytes(const AttentionShape& attention, bool int8);

class Code {
  public:
    struct Entry {
        const Operation* operation;
        Record record;
        std::vector<Piece> pieces;
    };

    // exchanges: whether ranks share the model; a bundle is of a whole one. Throws std::invalid_argument with the
    // number of the operation and the field that cannot be.
    Code(const std::vector<int64_t>& numbers, const ModelShape& shape, bool exchanges);

    const ModelShape& shape() const { return shape_; }
    const std::vector<Entry>& entries() const { return entries_; }
    // Bytes of the arena for steps of so many tokens and logit rows.
    int64_t arena_bytes(int64_t tokens, int64_t rows) const {
        return shape_.arena[0] + shape_.arena[1] * tokens + shape_.arena[2] * rows;
    }
    // Whether a token sees those behind it: then a prompt is one step, and nothing follows it.
    bool both_ways() const {
        for (const Entry& entry : entries_)
            if (entry.operation->flags & kBothWays) return true;
        return false;
    }
    // Floats of a slot of recurrent state: what the layers keep of one sequence; 0: none of them keeps any.
    int64_t state_values() const;
    // Bytes of a page over all layers that write keys and values.
    int64_t page_bytes(bool int8) const;

  private:
    ModelShape shape_;
    std::vector<Entry> entries_;
};

}  // namespace roofline
