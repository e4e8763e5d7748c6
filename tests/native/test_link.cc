// Two engines in one process, linked over 127.0.0.1.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "barrier.h"
#include "engines.h"
#include "link.h"

using namespace ldr_test;
using ldr::kMillisecond;
using ldr::kSecond;
using ldr::now_ns;

namespace {

constexpr uint32_t kShm = 1u << LDR_PATH_SHM, kCma = 1u << LDR_PATH_CMA, kUnix = 1u << LDR_PATH_UNIX, kTcp = 1u << LDR_PATH_TCP;

void ready_on_both_sides() {
  TestEngine a(1), b(2);
  ldr_link_info_t at_a;
  CHECK_C(a.link(b, &at_a), LDR_OK);
  ldr_link_info_t at_b = b.query(1);
  CHECK_EQ(at_a.cluster_id, uint64_t(2));
  CHECK_EQ(at_a.incarnation, b.info().incarnation);
  CHECK_EQ(at_b.incarnation, a.info().incarnation);
  CHECK_EQ(at_a.state, uint32_t(LDR_LINK_READY));
  CHECK_EQ(at_b.state, uint32_t(LDR_LINK_READY));
  CHECK_EQ(at_a.path_set, kShm | kCma | kUnix | kTcp);
  CHECK_EQ(at_b.path_set, at_a.path_set);
  CHECK_EQ(at_a.peer_pid, int32_t(getpid()));
  CHECK_EQ(at_b.is_same_host, 1);
  CHECK_EQ(std::string(at_a.peer_address), "127.0.0.1:" + std::to_string(b.port()));
  CHECK_EQ(a.info().num_links, 1u);
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_UP).id, uint64_t(2));
  ldr_event_t up = b.next_event(LDR_EVENT_LINK_UP);
  CHECK_EQ(up.id, uint64_t(1));
  CHECK_EQ(up.user_tag, a.info().incarnation);
  ldr_link_info_t listed[2];
  uint32_t count;
  CHECK_C(ldr_link_list(a, listed, 2, &count), LDR_OK);
  CHECK_EQ(count, 1u);
  CHECK_EQ(listed[0].epoch, at_a.epoch);
  CHECK_C(ldr_link_query(a, 77, &at_a), LDR_ERR_NOT_LINKED);
}

void paths_are_what_both_allow() {
  struct Case { const char *a, *b; uint32_t expected; } cases[] = {
      {"shm", "", kShm}, {"cma", "cma,tcp", kCma}, {"unix", "unix", kUnix}, {"tcp", "", kTcp}, {"shm,tcp", "shm,unix,tcp", kShm | kTcp}};
  for (const Case &c : cases) {
    EngineOptions first{1}, second{2};
    first.paths = c.a;
    second.paths = c.b;
    TestEngine a(first), b(second);
    ldr_link_info_t info;
    CHECK_C(a.link(b, &info), LDR_OK);
    CHECK_EQ(info.path_set, c.expected);
    CHECK_EQ(b.query(1).path_set, c.expected);
  }
}

void no_common_path() {
  EngineOptions first{1}, second{2};
  first.paths = "shm,cma";
  second.paths = "tcp";
  TestEngine a(first), b(second);
  CHECK_C(a.link(b), LDR_ERR_LINK_FAILED);
  CHECK_CONTAINS(ldr_last_error(), "shm,cma");
  CHECK_CONTAINS(ldr_last_error(), "tcp");
  CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
}

void refused_cma() {
  setenv("LDR_TEST_REFUSE_CMA", "1", 1);
  TestEngine a(1);
  unsetenv("LDR_TEST_REFUSE_CMA");
  TestEngine b(2), c(EngineOptions{3, LDR_ENGINE_REMOTE_ACCESS, "cma"});
  ldr_link_info_t info;
  CHECK_C(a.link(b, &info), LDR_OK);
  CHECK_EQ(info.path_set, kShm | kUnix | kTcp);
  CHECK_EQ(b.query(1).path_set, info.path_set);
  CHECK_C(c.link(a), LDR_ERR_LINK_FAILED);
  CHECK_CONTAINS(ldr_last_error(), "cma was refused");
}

