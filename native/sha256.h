// SHA-256 (FIPS 180-4) in plain C++: bundles keep the hash of each of their files.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace roofline {

class Sha256 {
  public:
    void add(const uint8_t* data, size_t bytes) {
        total_ += bytes;
        if (filled_ > 0) {
            const size_t n = bytes < kBlock - filled_ ? bytes : kBlock - filled_;
            std::memcpy(block_ + filled_, data, n);
            data += n, bytes -= n, filled_ += n;
            if (filled_ < kBlock) return;
            take(block_);
            filled_ = 0;
        }
        for (; bytes >= kBlock; data += kBlock, bytes -= kBlock) take(data);
        std::memcpy(block_, data, bytes);
        filled_ = bytes;
    }

    // In hexadecimal; nothing may be added afterwards.
    std::string hex() {
        const uint64_t bits = total_ * 8;
        const uint8_t end = 0x80, zero = 0;
        add(&end, 1);
        while (filled_ != kBlock - 8) add(&zero, 1);
        uint8_t length[8];
        for (int i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
        add(length, 8);
        std::string out;
        for (const uint32_t word : state_)
            for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
        return out;
    }

  private:
    static constexpr size_t kBlock = 64;

    static uint32_t turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

    void take(const uint8_t* block) {
        static constexpr uint32_t kRound[64] = {
            // fractions of the cube roots of the first 64 primes
            0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
            0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
            0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
            0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
            0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
            0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
            0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
            0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = (uint32_t)block[4 * i] << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8 | block[4 * i + 3];
        for (int i = 16; i < 64; i++) {
            const uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        std::memcpy(s, state_, sizeof s);
        for (int i = 0; i < 64; i++) {
            const uint32_t a = s[0], e = s[4];
            const uint32_t first =
                s[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + kRound[i] + w[i];
            const uint32_t second =
                (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            s[7] = s[6], s[6] = s[5], s[5] = e, s[4] = s[3] + first;
            s[3] = s[2], s[2] = s[1], s[1] = a, s[0] = first + second;
        }
        for (int i = 0; i < 8; i++) state_[i] += s[i];
    }

    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint64_t total_ = 0;
    size_t filled_ = 0;
    uint8_t block_[kBlock];
};

}  // namespace roofline
