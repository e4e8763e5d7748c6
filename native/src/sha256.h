// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): a few hundred bytes per handshake, so plain code is fast enough.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ldr {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(const void *data, size_t size_bytes);
  Digest finish();  // once

 private:
  void compress(const uint8_t *block);
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t size_bytes_ = 0;
};

class HmacSha256 {
 public:
  HmacSha256(const void *key, size_t key_bytes);
  void add(const void *data, size_t size_bytes) { inner_.add(data, size_bytes); }
  Digest finish();  // once

 private:
  Sha256 inner_;
  std::array<uint8_t, 64> outer_pad_;
};

bool equal_in_constant_time(const uint8_t *a, const uint8_t *b, size_t size_bytes);

}  // namespace ldr
