#include "formats.h"

#include <cstring>

namespace roofline {
namespace {

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}

// One row's values of a group of 32 as unsigned bytes, read from the file's block.
struct Group {
    uint8_t q[32];
};

void nibble_halves(const uint8_t* q, Group& g) {  // low nibbles are inputs 0..15, high nibbles 16..31
    for (int i = 0; i < 16; i++) {
        g.q[i] = q[i] & 15;
        g.q[i + 16] = q[i] >> 4;
    }
}

// K-quants pack a superblock's eight 6-bit scales and minima into twelve bytes (ggml's layout).
void k_scales(const uint8_t* s, int j, uint8_t& scale, uint8_t& minimum) {
    if (j < 4) {
        scale = s[j] & 63;
        minimum = s[j + 4] & 63;
    } else {
        scale = (uint8_t)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
        minimum = (uint8_t)((s[j + 4] >> 4) | (s[j] >> 6) << 4);
    }
}

void fifth_bits(const uint8_t* high, Group& g) {  // bit i of 32: input i
    for (int i = 0; i < 32; i++) g.q[i] |= (uint8_t)((high[i / 8] >> (i % 8) & 1) << 4);
}

// Two halves of 128 values have 32 bytes each; group 4 * half + n lies at bits 2n.
void bit_pairs(const uint8_t* q, int group, Group& g) {
    for (int i = 0; i < 32; i++) g.q[i] = q[group / 4 * 32 + i] >> (2 * (group % 4)) & 3;
}

// Q3_K's sixteen 6-bit scales in twelve bytes, offset by 32: low halves of eight bytes, their high halves, upper pairs.
int8_t q3_scale(const uint8_t* s, int j) {
    const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4, high = s[8 + j % 4] >> (2 * (j / 4)) & 3;
    return (int8_t)((low | high << 4) - 32);
}

void read_group(Format f, const uint8_t* row, int64_t group, Group& g) {
    switch (f) {
        case Format::Q8_0: {
            const uint8_t* b = row + group * 34 + 2;
            for (int i = 0; i < 32; i++) g.q[i] = (uint8_t)(b[i] ^ 0x80);
            return;
        }
        case Format::INT8: {
            const uint8_t* b = row + group * 36 + 4;
            for (int i = 0; i < 32; i++) g.q[i] = (uint8_t)(b[i] ^ 0x80);
            return;
        }
        case Format::INT4: return nibble_halves(row + group * 21 + 5, g);
        case Format::Q4_0: return nibble_halves(row + group * 18 + 2, g);
        case Format::Q4_1: return nibble_halves(row + group * 20 + 4, g);
        case Format::Q5_0:
            nibble_halves(row + group * 22 + 6, g);
            return fifth_bits(row + group * 22 + 2, g);
        case Format::Q5_1:
            nibble_halves(row + group * 24 + 8, g);
            return fifth_bits(row + group * 24 + 4, g);
        case Format::IQ4_NL: return nibble_halves(row + group * 18 + 2, g);
        case Format::MXFP4: return nibble_halves(row + group * 17 + 1, g);
        case Format::Q2_K: return bit_pairs(row + group / 8 * 84 + 16, (int)(group % 8), g);
        case Format::Q3_K: {
            const uint8_t* b = row + group / 8 * 110;
            bit_pairs(b + 32, (int)(group % 8), g);
            for (int i = 0; i < 32; i++) g.q[i] |= (uint8_t)((b[i] >> (group % 8) & 1) << 2);
            return;
        }
        case Format::IQ4_T32:
        case Format::IQ3_XXS_T32:
        case Format::IQ3_S_T32:
        case Format::IQ2_T32: return nibble_halves(row + group / 8 * 140 + 12 + group % 8 * 16, g);
        case Format::IQ2_T16: return nibble_halves(row + group / 8 * 148 + 20 + group % 8 * 16, g);
        case Format::Q4_K: {
            const uint8_t* q = row + group / 8 * 144 + 16 + group % 8 / 2 * 32;
            for (int i = 0; i < 32; i++) g.q[i] = group % 2 ? q[i] >> 4 : q[i] & 15;
            return;
        }
        case Format::Q5_K: {
            const uint8_t* b = row + group / 8 * 176;
            const uint8_t *high = b + 16, *q = b + 48 + group % 8 / 2 * 32;
            for (int i = 0; i < 32; i++)
                g.q[i] = (uint8_t)((group % 2 ? q[i] >> 4 : q[i] & 15) | (high[i] >> (group % 8) & 1) << 4);
            return;
        }
        case Format::Q6_K: {  // 256 values in two halves of 128: low nibbles 2 x 64 bytes, then the upper bits 2 x 32
            const uint8_t* b = row + group / 8 * 210;
            const int half = (int)(group % 8 / 4), part = (int)(group % 4);
            const uint8_t *low = b + half * 64 + part % 2 * 32, *high = b + 128 + half * 32;
            for (int i = 0; i < 32; i++)
                g.q[i] = (uint8_t)((part < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * part) & 3) << 4);
            return;
        }
        default: return;
    }
}

