#include "variant.h"

#include <sstream>
#include <stdexcept>

namespace roofline {
namespace {

[[noreturn]] void refuse(const std::string& word, const char* why) {
    throw std::invalid_argument("variant \"" + word + "\": " + why);
}

int64_t number(const std::string& word, const std::string& digits, int64_t low, int64_t high) {
    if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos)
        refuse(word, "there is no such word");
    const int64_t value = std::stoll(digits);
    if (value < low || value > high) refuse(word, "the number is out of range");
    return value;
}

bool linear_word(const std::string& word, const Kernels* kernels, int digits, Blocks& blocks) {
    const size_t x = word.find('x');
    if (word == "greedy") {
        blocks.greedy = true;
    } else if (word == "fetch=off") {
        blocks.fetch = 0;
    } else if (word == "fetch=next") {
        blocks.fetch = Blocks::kFetchNext;
    } else if (word.rfind("fetch=", 0) == 0) {
        blocks.fetch = number(word, word.substr(6), 64, 1 << 20);
    } else if (x == 1 && word[0] >= '0' && word[0] <= '9') {
        blocks.tiles = (int)number(word, word.substr(0, 1), 1, 2);
        blocks.tokens = (int)number(word, word.substr(2), 1, 99);
        if (blocks.tokens > kernels->block_tokens[digits - 1][blocks.tiles - 1])
            refuse(word, "these kernels have no block of that size");
    } else {
        return false;
    }
    return true;
}

}  // namespace

Variant variant_named(VariantKind kind, const std::string& name, const Kernels* kernels, int digits) {
    Variant v;
    if (name == "default") return v;
    std::istringstream words(name);
    bool any = false;
    for (std::string word; words >> word; any = true) {
        const bool linear = kind == VariantKind::Linear;
        if (linear && linear_word(word, kernels, digits, v.blocks)) continue;
        if ((linear || kind == VariantKind::FloatLinear) && word.rfind("claim=", 0) == 0)
            v.claim_us = (int)number(word, word.substr(6), 1, 10000);
        else if (kind == VariantKind::Rows && word.rfind("private=", 0) == 0)
            v.private_rows = (int)number(word, word.substr(8), 0, kMostPrivateRows);
        else if (kind == VariantKind::Attend && word.rfind("queries=", 0) == 0)
            v.query_rows = (int)number(word, word.substr(8), 1, 1024);
        else
            refuse(word, "ops of this kind have no such variant");
    }
    if (!any) refuse(name, "the name is empty");
    return v;
}

}  // namespace roofline
