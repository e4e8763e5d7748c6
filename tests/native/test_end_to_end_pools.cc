// Allocated caches over each data path: keys that pulls consume, memory that outlives its owner's interest, pushes to an address.
#include <atomic>
#include <memory>

#include "end_to_end.h"

using namespace ldr_test;

namespace {

constexpr uint64_t kPoolBytes = 8u << 20, kPage = 4096;

void add_pool(ldr_engine_t *engine, uint32_t placement = LDR_PLACEMENT_DEVICE) {
  ldr_pool_params_t params{};
  params.struct_size = sizeof(params);
  params.placement = placement;
  params.size_bytes = kPoolBytes;
  params.page_shift = 12;
  CHECK_C(ldr_pool_create(engine, &params), LDR_OK);
}

ldr_pool_info_t pool_info(ldr_engine_t *engine) {
  ldr_pool_info_t info;
  CHECK_C(ldr_pool_info(engine, LDR_PLACEMENT_DEVICE, &info), LDR_OK);
  return info;
}

template <class F> void await(F condition) {
  for (const int64_t until = ldr::now_ns() + kTimeout; !condition(); std::this_thread::yield()) CHECK(ldr::now_ns() < until);
}

struct Allocated {
  Allocated(ldr_engine_t *engine, uint32_t kind, uint32_t num_tensors, uint64_t num_entries, uint64_t stride, uint8_t seed,
            std::vector<ldr_cache_key_t> keys = {})
      : engine(engine), stride(stride), addresses(num_tensors) {
    ldr_cache_params_t params{};
    params.struct_size = sizeof(params);
    params.kind = kind;
    params.placement = LDR_PLACEMENT_DEVICE;
    params.num_tensors = num_tensors;
    params.num_keys = uint32_t(keys.size());
    params.num_entries = num_entries;
    params.tensor_bytes = tensor_bytes = num_entries * stride;
    params.keys = keys.data();
    CHECK_C(ldr_cache_allocate(engine, &params, &id, addresses.data()), LDR_OK);
    std::mt19937 random(seed);
    for (uint64_t address : addresses) {
      for (uint64_t i = 0; i < tensor_bytes; ++i) reinterpret_cast<uint8_t *>(address)[i] = uint8_t(random());
    }
  }
  const uint8_t *entry(uint32_t tensor, uint64_t index) const { return reinterpret_cast<const uint8_t *>(addresses[tensor]) + index * stride; }

  ldr_engine_t *engine;
  uint64_t stride, tensor_bytes;
  std::vector<uint64_t> addresses;
  int64_t id = 0;
};

ldr_cache_key_t request(uint64_t id, uint32_t batch) { return {LDR_KEY_REQUEST, batch, id, 0}; }

ldr_transfer_params_t pull_key(uint64_t key_id, int64_t local) {
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_ENTRY, 0, local);
  p.remote_by = LDR_BY_REQUEST_KEY;
  p.remote_key_id = key_id;
  return p;
}

bool got(const TestCache &sink, uint32_t sink_tensor, uint64_t sink_entry, const Allocated &source, uint32_t tensor, uint64_t entry) {
  return memcmp(sink.memory + sink_tensor * sink.tensor_bytes + sink_entry * sink.stride, source.entry(tensor, entry), sink.stride) == 0;
}

