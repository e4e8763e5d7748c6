// More than one TCP listener, shared ones, and what the sockets of an engine are marked with.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>
#include <thread>

#include "engines.h"
#include "fd.h"
#include "socket.h"

using namespace ldr_test;

namespace {

// A port that nobody listens on, at least until somebody takes it.
uint32_t free_port() {
  ldr::Fd socket;
  uint32_t port = 0;
  CHECK_OK(ldr::listen_tcp("0.0.0.0", 0, {}, &socket, &port));
  return port;
}

bool is_heard(const char *ip, uint32_t port) {
  ldr::Fd socket;
  ldr::Status status = ldr::connect_tcp(ip, port, {}, ldr::deadline_after(kPatienceNs), -1, &socket);
  CHECK(status.ok() || status.code == LDR_ERR_LINK_FAILED);
  return status.ok();
}

// The engine drops what only knocked a moment later.
void await_descriptors(int count) {
  for (const int64_t until = ldr::now_ns() + kPatienceNs; count_entries("fd") != count; std::this_thread::yield()) CHECK(ldr::now_ns() < until);
}

void one_more() {
  TestEngine a(1), b(2), c(3);
  const uint32_t first = b.port(), second = free_port();
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", second), LDR_OK);
  CHECK_EQ(b.port(), first);
  CHECK_C(a.link(second), LDR_OK);
  CHECK_C(c.link(first), LDR_OK);
  CHECK_EQ(a.query(2).incarnation, b.info().incarnation);
  CHECK_C(ldr_engine_listen(b, nullptr, 0), LDR_OK);  // stops its own only
  CHECK(!is_heard("127.0.0.1", first) && is_heard("127.0.0.1", second));
  CHECK_EQ(b.port(), 0u);
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", second), LDR_OK);
  CHECK(!is_heard("127.0.0.1", second));
  CHECK_EQ(a.query(2).state, uint32_t(LDR_LINK_READY));  // links stay
  CHECK_C(ldr_link_probe(a, 2, kPatienceNs), LDR_OK);
}

void shares_are_counted() {
  TestEngine b(2);
  const uint32_t port = free_port();
  const int before = count_entries("fd");
  for (int i = 0; i < 3; ++i) CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", port), LDR_OK);
  CHECK_EQ(count_entries("fd"), before + 1);
  for (int i = 0; i < 3; ++i) {
    CHECK(is_heard("127.0.0.1", port));
    CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_OK);
  }
  CHECK(!is_heard("127.0.0.1", port));
  await_descriptors(before);
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_ERR_NOT_FOUND);
  CHECK_CONTAINS(ldr_last_error(), "127.0.0.1:" + std::to_string(port));
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", port), LDR_OK);  // and again
  CHECK(is_heard("127.0.0.1", port));
}

// The main one stays while either wants it.
void shared_with_the_main_one() {
  TestEngine b(2);
  const uint32_t port = b.port();
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_ERR_NOT_FOUND);  // it is nobody's share
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", port), LDR_OK);
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_OK);
  CHECK(is_heard("127.0.0.1", port));
  CHECK_EQ(b.port(), port);
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", port), LDR_OK);
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", 0), LDR_OK);  // moves away
  CHECK(b.port() != port);
  CHECK(is_heard("127.0.0.1", port) && is_heard("127.0.0.1", b.port()));
  const uint32_t moved = b.port();
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", port), LDR_OK);  // and back, to what is there
  CHECK_EQ(b.port(), port);
  CHECK(!is_heard("127.0.0.1", moved));
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_OK);
  CHECK(is_heard("127.0.0.1", port));
  CHECK_C(ldr_engine_listen(b, nullptr, 0), LDR_OK);
  CHECK(!is_heard("127.0.0.1", port));
}

void addresses() {
  TestEngine b(2);
  const uint32_t port = b.port();
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.2", port), LDR_OK);  // another address of this host: another listener
  CHECK(is_heard("127.0.0.2", port));
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_ERR_NOT_FOUND);
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.2", port), LDR_OK);
  CHECK(!is_heard("127.0.0.2", port) && is_heard("127.0.0.1", port));
  const uint32_t wide = free_port();
  CHECK_C(ldr_engine_listen(b, "0.0.0.0", wide), LDR_OK);  // hears all of them
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", wide), LDR_OK);
  CHECK_C(ldr_engine_listen(b, nullptr, 0), LDR_OK);
  CHECK(is_heard("127.0.0.1", wide));
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", wide), LDR_OK);
  CHECK(!is_heard("127.0.0.1", wide));
  CHECK(ldr::covers("::1", "0:0:0:0:0:0:0:1") && ldr::covers("::", "::1") && ldr::covers("10.1.2.3", "10.1.2.3"));
  CHECK(!ldr::covers("127.0.0.1", "0.0.0.0") && !ldr::covers("::", "10.1.2.3") && !ldr::covers("0.0.0.0", "no address") && !ldr::covers("10.1.2.3", "10.1.2.4"));
}

void errors() {
  TestEngine a(1), b(2);
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", a.port()), LDR_ERR_BIND);
  CHECK_CONTAINS(ldr_last_error(), "127.0.0.1:" + std::to_string(a.port()));
  CHECK_C(ldr_engine_listen_also(b, "192.0.2.1", free_port()), LDR_ERR_BIND);  // no address of this host
  CHECK_CONTAINS(ldr_last_error(), "192.0.2.1:");
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", 0), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_listen_also(b, "nowhere", 5), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", 70000), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_listen_also(b, nullptr, 5), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_unlisten(b, nullptr, 5), LDR_ERR_INVALID);
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", a.port()), LDR_ERR_NOT_FOUND);
  CHECK(is_heard("127.0.0.1", b.port()));
}

