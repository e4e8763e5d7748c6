// What the end-to-end tests share: two engines in one process, caches whose bytes tell where they were, and each data path alone.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"
#include "ldr.h"

namespace ldr_test {

using ldr::kMillisecond;
using ldr::kSecond;

constexpr int64_t kTimeout = 20 * kSecond;
// The long transfers of the tests write the same block again and again, which two threads may not do in the eyes of ThreadSanitizer.
#ifdef __SANITIZE_THREAD__
constexpr uint32_t kCopyThreads = 1;
#else
constexpr uint32_t kCopyThreads = 2;
#endif
constexpr uint64_t kSourceId = 11, kSinkId = 22;

inline ldr_engine_t *make_engine(uint64_t cluster_id, uint32_t path_set, bool remote_access, bool listens) {
  ldr_engine_params_t params{};
  params.struct_size = sizeof(params);
  params.flags = remote_access ? LDR_ENGINE_REMOTE_ACCESS : 0;
  params.cluster_id = cluster_id;
  params.listen_ip = listens ? "127.0.0.1" : nullptr;
  params.path_set = path_set;
  params.num_copy_threads = kCopyThreads;
  ldr_engine_t *engine = nullptr;
  CHECK_C(ldr_engine_create(&params, &engine), LDR_OK);
  return engine;
}

// A source that listens and a sink that linked to it.
struct Pair {
  Pair(uint32_t path_set, bool remote_access) {
    source = make_engine(kSourceId, path_set, remote_access, true);
    sink = make_engine(kSinkId, path_set, remote_access, false);
    ldr_engine_info_t info;
    CHECK_C(ldr_engine_info(source, &info), LDR_OK);
    ldr_link_params_t link{};
    link.struct_size = sizeof(link);
    link.ip = "127.0.0.1";
    link.port = info.listen_port;
    link.timeout_ns = kTimeout;
    ldr_link_info_t linked;
    CHECK_C(ldr_link_open(sink, &link, &linked), LDR_OK);
    CHECK_EQ(linked.cluster_id, kSourceId);
    CHECK_EQ(linked.path_set, path_set);
  }
  ~Pair() {
    ldr_engine_destroy(sink);
    ldr_engine_destroy(source);
  }
  ldr_engine_t *source, *sink;
};

// One cache with its memory: plain, or a shared mapping. Filled with bytes that tell where they were.
struct TestCache {
  TestCache(ldr_engine_t *engine, bool shared, uint32_t kind, uint32_t num_tensors, uint64_t num_entries, uint64_t stride, uint8_t seed,
            std::vector<ldr_cache_key_t> keys = {}, bool accessible = true)
      : engine(engine), shared(shared), tensor_bytes(num_entries * stride), stride(stride), size(tensor_bytes * num_tensors) {
    if (shared) {
      void *address = nullptr;
      CHECK_C(ldr_shared_alloc(size, &address, nullptr), LDR_OK);
      memory = static_cast<uint8_t *>(address);
    } else {
      void *address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      CHECK(address != MAP_FAILED);
      memory = static_cast<uint8_t *>(address);
    }
    std::mt19937 random(seed);
    for (uint64_t i = 0; i < size; i += 4) {
      uint32_t word = uint32_t(random());
      memcpy(memory + i, &word, std::min<uint64_t>(4, size - i));
    }
    std::vector<uint64_t> addresses;
    for (uint32_t i = 0; i < num_tensors; ++i) addresses.push_back(reinterpret_cast<uint64_t>(memory + i * tensor_bytes));
    ldr_cache_params_t params{};
    params.struct_size = sizeof(params);
    params.kind = kind;
    params.placement = LDR_PLACEMENT_DEVICE;
    params.remote_accessible = accessible;
    params.num_tensors = num_tensors;
    params.num_keys = uint32_t(keys.size());
    params.num_entries = num_entries;
    params.tensor_bytes = tensor_bytes;
    params.addresses = addresses.data();
    params.keys = keys.data();
    CHECK_C(ldr_cache_register(engine, &params, &id), LDR_OK);
  }
  TestCache(const TestCache &) = delete;
  ~TestCache() {
    drop();
    if (shared) CHECK_C(ldr_shared_free(memory), LDR_OK);
    else munmap(memory, size);
  }
  void drop() {
    if (id) CHECK_C(ldr_cache_unregister(engine, id), LDR_OK);
    id = 0;
  }
  std::vector<uint8_t> bytes() const { return {memory, memory + size}; }

