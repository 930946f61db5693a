#include "vocabulary.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "json.h"

namespace roofline {
namespace {

constexpr char kMagic[] = "RLTOK2\n";
constexpr size_t kMagicBytes = sizeof kMagic - 1;

// The next character of UTF-8 text, -1 where it is damaged.
int next_character(const std::string& text, size_t& at) {
    const uint8_t first = (uint8_t)text[at++];
    const int more = first < 0x80 ? 0 : first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0xC0 ? 1 : -1;
    if (more < 0 || at + (size_t)more > text.size()) return -1;
    int code = more == 0 ? first : first & (0x3F >> more);
    for (int i = 0; i < more; i++) code = code << 6 | ((uint8_t)text[at++] & 63);
    return code;
}

// GPT-2's printable spelling of the bytes: those that are printable stand for themselves, the others follow U+0100.
struct ByteAlphabet {
    int bytes[512];
    ByteAlphabet() {
        int hidden = 256;
        std::memset(bytes, -1, sizeof bytes);
        for (int b = 0; b < 256; b++) {
            const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
            bytes[printable ? b : hidden++] = b;
        }
    }
};

std::string byte_level(const std::string& token, const ByteAlphabet& alphabet) {
    std::string out;
    for (size_t at = 0; at < token.size();) {
        const int code = next_character(token, at);
        if (code < 0 || code >= 512 || alphabet.bytes[code] < 0) return token;
        out += (char)alphabet.bytes[code];
    }
    return out;
}

std::string sentence_piece(const std::string& token) {
    if (token.size() == 6 && token.compare(0, 3, "<0x") == 0 && token[5] == '>' &&
        token.find_first_not_of("0123456789abcdefABCDEF", 3) == 5)
        return std::string(1, (char)std::stoi(token.substr(3, 2), nullptr, 16));
    std::string out;
    for (size_t at = 0; at < token.size();) {
        if (token.compare(at, 3, "\xE2\x96\x81") == 0) {  // its visible space
            out += ' ';
            at += 3;
        } else {
            out += token[at++];
        }
    }
    return out;
}

}  // namespace

Vocabulary::Vocabulary(const std::string& file) {
    const size_t start = kMagicBytes + 4;
    if (file.size() < start || file.compare(0, kMagicBytes, kMagic) != 0)
        throw std::invalid_argument("it does not begin with RLTOK2");
    uint32_t length;
    std::memcpy(&length, file.data() + kMagicBytes, 4);
    if (length > file.size() - start) throw std::invalid_argument("it is too short");
    const Json header = Json::parse(file.substr(start, length));
    const Json &counts = header["counts"], &sizes = header["bytes"];
    if (counts.items.empty() || sizes.items.empty()) throw std::invalid_argument("its header is damaged");
    size_t left = file.size() - start - length;
    for (const Json& bytes : sizes.items) {
        const long long section = bytes.integer();
        if (section < 0 || (size_t)section > left) throw std::invalid_argument("it is too short");
        left -= (size_t)section;
    }
    if (left != 0) throw std::invalid_argument("it is too long");
    const long long count = counts.items[0].integer(), size = sizes.items[0].integer();
    const std::string tokens = file.substr(start + length, (size_t)size), &separator = header["separator"].string();
    if (separator.empty()) throw std::invalid_argument("its header is damaged");
    // A token of such a vocabulary has a space before it or none by what stands around it.
    if (header["continues"].kind != Json::Null)
        throw std::invalid_argument("its tokens are words (WordPiece, WordLevel), which roofline serve decodes");
    const bool by_bytes = header["byte_level"].boolean();
    const ByteAlphabet alphabet;
    for (size_t at = 0, end; count > 0 && at <= tokens.size(); at = end + separator.size()) {
        end = std::min(tokens.find(separator, at), tokens.size());
        const std::string token = tokens.substr(at, end - at);
        bytes_.push_back(by_bytes ? byte_level(token, alphabet) : sentence_piece(token));
    }
    if ((long long)bytes_.size() != count) throw std::invalid_argument("it has another number of tokens than it says");
    for (const Json& added : header["added"].items) {
        const long long id = added["id"].integer();
        if (id < 0 || id > 1 << 24) throw std::invalid_argument("an added token has an id that cannot be");
        if ((size_t)id >= bytes_.size()) bytes_.resize((size_t)id + 1);
        const std::string& content = added["content"].string();
        bytes_[(size_t)id] = added["special"].boolean() ? "" : by_bytes ? content : sentence_piece(content);
    }
}

}  // namespace roofline