void already_linked() {
  TestEngine a(1), b(2);
  CHECK_C(a.link(b), LDR_OK);
  uint64_t epoch = a.query(2).epoch;
  CHECK_C(a.link(b), LDR_ERR_ALREADY_LINKED);
  CHECK_C(b.link(a), LDR_ERR_ALREADY_LINKED);
  CHECK_EQ(a.query(2).epoch, epoch);
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));
  CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_READY));
}

void refused(EngineOptions first, EngineOptions second, ldr_status_t code, std::vector<std::string> parts) {
  first.cluster_id = 1;
  second.cluster_id = 2;
  TestEngine a(first), b(second);
  for (auto [from, to] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    CHECK_C(from->link(*to), code);
    std::string text = ldr_last_error();
    parts.push_back("127.0.0.1:" + std::to_string(to->port()));
    for (const std::string &part : parts) CHECK_CONTAINS(text, part);
    parts.pop_back();
  }
  CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
  CHECK(!a.has_event() && !b.has_event());
}

void refusals() {
  EngineOptions plain, two_sided, secret, other_secret, layout, other_layout;
  two_sided.flags = 0;
  secret.secret = "one";
  other_secret.secret = "two";
  layout.layout_digest = 1;
  layout.layout_text = "layers=2 dtype=f32";
  other_layout.layout_digest = 2;
  other_layout.layout_text = "layers=3 dtype=f32";
  refused(plain, two_sided, LDR_ERR_MODE_MISMATCH, {"cluster 1 allows remote cache access", "cluster 2 does not"});
  refused(secret, plain, LDR_ERR_AUTH, {"cluster 1 has a cluster secret", "cluster 2 has none", "LLM_DATADIST_SECRET"});
  refused(secret, other_secret, LDR_ERR_AUTH, {"different secrets", "LLM_DATADIST_SECRET"});
  refused(layout, other_layout, LDR_ERR_LAYOUT, {"layers=2", "layers=3"});
}

void allowances() {
  EngineOptions plain{1}, layout{2}, secret{1}, same_secret{2};
  layout.layout_digest = 9;
  secret.secret = same_secret.secret = "shared";
  TestEngine a(plain), b(layout), c(secret), d(same_secret);
  CHECK_C(a.link(b), LDR_OK);  // only members of a cluster compare layouts
  CHECK_C(c.link(d), LDR_OK);
}

void unreachable() {
  TestEngine a(1);
  uint32_t port;
  {
    TestEngine gone(2);
    port = gone.port();
  }
  CHECK_C(a.link(port), LDR_ERR_LINK_FAILED);
  CHECK_CONTAINS(ldr_last_error(), "127.0.0.1:" + std::to_string(port));
  CHECK_CONTAINS(ldr_last_error(), "\"connect\" after");
  CHECK_C(a.link(0), LDR_ERR_INVALID);
  ldr_link_params_t params{};
  params.struct_size = sizeof(params);
  params.ip = "no-address";
  params.port = 1;
  CHECK_C(ldr_link_open(a, &params, nullptr), LDR_ERR_INVALID);
}

