// What travels on a data connection, and the owner's checks of it. Every frame is a FrameHeader whose call_id is the chunk id, chosen by the requester:
//   kRead      payload: a ChunkRequest
//   kReadData  payload_bytes raw bytes (all of the chunk, or none when refused at once), then an int32 status
//   kWrite     payload: a ChunkRequest; then the chunk's raw bytes
//   kWriteDone payload: an int32 status
// The byte stream stays in step whatever happens to the memory: zeros are sent and bytes are dropped where a cache went away, and the status says so.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "../status.h"
#include "../wire.h"

namespace ldr {

class Engine;
class Link;

constexpr uint64_t kMaxChunkBytes = 1u << 20;
constexpr uint32_t kMaxChunkPieces = 4096;
constexpr uint32_t kMaxRequestBytes = 40 + kMaxChunkPieces * 16;

struct ChunkPiece {
  uint32_t tensor, size_bytes;
  uint64_t offset;
};

struct ChunkRequest {
  uint32_t cache_slot = 0;
  uint64_t cache_version = 0;
  bool has_grant = false;
  uint32_t grant_slot = 0;
  uint64_t grant_version = 0;
  std::vector<ChunkPiece> pieces;
  uint64_t size_bytes = 0;  // of all pieces; derived, not sent
  uint64_t window = 0;      // set by locate_chunk: the pin that allows the write; not sent
};

void encode_request(const ChunkRequest &request, Writer &out);
bool decode_request(Reader in, ChunkRequest *request_p);  // false: malformed or beyond the limits above

// Memory in several parts, moved front to back.
class Scatter {
 public:
  void add(uint64_t address, uint64_t size_bytes);
  uint64_t left() const { return left_; }
  unsigned fill(iovec *out, unsigned capacity, uint64_t max_bytes) const;  // the next parts
  void consume(uint64_t size_bytes);
  void redirect(uint8_t *buffer, uint64_t buffer_bytes);  // what is left goes to or comes from this buffer, again and again

 private:
  std::vector<iovec> parts_;
  size_t next_ = 0;
  uint64_t left_ = 0;
};

// The owner's side. OK, NO_CACHE (forgotten), STALE (the grant ended) or INVALID (a range or a right that is not there).
// Reads are for everybody with a link; in two-sided mode a write needs a window that a look-up over this link has opened (pins.h).
ldr_status_t locate_chunk(const Engine &engine, const Link *link, bool is_write, ChunkRequest *request_p, Scatter *memory_p);
// Whether what was located is still there; cheap, asked around each touch, under CacheTable::read_guard.
ldr_status_t recheck_chunk(const Engine &engine, const ChunkRequest &request);
// A status that a peer may send for a chunk.
bool is_chunk_status(int32_t status);

}  // namespace ldr
