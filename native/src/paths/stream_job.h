// One transfer on the stream path: its pieces are cut into chunks, which the link's data connections claim one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "path.h"
#include "stream_frames.h"

namespace ldr {

class StreamJob {
 public:
  StreamJob(std::shared_ptr<CopyJob> copy, uint64_t chunk_bytes, std::function<void(Status)> done);

  const CopyJob &copy() const { return *copy_; }
  bool is_write() const { return copy_->direction == LDR_PUSH; }
  // The next chunk; false when there is none left, one has failed or the operation was stopped. Each claim (and each hold) is answered by one settle().
  bool claim(ChunkRequest *request_p, Scatter *local_p);
  void hold();
  // The first failure wins. Runs done when it is the last one: call it without locks.
  void settle(const Status &status, uint64_t bytes_moved) noexcept;

 private:
  const std::shared_ptr<CopyJob> copy_;
  const uint64_t chunk_bytes_;
  std::function<void(Status)> done_;
  std::mutex mutex_;
  size_t next_piece_ = 0;
  uint64_t next_offset_ = 0;  // inside that piece
  uint32_t outstanding_ = 0;
  Status failure_;
};

}  // namespace ldr
