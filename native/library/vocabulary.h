// The bytes of each id, from a bundle's tokenizer.bin (written by text/tokenizers/binary_file.py).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace roofline {

class Vocabulary {
  public:
    // Throws std::invalid_argument: damaged.
    explicit Vocabulary(const std::string& file);
    // Adds the bytes of an id; none for a special one, or one that no token has.
    void append(int32_t id, std::string& out) const {
        if ((size_t)id < bytes_.size()) out += bytes_[(size_t)id];
    }

  private:
    std::vector<std::string> bytes_;
};

}  // namespace roofline
