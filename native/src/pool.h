// Memory for allocated caches: pages of one sealed shared mapping for each placement (spec api-config 3.1, api-cachemanager 4).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "status.h"

namespace ldr {

// Keeps pages of a pool, and the pool: they are free again when the last owner is gone. Nobody looks inside.
using PoolMemory = std::shared_ptr<const void>;

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static Status create(const ldr_pool_params_t &params, std::shared_ptr<Pool> *pool_p);
  ~Pool();
  // count ranges of whole pages, each of at least size_bytes and in the smallest free range that holds it; all of them, or POOL_FULL and none. Any thread.
  Status allocate(uint64_t size_bytes, uint32_t count, PoolMemory *memory_p, std::vector<uint64_t> *addresses_p);
  ldr_pool_info_t info() const;

 private:
  Pool() = default;
  using FreeRanges = std::set<std::pair<uint64_t, uint64_t>>;  // number of pages, first page
  struct Range {
    uint64_t num_pages;
    FreeRanges::node_type entry = {};  // while it is used: what goes into free_ afterwards, so that a release needs no memory
    bool is_used() const { return !entry.empty(); }
  };
  using Ranges = std::map<uint64_t, Range>;  // by first page; together they cover the pool, and no two neighbours are free
  struct Allocation;

  Ranges::iterator take(uint64_t num_pages);  // end(): none is large enough
  void release(const std::vector<uint64_t> &first_pages) noexcept;
  Status full(uint64_t size_bytes, uint32_t count, uint32_t num_taken) const;
  ldr_pool_info_t count_ranges() const;

  void *base_ = nullptr;
  uint64_t page_bytes_ = 0, num_pages_ = 0, huge_bytes_ = 0;
  std::atomic<uint32_t> num_allocations_{0};
  mutable std::mutex mutex_;
  Ranges ranges_;
  FreeRanges free_;
};

// At most one for each placement.
class Pools {
 public:
  Status create(const ldr_pool_params_t &params);
  std::shared_ptr<Pool> find(uint32_t placement) const;  // nullptr: there is none

 private:
  mutable std::mutex mutex_;
  std::array<std::shared_ptr<Pool>, 2> pools_;
};

}  // namespace ldr
