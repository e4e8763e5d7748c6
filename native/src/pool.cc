#include "pool.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "shared_memory.h"

namespace ldr {
namespace {

using ull = unsigned long long;

constexpr uint32_t kDefaultPageShift = 16, kMinPageShift = 10, kMaxPageShift = 30;

const char *placement_name(uint32_t placement) { return placement == LDR_PLACEMENT_HOST ? "host" : "device"; }

// UINT64_MAX: not known.
// The number behind a word at the start of a line, or of the file; UINT64_MAX when there is none.
uint64_t number_in(const char *path, const char *format) {
  uint64_t number = 0;
  bool is_found = false;
  FILE *file = fopen(path, "re");
  char line[128];
  while (file && !is_found && fgets(line, sizeof(line), file)) is_found = sscanf(line, format, &number) == 1;
  if (file) fclose(file);
  return is_found ? number : UINT64_MAX;
}

// What this machine has left, or the container that we are in.
uint64_t available_bytes() {
  const uint64_t kilobytes = number_in("/proc/meminfo", "MemAvailable: %" SCNu64 " kB");
  const uint64_t of_machine = kilobytes == UINT64_MAX ? kilobytes : kilobytes << 10;
  const uint64_t limit = number_in("/sys/fs/cgroup/memory.max", "%" SCNu64), used = number_in("/sys/fs/cgroup/memory.current", "%" SCNu64);
  if (limit == UINT64_MAX || used == UINT64_MAX) return of_machine;
  return std::min(of_machine, limit > used ? limit - used : 0);
}

}  // namespace

struct Pool::Allocation {
  explicit Allocation(std::shared_ptr<Pool> owner) : pool(std::move(owner)) { ++pool->num_allocations_; }
  ~Allocation() {
    pool->release(first_pages);
    --pool->num_allocations_;
  }
  const std::shared_ptr<Pool> pool;
  std::vector<uint64_t> first_pages;
};

Status Pool::create(const ldr_pool_params_t &params, std::shared_ptr<Pool> *pool_p) {
  const uint32_t shift = params.page_shift ? params.page_shift : kDefaultPageShift;
  if (shift < kMinPageShift || shift > kMaxPageShift) {
    return fail(LDR_ERR_INVALID, "create pool: page_shift is %u; %u to %u are allowed", shift, kMinPageShift, kMaxPageShift);
  }
  if (params.flags & ~uint32_t(LDR_POOL_LAZY)) return fail(LDR_ERR_INVALID, "create pool: unknown flags %#x", params.flags);
  const uint64_t num_pages = params.size_bytes >> shift, size_bytes = num_pages << shift;
  if (num_pages == 0 || num_pages >= UINT32_MAX) {
    return fail(LDR_ERR_INVALID, "create pool: %llu bytes are %llu pages of %llu bytes; 1 to %u are allowed", ull(params.size_bytes), ull(num_pages),
                1ull << shift, UINT32_MAX - 1);
  }
  const bool is_lazy = params.flags & LDR_POOL_LAZY;
  if (const uint64_t available = available_bytes(); !is_lazy && size_bytes > available) {
    return fail(LDR_ERR_NO_MEMORY, "create pool: %llu bytes for the %s pool, but %llu are available on this machine", ull(size_bytes),
                placement_name(params.placement), ull(available));
  }
  std::shared_ptr<Pool> pool(new Pool);
  pool->page_bytes_ = 1ull << shift;
  pool->num_pages_ = num_pages;
  pool->ranges_[0] = {num_pages};
  pool->free_.emplace(num_pages, 0);
  if (Status s = shared_alloc(size_bytes, &pool->base_, &pool->huge_bytes_, is_lazy ? Populate::kLazy : Populate::kFull); !s.ok()) {
    return fail(s.code == LDR_ERR_SYSTEM ? LDR_ERR_SYSTEM : LDR_ERR_NO_MEMORY, "create pool: %llu bytes for the %s pool: %s", ull(size_bytes),
                placement_name(params.placement), s.text.c_str());
  }
  *pool_p = std::move(pool);
  return Status::success();
}

Pool::~Pool() {
  if (base_) (void)shared_free(base_);
}

Status Pool::allocate(uint64_t size_bytes, uint32_t count, PoolMemory *memory_p, std::vector<uint64_t> *addresses_p) {
  const uint64_t num_pages = size_bytes / page_bytes_ + (size_bytes % page_bytes_ != 0);
  auto allocation = std::make_shared<Allocation>(shared_from_this());  // gives back what it has, without the mutex
  allocation->first_pages.reserve(count);
  std::vector<uint64_t> addresses;
  addresses.reserve(count);
  std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < count; ++i) {
    auto range = take(num_pages);
    if (range == ranges_.end()) return full(size_bytes, count, i);
    allocation->first_pages.push_back(range->first);
    addresses.push_back(reinterpret_cast<uint64_t>(base_) + range->first * page_bytes_);
  }
  *memory_p = std::move(allocation);
  *addresses_p = std::move(addresses);
  return Status::success();
}

