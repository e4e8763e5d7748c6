#include "sha256.h"

#include <algorithm>
#include <cstring>

namespace ldr {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotated(uint32_t v, int bits) { return v >> bits | v << (32 - bits); }

uint32_t big_endian(const uint8_t *p) { return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3]; }

void put_big_endian(uint8_t *p, uint32_t v) {
  for (int i = 0; i < 4; ++i) p[i] = uint8_t(v >> (24 - 8 * i));
}

}  // namespace

void Sha256::compress(const uint8_t *block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    uint32_t s0 = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t s1 = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    uint32_t t1 = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    uint32_t t2 = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::add(const void *data, size_t size_bytes) {
  auto *from = static_cast<const uint8_t *>(data);
  while (size_bytes > 0) {
    size_t used = size_bytes_ % 64, part = std::min(size_bytes, 64 - used);
    memcpy(block_.data() + used, from, part);
    from += part, size_bytes -= part, size_bytes_ += part;
    if (size_bytes_ % 64 == 0) compress(block_.data());
  }
}

Digest Sha256::finish() {
  uint64_t bits = size_bytes_ * 8;
  uint8_t one = 0x80, zero = 0, length[8];
  add(&one, 1);
  while (size_bytes_ % 64 != 56) add(&zero, 1);
  put_big_endian(length, uint32_t(bits >> 32));
  put_big_endian(length + 4, uint32_t(bits));
  add(length, 8);
  Digest digest;
  for (int i = 0; i < 8; ++i) put_big_endian(digest.data() + 4 * i, state_[i]);
  return digest;
}

HmacSha256::HmacSha256(const void *key, size_t key_bytes) {
  std::array<uint8_t, 64> block{}, inner_pad;
  if (key_bytes > block.size()) {
    Sha256 hash;
    hash.add(key, key_bytes);
    Digest digest = hash.finish();
    std::copy(digest.begin(), digest.end(), block.begin());
  } else if (key_bytes > 0) {
    memcpy(block.data(), key, key_bytes);
  }
  for (size_t i = 0; i < block.size(); ++i) {
    inner_pad[i] = block[i] ^ 0x36;
    outer_pad_[i] = block[i] ^ 0x5c;
  }
  inner_.add(inner_pad.data(), inner_pad.size());
}

Digest HmacSha256::finish() {
  Digest digest = inner_.finish();
  Sha256 outer;
  outer.add(outer_pad_.data(), outer_pad_.size());
  outer.add(digest.data(), digest.size());
  return outer.finish();
}

bool equal_in_constant_time(const uint8_t *a, const uint8_t *b, size_t size_bytes) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < size_bytes; ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace ldr
