// The C functions for status, paths, engines, events and links.
#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "barrier.h"
#include "clock.h"
#include "link.h"

namespace ldr {
namespace {

constexpr uint32_t kClosing = 1u << 31;

thread_local ldr_engine_t *entered = nullptr;

// Of all handles: they wait here and not in a handle, because the last call of a handle must not touch it any more.
struct LastCall {
  std::mutex mutex;
  std::condition_variable left;
};

// Made anew in a forked child, where the parent's may be locked or waited on by threads that are not there. Never freed: threads may outlive static destructors.
LastCall &last_call() {
  static LastCall *current = nullptr;
  static uint64_t made_in = 0;
  const uint64_t generation = fork_generation();
  std::lock_guard lock(fork_mutex());
  if (made_in != generation) current = new LastCall;
  made_in = generation;
  return *current;
}

void describe(const Link &link, ldr_link_info_t *info) {
  const LinkFacts &facts = link.facts();
  *info = {};
  info->cluster_id = facts.cluster_id;
  info->incarnation = facts.incarnation;
  info->epoch = facts.epoch;
  info->state = link.ready() ? LDR_LINK_READY : LDR_LINK_BROKEN;
  info->path_set = facts.path_set;
  info->peer_pid = facts.peer_pid;
  info->is_same_host = facts.is_same_host;
  info->last_heard_ns = now_ns() - link.last_heard_ns();
  for (int path = 0; path < LDR_NUM_PATHS; ++path) {
    info->bytes_pulled[path] = link.bytes_pulled[path].load(std::memory_order_relaxed);
    info->bytes_pushed[path] = link.bytes_pushed[path].load(std::memory_order_relaxed);
  }
  info->is_inbound = facts.is_inbound;
  snprintf(info->peer_address, sizeof(info->peer_address), "%s", facts.address.c_str());
}

}  // namespace

Status enter(ldr_engine_t *handle, Engine **engine_p) {
  if (!handle) return fail(LDR_ERR_INVALID, "the engine is NULL");
  if (handle->forked()) return fail(LDR_ERR_FORKED, "this engine was inherited by fork(); make a new one in this process");
  const bool closing = handle->calls.fetch_add(1) & kClosing;
  entered = handle;
  *engine_p = closing ? nullptr : handle->engine.get();  // once it is closing it may go at any moment
  return closing ? fail(LDR_ERR_CLOSED, "the engine is being destroyed") : Status::success();
}

void leave() noexcept {
  ldr_engine_t *handle = std::exchange(entered, nullptr);
  if (!handle || handle->calls.fetch_sub(1) != (kClosing | 1)) return;
  LastCall &last = last_call();
  std::lock_guard lock(last.mutex);
  last.left.notify_all();
}

bool is_closing(const ldr_engine_t *handle) { return handle->calls & kClosing; }

void close_handle(ldr_engine_t *handle) { handle->calls.fetch_or(kClosing); }

void wait_for_calls(ldr_engine_t *handle) {
  LastCall &last = last_call();
  std::unique_lock lock(last.mutex);
  last.left.wait(lock, [handle] { return handle->calls == kClosing; });
}

// Calls that are inside end with CLOSED; those that come later do not touch the engine any more.
void end_engine(ldr_engine_t *handle) {
  close_handle(handle);
  if (!handle->engine) return;
  handle->engine->shutdown();
  wait_for_calls(handle);
  handle->engine.reset();
}

}  // namespace ldr

using namespace ldr;

uint32_t ldr_abi_version(void) { return LDR_ABI_VERSION; }

ldr_status_t ldr_paths_parse(const char *text, uint32_t *path_set_p) {
  return guarded([&] { return path_set_p ? parse_path_set(text, path_set_p) : missing("path_set_p"); });
}

const char *ldr_path_name(uint32_t path) { return path_name(path); }