void place_nibbles(const Group& g, int row, uint8_t* plane) {
    for (int j = 0; j < 4; j++)
        for (int c = 0; c < 4; c++) plane[j * 64 + row * 4 + c] = (uint8_t)((g.q[8 * j + c] & 15) | (g.q[8 * j + 4 + c] & 15) << 4);
}

void place_pairs(const Group& g, int row, uint8_t* plane, int shift) {  // two bits of each value
    for (int v = 0; v < 8; v++)
        for (int c = 0; c < 4; c++)
            plane[v / 4 * 64 + row * 4 + c] |= (uint8_t)((g.q[4 * v + c] >> shift & 3) << (2 * (v % 4)));
}

void place_bits(const Group& g, int row, uint8_t* plane, int shift) {  // one bit of each value
    for (int v = 0; v < 8; v++)
        for (int c = 0; c < 4; c++) {
            const int bit = row * 4 + c;
            plane[v * 8 + bit / 8] |= (uint8_t)((g.q[4 * v + c] >> shift & 1) << (bit % 8));
        }
}

void place_group(Format f, const Group& g, int row, uint8_t* values) {
    switch (f) {
        case Format::Q8_0:
        case Format::INT8:
            for (int v = 0; v < 8; v++) std::memcpy(values + v * 64 + row * 4, g.q + 4 * v, 4);
            return;
        case Format::Q2_K: return place_pairs(g, row, values, 0);
        case Format::Q3_K:
            place_pairs(g, row, values, 0);
            return place_bits(g, row, values + 128, 2);
        case Format::Q5_0:
        case Format::Q5_1:
        case Format::Q5_K:
            place_nibbles(g, row, values);
            return place_bits(g, row, values + 256, 4);
        case Format::Q6_K:
            place_nibbles(g, row, values);
            return place_pairs(g, row, values + 256, 4);
        default: return place_nibbles(g, row, values);
    }
}

// Coded floats: a row's codes go to its lane, input after input. A code that is NaN makes its group's scale NaN, since the
// kernel knows numbers only, and so does a scale of e4m3 that is too large for the kernel to multiply it by 256.
void place_codes(Format f, const uint8_t* row_data, int64_t k, int row, uint8_t* tile) {
    const FormatInfo& i = info(f);
    uint8_t* scales = tile + values_bytes(f, k);
    for (int64_t b = 0; b < k / i.block; b++) {
        const uint8_t* block = row_data + b * i.block_bytes;
        uint8_t scale[4];
        std::memcpy(scale, block, 4);
        const uint8_t* codes = block + 4;
        if (f == Format::E4M3) {
            if ((scale[3] & 0x7f) >= 0x7b) std::memset(scale, 0xff, 4);  // from 2^119 on
            for (int c = 0; c < i.block; c++) {
                tile[(b * i.block + c) * kTileRows + row] = codes[c];
                if ((codes[c] & 0x7f) == 0x7f) std::memset(scale, 0xff, 4);
            }
        } else {  // the file's even input is the high nibble
            for (int c = 0; c < i.block / 2; c++)
                tile[(b * i.block / 2 + c) * kTileRows + row] = (uint8_t)(codes[c] >> 4 | codes[c] << 4);
        }
        std::memcpy(scales + (b * kTileRows + row) * 4, scale, 4);
    }
}

