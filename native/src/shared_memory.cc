#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ldr {
namespace {

constexpr uint64_t kHugePageBytes = 2u << 20;

struct Mapping {
  uint64_t id;
  uint64_t size_bytes;
  Fd fd;
};

struct Mappings {  // all of it under the fork mutex
  std::map<uint64_t, Mapping> by_address;
  uint64_t next_id = 1;
};

// Never destroyed: memory may be freed by a thread that outlives static destructors.
Mappings &mappings() {
  static auto *const table = new Mappings;
  return *table;
}

// Maps the descriptor at an address that is a multiple of 2 MiB, so that the kernel can back it with huge pages.
void *map_aligned(int fd, uint64_t size_bytes) {
  uint64_t span = size_bytes + kHugePageBytes;
  void *reserved = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  uint64_t begin = reinterpret_cast<uint64_t>(reserved);
  uint64_t aligned = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void *mapped = mmap(reinterpret_cast<void *>(aligned), size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  int error = errno;
  if (mapped == MAP_FAILED) {
    munmap(reserved, span);
  } else {
    if (aligned > begin) munmap(reserved, aligned - begin);
    uint64_t end = aligned + size_bytes;
    if (begin + span > end) munmap(reinterpret_cast<void *>(end), begin + span - end);
  }
  errno = error;
  return mapped;
}

// An untouched range cannot be collapsed, a fully populated one costs several times more: so one touch for each 2 MiB. Best effort: returns the bytes that
// are huge now, and leaves the rest untouched once the kernel has said no.
uint64_t make_huge(uint8_t *base, uint64_t size_bytes) {
  uint64_t huge_bytes = 0;
  for (uint64_t at = 0; size_bytes - at >= kHugePageBytes; at += kHugePageBytes) {
    *static_cast<volatile uint8_t *>(base + at) = 0;
    if (madvise(base + at, kHugePageBytes, MADV_COLLAPSE) == 0) {
      huge_bytes += kHugePageBytes;
    } else if (errno != EAGAIN) {
      break;
    }
  }
  return huge_bytes;
}

// Every page is there afterwards. Kernels before 5.14 do not know the advice; they allocate the file's pages instead.
bool populate_all(int fd, void *base, uint64_t size_bytes) {
  if (madvise(base, size_bytes, MADV_POPULATE_WRITE) == 0) return true;
  return errno == EINVAL && fallocate(fd, 0, 0, off_t(size_bytes)) == 0;
}

}  // namespace

Status shared_alloc(uint64_t size_bytes, void **address_p, uint64_t *huge_bytes_p, Populate populate) {
  if (!address_p) return fail(LDR_ERR_INVALID, "shared memory: no place for the address");
  if (size_bytes == 0 || size_bytes > uint64_t(1) << 46) {
    return fail(LDR_ERR_INVALID, "shared memory: %llu bytes asked for; give 1 byte to 64 TiB", (unsigned long long)size_bytes);
  }
  const uint64_t page_bytes = uint64_t(sysconf(_SC_PAGESIZE));
  size_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
  Fd fd(memfd_create("llm_datadist_ray", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(LDR_ERR_SYSTEM, "shared memory: memfd_create");
  if (ftruncate(fd.get(), off_t(size_bytes)) != 0) {
    return fail_errno(LDR_ERR_NO_MEMORY, "shared memory: ftruncate to %llu bytes", (unsigned long long)size_bytes);
  }
  // Never F_SEAL_WRITE: it is refused while mapped and would forbid pushes.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(LDR_ERR_SYSTEM, "shared memory: sealing");
  }
  void *address = map_aligned(fd.get(), size_bytes);
  if (address == MAP_FAILED) return fail_errno(LDR_ERR_NO_MEMORY, "shared memory: mmap of %llu bytes", (unsigned long long)size_bytes);
  uint64_t huge_bytes = populate == Populate::kLazy ? 0 : make_huge(static_cast<uint8_t *>(address), size_bytes);
  if (populate == Populate::kFull && !populate_all(fd.get(), address, size_bytes)) {
    Status status = fail_errno(LDR_ERR_NO_MEMORY, "shared memory: reserving %llu bytes", (unsigned long long)size_bytes);
    munmap(address, size_bytes);
    return status;
  }

  std::map<uint64_t, Mapping> entry;
  entry.emplace(reinterpret_cast<uint64_t>(address), Mapping{0, size_bytes, std::move(fd)});
  Mappings &table = mappings();
  {
    std::lock_guard lock(fork_mutex());  // nothing in here may fail: what is closed on the way out takes this mutex too
    entry.begin()->second.id = table.next_id++;
    table.by_address.merge(entry);
  }
  *address_p = address;
  if (huge_bytes_p) *huge_bytes_p = huge_bytes;
  return Status::success();
}

Status shared_free(void *address) {
  Mappings &table = mappings();
  std::map<uint64_t, Mapping>::node_type freed;  // its descriptor is closed without the lock
  {
    std::lock_guard lock(fork_mutex());
    freed = table.by_address.extract(reinterpret_cast<uint64_t>(address));
  }
  if (!freed) return fail(LDR_ERR_INVALID, "shared memory: %p is not the start of a live allocation", address);
  munmap(address, freed.mapped().size_bytes);  // takes long when it is large
  return Status::success();
}

bool shared_find(uint64_t address, uint64_t size_bytes, uint64_t *mapping_id_p, uint64_t *offset_p) {
  Mappings &table = mappings();
  std::lock_guard lock(fork_mutex());
  auto it = table.by_address.upper_bound(address);
  if (it == table.by_address.begin()) return false;
  --it;
  uint64_t offset = address - it->first;
  if (offset >= it->second.size_bytes || size_bytes > it->second.size_bytes - offset) return false;
  *mapping_id_p = it->second.id;
  *offset_p = offset;
  return true;
}

Fd shared_fd(uint64_t mapping_id) {
  Mappings &table = mappings();
  std::lock_guard lock(fork_mutex());
  for (const auto &[address, mapping] : table.by_address) {
    if (mapping.id == mapping_id) return Fd(fcntl(mapping.fd.get(), F_DUPFD_CLOEXEC, 0));
  }
  errno = ENOENT;
  return Fd();
}

bool is_sealed(int fd) {
  constexpr int kDemanded = F_SEAL_SHRINK | F_SEAL_GROW;
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kDemanded) == kDemanded;
}

}  // namespace ldr