  ldr_engine_t *engine;
  bool shared;
  uint64_t tensor_bytes, stride, size;
  uint8_t *memory;
  int64_t id = 0;
};

// Copies into an expectation: one piece of one tensor.
inline void expect(std::vector<uint8_t> &bytes, const TestCache &to, uint32_t to_tensor, uint64_t to_offset, const TestCache &from, uint32_t from_tensor,
            uint64_t from_offset, uint64_t size) {
  memcpy(&bytes[to_tensor * to.tensor_bytes + to_offset], from.memory + from_tensor * from.tensor_bytes + from_offset, size);
}

inline ldr_block_list_t list(const std::vector<int32_t> &blocks) { return {blocks.data(), blocks.size(), 4, 0}; }

inline ldr_transfer_params_t transfer(uint32_t direction, uint64_t peer, uint32_t move, int64_t remote_cache, int64_t local_cache) {
  ldr_transfer_params_t p{};
  p.struct_size = sizeof(p);
  p.direction = direction;
  p.cluster_id = peer;
  p.move = move;
  p.remote_cache_id = remote_cache;
  p.local_cache_id = local_cache;
  p.size_bytes = -1;
  p.timeout_ns = kTimeout;
  return p;
}

inline ldr_event_t next_op_event(ldr_engine_t *engine) {
  for (;;) {
    ldr_event_t event;
    uint32_t count = 0;
    CHECK_C(ldr_poll(engine, &event, 1, kTimeout, &count), LDR_OK);
    CHECK_EQ(count, 1u);
    if (event.kind == LDR_EVENT_OP) return event;
  }
}

inline void check_no_op_event(ldr_engine_t *engine) {
  ldr_event_t event;
  uint32_t count = 0;
  do {
    CHECK_C(ldr_poll(engine, &event, 1, 0, &count), LDR_OK);
    CHECK(count == 0 || event.kind != LDR_EVENT_OP);
  } while (count);
}

inline std::string op_error(ldr_engine_t *engine, uint64_t op_id) {
  char text[512];
  CHECK_C(ldr_op_error(engine, op_id, text, sizeof(text)), LDR_OK);
  return text;
}

struct Setting {
  uint32_t path;
  bool remote_access;
  bool shared;
  uint32_t path_set() const { return 1u << path; }
};

inline void check_moved(const Setting &setting, const ldr_transfer_result_t &result, uint64_t bytes) {
  CHECK_EQ(result.bytes, bytes);
  CHECK_EQ(result.path, setting.path);
  CHECK(result.latency_ns > 0);
}

inline void wait_until_moving(ldr_engine_t *engine, uint64_t op_id) {
  const int64_t deadline = ldr::now_ns() + kTimeout;
  uint64_t done = 0, total = 0;
  while (done == 0) {
    CHECK(ldr::now_ns() < deadline);
    CHECK_C(ldr_op_progress(engine, op_id, &done, &total), LDR_OK);
    std::this_thread::yield();
  }
}

// Runs body for each path, mode and kind of source memory; an argument of the program names the only path to run.
template <class F> void for_each_setting(int argc, char **argv, F body) {
  for (uint32_t path : {LDR_PATH_SHM, LDR_PATH_CMA, LDR_PATH_UNIX, LDR_PATH_TCP}) {
    if (argc > 1 && std::string(argv[1]) != ldr_path_name(path)) continue;
    for (bool remote_access : {false, true}) {
      for (bool shared : {false, true}) {
        if (path == LDR_PATH_SHM && !shared) continue;  // nothing to reach: LDR_ERR_NO_PATH
        fprintf(stderr, " %s, %s, %s memory\n", ldr_path_name(path), remote_access ? "remote access" : "two-sided", shared ? "shared" : "plain");
        body(Setting{path, remote_access, shared});
      }
    }
  }
}

}  // namespace ldr_test
