#include "engine.h"

#include <cstdlib>
#include <cstring>
#include <future>

#include "auth.h"
#include "clock.h"

namespace ldr {
namespace {

constexpr int64_t kDefaultHeartbeatNs = 500 * kMillisecond;
constexpr int64_t kDefaultBudgetNs = 3 * kSecond;
constexpr uint32_t kMaxCopyThreads = 64;
constexpr uint32_t kMaxSecretBytes = 4096;

Status read_config(const ldr_engine_params_t &params, EngineConfig *config_p) {
  EngineConfig config;
  if (params.path_set & ~kAllPaths) return fail(LDR_ERR_INVALID, "path_set %#x has unknown bits; known is %#x", params.path_set, kAllPaths);
  if (params.secret_bytes > kMaxSecretBytes || (params.secret_bytes && !params.secret))
    return fail(LDR_ERR_INVALID, "a secret of %u bytes at %p; at most %u are allowed", params.secret_bytes, static_cast<const void *>(params.secret), kMaxSecretBytes);
  if (params.num_copy_threads > kMaxCopyThreads) return fail(LDR_ERR_INVALID, "%u copy threads; at most %u are allowed", params.num_copy_threads, kMaxCopyThreads);
  if (params.listen_port > 65535) return fail(LDR_ERR_INVALID, "listen_port is %u", params.listen_port);
  config.cluster_id = params.cluster_id;
  config.remote_access = params.flags & LDR_ENGINE_REMOTE_ACCESS;
  config.insecure = params.flags & LDR_ENGINE_INSECURE;
  config.one_way = params.flags & LDR_ENGINE_ONE_WAY;
  config.allow_ptracer = !(params.flags & LDR_ENGINE_NO_PTRACER);
  config.path_set = params.path_set ? params.path_set : kAllPaths;
  if (params.secret_bytes) config.secret.assign(params.secret, params.secret + params.secret_bytes);
  config.num_copy_threads = params.num_copy_threads;
  config.heartbeat_interval_ns = params.heartbeat_interval_ns > 0 ? params.heartbeat_interval_ns : kDefaultHeartbeatNs;
  config.liveness_budget_ns = params.liveness_budget_ns > 0 ? params.liveness_budget_ns : kDefaultBudgetNs;
  if (config.liveness_budget_ns <= config.heartbeat_interval_ns)
    return fail(LDR_ERR_INVALID, "the liveness budget (%lld ms) must be longer than the heartbeat interval (%lld ms)",
                (long long)(config.liveness_budget_ns / kMillisecond), (long long)(config.heartbeat_interval_ns / kMillisecond));
  config.layout_digest = params.layout_digest;
  if (params.layout_text) config.layout_text = params.layout_text;
  config.marks = {params.ip_tos, params.socket_priority};
  const char *refuse_cma = getenv("LDR_TEST_REFUSE_CMA");
  config.refuse_cma = refuse_cma && strcmp(refuse_cma, "1") == 0;
  *config_p = std::move(config);
  return Status::success();
}

}  // namespace

Engine::Engine(EngineConfig config_in, uint64_t incarnation_in, std::unique_ptr<Page> page_in)
    : config(std::move(config_in)),
      incarnation(incarnation_in),
      host(Host::here()),
      page(std::move(page_in)),
      pool(config.num_copy_threads),
      caches(*page, config.remote_access),
      pins(*this),
      ops(*this),
      grants(*this),
      open_grants(*this),
      links(*this),
      listener(*this) {}

Status Engine::create(const ldr_engine_params_t &params, std::unique_ptr<Engine> *engine_p) {
  EngineConfig config;
  if (Status status = read_config(params, &config); !status.ok()) return status;
  uint64_t incarnation = 0;
  while (incarnation == 0) {
    if (Status status = random_bytes(&incarnation, sizeof(incarnation)); !status.ok()) return status;
  }
  std::unique_ptr<Page> page;
  if (Status status = Page::create(incarnation, &page); !status.ok()) return status;
  std::unique_ptr<Engine> engine(new Engine(std::move(config), incarnation, std::move(page)));
  if (engine->events.fd() < 0 || engine->links.wake_fd() < 0) return fail(LDR_ERR_SYSTEM, "no descriptor is left for the event queue or the link table");

  // The death word is held before anybody can see the page.
  auto held = std::make_shared<std::promise<void>>();
  Page &shown = *engine->page;
  Status status = engine->loop.start(
      [&shown, held] {
        shown.hold_death_word();
        held->set_value();
      },
      [&shown] { shown.release_death_word(); });
  if (!status.ok()) return status;
  held->get_future().wait();
  engine->loop_runs_ = true;
  if (status = engine->listener.start_unix(); !status.ok()) return status;
  if (params.listen_ip) {
    if (status = engine->listener.listen(params.listen_ip, params.listen_port); !status.ok()) return status;
  }
  *engine_p = std::move(engine);
  return Status::success();
}

void Engine::shutdown() {
  std::lock_guard lock(shutdown_mutex_);
  if (std::exchange(is_shut_down_, true)) return;
  links.begin_close();
  if (loop_runs_) listener.stop();
  ops.close();
  // Links before the wait: a push whose peer has stopped reading ends with its connection only.
  if (loop_runs_) links.close_all();
  ops.wait_all();
  pool.stop();
  loop.stop();
  events.close();
}

Engine::~Engine() { shutdown(); }


void Engine::info(ldr_engine_info_t *info) const {
  *info = {};
  info->incarnation = incarnation;
  info->cluster_id = config.cluster_id;
  info->listen_port = listener.port();
  info->path_set = config.path_set;
  info->num_copy_threads = pool.num_threads();
  info->num_links = links.size();
  info->num_caches = caches.size();
  info->num_ops_in_flight = ops.in_flight();
  for (int path = 0; path < LDR_NUM_PATHS; ++path) {
    info->bytes_pulled[path] = bytes_pulled[path].load(std::memory_order_relaxed);
    info->bytes_pushed[path] = bytes_pushed[path].load(std::memory_order_relaxed);
    info->bytes_served[path] = bytes_served[path].load(std::memory_order_relaxed);
  }
}

}  // namespace ldr
