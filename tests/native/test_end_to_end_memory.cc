// Memory that goes away around transfers.
#include "end_to_end.h"

using namespace ldr_test;

namespace {

// Bytes of shared mappings of this process that are of pools: those of the source's engine and, as a peer, of the sink's.
uint64_t mapped_bytes(uint64_t size) {
  FILE *maps = fopen("/proc/self/maps", "r");
  CHECK(maps != nullptr);
  uint64_t sum = 0;
  char line[512];
  while (fgets(line, sizeof(line), maps)) {
    unsigned long begin, end;
    char share;
    if (sscanf(line, "%lx-%lx %*c%*c%*c%c", &begin, &end, &share) == 3 && share == 's' && end - begin == size) sum += end - begin;
  }
  fclose(maps);
  return sum;
}

// The peer frees a pool: its memory is not held here for ever.
void freed_pools_are_unmapped() {
  constexpr uint64_t kStride = 4 << 20;
  for (bool remote_access : {false, true}) {
    Pair pair(1u << LDR_PATH_SHM, remote_access);
    TestCache sink(pair.sink, false, LDR_CACHE_BLOCKS, 1, 3, kStride, 2);
    std::vector<int32_t> blocks = {0, 1, 2};
    const uint64_t before = mapped_bytes(3 * kStride);
    for (int round = 0; round < 4; ++round) {
      TestCache source(pair.source, true, LDR_CACHE_BLOCKS, 1, 3, kStride, uint8_t(round));
      ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
      p.src_blocks = p.dst_blocks = list(blocks);
      for (int i = 0; i < 2; ++i) CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
      CHECK(memcmp(sink.memory, source.memory, sink.size) == 0);
      CHECK_EQ(mapped_bytes(3 * kStride) - before, 2 * 3 * kStride);  // this one, at both ends
    }
  }
}

// A pool of an engine stays while its caches come and go: the next one is reached without mapping it again.
void engine_pools_stay_mapped() {
  constexpr uint64_t kPool = 7 << 20;
  for (bool remote_access : {false, true}) {
    Pair pair(1u << LDR_PATH_SHM | 1u << LDR_PATH_CMA, remote_access);
    ldr_pool_params_t pool{};
    pool.struct_size = sizeof(pool);
    pool.placement = LDR_PLACEMENT_DEVICE;
    pool.size_bytes = kPool;
    CHECK_C(ldr_pool_create(pair.source, &pool), LDR_OK);
    TestCache plain(pair.source, false, LDR_CACHE_BLOCKS, 1, 1, 1 << 16, 1), sink(pair.sink, false, LDR_CACHE_BLOCKS, 1, 1, 1 << 16, 2);
    std::vector<int32_t> blocks = {0};
    auto pull = [&](int64_t from, uint32_t path) {
      ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, from, sink.id);
      p.src_blocks = p.dst_blocks = list(blocks);
      ldr_transfer_result_t result;
      CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
      CHECK_EQ(result.path, path);
    };
    const uint64_t before = mapped_bytes(kPool);
    for (int round = 0; round < 2; ++round) {
      ldr_cache_params_t params{};
      params.struct_size = sizeof(params);
      params.kind = LDR_CACHE_BLOCKS;
      params.placement = LDR_PLACEMENT_DEVICE;
      params.num_tensors = 1;
      params.num_entries = 1;
      params.tensor_bytes = 1 << 16;
      int64_t id = 0;
      uint64_t address = 0;
      CHECK_C(ldr_cache_allocate(pair.source, &params, &id, &address), LDR_OK);
      memset(reinterpret_cast<void *>(address), 0x30 + round, 1 << 16);
      pull(id, LDR_PATH_SHM);
      CHECK_EQ(sink.memory[65535], uint8_t(0x30 + round));
      CHECK_C(ldr_cache_deallocate(pair.source, id), LDR_OK);
      pull(plain.id, LDR_PATH_CMA);
      CHECK_EQ(mapped_bytes(kPool) - before, kPool);  // at the sink; the source's own was there before
    }
  }
}

// A hole in the middle: the end that has it is named.
void holes(uint32_t direction, bool is_local) {
  Pair pair(1u << LDR_PATH_CMA, true);
  constexpr uint64_t kStride = 1 << 20;
  TestCache source(pair.source, false, LDR_CACHE_BLOCKS, 1, 1, kStride, 1), sink(pair.sink, false, LDR_CACHE_BLOCKS, 1, 1, kStride, 2);
  ldr_transfer_params_t p = transfer(direction, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
  std::vector<int32_t> blocks = {0};
  p.src_blocks = p.dst_blocks = list(blocks);
  TestCache &holed = is_local ? sink : source;
  for (int protection : {PROT_NONE, PROT_READ}) {
    const bool is_target = is_local == (direction == LDR_PULL);
    if (protection == PROT_READ && !is_target) continue;
    CHECK_EQ(mprotect(holed.memory + 40 * 4096, 4096, protection), 0);
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), is_local ? LDR_ERR_INVALID : LDR_ERR_NO_CACHE);
    CHECK_CONTAINS(ldr_last_error(), is_local ? "local memory" : "remote memory is gone");
    CHECK_EQ(mprotect(holed.memory + 40 * 4096, 4096, PROT_READ | PROT_WRITE), 0);
  }
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
}

}  // namespace

int main() {
  test("freed pools are unmapped", freed_pools_are_unmapped);
  test("pools of engines stay mapped", engine_pools_stay_mapped);
  for (uint32_t direction : {LDR_PULL, LDR_PUSH}) {
    for (bool is_local : {false, true}) {
      test((std::string(direction == LDR_PULL ? "pull" : "push") + " with a hole, " + (is_local ? "local" : "remote")).c_str(), [&] { holes(direction, is_local); });
    }
  }
}
