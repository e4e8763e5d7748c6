// How shm and cma divide a job: by bytes, over the copy threads, one batch at a time.
#include <algorithm>
#include <mutex>

#include "../engine.h"
#include "path.h"

namespace ldr {

namespace {

constexpr uint64_t kMinBatchBytes = 256u << 10;

// So that no batch is larger than the rest can balance, however the pieces were merged.
void split_large_pieces(std::vector<Piece> &pieces, uint64_t max_bytes) {
  if (std::all_of(pieces.begin(), pieces.end(), [&](const Piece &p) { return p.size_bytes <= max_bytes; })) return;
  std::vector<Piece> parts;
  parts.reserve(pieces.size() + pieces.size() / 2);
  for (Piece piece : pieces) {
    while (piece.size_bytes > max_bytes) {
      parts.push_back({piece.local_address, piece.remote_offset, max_bytes, piece.remote_tensor});
      piece.local_address += max_bytes;
      piece.remote_offset += max_bytes;
      piece.size_bytes -= max_bytes;
    }
    parts.push_back(piece);
  }
  pieces.swap(parts);
}

struct Batch {
  size_t first, last;
  uint64_t size_bytes;
};

std::vector<Batch> make_batches(const std::vector<Piece> &pieces, uint64_t max_bytes, uint32_t max_pieces) {
  std::vector<Batch> batches;
  for (size_t i = 0; i < pieces.size(); ++i) {
    uint64_t size = pieces[i].size_bytes;
    if (batches.empty() || batches.back().size_bytes + size > max_bytes || i - batches.back().first >= max_pieces) batches.push_back({i, i, 0});
    batches.back().last = i + 1;
    batches.back().size_bytes += size;
  }
  return batches;
}

class BatchRun : public std::enable_shared_from_this<BatchRun> {
 public:
  BatchRun(std::shared_ptr<CopyJob> job, std::vector<Batch> batches, BatchCopy copy, std::function<void(Status)> done)
      : job_(std::move(job)), batches_(std::move(batches)), copy_(std::move(copy)), done_(std::move(done)) {}

  void run_here() {
    for (size_t i = 0; i < batches_.size() && !failed_; ++i) run_one(batches_[i]);
    done_(std::move(failure_));
  }

  // bad_alloc: nothing has begun. One worker only; it fetches the others, which may be missing then.
  void run_on_pool() {
    pool().submit([self = shared_from_this()] { self->begin(); });
  }

 private:
  CopyPool &pool() const { return job_->link->engine().pool; }
  bool try_submit() {
    try {
      pool().submit([self = shared_from_this()] { self->work(); });
      return true;
    } catch (const std::bad_alloc &) {
      return false;
    }
  }

  void begin() {
    const size_t num_workers = std::min<size_t>(pool().num_threads(), batches_.size());
    for (size_t i = 1; i < num_workers; ++i) {
      ++workers_;
      if (!try_submit()) --workers_;
    }
    work();
  }

  void work() {
    size_t i;
    while ((i = next_.fetch_add(1, std::memory_order_relaxed)) < batches_.size() && !failed_) {
      run_one(batches_[i]);
      // One batch per turn: a large job does not keep the threads from other links and from what peers ask of us.
      if (try_submit()) return;
    }
    if (workers_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_(std::move(failure_));
  }

  void run_one(const Batch &batch) noexcept {
    Status status;
    try {
      auto guard = job_->link->engine().caches.read_guard();
      status = job_->check();
      if (status.ok()) status = copy_(*job_, batch.first, batch.last);
      // What the kernel or memcpy gave is worth nothing if the source changed or died meanwhile; that is also the better explanation of a fault.
      if (Status after = job_->check(); !after.ok()) status = std::move(after);
    } catch (const std::bad_alloc &) {
      status = out_of_memory();
    }
    if (status.ok()) {
      job_->op->bytes_done.fetch_add(batch.size_bytes, std::memory_order_relaxed);
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failed_) failure_ = std::move(status);
      failed_ = true;
    }
  }

  const std::shared_ptr<CopyJob> job_;
  const std::vector<Batch> batches_;
  const BatchCopy copy_;
  const std::function<void(Status)> done_;
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> workers_{1};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  Status failure_;  // written under mutex_, read when no worker is left
};

}  // namespace

Status CopyJob::check() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // between the bytes and the words
  if (op->stopped()) return op->stop_status();
  if (!link->ready()) {
    Status why = link->why_down();
    return fail(LDR_ERR_LINK_BROKEN, "the link went down: %s", why.text.c_str());
  }
  if (link->peer_gone()) return fail(LDR_ERR_LINK_BROKEN, "the peer's process died during the operation");
  if (const PeerPage *page = link->page()) {
    if (has_grant && page->grant_version(grant_slot) != grant_version) return fail(LDR_ERR_STALE, "the grant ended during the operation");
    if (page->cache_version(cache_slot) != cache_version) {
      return fail(LDR_ERR_NO_CACHE, "the peer forgot its cache %lld during the operation", (long long)remote->id);
    }
  }
  if (!link->engine().caches.find_slot(local->slot, local->version)) {
    return fail(LDR_ERR_NO_CACHE, "the local cache %lld was unregistered during the operation", (long long)local->id);
  }
  return Status::success();
}

void run_batches(std::shared_ptr<CopyJob> job, uint64_t max_batch_bytes, uint32_t max_batch_pieces, BatchCopy copy, std::function<void(Status)> done) {
  const uint64_t total = sum_bytes(job->pieces);
  const bool run_inline = total <= kInlineBytes;
  // A few batches for each thread, so that they end together.
  uint64_t share = total / (uint64_t(job->link->engine().pool.num_threads()) * 4);
  uint64_t batch_bytes = run_inline ? max_batch_bytes : std::clamp(share, std::min(kMinBatchBytes, max_batch_bytes), max_batch_bytes);
  split_large_pieces(job->pieces, batch_bytes);
  std::vector<Batch> batches = make_batches(job->pieces, batch_bytes, max_batch_pieces);
  auto run = std::make_shared<BatchRun>(std::move(job), std::move(batches), std::move(copy), std::move(done));
  if (run_inline) {
    run->run_here();
  } else {
    run->run_on_pool();
  }
}

}  // namespace ldr
