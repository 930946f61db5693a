// Linear layers and the embedding, in every format, for few and many tokens.
#include <algorithm>

#include "check.h"

namespace check {
using namespace roofline;
namespace {

// A half's largest exponent (biased by 15) such that a format's weights stay below about 1/4, as a model's do: in a
// whole program with larger ones every softmax has one winner, and what a kernel gets wrong there cannot be seen.
int top_exponent(Format f) {
    switch (f) {
        case Format::F16:
            return 12;
        case Format::Q8_0:
        case Format::IQ4_NL:
        case Format::Q3_K:
            return 5;
        case Format::Q4_0:
        case Format::Q4_1:
            return 9;
        case Format::Q5_0:
        case Format::Q5_1:
            return 8;
        case Format::Q2_K:
            return 7;
        default:
            return 2;
    }
}

uint16_t half(Format f, Random& random) {  // finite; one in eight is a denormal
    const int lower = random.below(3), exponent = random.below(8) ? top_exponent(f) - lower : 0;
    return (uint16_t)((random.bits() & 0x83ff) | (uint64_t)exponent << 10);
}

void set_scales(Format f, uint8_t* block, Random& random) {
    if (f == Format::INT4 || f == Format::INT8 || f == Format::E4M3 || f == Format::NF4) {  // float32 scales
        const float most = f == Format::NF4 ? 0.25f : f == Format::INT4 ? 1 / 64.0f : f == Format::INT8 ? 1 / 512.0f : 1 / 2048.0f;
        const uint32_t scale = bits_of(random.real() * most);
        std::memcpy(block, &scale, 4);
        if (f == Format::INT4) block[4] &= 15;  // the zero point
        for (int b = 4; f == Format::E4M3 && b < info(f).block_bytes; b++)
            if ((block[b] & 0x7f) == 0x7f) block[b] ^= 1;  // not NaN
        return;
    }
    const auto put = [&](int at) {
        const uint16_t h = half(f, random);
        std::memcpy(block + at, &h, 2);
    };
    switch (f) {
        case Format::Q4_1:
        case Format::Q5_1:
        case Format::Q4_K:
        case Format::Q5_K:
            put(2);
            return put(0);
        case Format::Q6_K:
            return put(208);
        case Format::Q2_K:
            put(82);
            return put(80);
        case Format::Q3_K:
            return put(108);
        case Format::MXFP4:  // one in eight is below the smallest normal number
            block[0] = (uint8_t)(random.below(8) ? 120 + random.below(4) : random.below(3));
            return;
        case Format::IQ4_T32:
        case Format::IQ3_XXS_T32:
        case Format::IQ3_S_T32:
        case Format::IQ2_T32:
        case Format::IQ2_T16: {
            const float scale = random.real() * 0x1p-15f;
            std::memcpy(block, &scale, 4);
            return;
        }
        default:
            return put(0);
    }
}

std::vector<uint8_t> file_bytes(Format f, int64_t rows, int64_t k, Random& random) {
    const FormatInfo& i = info(f);
    std::vector<uint8_t> file((size_t)(rows * k / i.block * i.block_bytes));
    for (size_t at = 0; at < file.size(); at += i.block_bytes) {
        uint8_t* block = file.data() + at;
        const uint32_t value = bits_of(random.real() * 0.125f);
        const uint16_t h = half(f, random);
        if (f == Format::F32)
            std::memcpy(block, &value, 4);
        else if (f == Format::F16)
            std::memcpy(block, &h, 2);
        else if (f == Format::BF16)
            std::memcpy(block, (const uint8_t*)&value + 2, 2);
        else
            for (int b = 0; b < i.block_bytes; b++) block[b] = (uint8_t)random.bits();
        if (!is_plain(f)) set_scales(f, block, random);
    }
    return file;
}

struct Case {
    Format format;
    int digits;
    int64_t rows, k;
    bool gated;
};

// Tokens are taken with bias, with residual, with both and with neither; tiles in one claim or two.
void run(const Case& c, const Kernels& kernels, const Matrix& weight, const Matrix& up, int64_t tokens,
         const std::vector<float>& x, const std::vector<float>& bias, const std::vector<float>& residual, Output& out) {
    std::vector<float> memory(tokens * Quantised::row_bytes(c.k, c.digits) / 4 + 16), y(tokens * (c.rows + 3), 7.0f);
    Linear a{};
    a.format = c.format;
    a.weight = weight.tiles();
    a.up = c.gated ? up.tiles() : nullptr;
    a.rows = c.rows;
    a.k = c.k;
    a.tokens = tokens;
    a.xf = x.data();
    a.x = Quantised{(uint8_t*)memory.data(), tokens, c.k, c.digits};
    if (!is_float(c.format))
        for (int64_t t = 0; t < tokens; t++) kernels.quantise(x.data() + t * c.k, a.x, t);
    a.y = y.data();
    a.ldy = c.rows + 3;
    a.bias = !c.gated && tokens % 2 ? bias.data() : nullptr;
    a.residual = !c.gated && tokens % 3 ? residual.data() : nullptr;
    a.ldr = c.rows + 1;
    a.blocks.tiles = (int)(tokens % 4 == 1 ? 2 : tokens % 4 == 2 ? 1 : 0);  // cut otherwise, with the same bits
    a.blocks.greedy = tokens % 3 == 0;
    const int64_t tiles = (c.rows + kTileRows - 1) / kTileRows, first = tokens % 5 ? tiles : tiles / 2;
    kernels.linear(a, 0, first);
    kernels.linear(a, first, tiles);
    out.floats(y.data(), y.size());
}

void linear(Checker& check, const Case& c, const std::vector<int64_t>& token_counts, const std::string& kind) {
    Random random(100 + (int)c.format);
    const Matrix weight(c.format, c.rows, c.k, random), up(c.format, c.rows, c.k, random);
    const int64_t most = *std::max_element(token_counts.begin(), token_counts.end());
    std::vector<float> x = random.reals(most * c.k);
    if (kind == "poison") x[c.k + 40] = kNan, x[2 * c.k + 1] = kInfinity, x[3 * c.k + 9] = -kInfinity;
    if (kind == "tiny")
        for (float& v : x) v *= 0x1p-122f;
    const std::vector<float> bias = random.reals(c.rows), residual = random.reals(most * (c.rows + 1));
    const std::string name = std::string(info(c.format).name) + " digits " + std::to_string(c.digits) + " " +
                             std::to_string(c.rows) + "x" + std::to_string(c.k) + (c.gated ? " gated " : " ") + kind;
    check("linear " + name, [&](const Kernels& kernels, Output& out) {
        for (int64_t tokens : token_counts) run(c, kernels, weight, up, tokens, x, bias, residual, out);
    });
}

void embed(Checker& check, Format f, int64_t rows, int64_t k) {
    Random random(200 + (int)f);
    const Matrix weight(f, rows, k, random);
    check(std::string("embed ") + info(f).name, [&](const Kernels& kernels, Output& out) {
        for (int64_t row = 0; row < rows; row++) {
            std::vector<float> y(k);
            kernels.embed(f, weight.tiles(), k, row, y.data());
            out.floats(y.data(), k);
        }
    });
}

}  // namespace

Matrix::Matrix(Format format, int64_t rows, int64_t k, Random& random) {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    packed_.resize(tiles * tile_bytes(format, k) + 64);
    skip_ = (64 - (uintptr_t)packed_.data() % 64) % 64;
    const std::vector<uint8_t> file = file_bytes(format, rows, k, random);
    pack_tiles(format, file.data(), rows, k, 0, tiles, packed_.data() + skip_);
}

void linears(Checker& check) {
    std::vector<int64_t> all;
    for (int64_t tokens = 1; tokens <= 33; tokens++) all.push_back(tokens);
    for (int f = 0; f < (int)Format::Count; f++) {
        const Format format = (Format)f;
        for (int digits = 1; digits <= (is_float(format) ? 1 : 2); digits++) {
            linear(check, {format, digits, 23, 256, false}, all, "");
            linear(check, {format, digits, 7, 768, false}, {1, 3, 8}, "");
            linear(check, {format, digits, 100, 512, false}, {1, 2, 5}, "");
            linear(check, {format, digits, 16, 256, false}, {165}, "panels");
            linear(check, {format, digits, 23, 256, true}, {1, 2, 3, 4, 5, 7, 16, 33}, "");
            linear(check, {format, digits, 32, 256, false}, {5}, "poison");
            linear(check, {format, digits, 32, 256, false}, {5}, "tiny");
        }
        embed(check, format, 35, 512);
    }
}

}  // namespace check