void consumption(const Setting &setting, Pair &pair) {
  constexpr uint64_t kStride = 6000;
  Allocated source(pair.source, LDR_CACHE_CONTIGUOUS, 2, 3, kStride, 1, {request(1, 0), request(2, 1), {LDR_KEY_PREFIX, 2, 3, 0}});
  TestCache sink(pair.sink, false, LDR_CACHE_CONTIGUOUS, 2, 2, kStride, 2);
  TestCache blocks(pair.sink, false, LDR_CACHE_BLOCKS, 2, 8, 1000, 3);

  // A pull that fails leaves the key, one that keeps it as well, a good one takes it.
  ldr_transfer_params_t p = pull_key(1, sink.id);
  p.remote_num_tensors = 1;
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_INVALID);
  p = pull_key(1, sink.id);
  p.flags = LDR_TRANSFER_KEEP_KEY;
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  memset(sink.memory, 0, sink.size);
  p.flags = 0;
  ldr_transfer_result_t result;
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 2 * kStride);
  for (uint32_t t = 0; t < 2; ++t) CHECK(got(sink, t, 0, source, t, 0));
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);

  // Tensor by tensor, into blocks or not.
  p = pull_key(2, sink.id);
  p.local_batch_index = 1;
  p.local_num_tensors = p.remote_num_tensors = 1;
  p.remote_first_tensor = 1;
  for (int i = 0; i < 2; ++i) {
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
    CHECK(got(sink, 0, 1, source, 1, 1));
  }
  std::vector<int32_t> to = {5, 4, 3, 2, 1, 0};
  p = pull_key(2, blocks.id);
  p.move = LDR_MOVE_ENTRY_TO_BLOCKS;
  p.local_num_tensors = p.remote_num_tensors = 1;
  p.dst_blocks = list(to);
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  for (size_t k = 0; k < to.size(); ++k) CHECK(memcmp(blocks.memory + to[k] * 1000, source.entry(0, 1) + k * 1000, 1000) == 0);
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);

  // The id is gone for its owner; peers still come by id, as long as a key is bound. Prefix keys are not consumed.
  CHECK_C(ldr_cache_deallocate(pair.source, source.id), LDR_OK);
  CHECK_C(ldr_cache_deallocate(pair.source, source.id), LDR_ERR_NO_CACHE);
  p = transfer(LDR_PULL, kSourceId, LDR_MOVE_ENTRY, source.id, sink.id);
  for (uint32_t batch : {2, 1}) {
    p.remote_batch_index = batch;
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
    CHECK(got(sink, 1, 0, source, 1, batch));
  }
  CHECK(pool_info(pair.source).used_bytes > 0);
  ldr_cache_key_t key = {LDR_KEY_PREFIX, 0, 3, 0};
  CHECK_C(ldr_cache_remove_key(pair.source, &key), LDR_OK);
  CHECK_EQ(pool_info(pair.source).used_bytes, uint64_t(0));
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);
  CHECK_C(ldr_cache_remove_key(pair.source, &key), LDR_OK);
}

// The last key of a deallocated cache: when the pull is over, its memory can be allocated again, all of it.
void memory_goes_back(Pair &pair) {
  TestCache sink(pair.sink, false, LDR_CACHE_CONTIGUOUS, 1, 1, kPoolBytes, 2);
  for (uint8_t round = 0; round < 20; ++round) {
    Allocated source(pair.source, LDR_CACHE_CONTIGUOUS, 1, 1, kPoolBytes, round, {request(1, 0)});
    CHECK_C(ldr_cache_deallocate(pair.source, source.id), LDR_OK);
    ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_ENTRY, source.id, sink.id);  // by id, which has a bound key
    std::vector<uint8_t> expected(source.entry(0, 0), source.entry(0, 0) + kPoolBytes);
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
    CHECK(sink.bytes() == expected);
    CHECK_EQ(pool_info(pair.source).num_allocations, 0u);
  }
  ldr_engine_info_t info;
  CHECK_C(ldr_engine_info(pair.source, &info), LDR_OK);
  CHECK_EQ(info.num_caches, 0u);
}

struct SecondSink {
  SecondSink(const Setting &setting, Pair &pair) : engine(make_engine(33, setting.path_set(), setting.remote_access, false)) {
    ldr_engine_info_t info;
    CHECK_C(ldr_engine_info(pair.source, &info), LDR_OK);
    ldr_link_params_t link{};
    link.struct_size = sizeof(link);
    link.ip = "127.0.0.1";
    link.port = info.listen_port;
    link.timeout_ns = kTimeout;
    CHECK_C(ldr_link_open(engine, &link, nullptr), LDR_OK);
  }
  ~SecondSink() { ldr_engine_destroy(engine); }
  ldr_engine_t *engine;
};

