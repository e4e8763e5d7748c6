// Engines for tests: made with few words, destroyed at the end of the scope.
#pragma once

#include <dirent.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "clock.h"
#include "ldr.h"

namespace ldr_test {

constexpr int64_t kPatienceNs = 20 * ldr::kSecond;  // nothing takes that long; a test that waits for it has failed

struct EngineOptions {
  uint64_t cluster_id = 1;
  uint32_t flags = LDR_ENGINE_REMOTE_ACCESS;
  std::string paths = "";  // all
  std::string secret = "";
  uint64_t layout_digest = 0;
  std::string layout_text = "";
  int64_t budget_ns = 0;
  uint32_t ip_tos = 0, socket_priority = 0;
};

class TestEngine {
 public:
  explicit TestEngine(const EngineOptions &options) {
    ldr_engine_params_t params{};
    params.struct_size = sizeof(params);
    params.flags = options.flags;
    params.cluster_id = options.cluster_id;
    params.listen_ip = "127.0.0.1";
    params.secret = reinterpret_cast<const uint8_t *>(options.secret.data());
    params.secret_bytes = uint32_t(options.secret.size());
    params.num_copy_threads = 1;
    params.liveness_budget_ns = options.budget_ns;
    params.heartbeat_interval_ns = options.budget_ns / 4;
    params.layout_digest = options.layout_digest;
    params.layout_text = options.layout_text.c_str();
    params.ip_tos = options.ip_tos;
    params.socket_priority = options.socket_priority;
    CHECK_C(ldr_paths_parse(options.paths.c_str(), &params.path_set), LDR_OK);
    CHECK_C(ldr_engine_create(&params, &handle_), LDR_OK);
  }
  explicit TestEngine(uint64_t cluster_id) : TestEngine(EngineOptions{cluster_id}) {}
  TestEngine(TestEngine &&other) : handle_(std::exchange(other.handle_, nullptr)) {}
  ~TestEngine() { destroy(); }
  ldr_engine_t *release() { return std::exchange(handle_, nullptr); }
  void destroy() { ldr_engine_destroy(std::exchange(handle_, nullptr)); }
  operator ldr_engine_t *() const { return handle_; }

  ldr_engine_info_t info() const {
    ldr_engine_info_t info;
    CHECK_C(ldr_engine_info(handle_, &info), LDR_OK);
    return info;
  }
  uint32_t port() const { return info().listen_port; }

  ldr_status_t link(uint32_t port, ldr_link_info_t *info_p = nullptr, int64_t timeout_ns = kPatienceNs) const {
    ldr_link_params_t params{};
    params.struct_size = sizeof(params);
    params.ip = "127.0.0.1";
    params.port = port;
    params.timeout_ns = timeout_ns;
    return ldr_link_open(handle_, &params, info_p);
  }
  ldr_status_t link(const TestEngine &peer, ldr_link_info_t *info_p = nullptr, int64_t timeout_ns = kPatienceNs) const {
    return link(peer.port(), info_p, timeout_ns);
  }
  ldr_status_t unlink(uint64_t cluster_id, bool force = false, int64_t timeout_ns = kPatienceNs) const {
    return ldr_link_close(handle_, cluster_id, force, nullptr, 0, timeout_ns);
  }
  std::vector<ldr_link_info_t> list() const {
    std::vector<ldr_link_info_t> infos(32);
    uint32_t count = 0;
    CHECK_C(ldr_link_list(handle_, infos.data(), uint32_t(infos.size()), &count), LDR_OK);
    CHECK(count <= infos.size());
    infos.resize(count);
    return infos;
  }
  ldr_link_info_t query(uint64_t cluster_id) const {
    ldr_link_info_t info;
    CHECK_C(ldr_link_query(handle_, cluster_id, &info), LDR_OK);
    return info;
  }
  // The next event; it must be of this kind.
  ldr_event_t next_event(uint16_t kind) const {
    ldr_event_t event{};
    uint32_t count = 0;
    CHECK_C(ldr_poll(handle_, &event, 1, kPatienceNs, &count), LDR_OK);
    CHECK_EQ(count, 1u);
    CHECK_EQ(event.kind, kind);
    return event;
  }
  bool has_event() const {
    ldr_event_t event{};
    uint32_t count = 0;
    CHECK_C(ldr_poll(handle_, &event, 1, 0, &count), LDR_OK);
    return count > 0;
  }

 private:
  ldr_engine_t *handle_ = nullptr;
};

// Entries of a /proc/self directory: open descriptors ("fd") or threads ("task").
inline int count_entries(const char *name) {
  DIR *directory = opendir((std::string("/proc/self/") + name).c_str());
  CHECK(directory != nullptr);
  int count = 0;
  while (dirent *entry = readdir(directory)) count += entry->d_name[0] != '.';
  closedir(directory);
  return count;
}

}  // namespace ldr_test
