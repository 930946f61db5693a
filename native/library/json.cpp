#include "json.h"

#include <cstring>
#include <limits>
#include <stdexcept>

namespace roofline {
namespace {

constexpr int kDepth = 64;  // text/templates/simple_template.py keeps below it

void put_utf8(std::string& out, unsigned code) {
    if (code < 0x80) {
        out += (char)code;
    } else if (code < 0x800) {
        out += {(char)(0xC0 | code >> 6), (char)(0x80 | (code & 63))};
    } else if (code < 0x10000) {
        out += {(char)(0xE0 | code >> 12), (char)(0x80 | (code >> 6 & 63)), (char)(0x80 | (code & 63))};
    } else {
        out += {(char)(0xF0 | code >> 18), (char)(0x80 | (code >> 12 & 63)), (char)(0x80 | (code >> 6 & 63)),
                (char)(0x80 | (code & 63))};
    }
}

class Parser {
  public:
    explicit Parser(const std::string& text) : at_(text.c_str()), end_(at_ + text.size()) {}

    Json document() {
        Json value = read(0);
        space();
        if (at_ != end_) fail();
        return value;
    }

  private:
    [[noreturn]] static void fail() { throw std::invalid_argument("it is not JSON"); }
    void space() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) at_++;
    }
    bool take(char c) {
        space();
        if (at_ == end_ || *at_ != c) return false;
        at_++;
        return true;
    }
    bool word(const char* letters) {
        const size_t n = std::strlen(letters);
        if ((size_t)(end_ - at_) < n || std::memcmp(at_, letters, n) != 0) return false;
        at_ += n;
        return true;
    }

    Json read(int depth) {
        if (depth > kDepth) fail();
        Json value;
        space();
        if (take('{')) {
            value.kind = Json::Object;
            while (!take('}')) {
                if (!value.members.empty() && !take(',')) fail();
                space();
                std::string name = string();
                if (!take(':')) fail();
                value.members.emplace_back(std::move(name), read(depth + 1));
            }
        } else if (take('[')) {
            value.kind = Json::Array;
            while (!take(']')) {
                if (!value.items.empty() && !take(',')) fail();
                value.items.push_back(read(depth + 1));
            }
        } else if (at_ < end_ && *at_ == '"') {
            value.kind = Json::String;
            value.text = string();
        } else if (word("true")) {
            value.kind = Json::True;
        } else if (word("false")) {
            value.kind = Json::False;
        } else if (!word("null")) {
            value.kind = Json::Number;
            value.number = number();
        }
        return value;
    }

    // Not strtod: a program's locale may have a decimal comma. Only whole numbers are ever asked for; others are NaN.
    double number() {
        const double none = std::numeric_limits<double>::quiet_NaN();
        if (word("NaN") || word("Infinity") || word("-Infinity")) return none;
        const bool negative = word("-");
        const char* const from = at_;
        double whole = 0;
        for (; at_ < end_ && *at_ >= '0' && *at_ <= '9'; at_++) whole = whole * 10 + (*at_ - '0');
        if (at_ == from) fail();
        const char* const after = at_;
        while (at_ < end_ && *at_ && std::strchr("+-.eE0123456789", *at_)) at_++;
        return at_ != after ? none : negative ? -whole : whole;
    }

    std::string string() {
        if (at_ == end_ || *at_ != '"') fail();
        std::string out;
        for (at_++; at_ < end_ && *at_ != '"'; at_++) {
            if (*at_ != '\\') {
                out += *at_;
                continue;
            }
            if (++at_ == end_) fail();
            static const char kNames[] = "\"\\/bfnrt", kMeant[] = "\"\\/\b\f\n\r\t";
            if (*at_ == 'u') {
                unsigned code = hex();
                if (code >= 0xD800 && code < 0xDC00 && end_ - at_ > 6 && at_[1] == '\\' && at_[2] == 'u') {
                    at_ += 2;
                    code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
                }
                put_utf8(out, code);
            } else if (const char* known = *at_ ? std::strchr(kNames, *at_) : nullptr) {
                out += kMeant[known - kNames];
            } else {
                fail();
            }
        }
        if (at_ == end_) fail();
        at_++;
        return out;
    }

    unsigned hex() {  // four digits after the u; leaves at_ on the last
        unsigned code = 0;
        if (end_ - at_ < 5) fail();
        for (int i = 0; i < 4; i++) {
            const char c = *++at_;
            const int digit = c >= '0' && c <= '9'                 ? c - '0'
                              : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                                   : -1;
            if (digit < 0) fail();
            code = code << 4 | (unsigned)digit;
        }
        return code;
    }

    const char *at_, *end_;
};

}  // namespace

Json Json::parse(const std::string& text) { return Parser(text).document(); }

const Json& Json::operator[](const char* name) const {
    static const Json none;
    for (const auto& member : members)
        if (member.first == name) return member.second;
    return none;
}

const std::string& Json::string() const {
    if (kind != String) throw std::invalid_argument("a text is missing");
    return text;
}

long long Json::integer() const {
    if (kind != Number || !(number > -9e15 && number < 9e15) || number != (double)(long long)number)
        throw std::invalid_argument("a whole number is missing");
    return (long long)number;
}

bool Json::boolean() const {
    if (kind != True && kind != False) throw std::invalid_argument("true or false is missing");
    return kind == True;
}

}  // namespace roofline