ldr_status_t ldr_engine_create(const ldr_engine_params_t *params, ldr_engine_t **engine_p) {
  return guarded([&]() -> Status {
    ldr_engine_params_t p;
    if (Status status = read_params(params, &p); !status.ok()) return status;
    if (!engine_p) return missing("engine_p");
    auto handle = std::make_unique<ldr_engine>();
    (void)last_call();  // its memory is there before a call could need it
    if (Status status = Engine::create(p, &handle->engine); !status.ok()) return status;
    *engine_p = handle.release();
    return Status::success();
  });
}

void ldr_engine_shutdown(ldr_engine_t *handle) {
  if (!handle || handle->forked()) return;
  (void)guarded([&] {
    end_engine(handle);
    return Status::success();
  });
}

void ldr_engine_destroy(ldr_engine_t *handle) {
  if (!handle || handle->forked()) return;  // forked: its threads are not here; what it held was closed in the fork handler, its memory stays
  (void)guarded([&] {
    end_engine(handle);
    delete handle;
    return Status::success();
  });
}

ldr_status_t ldr_engine_info(ldr_engine_t *handle, ldr_engine_info_t *info_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    if (!info_p) return missing("info_p");
    engine->info(info_p);
    return Status::success();
  });
}

ldr_status_t ldr_engine_listen(ldr_engine_t *handle, const char *ip, uint32_t port) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    if (ip) return engine->listener.listen(ip, port);
    engine->listener.unlisten();
    return Status::success();
  });
}

ldr_status_t ldr_engine_listen_also(ldr_engine_t *handle, const char *ip, uint32_t port) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    return ip ? engine->listener.listen_also(ip, port) : missing("ip");
  });
}

ldr_status_t ldr_engine_unlisten(ldr_engine_t *handle, const char *ip, uint32_t port) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    return ip ? engine->listener.give_up(ip, port) : missing("ip");
  });
}

int ldr_engine_event_fd(ldr_engine_t *handle) {
  int fd = -1;
  (void)guarded([&] {
    Engine *engine;
    Status status = enter(handle, &engine);
    if (status.ok()) fd = engine->events.fd();
    return status;
  });
  return fd;
}

ldr_status_t ldr_poll(ldr_engine_t *handle, ldr_event_t *events, uint32_t capacity, int64_t timeout_ns, uint32_t *count_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    if (!events || !capacity || !count_p) return fail(LDR_ERR_INVALID, "ldr_poll needs room for events and a count");
    return engine->events.take(events, capacity, timeout_ns, count_p);
  });
}

ldr_status_t ldr_link_open(ldr_engine_t *handle, const ldr_link_params_t *params, ldr_link_info_t *info_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_link_params_t p;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    if (Status status = read_params(params, &p); !status.ok()) return status;
    LinkPtr link;
    if (Status status = engine->links.open(p, &link); !status.ok()) return status;
    if (info_p) describe(*link, info_p);
    return Status::success();
  });
}

ldr_status_t ldr_link_close(ldr_engine_t *handle, uint64_t cluster_id, int32_t force, const char *ip, uint32_t port, int64_t timeout_ns) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    return engine->links.close(cluster_id, force, ip, port, timeout_ns);
  });
}

ldr_status_t ldr_link_query(ldr_engine_t *handle, uint64_t cluster_id, ldr_link_info_t *info_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    if (!info_p) return missing("info_p");
    LinkPtr link = engine->links.find(cluster_id);
    if (!link) return fail(LDR_ERR_NOT_LINKED, "there is no link to cluster %llu", (unsigned long long)cluster_id);
    describe(*link, info_p);
    return Status::success();
  });
}

ldr_status_t ldr_link_probe(ldr_engine_t *handle, uint64_t cluster_id, int64_t timeout_ns) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    return engine->links.probe(cluster_id, timeout_ns);
  });
}

ldr_status_t ldr_link_list(ldr_engine_t *handle, ldr_link_info_t *infos, uint32_t capacity, uint32_t *count_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status status = enter(handle, &engine); !status.ok()) return status;
    if (!count_p || (capacity && !infos)) return missing("infos or count_p");
    std::vector<LinkPtr> links = engine->links.all();
    for (size_t i = 0; i < links.size() && i < capacity; ++i) describe(*links[i], &infos[i]);
    *count_p = uint32_t(links.size());
    return Status::success();
  });
}
