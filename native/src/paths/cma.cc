// Same host, any memory of the peer's process: process_vm_readv and process_vm_writev. That the kernel allows it was probed when the link was made.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "path.h"

namespace ldr {

namespace {

constexpr uint64_t kBatchBytes = 4u << 20;
constexpr uint32_t kBatchPieces = 1024;  // IOV_MAX

// The kernel does not say on which side the fault was.
bool is_local_fault(const Piece &piece) {
  for (uint64_t at : {piece.local_address, piece.local_address + piece.size_bytes - 1}) {
    uint8_t byte;
    iovec to{&byte, 1}, from{reinterpret_cast<void *>(at), 1};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1) return true;
  }
  return false;
}

Status fault(const CopyJob &job, size_t first, size_t last, uint64_t moved) {
  size_t i = first;
  while (i + 1 < last && moved >= job.pieces[i].size_bytes) moved -= job.pieces[i++].size_bytes;
  const Piece &piece = job.pieces[i];
  if (is_local_fault(piece)) {
    return fail(LDR_ERR_INVALID, "local memory at 0x%llx (%llu bytes of cache %lld) is not accessible", (unsigned long long)piece.local_address,
                (unsigned long long)piece.size_bytes, (long long)job.local->id);
  }
  return fail(LDR_ERR_NO_CACHE, "remote memory is gone: tensor %u of cache %lld at offset %llu", piece.remote_tensor, (long long)job.remote->id,
              (unsigned long long)piece.remote_offset);
}

Status copy(const CopyJob &job, size_t first, size_t last) {
  iovec local[kBatchPieces], remote[kBatchPieces];
  uint64_t total = 0;
  size_t n = 0;
  for (size_t i = first; i < last; ++i, ++n) {
    const Piece &piece = job.pieces[i];
    local[n] = {reinterpret_cast<void *>(piece.local_address), piece.size_bytes};
    remote[n] = {reinterpret_cast<void *>(job.remote->addresses[piece.remote_tensor] + piece.remote_offset), piece.size_bytes};
    total += piece.size_bytes;
  }
  auto move = job.direction == LDR_PULL ? process_vm_readv : process_vm_writev;
  ssize_t moved = move(job.link->facts().peer_pid, local, n, remote, n, 0);
  if (moved == ssize_t(total)) return Status::success();
  if (moved >= 0) return fault(job, first, last, uint64_t(moved));
  if (errno == EFAULT) return fault(job, first, last, 0);
  if (errno == ESRCH) return fail(LDR_ERR_LINK_BROKEN, "the peer's process is gone");
  return fail_errno(LDR_ERR_SYSTEM, "%s of process %d", job.direction == LDR_PULL ? "process_vm_readv" : "process_vm_writev", int(job.link->facts().peer_pid));
}

class CmaPath : public Path {
 public:
  void run(std::shared_ptr<CopyJob> job, bool may_run_inline, std::function<void(Status)> done) override {
    run_batches(std::move(job), may_run_inline, kBatchBytes, kBatchPieces, copy, std::move(done));
  }
};

}  // namespace

Path &cma_path() {
  static CmaPath path;
  return path;
}

}  // namespace ldr