// Two sinks want the same keys at once: each key has one winner at least, whoever gets it has all of it, and it is gone after that.
void contention(const Setting &setting, Pair &pair) {
  constexpr uint64_t kStride = 300000, kKeys = 20;
  SecondSink second(setting, pair);
  uint32_t wins[kKeys] = {};
  std::vector<ldr_cache_key_t> keys;
  for (uint64_t k = 0; k < kKeys; ++k) keys.push_back(request(k, uint32_t(k)));
  Allocated source(pair.source, LDR_CACHE_CONTIGUOUS, 1, kKeys, kStride, 4, keys);
  std::mutex mutex;
  auto pull_all = [&](ldr_engine_t *engine) {
    TestCache sink(engine, false, LDR_CACHE_CONTIGUOUS, 1, 1, kStride, 5);
    for (uint64_t k = 0; k < kKeys; ++k) {
      ldr_transfer_params_t p = pull_key(k, sink.id);
      const ldr_status_t status = ldr_transfer(engine, &p, nullptr);
      CHECK(status == LDR_OK || status == LDR_ERR_NO_CACHE);
      if (status != LDR_OK) continue;
      CHECK(got(sink, 0, 0, source, 0, k));
      std::lock_guard lock(mutex);
      ++wins[k];
    }
  };
  std::thread other([&] { pull_all(second.engine); });
  pull_all(pair.sink);
  other.join();
  for (uint32_t count : wins) CHECK(count == 1 || count == 2);
  CHECK_C(ldr_cache_deallocate(pair.source, source.id), LDR_OK);
  CHECK_EQ(pool_info(pair.source).used_bytes, uint64_t(0));  // no key was left
}

// A pull without an end reads a blocks cache that its owner deallocates: it goes on, nobody else finds the cache, and the memory is not used again before.
void deallocated_during_a_pull(const Setting &setting, bool puller_dies) {
  auto pair = std::make_unique<Pair>(setting.path_set(), false);
  add_pool(pair->source);
  SecondSink second(setting, *pair);
  Allocated source(pair->source, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 6, {{LDR_KEY_BLOCKS, 0, 0, 9}});
  TestCache other(second.engine, false, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 8);
  auto sink = std::make_unique<TestCache>(pair->sink, false, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 7);
  std::vector<int32_t> blocks(1 << 17, 0), one = {1};
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, 0, sink->id);
  p.remote_by = LDR_BY_BLOCKS_KEY;
  p.remote_model_id = 9;
  p.src_blocks = p.dst_blocks = list(blocks);
  p.timeout_ns = -1;
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(pair->sink, &p, 1, &op_id), LDR_OK);
  wait_until_moving(pair->sink, op_id);
  CHECK_C(ldr_cache_deallocate(pair->source, source.id), LDR_OK);
  CHECK_EQ(pool_info(pair->source).used_bytes, uint64_t(2 << 20));
  p.local_cache_id = other.id;
  p.src_blocks = p.dst_blocks = list(one);
  p.timeout_ns = kTimeout;
  CHECK_C(ldr_transfer(second.engine, &p, nullptr), LDR_ERR_NO_CACHE);
  p.remote_by = LDR_BY_CACHE_ID;
  p.remote_cache_id = source.id;
  CHECK_C(ldr_transfer(second.engine, &p, nullptr), LDR_ERR_NO_CACHE);
  uint64_t done = 0, total = 0, before = 0;
  CHECK_C(ldr_op_progress(pair->sink, op_id, &before, &total), LDR_OK);
  await([&] {
    CHECK_C(ldr_op_progress(pair->sink, op_id, &done, &total), LDR_OK);
    return done > before + (8 << 20);
  });
  CHECK_EQ(pool_info(pair->source).used_bytes, uint64_t(2 << 20));
  if (puller_dies) {
    ldr_engine_destroy(pair->sink);
    pair->sink = nullptr;
    sink->id = 0;
  } else {
    CHECK_C(ldr_op_cancel(pair->sink, op_id), LDR_OK);
    CHECK_EQ(next_op_event(pair->sink).status, int32_t(LDR_ERR_CANCELLED));
    CHECK(memcmp(sink->memory, source.entry(0, 0), 1 << 20) == 0);
  }
  await([&] { return pool_info(pair->source).used_bytes == 0; });
}