void link_to_self() {
  for (const char *paths : {"", "unix", "tcp"}) {
    TestEngine a(EngineOptions{1, LDR_ENGINE_REMOTE_ACCESS, paths});
    ldr_link_info_t info;
    CHECK_C(a.link(a, &info), LDR_OK);
    CHECK_EQ(info.incarnation, a.info().incarnation);
    CHECK_EQ(a.info().num_links, 1u);
    CHECK_C(a.link(a), LDR_ERR_ALREADY_LINKED);
    a.next_event(LDR_EVENT_LINK_UP);
    CHECK_C(a.unlink(1), LDR_OK);
    CHECK_EQ(a.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
    CHECK_C(a.link(a), LDR_OK);
    CHECK_C(a.unlink(1, true), LDR_OK);
    CHECK_C(a.link(a), LDR_OK);
  }
}

void simultaneous() {
  for (int round = 0; round < 25; ++round) {
    TestEngine a(1), b(2);
    ldr_status_t at_a = LDR_ERR_INTERNAL, at_b = LDR_ERR_INTERNAL;
    std::string text;
    std::thread other([&] {
      at_b = b.link(a);
      if (at_b != LDR_OK) text = ldr_last_error();
    });
    at_a = a.link(b);
    if (at_a != LDR_OK) text = ldr_last_error();
    other.join();
    // One of them may have come a moment too late; never may both fail.
    bool fine = (at_a == LDR_OK || at_a == LDR_ERR_ALREADY_LINKED) && (at_b == LDR_OK || at_b == LDR_ERR_ALREADY_LINKED) && (at_a == LDR_OK || at_b == LDR_OK);
    if (!fine) failed(__FILE__, __LINE__, std::to_string(at_a) + " and " + std::to_string(at_b) + ": " + text);
    CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));
    CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_READY));
    // It is one link and not two half ones: what one side closes, the other side loses.
    a.next_event(LDR_EVENT_LINK_UP);
    b.next_event(LDR_EVENT_LINK_UP);
    CHECK_C(a.unlink(2), LDR_OK);
    CHECK_EQ(b.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
    CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
  }
}

void many_threads_to_one_peer() {
  TestEngine a(1), b(2);
  std::vector<std::thread> threads;
  std::atomic<int> linked{0}, already{0};
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      ldr_status_t status = a.link(b);
      linked += status == LDR_OK;
      already += status == LDR_ERR_ALREADY_LINKED;
    });
  }
  for (auto &thread : threads) thread.join();
  CHECK_EQ(linked.load(), 1);
  CHECK_EQ(already.load(), 5);
  CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_READY));
}

void many_peers_at_once() {
  TestEngine hub(100);
  std::vector<TestEngine> peers;
  for (uint64_t id = 1; id <= 8; ++id) peers.emplace_back(EngineOptions{id, LDR_ENGINE_REMOTE_ACCESS, id % 2 ? "tcp" : ""});
  std::vector<std::thread> threads;
  for (TestEngine &peer : peers) threads.emplace_back([&] { CHECK_C(peer.link(hub), LDR_OK); });
  for (auto &thread : threads) thread.join();
  CHECK_EQ(hub.info().num_links, 8u);
}

