// The engine: owns everything below, in the order in which it is torn down.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache_table.h"
#include "copy_pool.h"
#include "event_loop.h"
#include "event_queue.h"
#include "grant.h"
#include "host.h"
#include "link_table.h"
#include "listener.h"
#include "op.h"
#include "page.h"
#include "pins.h"
#include "pool.h"
#include "socket.h"

namespace ldr {

struct EngineConfig {
  uint64_t cluster_id = 0;
  bool remote_access = false;
  bool insecure = false;
  bool allow_ptracer = true;
  bool one_way = false;
  uint32_t path_set = 0;
  std::vector<uint8_t> secret;
  uint32_t num_copy_threads = 0;
  int64_t heartbeat_interval_ns = 0;
  int64_t liveness_budget_ns = 0;
  uint64_t layout_digest = 0;
  std::string layout_text;
  SocketMarks marks;        // of TCP sockets
  bool refuse_cma = false;  // LDR_TEST_REFUSE_CMA=1: the probe fails
};

class Engine {
 public:
  static Status create(const ldr_engine_params_t &params, std::unique_ptr<Engine> *engine_p);
  ~Engine();
  // Everything in flight fails with CLOSED, links and listeners close, threads end. Idempotent, any thread: back when it is done. The first half of destruction.
  void shutdown();

  const EngineConfig config;
  const uint64_t incarnation;  // random
  const Host host;
  std::unique_ptr<Page> page;
  EventQueue events;
  EventLoop loop;
  CopyPool pool;
  Pools pools;  // memory for allocated caches
  CacheTable caches;
  Pins pins;
  OpTable ops;
  GrantTable grants;
  OpenGrants open_grants;
  LinkTable links;
  Listener listener;  // TCP and the Unix socket
  std::array<std::atomic<uint64_t>, LDR_NUM_PATHS> bytes_pulled{}, bytes_pushed{}, bytes_served{};

  void info(ldr_engine_info_t *info) const;

 private:
  Engine(EngineConfig config, uint64_t incarnation, std::unique_ptr<Page> page);
  bool loop_runs_ = false;
  std::mutex shutdown_mutex_;
  bool is_shut_down_ = false;
};

}  // namespace ldr