void many_threads() {
  TestEngine b(2);
  const uint32_t port = free_port();
  const int before = count_entries("fd");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 30; ++round) {
        CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", port), LDR_OK);
        CHECK(is_heard("127.0.0.1", port));
        CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_OK);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  CHECK_C(ldr_engine_unlisten(b, "127.0.0.1", port), LDR_ERR_NOT_FOUND);
  CHECK(!is_heard("127.0.0.1", port));
  await_descriptors(before);
}

void all_end_with_the_engine() {
  const int fds = count_entries("fd");
  const uint32_t first = free_port(), second = free_port();
  {
    TestEngine b(2);
    CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", first), LDR_OK);
    CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", second), LDR_OK);
    ldr_engine_shutdown(b);
    CHECK(!is_heard("127.0.0.1", first) && !is_heard("127.0.0.1", second));
    CHECK_C(ldr_engine_listen_also(b, "127.0.0.1", first), LDR_ERR_CLOSED);
  }
  CHECK_EQ(count_entries("fd"), fds);
}

int option(int fd, int level, int name) {
  int value = -1;
  socklen_t size = sizeof(value);
  CHECK_EQ(getsockopt(fd, level, name, &value, &size), 0);
  return value;
}

// Our connected TCP sockets that are on this port, at either end: (TOS, priority) of each.
std::multiset<std::pair<int, int>> marks_of(uint32_t port) {
  std::multiset<std::pair<int, int>> found;
  for (int fd = 3; fd < 512; ++fd) {
    sockaddr_in own{}, peer{};
    socklen_t size = sizeof(own);
    if (getsockname(fd, reinterpret_cast<sockaddr *>(&own), &size) < 0 || own.sin_family != AF_INET) continue;
    size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr *>(&peer), &size) < 0 || (ntohs(own.sin_port) != port && ntohs(peer.sin_port) != port)) continue;
    found.emplace(option(fd, IPPROTO_IP, IP_TOS), option(fd, SOL_SOCKET, SO_PRIORITY));
  }
  return found;
}

void sockets_are_marked() {
  EngineOptions plain{1, LDR_ENGINE_REMOTE_ACCESS, "tcp"}, marked{2, LDR_ENGINE_REMOTE_ACCESS, "tcp"}, also_marked{3, LDR_ENGINE_REMOTE_ACCESS, "tcp"};
  marked.ip_tos = 0x68;
  marked.socket_priority = 5;
  also_marked.ip_tos = 0x20;
  also_marked.socket_priority = 3;
  TestEngine a(plain), b(marked), c(also_marked);
  CHECK_C(b.link(c), LDR_OK);
  const std::pair<int, int> at_b{0x68, 5}, at_c{0x20, 3};
  std::multiset<std::pair<int, int>> marks = marks_of(c.port());  // data connections, and one end perhaps of what was the hello's
  CHECK(marks.count(at_b) >= 4 && marks.count(at_c) >= 4);
  CHECK_EQ(marks.size(), marks.count(at_b) + marks.count(at_c));
  CHECK_C(a.link(b), LDR_OK);
  marks = marks_of(b.port());
  CHECK(marks.count(at_b) >= 4);
  CHECK(marks.size() >= 2 * 4);
  CHECK_EQ(marks.count(at_c), size_t(0));
}

void marks_are_best_effort() {
  const ldr::SocketMarks nothing, too_much{256, 0}, tos_only{0x10, 0}, both{0x10, 2};
  for (int family : {AF_INET, AF_INET6, AF_UNIX}) {
    const bool is_v6 = family == AF_INET6;
    auto tos = [&](int fd) { return is_v6 ? option(fd, IPPROTO_IPV6, IPV6_TCLASS) : option(fd, IPPROTO_IP, IP_TOS); };
    ldr::Fd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket && is_v6) continue;  // this machine has none
    CHECK(socket.get() >= 0);
    if (family == AF_UNIX) {
      ldr::mark(socket.get(), both);
      CHECK_EQ(option(socket.get(), SOL_SOCKET, SO_PRIORITY), 0);
      continue;
    }
    ldr::mark(socket.get(), nothing);
    ldr::mark(socket.get(), too_much);
    CHECK_EQ(tos(socket.get()), 0);
    ldr::mark(socket.get(), tos_only);
    CHECK_EQ(tos(socket.get()), 0x10);
    ldr::mark(socket.get(), both);
    CHECK_EQ(tos(socket.get()), 0x10);
    CHECK_EQ(option(socket.get(), SOL_SOCKET, SO_PRIORITY), 2);  // and not what the kernel makes of the TOS
    ldr::mark(socket.get(), {0, 1u << 20});  // without the right to it, or with: no harm
  }
}

}  // namespace

int main() {
  test("one more", one_more);
  test("shares are counted", shares_are_counted);
  test("shared with the main one", shared_with_the_main_one);
  test("addresses", addresses);
  test("errors", errors);
  test("many threads", many_threads);
  test("all end with the engine", all_end_with_the_engine);
  test("sockets are marked", sockets_are_marked);
  test("marks are best effort", marks_are_best_effort);
}
