// Engines in other processes: killed ones are seen dead at once, inherited ones are dead from birth.
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "end_to_end.h"
#include "engines.h"

using namespace ldr_test;
using ldr::kMillisecond;
using ldr::kSecond;
using ldr::now_ns;

namespace {

constexpr uint64_t kNumBlocks = 64, kBlockBytes = 1 << 20;

// A child process with an engine and a cache, the first one; its port comes back over a pipe, and it lives until it is killed.
struct Child {
  pid_t pid = -1;
  uint32_t port = 0;

  explicit Child(const EngineOptions &options) {
    int pipe_fds[2];
    CHECK_EQ(pipe(pipe_fds), 0);
    pid = fork();
    if (pid == 0) {
      TestEngine engine(options);
      TestCache cache(engine, false, LDR_CACHE_BLOCKS, 1, kNumBlocks, kBlockBytes, 1);
      port = engine.port();
      if (write(pipe_fds[1], &port, sizeof(port)) != sizeof(port)) _exit(1);
      for (;;) pause();
    }
    CHECK_EQ(read(pipe_fds[0], &port, sizeof(port)), ssize_t(sizeof(port)));
    close(pipe_fds[0]);
    close(pipe_fds[1]);
  }
  void kill_and_reap() {
    kill(pid, SIGKILL);
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
  }
};

EngineOptions options(uint64_t cluster_id, const char *paths) {
  EngineOptions o{cluster_id, LDR_ENGINE_REMOTE_ACCESS | LDR_ENGINE_INSECURE, paths};
  o.budget_ns = 10 * kSecond;  // whatever is seen earlier is not due to silence
  return o;
}

void killed(const char *paths) {
  Child child(options(2, paths));
  TestEngine engine(options(1, paths));
  ldr_link_info_t info;
  CHECK_C(engine.link(child.port, &info), LDR_OK);
  CHECK_EQ(info.peer_pid, int32_t(child.pid));
  engine.next_event(LDR_EVENT_LINK_UP);
  int64_t start = now_ns();
  kill(child.pid, SIGKILL);
  ldr_event_t event = engine.next_event(LDR_EVENT_LINK_DOWN);
  CHECK(now_ns() - start < 3 * kSecond);
  CHECK_EQ(event.status, int32_t(LDR_ERR_LINK_BROKEN));
  CHECK_EQ(engine.query(2).state, uint32_t(LDR_LINK_BROKEN));
  child.kill_and_reap();
  CHECK_C(engine.link(child.port), LDR_ERR_LINK_FAILED);
}

// The process is stopped: nothing closes, only the silence tells.
void stopped() {
  EngineOptions first{1}, second{2};
  first.budget_ns = second.budget_ns = kSecond;
  Child child(second);
  TestEngine engine(first);
  CHECK_C(engine.link(child.port), LDR_OK);
  engine.next_event(LDR_EVENT_LINK_UP);
  kill(child.pid, SIGSTOP);
  int64_t start = now_ns();
  CHECK_EQ(engine.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_ERR_LINK_BROKEN));
  int64_t elapsed = now_ns() - start;
  CHECK(elapsed > 500 * kMillisecond && elapsed < 3 * kSecond);
  child.kill_and_reap();
}

// A push to a process that is stopped in the middle of it: neither the destruction nor the budget's length may hold the caller.
void destroyed_under_a_push(const char *paths) {
  Child child(options(2, paths));
  TestEngine engine(options(1, paths));
  CHECK_C(engine.link(child.port), LDR_OK);
  auto cache = std::make_unique<TestCache>(engine, false, LDR_CACHE_BLOCKS, 1, kNumBlocks, kBlockBytes, 2);
  std::vector<int32_t> blocks(1 << 14);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = int32_t(i % kNumBlocks);
  ldr_transfer_params_t push = transfer(LDR_PUSH, 2, LDR_MOVE_BLOCKS, 1, cache->id);
  push.src_blocks = push.dst_blocks = list(blocks);
  push.timeout_ns = -1;
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(engine, &push, 1, &op_id), LDR_OK);
  wait_until_moving(engine, op_id);
  kill(child.pid, SIGSTOP);
  int64_t start = now_ns();
  engine.destroy();
  CHECK(now_ns() - start < 3 * kSecond);
  cache->id = 0;  // went with its engine
  child.kill_and_reap();
}

int count_sockets() {
  DIR *directory = opendir("/proc/self/fd");
  int count = 0;
  while (dirent *entry = readdir(directory)) {
    char target[256] = "";
    std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) > 0) count += strncmp(target, "socket:", 7) == 0 || strstr(target, "eventpoll") || strstr(target, "pidfd");
  }
  closedir(directory);
  return count;
}

// In the child of a process with engines: all calls are refused, nothing of the connections is held, a new engine works.
void inherited() {
  int before = count_sockets();
  TestEngine a(1), b(EngineOptions{2, LDR_ENGINE_REMOTE_ACCESS, "unix"});
  CHECK_C(a.link(b), LDR_OK);
  CHECK(count_sockets() > before);
  pid_t pid = fork();
  if (pid == 0) {
    CHECK_EQ(count_sockets(), before);
    ldr_engine_info_t info;
    CHECK_C(ldr_engine_info(a, &info), LDR_ERR_FORKED);
    CHECK_C(a.link(1), LDR_ERR_FORKED);
    ldr_event_t event;
    uint32_t count;
    CHECK_C(ldr_poll(a, &event, 1, -1, &count), LDR_ERR_FORKED);
    a.destroy();  // nothing to wait for, nothing to break
    b.destroy();
#ifndef __SANITIZE_THREAD__  // it has no threads after a fork of a threaded process
    TestEngine fresh(EngineOptions{3, LDR_ENGINE_REMOTE_ACCESS});
    TestEngine other(EngineOptions{4, LDR_ENGINE_REMOTE_ACCESS});
    CHECK_C(fresh.link(other), LDR_OK);
    fresh.destroy();
    other.destroy();
#endif
    _exit(0);
  }
  int status;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));
  CHECK_C(a.unlink(2), LDR_OK);
}

}  // namespace

int main() {
  // A child is forked before this process has threads.
  test("killed, shm and cma", [] { killed(""); });
  test("killed, tcp", [] { killed("tcp"); });
  test("stopped", stopped);
  test("destroyed under a push, unix", [] { destroyed_under_a_push("unix"); });
  test("destroyed under a push, tcp", [] { destroyed_under_a_push("tcp"); });
  test("inherited", inherited);
}
