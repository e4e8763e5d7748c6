// Same host, remote tensors inside mappings that are mapped here: plain copies.
#include <cstring>

#include "path.h"

namespace ldr {

namespace {

constexpr uint64_t kBatchBytes = 4u << 20;  // about a millisecond: how long a stop waits
constexpr uint32_t kBatchPieces = 65536;

class ShmPath : public Path {
 public:
  void run(std::shared_ptr<CopyJob> job, std::function<void(Status)> done) override {
    const Cache &remote = *job->remote;
    std::vector<uint8_t *> bases(remote.num_tensors(), nullptr);
    for (const Piece &piece : job->pieces) {
      uint8_t *&base = bases[piece.remote_tensor];
      if (base) continue;
      uint32_t i = piece.remote_tensor;
      base = job->link->mappings.address(remote, i);
      if (!base) return done(fail(LDR_ERR_LINK_BROKEN, "tensor %u of the remote cache %lld is not mapped here any more", i, (long long)remote.id));
    }
    auto copy = [bases = std::move(bases)](const CopyJob &job, size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        const Piece &piece = job.pieces[i];
        uint8_t *remote_at = bases[piece.remote_tensor] + piece.remote_offset;
        void *local_at = reinterpret_cast<void *>(piece.local_address);
        if (job.direction == LDR_PULL) {
          std::memcpy(local_at, remote_at, piece.size_bytes);
        } else {
          std::memcpy(remote_at, local_at, piece.size_bytes);
        }
      }
      return Status::success();
    };
    run_batches(std::move(job), kBatchBytes, kBatchPieces, std::move(copy), std::move(done));
  }
};

}  // namespace

Path &shm_path() {
  static ShmPath path;
  return path;
}

}  // namespace ldr