// Its own end of a transfer may be an allocated cache, too, and may go away under it.
void local_end_deallocated(const Setting &setting) {
  Pair pair(setting.path_set(), setting.remote_access);
  add_pool(pair.sink);
  TestCache source(pair.source, setting.shared, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 6);
  Allocated sink(pair.sink, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 7);
  std::vector<int32_t> blocks(1 << 17, 0);
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
  p.src_blocks = p.dst_blocks = list(blocks);
  p.timeout_ns = -1;
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(pair.sink, &p, 1, &op_id), LDR_OK);
  wait_until_moving(pair.sink, op_id);
  CHECK_C(ldr_cache_deallocate(pair.sink, sink.id), LDR_OK);
  CHECK_EQ(next_op_event(pair.sink).status, int32_t(LDR_ERR_NO_CACHE));
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);
  await([&] { return pool_info(pair.sink).used_bytes == 0; });
}

// Who has heard of the end of a transfer holds all there is to hold of its cache.
void local_end_is_free_at_once(const Setting &setting) {
  Pair pair(setting.path_set(), setting.remote_access);
  add_pool(pair.sink);
  for (uint64_t stride : {uint64_t(96), uint64_t(3) << 20}) {
    TestCache source(pair.source, setting.shared, LDR_CACHE_BLOCKS, 2, 1, stride, 6);
    std::vector<int32_t> blocks(1, 0);
    for (int i = 0; i < 60; ++i) {
      Allocated sink(pair.sink, LDR_CACHE_BLOCKS, 2, 1, stride, 7);
      ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
      p.src_blocks = p.dst_blocks = list(blocks);
      CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
      CHECK(memcmp(sink.entry(1, 0), source.memory + source.tensor_bytes, stride) == 0);
      CHECK_C(ldr_cache_deallocate(pair.sink, sink.id), LDR_OK);
      CHECK_EQ(pool_info(pair.sink).used_bytes, uint64_t(0));
    }
  }
}

void remote_access(const Setting &setting, Pair &pair) {
  Allocated source(pair.source, LDR_CACHE_CONTIGUOUS, 2, 2, 5000, 1, {request(1, 1)});
  TestCache sink(pair.sink, false, LDR_CACHE_CONTIGUOUS, 2, 1, 5000, 2);
  ldr_transfer_params_t p = pull_key(1, sink.id);
  ldr_transfer_result_t result;
  for (int i = 0; i < 2; ++i) {  // keys are never consumed here
    CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
    check_moved(setting, result, 10000);
    CHECK(got(sink, 1, 0, source, 1, 1));
  }
  p.direction = LDR_PUSH;
  memset(sink.memory, 0x5A, sink.size);
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  CHECK(got(sink, 1, 0, source, 1, 1));
  p.direction = LDR_PULL;
  CHECK_C(ldr_cache_deallocate(pair.source, source.id), LDR_OK);
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  ldr_cache_key_t key = request(1, 0);
  CHECK_C(ldr_cache_remove_key(pair.source, &key), LDR_OK);
  CHECK_EQ(pool_info(pair.source).used_bytes, uint64_t(0));
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);
}

