// Engines, caches and links over socket pairs for the tests of the stream path.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <random>

#include "check.h"
#include "clock.h"
#include "engine.h"
#include "link.h"
#include "paths/path.h"
#include "paths/stream.h"

namespace ldr_test {

using namespace ldr;

constexpr uint64_t kMiB = 1u << 20;

inline std::unique_ptr<Engine> make_engine(uint64_t cluster_id, uint32_t flags = LDR_ENGINE_REMOTE_ACCESS) {
  ldr_engine_params_t params{};
  params.struct_size = sizeof(params);
  params.flags = flags | LDR_ENGINE_INSECURE;
  params.cluster_id = cluster_id;
  params.num_copy_threads = 2;
  params.liveness_budget_ns = 100 * kSecond;  // the raw peers below send no heartbeats
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::create(params, &engine));
  return engine;
}

// A cache over memory of its own, filled with bytes that depend on seed and place.
struct TestCache {
  TestCache(Engine &engine_in, uint32_t num_tensors, uint64_t tensor_bytes, uint64_t seed, bool accessible = true) : engine(engine_in) {
    std::mt19937_64 random(seed);
    std::vector<uint64_t> addresses;
    for (uint32_t i = 0; i < num_tensors; ++i) {
      tensors.emplace_back(tensor_bytes);
      for (size_t at = 0; at + 8 <= tensor_bytes; at += 8) {
        uint64_t value = random();
        memcpy(&tensors.back()[at], &value, 8);
      }
      addresses.push_back(reinterpret_cast<uint64_t>(tensors.back().data()));
    }
    add(addresses, tensor_bytes, accessible);
  }
  TestCache(Engine &engine_in, std::vector<uint64_t> addresses, uint64_t tensor_bytes) : engine(engine_in) { add(addresses, tensor_bytes, true); }
  ~TestCache() { engine.caches.remove(cache->id); }

  void add(const std::vector<uint64_t> &addresses, uint64_t tensor_bytes, bool accessible) {
    ldr_cache_params_t params{};
    params.kind = LDR_CACHE_BLOCKS;
    params.remote_accessible = accessible;
    params.num_tensors = uint32_t(addresses.size());
    params.num_entries = 1;
    params.tensor_bytes = tensor_bytes;
    params.addresses = addresses.data();
    int64_t id = 0;
    CHECK_OK(engine.caches.add(params, &id));
    cache = engine.caches.find(id);
  }
  void remove() { engine.caches.remove(cache->id); }

  Engine &engine;
  std::vector<std::vector<uint8_t>> tensors;
  CachePtr cache;
};

inline void socket_pair(Fd *a, Fd *b) {
  int fds[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  *a = Fd(fds[0]);
  *b = Fd(fds[1]);
}

inline LinkPtr create_link(Engine &engine, uint64_t peer_cluster, Fd control, std::vector<Fd> data) {
  LinkFacts facts;
  facts.cluster_id = peer_cluster;
  facts.incarnation = 1000 + peer_cluster;
  facts.address = "test";
  facts.path_set = 1u << LDR_PATH_UNIX;
  std::vector<std::shared_ptr<StreamConnection>> connections;
  for (Fd &fd : data) connections.push_back(StreamConnection::create(engine, std::move(fd), LDR_PATH_UNIX));
  return Link::create(engine, facts, std::move(control), Fd(), nullptr, std::move(connections));
}

inline LinkPtr make_link(Engine &engine, uint64_t peer_cluster, Fd control, std::vector<Fd> data) {
  LinkPtr link = create_link(engine, peer_cluster, std::move(control), std::move(data));
  link->start();
  return link;
}

// A job and a place to wait for its end.
struct Run {
  Run(LinkPtr link, uint32_t direction, CachePtr local, CachePtr remote) : job(std::make_shared<CopyJob>()) {
    static std::atomic<uint64_t> ids{1};
    job->link = std::move(link);
    job->op = std::make_shared<Op>();
    job->op->id = ids++;
    job->direction = direction;
    job->local = std::move(local);
    job->remote = remote;
    job->cache_slot = remote->slot;
    job->cache_version = remote->version;
  }
  Run &piece(uint64_t local_address, uint32_t tensor, uint64_t offset, uint64_t size) {
    job->pieces.push_back({local_address, offset, size, tensor});
    return *this;
  }
  // Tensor i of one to tensor i of the other, whole.
  Run &everything() {
    for (uint32_t i = 0; i < job->local->num_tensors(); ++i) piece(job->local->addresses[i], i, 0, job->local->tensor_bytes);
    return *this;
  }
  Run &start() {
    stream_path().run(job, [state = state](Status status) {
      std::lock_guard lock(state->mutex);
      CHECK(!state->done);
      state->done = true;
      state->status = status;
      state->changed.notify_all();
    });
    return *this;
  }
  Status wait() {
    std::unique_lock lock(state->mutex);
    CHECK(state->changed.wait_for(lock, std::chrono::seconds(60), [&] { return state->done; }));
    return state->status;
  }
  bool is_done() {
    std::lock_guard lock(state->mutex);
    return state->done;
  }
  void stop(ldr_status_t code, const char *text) {
    CHECK(job->op->stop(code, text));
    for (const auto &connection : job->link->data()) connection->abandon(*job->op);
  }

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    Status status;
  };
  std::shared_ptr<CopyJob> job;
  std::shared_ptr<State> state = std::make_shared<State>();
};

}  // namespace ldr_test