void unlink_drops_both_halves() {
  TestEngine a(1), b(2);
  CHECK_C(a.link(b), LDR_OK);
  a.next_event(LDR_EVENT_LINK_UP);
  b.next_event(LDR_EVENT_LINK_UP);
  CHECK_C(ldr_link_close(a, 2, 0, "127.0.0.1", b.port(), kPatienceNs), LDR_OK);
  CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
  ldr_link_info_t info;
  CHECK_C(ldr_link_query(a, 2, &info), LDR_ERR_NOT_LINKED);
  CHECK_C(ldr_link_query(b, 1, &info), LDR_ERR_NOT_LINKED);
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
  CHECK_EQ(b.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
  CHECK_C(a.unlink(2), LDR_OK);  // no link: success
  CHECK_C(b.link(a), LDR_OK);    // and again, the other way
  CHECK_C(a.unlink(2), LDR_OK);  // by the side that was linked to
  CHECK_EQ(b.info().num_links, 0u);
}

// Before the loop has even looked at the new link: its first heartbeat meets a closed socket, and still the answer to the unlink is what counts.
void unlink_at_once() {
  TestEngine a(1), b(2);
  for (int round = 0; round < 60; ++round) {
    CHECK_C(a.link(b), LDR_OK);
    CHECK_C((round % 2 ? a : b).unlink(round % 2 ? 2 : 1), LDR_OK);
    for (TestEngine *engine : {&a, &b}) {
      engine->next_event(LDR_EVENT_LINK_UP);
      CHECK_EQ(engine->next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
    }
  }
}

void unlink_by_both_at_once() {
  for (int round = 0; round < 20; ++round) {
    TestEngine a(1), b(2);
    CHECK_C(a.link(b), LDR_OK);
    std::thread other([&] { CHECK_C(b.unlink(1), LDR_OK); });
    CHECK_C(a.unlink(2), LDR_OK);
    other.join();
    CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
  }
}

void forced_unlink() {
  TestEngine a(1), b(2);
  CHECK_C(a.link(b), LDR_OK);
  b.next_event(LDR_EVENT_LINK_UP);
  CHECK_C(a.unlink(2, true), LDR_OK);
  ldr_link_info_t info;
  CHECK_C(ldr_link_query(a, 2, &info), LDR_ERR_NOT_LINKED);
  CHECK_EQ(b.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_ERR_LINK_BROKEN));
  CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_BROKEN));  // its half is its own affair
  CHECK_EQ(b.info().num_links, 0u);
  CHECK_C(a.link(b), LDR_OK);  // replaces the broken half
  CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_READY));
  CHECK_C(a.unlink(2, true), LDR_OK);
  b.next_event(LDR_EVENT_LINK_UP);
  b.next_event(LDR_EVENT_LINK_DOWN);
  CHECK_C(b.unlink(1), LDR_OK);  // a broken link is unlinked without the peer
  CHECK_C(ldr_link_query(b, 1, &info), LDR_ERR_NOT_LINKED);
}

void unlink_of_an_unreachable_listener_keeps_the_link() {
  TestEngine a(1), b(2);
  CHECK_C(a.link(b), LDR_OK);
  uint32_t port = b.port();
  CHECK_C(ldr_engine_listen(b, nullptr, 0), LDR_OK);
  CHECK_C(ldr_link_close(a, 2, 0, "127.0.0.1", port, kPatienceNs), LDR_ERR_UNLINK_FAILED);
  CHECK_CONTAINS(ldr_last_error(), "the link is kept");
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));
  CHECK_C(ldr_link_close(a, 2, 0, nullptr, 0, kPatienceNs), LDR_OK);
}

void listening() {
  TestEngine a(1), b(2);
  uint32_t port = b.port();
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", port), LDR_OK);  // as it is
  CHECK_C(a.link(port), LDR_OK);
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", a.port()), LDR_ERR_BIND);  // taken; the old one is gone
  CHECK_CONTAINS(ldr_last_error(), "127.0.0.1:" + std::to_string(a.port()));
  CHECK_EQ(b.port(), 0u);
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", 0), LDR_OK);
  CHECK(b.port() != 0);
  CHECK_C(a.unlink(2), LDR_OK);
  CHECK_C(a.link(b), LDR_OK);
  uint32_t kept = b.port();
  CHECK_C(ldr_engine_listen(b, "not an address", 1), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", 70000), LDR_ERR_INVALID);
  CHECK_EQ(b.port(), kept);
}

// Stands for a transfer that runs as long as the test wants.
struct Occupant : ldr::Transfer {
  std::atomic<int> stopped{0}, refused{0};
  void start_turn() override {}
  void refuse(const ldr::Status &why) override { refused += why.code == LDR_ERR_NOT_LINKED; }
  void stop(const ldr::Status &) override { ++stopped; }
};

ldr::TransferQueue &queue(const TestEngine &engine, uint64_t peer) {
  return static_cast<ldr_engine_t *>(engine)->engine->links.find(peer)->transfers;
}

void unlink_waits_for_transfers() {
  TestEngine a(1), b(2);
  CHECK_C(a.link(b), LDR_OK);
  ldr::LinkPtr at_a = static_cast<ldr_engine_t *>(a)->engine->links.find(2);  // keeps the queue when the link is gone
  ldr::LinkPtr at_b = static_cast<ldr_engine_t *>(b)->engine->links.find(1);
  auto own = std::make_shared<Occupant>(), peers = std::make_shared<Occupant>(), late = std::make_shared<Occupant>();
  CHECK(queue(a, 2).enter(own));
  CHECK_C(a.unlink(2, false, 50 * kMillisecond), LDR_ERR_TIMEOUT);
  CHECK_CONTAINS(ldr_last_error(), "the link is kept");
  at_a->transfers.leave(*own);
  CHECK(queue(a, 2).enter(own));  // open again
  at_a->transfers.leave(*own);
  CHECK(queue(b, 1).enter(peers));
  CHECK_C(a.unlink(2, false, 400 * kMillisecond), LDR_ERR_UNLINK_FAILED);
  CHECK_CONTAINS(ldr_last_error(), "transfer of cluster 2");
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));
  CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_READY));
  CHECK_EQ(own->stopped + peers->stopped, 0);
  std::thread unlinker([&] { CHECK_C(a.unlink(2), LDR_OK); });
  at_b->transfers.leave(*peers);
  unlinker.join();
  CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
  CHECK(!at_a->transfers.enter(late));
  CHECK_EQ(late->refused.load(), 1);
}

