// Same host, any memory of the peer's process: process_vm_readv and process_vm_writev. That the kernel allows it was probed when the link was made.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "path.h"

namespace ldr {

namespace {

constexpr uint64_t kBatchBytes = 4u << 20;
constexpr uint32_t kBatchPieces = 1024;  // IOV_MAX

// One byte of each page.
bool is_readable(pid_t pid, uint64_t address, uint64_t size_bytes) {
  const uint64_t page_bytes = uint64_t(sysconf(_SC_PAGESIZE)), end = address + size_bytes;
  while (address < end) {
    uint8_t bytes[kBatchPieces];
    iovec from[kBatchPieces];
    size_t n = 0;
    for (; n < kBatchPieces && address < end; ++n, address = (address / page_bytes + 1) * page_bytes) from[n] = {reinterpret_cast<void *>(address), 1};
    iovec to{bytes, n};
    if (process_vm_readv(pid, &to, 1, from, n, 0) != ssize_t(n)) return false;
  }
  return true;
}

uint64_t remote_address(const CopyJob &job, const Piece &piece) { return job.remote->addresses[piece.remote_tensor] + piece.remote_offset; }

// The kernel does not say on which side the fault was: the target has it when the source can be read.
bool is_local_fault(const CopyJob &job, const Piece &piece) {
  if (job.direction == LDR_PUSH) return !is_readable(getpid(), piece.local_address, piece.size_bytes);
  return is_readable(job.link->facts().peer_pid, remote_address(job, piece), piece.size_bytes);
}

Status fault(const CopyJob &job, size_t first, size_t last, uint64_t moved) {
  size_t i = first;
  while (i + 1 < last && moved >= job.pieces[i].size_bytes) moved -= job.pieces[i++].size_bytes;
  const Piece &piece = job.pieces[i];
  if (is_local_fault(job, piece)) {
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
    remote[n] = {reinterpret_cast<void *>(remote_address(job, piece)), piece.size_bytes};
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
  void run(std::shared_ptr<CopyJob> job, std::function<void(Status)> done) override {
    run_batches(std::move(job), kBatchBytes, kBatchPieces, copy, std::move(done));
  }
};

}  // namespace

Path &cma_path() {
  static CmaPath path;
  return path;
}

}  // namespace ldr
