#include "stream_job.h"

#include <algorithm>

#include "stream.h"
#include "stream_connection.h"

namespace ldr {
namespace {

// Below this a second connection costs more than it brings; above kMaxChunkBytes chunks only take longer to be stopped.
constexpr uint64_t kMinShareBytes = 256u << 10;

class StreamPath : public Path {
 public:
  void run(std::shared_ptr<CopyJob> job, std::function<void(Status)> done) override {
    const auto connections = job->link->data();
    if (connections.empty()) {
      const bool is_up = job->link->ready();  // a link that is down gives up its connections
      done(is_up ? fail(LDR_ERR_NO_PATH, "%s has no data connections", job->link->name().c_str()) : job->link->why_down());
      return;
    }
    const uint64_t total_bytes = sum_bytes(job->pieces);
    const uint64_t shares = std::min<uint64_t>(connections.size(), total_bytes / kMinShareBytes + 1);
    const uint64_t chunk_bytes = std::clamp(total_bytes / (shares * 2) + 1, kMinShareBytes, kMaxChunkBytes);
    const bool is_small = shares == 1 && total_bytes <= kMaxChunkBytes;
    const uint64_t first = job->op->id;
    LinkPtr link = job->link;
    auto stream_job = std::make_shared<StreamJob>(std::move(job), chunk_bytes, std::move(done));
    stream_job->hold();
    Status started;
    try {
      for (uint64_t i = 0; i < shares; ++i) connections[(first + i) % connections.size()]->impl().attach(stream_job, is_small);
    } catch (const std::bad_alloc &) {
      started = out_of_memory();  // what is under way ends first
    }
    stream_job->settle(started, 0);
  }
};

}  // namespace

StreamJob::StreamJob(std::shared_ptr<CopyJob> copy, uint64_t chunk_bytes, std::function<void(Status)> done)
    : copy_(std::move(copy)), chunk_bytes_(chunk_bytes), done_(std::move(done)) {}

bool StreamJob::claim(ChunkRequest *request_p, Scatter *local_p) {
  std::lock_guard lock(mutex_);
  if (next_piece_ == copy_->pieces.size() || !failure_.ok() || copy_->op->stopped()) return false;
  ChunkRequest request;
  request.cache_slot = copy_->cache_slot;
  request.cache_version = copy_->cache_version;
  request.has_grant = copy_->has_grant;
  request.grant_slot = copy_->grant_slot;
  request.grant_version = copy_->grant_version;
  while (next_piece_ < copy_->pieces.size() && request.size_bytes < chunk_bytes_ && request.pieces.size() < kMaxChunkPieces) {
    const Piece &piece = copy_->pieces[next_piece_];
    uint64_t size = std::min(piece.size_bytes - next_offset_, chunk_bytes_ - request.size_bytes);
    if (size > 0) {
      request.pieces.push_back({piece.remote_tensor, uint32_t(size), piece.remote_offset + next_offset_});
      local_p->add(piece.local_address + next_offset_, size);
      request.size_bytes += size;
      next_offset_ += size;
    }
    if (next_offset_ == piece.size_bytes) {
      ++next_piece_;
      next_offset_ = 0;
    }
  }
  if (request.pieces.empty()) return false;
  *request_p = std::move(request);
  ++outstanding_;
  return true;
}

void StreamJob::hold() {
  std::lock_guard lock(mutex_);
  ++outstanding_;
}

void StreamJob::settle(const Status &status, uint64_t bytes_moved) noexcept {
  copy_->op->bytes_done.fetch_add(bytes_moved, std::memory_order_relaxed);
  Status result;
  std::function<void(Status)> done;
  {
    std::lock_guard lock(mutex_);
    try {
      if (failure_.ok() && !status.ok()) failure_ = status;
    } catch (const std::bad_alloc &) {
      failure_ = out_of_memory();
    }
    if (--outstanding_ > 0) return;
    // A connection claims its next chunk before it settles one, so nobody goes on from here. What follows from a stop is not the reason.
    const bool is_complete = failure_.ok() && next_piece_ == copy_->pieces.size();
    try {
      result = !is_complete && copy_->op->stopped() ? copy_->op->stop_status() : failure_;
    } catch (const std::bad_alloc &) {
      result = out_of_memory();
    }
    done = std::move(done_);
  }
  done(std::move(result));
}

Path &stream_path() {
  static StreamPath path;
  return path;
}

}  // namespace ldr