Pool::Ranges::iterator Pool::take(uint64_t num_pages) {
  auto smallest = free_.lower_bound({num_pages, 0});
  if (smallest == free_.end()) return ranges_.end();
  const auto [found_pages, first_page] = *smallest;
  if (found_pages > num_pages) {
    const uint64_t rest_pages = found_pages - num_pages, rest_first = first_page + num_pages;
    Ranges rest_range;
    FreeRanges rest_entry;
    rest_range[rest_first] = {rest_pages};  // this and the next may throw: nothing is changed before
    rest_entry.emplace(rest_pages, rest_first);
    ranges_.merge(rest_range);
    free_.merge(rest_entry);
  }
  auto range = ranges_.find(first_page);
  range->second.num_pages = num_pages;
  range->second.entry = free_.extract(smallest);
  return range;
}

// Only merges ranges, so there is nothing that could fail.
void Pool::release(const std::vector<uint64_t> &first_pages) noexcept {
  std::lock_guard lock(mutex_);
  for (uint64_t first_page : first_pages) {
    auto it = ranges_.find(first_page);
    FreeRanges::node_type entry = std::move(it->second.entry);
    if (auto next = std::next(it); next != ranges_.end() && !next->second.is_used()) {
      free_.erase({next->second.num_pages, next->first});
      it->second.num_pages += next->second.num_pages;
      ranges_.erase(next);
    }
    if (auto before = it == ranges_.begin() ? ranges_.end() : std::prev(it); before != ranges_.end() && !before->second.is_used()) {
      free_.erase({before->second.num_pages, before->first});
      before->second.num_pages += it->second.num_pages;
      ranges_.erase(it);
      it = before;
    }
    entry.value() = {it->second.num_pages, it->first};
    free_.insert(std::move(entry));
  }
}

Status Pool::full(uint64_t size_bytes, uint32_t count, uint32_t num_taken) const {
  const ldr_pool_info_t now = count_ranges();
  return fail(LDR_ERR_POOL_FULL, "tensor %u of %u needs %llu bytes in whole pages of %llu, but the pool has %llu of %llu bytes free and the largest free range has %llu",
              num_taken, count, ull(size_bytes), ull(page_bytes_), ull(now.size_bytes - now.used_bytes), ull(now.size_bytes), ull(now.largest_free_bytes));
}

ldr_pool_info_t Pool::count_ranges() const {
  ldr_pool_info_t info{};
  info.size_bytes = num_pages_ * page_bytes_;
  info.page_bytes = page_bytes_;
  info.huge_bytes = huge_bytes_;
  info.num_allocations = num_allocations_;
  info.num_free_ranges = uint32_t(free_.size());
  if (!free_.empty()) info.largest_free_bytes = free_.rbegin()->first * page_bytes_;
  info.used_bytes = info.size_bytes;
  for (const auto &[num_pages, first_page] : free_) info.used_bytes -= num_pages * page_bytes_;
  return info;
}

ldr_pool_info_t Pool::info() const {
  std::lock_guard lock(mutex_);
  return count_ranges();
}

Status Pools::create(const ldr_pool_params_t &params) {
  if (params.placement > LDR_PLACEMENT_DEVICE) return fail(LDR_ERR_INVALID, "create pool: unknown placement %u", params.placement);
  auto taken = [&] { return fail(LDR_ERR_INVALID, "create pool: there is a %s pool already", placement_name(params.placement)); };
  if (find(params.placement)) return taken();
  std::shared_ptr<Pool> pool;  // takes long when it is large: without the mutex
  if (Status s = Pool::create(params, &pool); !s.ok()) return s;
  std::lock_guard lock(mutex_);
  if (pools_[params.placement]) return taken();
  pools_[params.placement] = std::move(pool);
  return Status::success();
}

std::shared_ptr<Pool> Pools::find(uint32_t placement) const {
  std::lock_guard lock(mutex_);
  return placement < pools_.size() ? pools_[placement] : nullptr;
}

}  // namespace ldr