// The timeout bounds how long a forced unlink lets a transfer run; the link goes in any case.
void forced_unlink_stops_transfers() {
  TestEngine a(1), b(2);
  CHECK_C(a.link(b), LDR_OK);
  ldr::LinkPtr link = static_cast<ldr_engine_t *>(a)->engine->links.find(2);
  auto running = std::make_shared<Occupant>(), waiting = std::make_shared<Occupant>();
  CHECK(link->transfers.enter(running));
  CHECK(!link->transfers.enter(waiting));
  CHECK_C(a.unlink(2, true, 20 * kMillisecond), LDR_OK);
  CHECK_EQ(running->stopped.load(), 1);
  CHECK_EQ(waiting->refused.load(), 1);
  link->transfers.leave(*running);
}

// With a budget of 1 s a link of two live engines stays up for several budgets.
void heartbeats_keep_it_up() {
  EngineOptions first{1}, second{2};
  first.budget_ns = second.budget_ns = kSecond;
  TestEngine a(first), b(second);
  CHECK_C(a.link(b), LDR_OK);
  a.next_event(LDR_EVENT_LINK_UP);
  ldr_event_t event;
  uint32_t count;
  CHECK_C(ldr_poll(a, &event, 1, 2500 * kMillisecond, &count), LDR_OK);
  CHECK_EQ(count, 0u);
  CHECK(a.query(2).last_heard_ns < kSecond);
  CHECK(b.query(1).last_heard_ns < kSecond);
}

// A new incarnation of a cluster replaces the link to the old one.
void restarted_peer() {
  TestEngine hub(1);
  uint64_t first;
  {
    TestEngine b(2);
    first = b.info().incarnation;
    CHECK_C(b.link(hub), LDR_OK);
    CHECK_EQ(hub.next_event(LDR_EVENT_LINK_UP).user_tag, first);
  }
  ldr_event_t down = hub.next_event(LDR_EVENT_LINK_DOWN);
  CHECK_EQ(down.user_tag, first);
  CHECK_EQ(down.status, int32_t(LDR_ERR_LINK_BROKEN));
  TestEngine b(2);
  CHECK_C(b.link(hub), LDR_OK);
  CHECK(hub.query(2).incarnation != first);
  uint64_t epoch = hub.query(2).epoch;
  TestEngine twin(2);  // lives, with the same id: the last one to link counts
  CHECK_C(twin.link(hub), LDR_OK);
  CHECK(hub.query(2).epoch > epoch);
  CHECK_EQ(hub.query(2).incarnation, twin.info().incarnation);
  b.next_event(LDR_EVENT_LINK_UP);
  CHECK_EQ(b.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_ERR_LINK_BROKEN));
}