void push_to_address(const Setting &setting, Pair &pair) {
  TestCache registered(pair.source, setting.shared, LDR_CACHE_BLOCKS, 2, 64, 1024, 1);
  Allocated allocated(pair.source, LDR_CACHE_CONTIGUOUS, 2, 1, 64 * 1024, 2);
  TestCache entry(pair.sink, false, LDR_CACHE_CONTIGUOUS, 4, 2, 10240, 3);
  TestCache blocks(pair.sink, false, LDR_CACHE_BLOCKS, 4, 16, 2048, 4);
  std::vector<int32_t> src = {3, 4, 15, 0}, dst = {7, 0, 1, 9};
  for (uint8_t *target : {registered.memory + registered.tensor_bytes, reinterpret_cast<uint8_t *>(allocated.addresses[1])}) {
    std::vector<uint8_t> expected(target, target + 64 * 1024);
    auto push = [&](uint32_t move, const TestCache &from, uint64_t offset) {
      ldr_transfer_params_t p = transfer(LDR_PUSH, kSourceId, move, 0, from.id);
      p.remote_by = LDR_BY_ADDRESS;
      p.remote_key_id = reinterpret_cast<uint64_t>(target) + offset;
      p.local_first_tensor = 2;
      p.local_num_tensors = 1;
      return p;
    };
    auto check = [&](const ldr_transfer_params_t &p, uint64_t bytes) {
      ldr_transfer_result_t result;
      CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
      check_moved(setting, result, bytes);
      CHECK(memcmp(target, expected.data(), expected.size()) == 0);
    };
    ldr_transfer_params_t p = push(LDR_MOVE_ENTRY, entry, 100);
    p.local_batch_index = 1;
    const uint8_t *from = entry.memory + 2 * entry.tensor_bytes;
    memcpy(&expected[100], from + 10240, 10240);
    check(p, 10240);

    p = push(LDR_MOVE_ENTRY, blocks, 0);  // of a blocks source: its block 0
    memcpy(&expected[0], blocks.memory + 2 * blocks.tensor_bytes, 2048);
    check(p, 2048);

    p = push(LDR_MOVE_BLOCKS, blocks, 4096);
    p.src_blocks = list(src);
    p.dst_blocks = list(dst);
    for (size_t k = 0; k < src.size(); ++k) memcpy(&expected[4096 + dst[k] * 2048], blocks.memory + 2 * blocks.tensor_bytes + src[k] * 2048, 2048);
    check(p, 4 * 2048);

    p = push(LDR_MOVE_ENTRY_TO_BLOCKS, entry, 8192);  // 10240 = 3 * 3000 + 1240
    p.dst_blocks = list(dst);
    p.dst_block_bytes = 3000;
    for (size_t k = 0; k < dst.size(); ++k) memcpy(&expected[8192 + dst[k] * 3000], from + k * 3000, k == 3 ? 1240 : 3000);
    check(p, 10240);

    // The last, shorter piece ends where the tensor does: it fits.
    dst[3] = 10;
    p = push(LDR_MOVE_ENTRY_TO_BLOCKS, entry, 64 * 1024 - 10 * 3000 - 1240);
    p.dst_blocks = list(dst);
    p.dst_block_bytes = 3000;
    const uint64_t at = 64 * 1024 - 10 * 3000 - 1240;
    for (size_t k = 0; k < dst.size(); ++k) memcpy(&expected[at + dst[k] * 3000], from + k * 3000, k == 3 ? 1240 : 3000);
    check(p, 10240);
    dst[3] = 9;

    auto refused = [&](ldr_status_t code, const char *text, ldr_transfer_params_t changed) {
      CHECK_C(ldr_transfer(pair.sink, &changed, nullptr), code);
      CHECK_CONTAINS(ldr_last_error(), text);
      CHECK(memcmp(target, expected.data(), expected.size()) == 0);
    };
    const char *nowhere = "lies in no region that the peer registered";
    p.remote_key_id += 1;
    refused(LDR_ERR_INVALID, nowhere, (p.dst_blocks.indices = (dst[3] = 10, dst.data()), p));
    dst[3] = 9;
    refused(LDR_ERR_INVALID, nowhere, push(LDR_MOVE_ENTRY, entry, 64 * 1024 - 10239));
    p = push(LDR_MOVE_ENTRY, entry, 0);
    p.remote_key_id = 4096;
    refused(LDR_ERR_INVALID, nowhere, p);
    p = push(LDR_MOVE_ENTRY, entry, 0);
    p.local_num_tensors = 2;
    refused(LDR_ERR_INVALID, "one goes to an address", p);
    p.local_num_tensors = 0;
    refused(LDR_ERR_INVALID, "one goes to an address", p);
    p = push(LDR_MOVE_ENTRY, entry, 0);
    p.local_batch_index = 2;
    refused(LDR_ERR_INVALID, "batch index 2", p);
    p = push(LDR_MOVE_BLOCKS, blocks, 0);
    p.src_blocks = list(src);
    p.dst_blocks = list(dst);
    p.dst_block_bytes = 2047;
    refused(LDR_ERR_INVALID, "2047", p);
    p.dst_block_bytes = 0;
    std::vector<int64_t> far = {0, 1, 2, INT64_MAX};
    p.dst_blocks = {far.data(), far.size(), 8, 0};
    refused(LDR_ERR_INVALID, "at an address", p);
    p = push(LDR_MOVE_ENTRY_TO_BLOCKS, entry, 0);
    p.dst_blocks = list(dst);
    refused(LDR_ERR_INVALID, "dst_block_bytes", p);
    p = push(LDR_MOVE_ENTRY, entry, 0);
    p.direction = LDR_PULL;
    refused(LDR_ERR_INVALID, "pushed", p);
  }
  CHECK_C(ldr_cache_deallocate(pair.source, allocated.id), LDR_OK);
  await([&] { return pool_info(pair.source).used_bytes == 0; });  // no push holds it any more
}

