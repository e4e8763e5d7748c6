// The page allocator against a model, and what a pool refuses.
#include "pool.h"

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "shared_memory.h"

using namespace ldr;
using ldr_test::test;

namespace {

std::shared_ptr<Pool> make_pool(uint64_t size_bytes, uint32_t page_shift = 12, uint32_t flags = 0) {
  ldr_pool_params_t params{};
  params.struct_size = sizeof(params);
  params.placement = LDR_PLACEMENT_DEVICE;
  params.size_bytes = size_bytes;
  params.page_shift = page_shift;
  params.flags = flags;
  std::shared_ptr<Pool> pool;
  CHECK_OK(Pool::create(params, &pool));
  return pool;
}

struct Taken {
  PoolMemory memory;
  std::vector<uint64_t> addresses;
  uint64_t num_pages;
  uint8_t mark;
};

// Which pages are used, one by one.
struct Model {
  explicit Model(uint64_t num_pages) : is_used(num_pages) {}
  std::vector<bool> is_used;

  void set(uint64_t first, uint64_t count, bool used) {
    for (uint64_t i = first; i < first + count; ++i) {
      CHECK(i < is_used.size());
      CHECK(is_used[i] != used);  // no page twice
      is_used[i] = used;
    }
  }
  ldr_pool_info_t info(uint64_t page_bytes) const {
    ldr_pool_info_t info{};
    uint64_t run = 0;
    for (size_t i = 0; i <= is_used.size(); ++i) {
      if (i < is_used.size() && is_used[i]) info.used_bytes += page_bytes;
      if (i < is_used.size() && !is_used[i]) {
        ++run;
        continue;
      }
      info.num_free_ranges += run > 0;
      info.largest_free_bytes = std::max(info.largest_free_bytes, run * page_bytes);
      run = 0;
    }
    return info;
  }
};

void random_against_model() {
  constexpr uint64_t kPage = 4096, kPages = 256;
  auto pool = make_pool(kPages * kPage);
  Model model(kPages);
  std::mt19937 random(7);
  std::vector<Taken> taken;
  uint64_t base = 0;
  uint32_t num_full = 0;
  {
    PoolMemory all;
    std::vector<uint64_t> addresses;
    CHECK_OK(pool->allocate(kPages * kPage, 1, &all, &addresses));
    base = addresses[0];
  }
  for (int round = 0; round < 20000; ++round) {
    if (random() % 2 || taken.empty()) {
      Taken next;
      const uint64_t size = 1 + random() % (random() % 4 ? 5 * kPage : 60 * kPage);
      const uint32_t count = 1 + random() % 4;
      next.num_pages = (size + kPage - 1) / kPage;
      next.mark = uint8_t(round);
      const ldr_pool_info_t before = pool->info();
      Status status = pool->allocate(size, count, &next.memory, &next.addresses);
      if (!status.ok()) {
        CHECK_EQ(status.code, LDR_ERR_POOL_FULL);
        CHECK(before.largest_free_bytes < next.num_pages * kPage * count);  // it would have held all of them
        CHECK_EQ(pool->info().used_bytes, before.used_bytes);               // nothing kept
        ++num_full;
      } else {
        CHECK_EQ(next.addresses.size(), size_t(count));
        for (uint64_t address : next.addresses) {
          model.set((address - base) / kPage, next.num_pages, true);
          memset(reinterpret_cast<void *>(address), next.mark, size);
        }
        taken.push_back(std::move(next));
      }
    } else {
      std::swap(taken[random() % taken.size()], taken.back());
      for (uint64_t address : taken.back().addresses) {
        CHECK_EQ(*reinterpret_cast<uint8_t *>(address), taken.back().mark);  // nobody else wrote there
        model.set((address - base) / kPage, taken.back().num_pages, false);
      }
      taken.pop_back();
    }
    const ldr_pool_info_t info = pool->info(), expected = model.info(kPage);
    CHECK_EQ(info.used_bytes, expected.used_bytes);
    CHECK_EQ(info.largest_free_bytes, expected.largest_free_bytes);
    CHECK_EQ(info.num_free_ranges, expected.num_free_ranges);
    CHECK_EQ(size_t(info.num_allocations), taken.size());
  }
  CHECK(num_full > 100);
  taken.clear();
  CHECK_EQ(pool->info().largest_free_bytes, kPages * kPage);
  CHECK_EQ(pool->info().num_free_ranges, 1u);
}

void smallest_range_first() {
  auto pool = make_pool(16 * 4096);
  std::vector<Taken> taken(4);
  for (size_t i = 0; i < 4; ++i) CHECK_OK(pool->allocate((i + 1) * 4096, 1, &taken[i].memory, &taken[i].addresses));  // 1 2 3 4, 6 free
  const uint64_t hole = taken[1].addresses[0];
  taken[1] = {};
  PoolMemory memory;
  std::vector<uint64_t> addresses;
  CHECK_OK(pool->allocate(2 * 4096, 1, &memory, &addresses));
  CHECK_EQ(addresses[0], hole);
}

void sizes() {
  auto pool = make_pool((3u << 16) + 5, 16);
  ldr_pool_info_t info = pool->info();
  CHECK_EQ(info.size_bytes, uint64_t(3u << 16));
  CHECK_EQ(info.page_bytes, uint64_t(1u << 16));
  CHECK_EQ(make_pool(1u << 20, 0)->info().page_bytes, uint64_t(1u << 16));
  PoolMemory memory;
  std::vector<uint64_t> addresses;
  CHECK_OK(pool->allocate(1, 2, &memory, &addresses));
  CHECK_EQ(pool->info().used_bytes, uint64_t(2u << 16));
  CHECK_EQ(addresses[0] % 4096, uint64_t(0));
  uint64_t mapping_id = 0, offset = 0;
  CHECK(shared_find(addresses[1], 1u << 16, &mapping_id, &offset));  // shm reaches it
  PoolMemory more;
  Status full = pool->allocate((1u << 16) + 1, 1, &more, &addresses);
  CHECK_CODE(full, LDR_ERR_POOL_FULL);
  for (const char *part : {"65537", "196608", "largest free range has 65536", "65536 of 196608 bytes free"}) CHECK_CONTAINS(full.text, part);
  // The memory outlives the pool's other owners.
  pool = nullptr;
  memset(reinterpret_cast<void *>(addresses[0]), 1, 1u << 16);
  memory = nullptr;
  CHECK(!shared_find(addresses[0], 1, &mapping_id, &offset));
}

void refusals() {
  Pools pools;
  ldr_pool_params_t params{};
  params.struct_size = sizeof(params);
  params.placement = LDR_PLACEMENT_HOST;
  params.size_bytes = 1u << 20;
  params.page_shift = 16;
  auto refused = [&](ldr_status_t code, auto change) {
    ldr_pool_params_t p = params;
    change(p);
    CHECK_CODE(pools.create(p), code);
    CHECK(pools.find(LDR_PLACEMENT_HOST) == nullptr);
  };
  refused(LDR_ERR_INVALID, [](auto &p) { p.placement = 2; });
  refused(LDR_ERR_INVALID, [](auto &p) { p.page_shift = 9; });
  refused(LDR_ERR_INVALID, [](auto &p) { p.page_shift = 31; });
  refused(LDR_ERR_INVALID, [](auto &p) { p.size_bytes = 65535; });
  refused(LDR_ERR_INVALID, [](auto &p) { p.flags = 2; });
  refused(LDR_ERR_INVALID, [](auto &p) { p.size_bytes = 1ull << 43, p.page_shift = 10; });
  refused(LDR_ERR_NO_MEMORY, [](auto &p) { p.size_bytes = 1ull << 44, p.page_shift = 20; });
  CHECK_CONTAINS(pools.create([&] { auto p = params; p.size_bytes = 1ull << 44, p.page_shift = 20; return p; }()).text, "17592186044416 bytes");
  CHECK_OK(pools.create(params));
  CHECK_CODE(pools.create(params), LDR_ERR_INVALID);
  params.placement = LDR_PLACEMENT_DEVICE;
  CHECK_OK(pools.create(params));
  CHECK(pools.find(LDR_PLACEMENT_DEVICE) != pools.find(LDR_PLACEMENT_HOST));
}

uint64_t shared_rss_bytes() {
  FILE *file = fopen("/proc/self/status", "re");
  CHECK(file != nullptr);
  unsigned long long kilobytes = 0;
  char line[256];
  while (fgets(line, sizeof(line), file) && sscanf(line, "RssShmem: %llu kB", &kilobytes) != 1) {}
  fclose(file);
  return kilobytes << 10;
}

void lazy_or_reserved() {
  constexpr uint64_t kSize = 64u << 20;
  const uint64_t before = shared_rss_bytes();
  auto lazy = make_pool(kSize, 16, LDR_POOL_LAZY);
  CHECK(shared_rss_bytes() - before < kSize / 4);
  CHECK_EQ(lazy->info().huge_bytes, uint64_t(0));
  auto reserved = make_pool(kSize);
  CHECK(shared_rss_bytes() - before >= kSize);
  // More than this machine has is no error as long as nobody touches it.
  CHECK_EQ(make_pool(1ull << 36, 20, LDR_POOL_LAZY)->info().size_bytes, uint64_t(1ull << 36));
}

void many_threads() {
  auto pool = make_pool(64 * 4096);
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int round = 0; round < 2000; ++round) {
        PoolMemory memory;
        std::vector<uint64_t> addresses;
        if (!pool->allocate(1 + random() % (20 * 4096), 2, &memory, &addresses).ok()) continue;
        for (uint64_t address : addresses) memset(reinterpret_cast<void *>(address), int(seed), 64);
        for (uint64_t address : addresses) CHECK_EQ(*reinterpret_cast<uint8_t *>(address), uint8_t(seed));
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  CHECK_EQ(pool->info().num_free_ranges, 1u);
}

}  // namespace

int main() {
  test("random against a model", random_against_model);
  test("smallest range first", smallest_range_first);
  test("sizes", sizes);
  test("refusals", refusals);
  test("lazy or reserved", lazy_or_reserved);
  test("many threads", many_threads);
}
