// Memory of this process that same-host peers can map: sealed memfds, kept in a process-wide table (they belong to no engine). The table is under the fork mutex, so
// that a forked child, which shares the memory, finds it whole and unlocked.
#pragma once

#include <cstdint>

#include "fd.h"
#include "status.h"

namespace ldr {

enum class Populate {
  kHuge,  // what can be huge pages, as far as the kernel goes along
  kFull,  // that, and every other page too; NO_MEMORY when they are not there
  kLazy,  // nothing: pages come with their first touch
};
Status shared_alloc(uint64_t size_bytes, void **address_p, uint64_t *huge_bytes_p, Populate populate = Populate::kHuge);
Status shared_free(void *address);
// Which mapping holds [address, address + size)? Ids are never re-used and not 0; false when none does.
bool shared_find(uint64_t address, uint64_t size_bytes, uint64_t *mapping_id_p, uint64_t *offset_p);
// A duplicate of the mapping's descriptor, to be passed to a peer; empty when it is gone (errno ENOENT), or when no descriptor is left.
Fd shared_fd(uint64_t mapping_id);
// Seals demanded of a descriptor before it is mapped: nobody can make us fault by shrinking it.
bool is_sealed(int fd);

}  // namespace ldr