void place_half(uint16_t h, int row, uint8_t* at) { std::memcpy(at + 2 * row, &h, 2); }

void place_scales(Format f, const uint8_t* row_data, int64_t k, int row, uint8_t* scales) {
    const FormatInfo& i = info(f);
    for (int64_t b = 0; b < k / i.scale_group; b++) {
        const uint8_t* block = row_data + b * i.block_bytes;
        uint8_t* out = scales + b * i.scales;
        switch (f) {
            case Format::Q8_0:
            case Format::Q4_0:
            case Format::Q5_0:
            case Format::IQ4_NL: place_half(half_at(block), row, out); break;
            case Format::INT8: std::memcpy(out + 4 * row, block, 4); break;
            case Format::INT4:  // the scale, then the zero point
                std::memcpy(out + 4 * row, block, 4);
                out[64 + row] = block[4];
                break;
            case Format::MXFP4:  // an exponent; 0 as 1: kernels flush what it makes smaller (unpack_impl.h)
                out[row] = block[0] ? block[0] : 1;
                break;
            case Format::Q4_1:
            case Format::Q5_1:
                place_half(half_at(block), row, out);
                place_half(half_at(block + 2), row, out + 32);
                break;
            case Format::Q4_K:
            case Format::Q5_K:  // d and dmin, then a byte of scale and a byte of minimum a group
                place_half(half_at(block), row, out);
                place_half(half_at(block + 2), row, out + 32);
                for (int j = 0; j < 8; j++) k_scales(block + 4, j, out[64 + j * 32 + row], out[64 + j * 32 + 16 + row]);
                break;
            case Format::Q6_K:  // d, then sixteen signed scales
                place_half(half_at(block + 208), row, out);
                for (int j = 0; j < 16; j++) out[32 + j * 16 + row] = block[192 + j];
                break;
            case Format::Q2_K:  // d and dmin, then sixteen bytes of a scale (low half) and a minimum
                place_half(half_at(block + 80), row, out);
                place_half(half_at(block + 82), row, out + 32);
                for (int j = 0; j < 16; j++) out[64 + j * 16 + row] = block[j];
                break;
            case Format::Q3_K:
                place_half(half_at(block + 108), row, out);
                for (int j = 0; j < 16; j++) out[32 + j * 16 + row] = (uint8_t)q3_scale(block + 96, j);
                break;
            case Format::IQ4_T32:
            case Format::IQ3_XXS_T32:
            case Format::IQ3_S_T32:
            case Format::IQ2_T32:
            case Format::IQ2_T16:  // a float, then eight or sixteen signed bytes
                std::memcpy(out + 4 * row, block, 4);
                for (int j = 0; j < i.block_bytes - 4 - 128; j++) out[64 + j * 16 + row] = block[4 + j];
                break;
            default: break;
        }
    }
}

}  // namespace

void pack_tiles(Format f, const uint8_t* file, int64_t rows, int64_t k, int64_t tile_begin, int64_t tile_end, uint8_t* out) {
    const FormatInfo& i = info(f);
    const size_t row_bytes = (size_t)(k / i.block) * i.block_bytes, size = tile_bytes(f, k);
    for (int64_t t = tile_begin; t < tile_end; t++) {
        uint8_t* tile = out + (t - tile_begin) * size;
        std::memset(tile, 0, size);
        for (int r = 0; r < kTileRows && t * kTileRows + r < rows; r++) {
            const uint8_t* row = file + (t * kTileRows + r) * row_bytes;
            if (is_plain(f)) {
                const int width = i.block_bytes;
                for (int64_t c = 0; c < k; c++) std::memcpy(tile + (c * kTileRows + r) * width, row + c * width, width);
                continue;
            }
            if (is_float(f)) {
                place_codes(f, row, k, r, tile);
                continue;
            }
            Group g;
            for (int64_t group = 0; group < k / 32; group++) {
                read_group(f, row, group, g);
                place_group(f, g, r, tile + group * i.values);
            }
            place_scales(f, row, k, r, tile + values_bytes(f, k));
        }
    }
}

}  // namespace roofline
