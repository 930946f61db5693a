// Packed weight tiles: how sixteen output rows of a matrix lie in memory, and how a file's blocks are packed into them.
//
// A quantised tile holds sixteen rows over all K inputs as two planes that follow each other: the quantised values of
// every group of 32 inputs, then the scales. In the value plane "canonical" vector c (0..7) of a group is 64 bytes: for
// each of sixteen rows the values of inputs 4c..4c+3. Nibble planes hold canonical vectors 2j (low) and 2j+1 (high) in
// vector j. Planes of two bits hold canonical vectors 4j..4j+3 in vector j, planes of single bits eight bytes a vector.
// A float tile is [K][16 rows] in the file's own type.
//
// Tiles of coded floats (E4M3, NF4) are multiplied with float inputs, a column at a time: their value plane is [K][16 rows]
// of codes (NF4: [K / 2][16 rows], the even input in the low nibble), their scales are float32.
//
// Formats named *_T32 and *_T16 are ours, and no file has them: 4-bit codes that stand for the values of a table
// (`kTables`), a float32 for 256 inputs and a signed byte for each 32 or 16 of them. Files whose weights come from
// codebooks are turned into them, exactly, by ops/formats/tables.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace roofline {

// Version of the packed layout, as bundles keep it: raise it when a packed byte changes (docs/reference/bundle.md).
inline constexpr int kLayoutVersion = 1;

enum class Format : int { F32 = 0, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K,
                            Q5_0, Q5_1, Q2_K, Q3_K, IQ4_NL, MXFP4,
                            IQ4_T32, IQ3_XXS_T32, IQ3_S_T32, IQ2_T32, IQ2_T16,
                            INT4, INT8, E4M3, NF4, Count };

inline constexpr int kTileRows = 16;

struct FormatInfo {
    const char* name;
    int block;        // inputs a file block covers
    int block_bytes;  // bytes of a file block
    int values;       // packed bytes of the value planes a group of 32 (16 rows); floats: bytes an input
    int scales;       // packed bytes of the scale plane a `scale_group` inputs (16 rows)
    int scale_group;  // inputs the scale record covers
};

inline constexpr FormatInfo kFormats[] = {
    {"F32", 1, 4, 64, 0, 1},         {"F16", 1, 2, 32, 0, 1},         {"BF16", 1, 2, 32, 0, 1},
    {"Q8_0", 32, 34, 512, 32, 32},   {"Q4_0", 32, 18, 256, 32, 32},   {"Q4_1", 32, 20, 256, 64, 32},
    {"Q4_K", 256, 144, 256, 320, 256}, {"Q5_K", 256, 176, 320, 320, 256}, {"Q6_K", 256, 210, 384, 288, 256},
    {"Q5_0", 32, 22, 320, 32, 32},   {"Q5_1", 32, 24, 320, 64, 32},   {"Q2_K", 256, 84, 128, 320, 256},
    {"Q3_K", 256, 110, 192, 288, 256}, {"IQ4_NL", 32, 18, 256, 32, 32}, {"MXFP4", 32, 17, 256, 16, 32},
    {"IQ4_T32", 256, 140, 256, 192, 256},   {"IQ3_XXS_T32", 256, 140, 256, 192, 256},
    {"IQ3_S_T32", 256, 140, 256, 192, 256}, {"IQ2_T32", 256, 140, 256, 192, 256},
    {"IQ2_T16", 256, 148, 256, 320, 256},
    {"INT4", 32, 21, 256, 80, 32},   {"INT8", 32, 36, 512, 64, 32},
    {"E4M3", 128, 132, 512, 64, 128}, {"NF4", 64, 36, 256, 64, 64},
};

// What the 4-bit codes of a format stand for. The last one has what 1- and 2-bit codebooks are made of.
inline constexpr int8_t kTables[5][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},  // IQ4_NL, IQ4_T32
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},                   // MXFP4: twice the value of the float
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},      // IQ3_XXS_T32
    {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},              // IQ3_S_T32
    {-43, -25, -9, -8, -7, -1, 0, 1, 7, 8, 9, 25, 43, 0, 0, 0},                  // IQ2_T32, IQ2_T16
};
inline const int8_t (&table_of(Format f))[16] {
    switch (f) {
        case Format::MXFP4: return kTables[1];
        case Format::IQ3_XXS_T32: return kTables[2];
        case Format::IQ3_S_T32: return kTables[3];
        case Format::IQ2_T32:
        case Format::IQ2_T16: return kTables[4];
        default: return kTables[0];
    }
}

inline const FormatInfo& info(Format f) { return kFormats[(unsigned)f < (unsigned)Format::Count ? (int)f : 0]; }
inline bool is_plain(Format f) { return f <= Format::BF16; }  // a number an element, no groups
// Multiplied with float inputs, not with rows of integers.
inline bool is_float(Format f) { return is_plain(f) || f == Format::E4M3 || f == Format::NF4; }

// Bytes of one packed tile, a multiple of 64.
inline size_t tile_bytes(Format f, int64_t k) {
    const FormatInfo& i = info(f);
    size_t n = is_plain(f) ? (size_t)i.values * k : (size_t)i.values * (k / 32) + (size_t)i.scales * (k / i.scale_group);
    return (n + 63) / 64 * 64;
}
inline size_t values_bytes(Format f, int64_t k) { return (size_t)info(f).values * (k / 32); }

// Packs rows [16 * tile_begin, min(rows, 16 * tile_end)) of a row-major file tensor; rows beyond the end are zero.
void pack_tiles(Format f, const uint8_t* file, int64_t rows, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* out);

}  // namespace roofline