int count_mappings(const char *name) {
  FILE *maps = fopen("/proc/self/maps", "re");
  CHECK(maps != nullptr);
  int count = 0;
  for (char line[512]; fgets(line, sizeof(line), maps);) count += strstr(line, name) != nullptr;
  fclose(maps);
  return count;
}

// A broken link stays in the table to say why; what it held of the peer's memory does not.
void broken_link_holds_nothing() {
  TestEngine a(1);
  const int own = count_mappings("ldr-page");
  {
    TestEngine b(2);
    CHECK_C(a.link(b), LDR_OK);
    CHECK(count_mappings("ldr-page") > own);
    a.next_event(LDR_EVENT_LINK_UP);
  }
  a.next_event(LDR_EVENT_LINK_DOWN);
  ldr::Engine &engine = *static_cast<ldr_engine_t *>(a)->engine;
  engine.loop.run([] {});
  std::promise<void> copied;  // the one copy thread has done all before
  engine.pool.submit([&] { copied.set_value(); });
  copied.get_future().wait();
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_BROKEN));
  CHECK_EQ(count_mappings("ldr-page"), own);
}

void destroy_with_open_links() {
  TestEngine a(1), b(2), c(3);
  CHECK_C(a.link(b), LDR_OK);
  CHECK_C(b.link(c), LDR_OK);
  CHECK_C(c.link(a), LDR_OK);
  a.next_event(LDR_EVENT_LINK_UP);
  a.next_event(LDR_EVENT_LINK_UP);
  int64_t start = now_ns();
  b.destroy();
  CHECK(now_ns() - start < 2 * kSecond);
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_DOWN).id, uint64_t(2));
  CHECK_EQ(a.query(3).state, uint32_t(LDR_LINK_READY));
  ldr_engine_destroy(nullptr);
}

// A caller that is blocked inside when the engine is destroyed leaves with CLOSED before the engine is freed.
void destroy_under_a_blocked_call() {
  ldr_engine_t *engine = TestEngine(1).release();
  int silent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_EQ(::listen(silent, 8), 0);  // the kernel accepts, nobody answers
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  CHECK_EQ(getsockname(silent, reinterpret_cast<sockaddr *>(&address), &size), 0);
  ldr_status_t status = LDR_OK;
  std::string text;
  std::thread linker([&] {
    ldr_link_params_t params{sizeof(params), ntohs(address.sin_port), "127.0.0.1", -1, 0, 0, 0};
    status = ldr_link_open(engine, &params, nullptr);
    text = ldr_last_error();
  });
  int connection = accept(silent, nullptr, nullptr);  // it is inside now
  CHECK(connection >= 0);
  ldr_engine_destroy(engine);
  linker.join();
  CHECK_EQ(status, LDR_ERR_CLOSED);
  CHECK_CONTAINS(text, "being destroyed");
  close(connection);
  close(silent);
}

void nothing_is_left_behind() {
  int fds = count_entries("fd"), threads = count_entries("task");
  for (const char *paths : {"", "unix", "tcp", "shm"}) {
    TestEngine a(EngineOptions{1, LDR_ENGINE_REMOTE_ACCESS, paths}), b(2);
    int before_link = count_entries("fd");
    CHECK_C(a.link(b), LDR_OK);
    CHECK(count_entries("fd") > before_link);
    CHECK_C(a.unlink(2), LDR_OK);
    b.next_event(LDR_EVENT_LINK_UP);
    b.next_event(LDR_EVENT_LINK_DOWN);
    CHECK_C(b.link(a), LDR_OK);
    CHECK_C(a.link(a), LDR_OK);
    b.destroy();
  }
  CHECK_EQ(count_entries("fd"), fds);
  CHECK_EQ(count_entries("task"), threads);
}

