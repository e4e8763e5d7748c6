// The bytes between two engines: little-endian frames with a fixed header, written and read by bounds-checked cursors.
// The reader is a pure function of its bytes; no input can make it read outside them or abort.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ldr {

constexpr uint32_t kProtocolVersion = 2;
constexpr uint32_t kMaxHandshakeFrameBytes = 4096;  // before the peer has proved itself
constexpr uint32_t kMaxFrameBytes = 2u << 20;       // afterwards: a cache table may be 1 MiB

enum class FrameType : uint16_t {
  // handshake, on fresh connections only (handshake.h)
  kHello = 1, kHelloReply, kAuth, kWelcome, kReject, kAttach, kAttachReply, kDataHello, kDataWelcome, kReady, kReadyReply,
  // control, on a link (link.cc)
  kReply = 32, kHeartbeat, kUnlink, kProbe,
  // control, served for the peer (serve.cc)
  kTable = 48, kLookup, kMapping, kGrantOpen, kGrantClose, kDone,
  // data connections (paths/stream.cc)
  kRead = 64, kReadData, kWrite, kWriteDone,
};

// Precedes every frame. call_id pairs a kReply with its request; 0 where there is none.
struct FrameHeader {
  uint32_t payload_bytes;
  uint16_t type;
  uint16_t num_fds;  // 1: a descriptor travels with the frame (Unix sockets only)
  uint64_t call_id;
};
static_assert(sizeof(FrameHeader) == 16);

class Writer {
 public:
  void u8(uint8_t v) { raw(&v, 1); }
  void u16(uint16_t v) { raw(&v, 2); }
  void u32(uint32_t v) { raw(&v, 4); }
  void u64(uint64_t v) { raw(&v, 8); }
  void i64(int64_t v) { raw(&v, 8); }
  void raw(const void *data, size_t size);
  void text(const std::string &s);  // u16 length + bytes, cut at 1024
  const std::vector<uint8_t> &bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// After the first read past the end every value is 0 and ok() stays false: check once, at the end.
class Reader {
 public:
  Reader() = default;
  Reader(const uint8_t *data, size_t size) : data_(data), left_(size) {}
  uint8_t u8() { return scalar<uint8_t>(); }
  uint16_t u16() { return scalar<uint16_t>(); }
  uint32_t u32() { return scalar<uint32_t>(); }
  uint64_t u64() { return scalar<uint64_t>(); }
  int64_t i64() { return scalar<int64_t>(); }
  const uint8_t *raw(size_t size);  // nullptr past the end
  std::string text();
  size_t left() const { return left_; }
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && left_ == 0; }

 private:
  template <typename T> T scalar() {
    T value = 0;
    if (const uint8_t *p = raw(sizeof(T))) __builtin_memcpy(&value, p, sizeof(T));
    return value;
  }
  const uint8_t *data_ = nullptr;
  size_t left_ = 0;
  bool ok_ = true;
};

}  // namespace ldr
