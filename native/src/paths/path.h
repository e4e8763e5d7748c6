// A data path moves the pieces of one transfer. All paths have this face.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../link.h"
#include "../op.h"
#include "../plan.h"

namespace ldr {

struct CopyJob {
  std::shared_ptr<Link> link;
  OpPtr op;
  uint32_t direction = LDR_PULL;
  CachePtr local, remote;
  std::vector<Piece> pieces;
  // The source's identity, compared before and after (shm, cma) or by the owner with every frame (unix, tcp).
  uint32_t cache_slot = 0;
  uint64_t cache_version = 0;
  bool has_grant = false;
  uint32_t grant_slot = 0;
  uint64_t grant_version = 0;

  // Version words unchanged, peer alive, link still the same, local cache still registered, operation not stopped: asked before and after every batch.
  // NO_CACHE, STALE, LINK_BROKEN or the stop's own code. Local memory is touched only between a check() that passed and its end, under CacheTable::read_guard.
  Status check() const;
};

// A job of up to this size on shm or cma is done by the thread that asks for it: handing it over costs more than copying it.
constexpr uint64_t kInlineBytes = 1u << 20;

class Path {
 public:
  virtual ~Path() = default;
  // Calls done exactly once, from any thread, when no byte of the job can move any more; a small job runs on the calling thread. bad_alloc: nothing moves and
  // done is not called.
  virtual void run(std::shared_ptr<CopyJob> job, std::function<void(Status)> done) = 0;
};

Path &shm_path();
Path &cma_path();
Path &stream_path();  // unix and tcp

// Shared by shm and cma: splits by bytes over the copy threads, batches of at most max_batch_bytes with job.check() around each.
// copy moves pieces [first, last) and returns a short description on failure.
using BatchCopy = std::function<Status(const CopyJob &job, size_t first, size_t last)>;
void run_batches(std::shared_ptr<CopyJob> job, uint64_t max_batch_bytes, uint32_t max_batch_pieces, BatchCopy copy, std::function<void(Status)> done);

}  // namespace ldr