void pools() {
  Pair pair(1u << LDR_PATH_SHM, true);
  ldr_pool_info_t info;
  CHECK_C(ldr_pool_info(pair.source, LDR_PLACEMENT_DEVICE, &info), LDR_ERR_NOT_FOUND);
  std::vector<uint64_t> addresses(4);
  ldr_cache_params_t params{};
  params.struct_size = sizeof(params);
  params.placement = LDR_PLACEMENT_HOST;
  params.num_tensors = 4;
  params.num_entries = 2;
  params.tensor_bytes = 2 * kPage;
  int64_t id = 0;
  add_pool(pair.source);
  CHECK_C(ldr_cache_allocate(pair.source, &params, &id, addresses.data()), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "host pool");
  add_pool(pair.source, LDR_PLACEMENT_HOST);
  params.tensor_bytes = kPoolBytes / 4 + 2;
  CHECK_C(ldr_cache_allocate(pair.source, &params, &id, addresses.data()), LDR_ERR_POOL_FULL);
  CHECK_C(ldr_pool_info(pair.source, LDR_PLACEMENT_HOST, &info), LDR_OK);
  CHECK_EQ(info.used_bytes, uint64_t(0));
  params.tensor_bytes = kPoolBytes / 4 + 1;
  CHECK_C(ldr_cache_allocate(pair.source, &params, &id, addresses.data()), LDR_ERR_INVALID);
  params.tensor_bytes = kPoolBytes / 4;
  CHECK_C(ldr_cache_allocate(pair.source, &params, &id, addresses.data()), LDR_OK);
  CHECK_EQ(id, int64_t(1));
  CHECK_C(ldr_pool_info(pair.source, LDR_PLACEMENT_HOST, &info), LDR_OK);
  CHECK_EQ(info.used_bytes, kPoolBytes);
  CHECK_EQ(info.num_allocations, 1u);
  CHECK_C(ldr_cache_unregister(pair.source, id), LDR_OK);
  CHECK_C(ldr_pool_info(pair.source, LDR_PLACEMENT_HOST, &info), LDR_OK);
  CHECK_EQ(info.used_bytes, uint64_t(0));
  ldr_cache_key_t key = request(1, 0);
  key.kind = 3;
  CHECK_C(ldr_cache_remove_key(pair.source, &key), LDR_ERR_INVALID);
}

}  // namespace

int main(int argc, char **argv) {
  test("pools", pools);
  for_each_setting(argc, argv, [](const Setting &setting) {
    if (setting.remote_access) {
      if (setting.shared) {
        Pair pair(setting.path_set(), true);
        add_pool(pair.source);
        test("remote access", [&] { remote_access(setting, pair); });
      }
      test("local end deallocated", [&] { local_end_deallocated(setting); });
      test("local end is free at once", [&] { local_end_is_free_at_once(setting); });
      return;
    }
    Pair pair(setting.path_set(), false);
    add_pool(pair.source);
    test("push to an address", [&] { push_to_address(setting, pair); });
    if (!setting.shared && setting.path != LDR_PATH_SHM) return;  // pools are shared memory
    test("consumption", [&] { consumption(setting, pair); });
    test("memory goes back", [&] { memory_goes_back(pair); });
    test("contention", [&] { contention(setting, pair); });
    test("deallocated during a pull", [&] { deallocated_during_a_pull(setting, false); });
    test("the puller dies", [&] { deallocated_during_a_pull(setting, true); });
    test("local end deallocated", [&] { local_end_deallocated(setting); });
    test("local end is free at once", [&] { local_end_is_free_at_once(setting); });
  });
}