void arguments() {
  ldr_engine_t *engine = nullptr;
  ldr_engine_params_t params{};
  CHECK_C(ldr_engine_create(nullptr, &engine), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_create(&params, &engine), LDR_ERR_INVALID);  // struct_size 0
  params.struct_size = sizeof(params);
  params.path_set = 1u << 9;
  CHECK_C(ldr_engine_create(&params, &engine), LDR_ERR_INVALID);
  params.path_set = 0;
  params.secret_bytes = 4;
  CHECK_C(ldr_engine_create(&params, &engine), LDR_ERR_INVALID);
  params.secret_bytes = 0;
  params.liveness_budget_ns = 1;
  CHECK_C(ldr_engine_create(&params, &engine), LDR_ERR_INVALID);
  CHECK(engine == nullptr);
  ldr_engine_info_t info;
  CHECK_C(ldr_engine_info(nullptr, &info), LDR_ERR_INVALID);
  CHECK_EQ(ldr_engine_event_fd(nullptr), -1);
  // A caller that knows a shorter struct.
  params = {};
  params.struct_size = offsetof(ldr_engine_params_t, path_set);
  params.path_set = 1u << 9;  // it does not know this field
  params.cluster_id = 5;
  CHECK_C(ldr_engine_create(&params, &engine), LDR_OK);
  CHECK_C(ldr_engine_info(engine, &info), LDR_OK);
  CHECK_EQ(info.cluster_id, uint64_t(5));
  CHECK_EQ(info.listen_port, 0u);
  CHECK_EQ(std::string(ldr_last_error()), std::string());
  ldr_engine_destroy(engine);
  uint32_t path_set;
  CHECK_C(ldr_paths_parse(" cma , tcp", &path_set), LDR_OK);
  CHECK_EQ(path_set, kCma | kTcp);
  CHECK_C(ldr_paths_parse(nullptr, &path_set), LDR_OK);
  CHECK_EQ(path_set, kShm | kCma | kUnix | kTcp);
  CHECK_C(ldr_paths_parse("cma,rdma", &path_set), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "rdma");
  CHECK_EQ(std::string(ldr_path_name(LDR_PATH_UNIX)), std::string("unix"));
  CHECK_EQ(std::string(ldr_status_name(LDR_ERR_TIMEOUT)), std::string("LDR_ERR_TIMEOUT"));
  CHECK_EQ(std::string(ldr_status_name(-9999)), std::string("LDR_ERR_?"));
  CHECK_EQ(ldr_abi_version(), uint32_t(LDR_ABI_VERSION));
}

}  // namespace

int main() {
  test("arguments", arguments);
  test("ready on both sides", ready_on_both_sides);
  test("paths are what both allow", paths_are_what_both_allow);
  test("no common path", no_common_path);
  test("refused cma", refused_cma);
  test("already linked", already_linked);
  test("refusals", refusals);
  test("allowances", allowances);
  test("unreachable", unreachable);
  test("link to self", link_to_self);
  test("simultaneous", simultaneous);
  test("many threads to one peer", many_threads_to_one_peer);
  test("many peers at once", many_peers_at_once);
  test("unlink drops both halves", unlink_drops_both_halves);
  test("unlink at once", unlink_at_once);
  test("unlink by both at once", unlink_by_both_at_once);
  test("forced unlink", forced_unlink);
  test("unlink of an unreachable listener keeps the link", unlink_of_an_unreachable_listener_keeps_the_link);
  test("unlink waits for transfers", unlink_waits_for_transfers);
  test("forced unlink stops transfers", forced_unlink_stops_transfers);
  test("listening", listening);
  test("heartbeats keep it up", heartbeats_keep_it_up);
  test("restarted peer", restarted_peer);
  test("broken link holds nothing", broken_link_holds_nothing);
  test("destroy with open links", destroy_with_open_links);
  test("destroy under a blocked call", destroy_under_a_blocked_call);
  test("nothing is left behind", nothing_is_left_behind);
}
