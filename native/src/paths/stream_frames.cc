#include "stream_frames.h"

#include <algorithm>

#include "../engine.h"

namespace ldr {

void encode_request(const ChunkRequest &request, Writer &out) {
  out.u32(request.cache_slot);
  out.u64(request.cache_version);
  out.u8(request.has_grant ? 1 : 0);
  out.u32(request.grant_slot);
  out.u64(request.grant_version);
  out.u32(uint32_t(request.pieces.size()));
  for (const ChunkPiece &piece : request.pieces) {
    out.u32(piece.tensor);
    out.u32(piece.size_bytes);
    out.u64(piece.offset);
  }
}

bool decode_request(Reader in, ChunkRequest *request_p) {
  ChunkRequest request;
  request.cache_slot = in.u32();
  request.cache_version = in.u64();
  uint8_t has_grant = in.u8();
  request.has_grant = has_grant == 1;
  request.grant_slot = in.u32();
  request.grant_version = in.u64();
  uint32_t num_pieces = in.u32();
  if (!in.ok() || has_grant > 1 || num_pieces == 0 || num_pieces > kMaxChunkPieces || in.left() != num_pieces * 16u) return false;
  request.pieces.resize(num_pieces);
  for (ChunkPiece &piece : request.pieces) {
    piece.tensor = in.u32();
    piece.size_bytes = in.u32();
    piece.offset = in.u64();
    request.size_bytes += piece.size_bytes;
    if (piece.size_bytes == 0 || request.size_bytes > kMaxChunkBytes) return false;
  }
  *request_p = std::move(request);
  return true;
}

void Scatter::add(uint64_t address, uint64_t size_bytes) {
  parts_.push_back({reinterpret_cast<void *>(address), size_bytes});
  left_ += size_bytes;
}

unsigned Scatter::fill(iovec *out, unsigned capacity, uint64_t max_bytes) const {
  unsigned count = 0;
  for (size_t i = next_; i < parts_.size() && count < capacity && max_bytes > 0; ++i) {
    uint64_t size = std::min<uint64_t>(parts_[i].iov_len, max_bytes);
    out[count++] = {parts_[i].iov_base, size};
    max_bytes -= size;
  }
  return count;
}

void Scatter::consume(uint64_t size_bytes) {
  left_ -= size_bytes;
  while (size_bytes > 0) {
    iovec &part = parts_[next_];
    uint64_t size = std::min<uint64_t>(part.iov_len, size_bytes);
    part.iov_base = static_cast<uint8_t *>(part.iov_base) + size;
    part.iov_len -= size;
    size_bytes -= size;
    if (part.iov_len == 0) ++next_;
  }
}

void Scatter::redirect(uint8_t *buffer, uint64_t buffer_bytes) {
  uint64_t left = left_;
  *this = Scatter();
  while (left > 0) {
    uint64_t size = std::min(left, buffer_bytes);
    add(reinterpret_cast<uint64_t>(buffer), size);
    left -= size;
  }
}

ldr_status_t locate_chunk(const Engine &engine, const Link *link, bool is_write, ChunkRequest *request_p, Scatter *memory_p) {
  ChunkRequest &request = *request_p;
  if (request.has_grant && request.grant_slot >= kNumGrantSlots) return LDR_ERR_INVALID;
  if (ldr_status_t status = recheck_chunk(engine, request); status != LDR_OK) return status;
  CachePtr cache = engine.caches.find_slot(request.cache_slot, request.cache_version);
  if (!cache) return LDR_ERR_NO_CACHE;
  if (engine.config.remote_access && !cache->remote_accessible) return LDR_ERR_INVALID;
  if (!engine.config.remote_access && is_write && (request.window = engine.pins.find_window(link, request)) == 0) return LDR_ERR_INVALID;
  for (const ChunkPiece &piece : request.pieces) {
    if (piece.tensor >= cache->num_tensors() || piece.offset > cache->tensor_bytes || piece.size_bytes > cache->tensor_bytes - piece.offset) {
      return LDR_ERR_INVALID;
    }
  }
  for (const ChunkPiece &piece : request.pieces) memory_p->add(cache->addresses[piece.tensor] + piece.offset, piece.size_bytes);
  return LDR_OK;
}

ldr_status_t recheck_chunk(const Engine &engine, const ChunkRequest &request) {
  if (!engine.caches.find_slot(request.cache_slot, request.cache_version)) return LDR_ERR_NO_CACHE;
  if (request.has_grant && engine.page->grant_version(request.grant_slot) != request.grant_version) return LDR_ERR_STALE;
  if (request.window && !engine.pins.is_open(request.window)) return LDR_ERR_INVALID;
  return LDR_OK;
}

bool is_chunk_status(int32_t status) {
  return status == LDR_OK || status == LDR_ERR_NO_CACHE || status == LDR_ERR_STALE || status == LDR_ERR_INVALID;
}

}  // namespace ldr
