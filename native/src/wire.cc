#include "wire.h"

#include <algorithm>

namespace ldr {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "scalars are copied as they lie in memory");

constexpr size_t kMaxTextBytes = 1024;

void Writer::raw(const void *data, size_t size) {
  auto *bytes = static_cast<const uint8_t *>(data);
  bytes_.insert(bytes_.end(), bytes, bytes + size);
}

void Writer::text(const std::string &s) {
  size_t size = std::min(s.size(), kMaxTextBytes);
  u16(uint16_t(size));
  raw(s.data(), size);
}

const uint8_t *Reader::raw(size_t size) {
  if (!ok_ || size > left_) {
    ok_ = false;
    left_ = 0;
    return nullptr;
  }
  const uint8_t *at = data_;
  data_ += size;
  left_ -= size;
  return at;
}

std::string Reader::text() {
  uint16_t size = u16();
  if (size > kMaxTextBytes) ok_ = false;
  const uint8_t *bytes = raw(size);
  return bytes ? std::string(reinterpret_cast<const char *>(bytes), size) : std::string();
}

}  // namespace ldr
