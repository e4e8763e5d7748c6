#include "event_loop.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"
#include "event_queue.h"
#include "fd.h"

using namespace ldr;
using namespace ldr_test;

namespace {

// Runs on the loop and waits for it.
void sync(EventLoop &loop, Task task = [] {}) {
  std::promise<void> done;
  loop.post([&] {
    task();
    done.set_value();
  });
  done.get_future().wait();
}

void start_and_stop() {
  EventLoop loop;
  std::vector<int> order;
  CHECK_OK(loop.start([&] { order.push_back(1); }, [&] { order.push_back(3); }));
  loop.post([&] {
    CHECK(loop.in_loop_thread());
    order.push_back(2);
  });
  CHECK(!loop.in_loop_thread());
  loop.stop();
  loop.stop();
  CHECK(order == std::vector<int>({1, 2, 3}));
  loop.post([&] { order.push_back(4); });
  CHECK_EQ(order.size(), size_t(3));
  CHECK_CODE(loop.watch(0, EPOLLIN, [](uint32_t) {}), LDR_ERR_CLOSED);
}

void posts_in_order_from_many_threads() {
  EventLoop loop;
  CHECK_OK(loop.start(nullptr, nullptr));
  constexpr int kThreads = 4, kPosts = 2000;
  std::vector<int> last(kThreads, -1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kPosts; ++i) {
        loop.post([&last, t, i] {
          CHECK_EQ(i, last[t] + 1);
          last[t] = i;
        });
      }
    });
  }
  for (auto &thread : threads) thread.join();
  sync(loop);
  for (int value : last) CHECK_EQ(value, kPosts - 1);
  loop.stop();
}

void timers() {
  EventLoop loop;
  CHECK_OK(loop.start(nullptr, nullptr));
  std::promise<void> done;
  std::vector<int> order;
  int64_t start = now_ns();
  loop.at(start + 30 * kMillisecond, [&] { order.push_back(3); });
  loop.at(start + 10 * kMillisecond, [&] {
    CHECK(now_ns() >= start + 10 * kMillisecond);
    order.push_back(1);
  });
  TimerId cancelled = loop.at(start + 20 * kMillisecond, [&] { order.push_back(2); });
  loop.at(start + 40 * kMillisecond, [&] { done.set_value(); });
  loop.at(kNever, [&] { order.push_back(9); });
  loop.cancel(cancelled);
  loop.cancel(cancelled);
  loop.cancel(12345);
  done.get_future().wait();
  CHECK(order == std::vector<int>({1, 3}));
  loop.stop();
}

void timer_set_while_the_loop_sleeps() {
  EventLoop loop;
  CHECK_OK(loop.start(nullptr, nullptr));
  loop.at(now_ns() + 3600 * kSecond, [] {});
  sync(loop);
  std::promise<void> done;
  loop.at(now_ns() + kMillisecond, [&] { done.set_value(); });  // must wake it
  done.get_future().wait();
  loop.stop();
}

void watching() {
  EventLoop loop;
  CHECK_OK(loop.start(nullptr, nullptr));
  Fd readable(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::promise<void> first;
  std::atomic<int> calls{0};
  CHECK_OK(loop.watch(readable.get(), EPOLLIN | EPOLLONESHOT, [&](uint32_t events) {
    CHECK(events & EPOLLIN);
    if (++calls == 1) first.set_value();
  }));
  CHECK(!loop.watch(readable.get(), EPOLLIN, [](uint32_t) {}).ok());  // twice
  CHECK(!loop.watch(-1, EPOLLIN, [](uint32_t) {}).ok());
  CHECK_EQ(eventfd_write(readable.get(), 1), 0);
  first.get_future().wait();
  sync(loop);
  CHECK_EQ(calls.load(), 1);  // still readable, but one shot
  loop.rearm(readable.get(), EPOLLIN | EPOLLONESHOT);
  sync(loop);
  sync(loop);
  CHECK_EQ(calls.load(), 2);
  sync(loop, [&] {
    loop.rearm(readable.get(), EPOLLIN | EPOLLONESHOT);
    loop.unwatch(readable.get());
  });
  sync(loop);
  CHECK_EQ(calls.load(), 2);
  loop.unwatch(readable.get());
  loop.stop();
}

// Two descriptors are ready in one wake-up; the first handler closes the second, and its number comes back at once for something else.
void stale_event_of_a_reused_descriptor() {
  EventLoop loop;
  CHECK_OK(loop.start(nullptr, nullptr));
  Fd a(eventfd(1, EFD_CLOEXEC)), b(eventfd(1, EFD_CLOEXEC)), replacement;
  int stale = 0, handled = 0;
  auto handler = [&](Fd &own, Fd &other) {
    return [&](uint32_t) {
      ++handled;
      loop.unwatch(own.get());
      int number = other.get();
      loop.unwatch(number);
      other.reset();
      replacement = Fd(eventfd(0, EFD_CLOEXEC));
      CHECK_EQ(replacement.get(), number);
      CHECK_OK(loop.watch(number, EPOLLIN, [&](uint32_t) { ++stale; }));
    };
  };
  sync(loop, [&] {  // both are watched before the loop looks again
    CHECK_OK(loop.watch(a.get(), EPOLLIN, handler(a, b)));
    CHECK_OK(loop.watch(b.get(), EPOLLIN, handler(b, a)));
  });
  sync(loop);
  sync(loop);
  CHECK_EQ(handled, 1);
  CHECK_EQ(stale, 0);
  loop.stop();
}

// What throws is given up alone: the loop and all that it serves go on.
void exceptions() {
  EventLoop loop;
  CHECK_OK(loop.start(nullptr, nullptr));
  Fd readable(eventfd(1, EFD_CLOEXEC));
  std::promise<void> handled, timed;
  loop.post([] { throw std::bad_alloc(); });
  CHECK_OK(loop.watch(readable.get(), EPOLLIN | EPOLLONESHOT, [&](uint32_t) {
    handled.set_value();
    throw std::bad_alloc();
  }));
  loop.at(now_ns(), [&] {
    timed.set_value();
    throw std::bad_alloc();
  });
  handled.get_future().wait();
  timed.get_future().wait();
  sync(loop);
  bool thrown = false;
  try {
    loop.run([] { throw std::runtime_error("back"); });
  } catch (const std::runtime_error &) {
    thrown = true;
  }
  CHECK(thrown);
  int runs = 0;
  CHECK(loop.run([&] { CHECK(loop.run([&] { ++runs; })); }));
  CHECK_EQ(runs, 1);
  loop.unwatch(readable.get());
  loop.stop();
  CHECK(!loop.run([] {}));
}

bool is_readable(int fd) {
  pollfd look{fd, POLLIN, 0};
  return poll(&look, 1, 0) == 1;
}

ldr_event_t event_of(uint64_t id) {
  ldr_event_t event{};
  event.id = id;
  return event;
}

void event_queue() {
  EventQueue queue;
  ldr_event_t events[4];
  uint32_t count = 9;
  CHECK_OK(queue.take(events, 4, 0, &count));
  CHECK_EQ(count, 0u);
  CHECK(!is_readable(queue.fd()));
  int64_t start = now_ns();
  CHECK_OK(queue.take(events, 4, 20 * kMillisecond, &count));
  CHECK(now_ns() - start >= 20 * kMillisecond);
  for (uint64_t id = 1; id <= 5; ++id) queue.push(event_of(id));
  CHECK(is_readable(queue.fd()));
  CHECK_OK(queue.take(events, 4, -1, &count));
  CHECK_EQ(count, 4u);
  CHECK_EQ(events[3].id, uint64_t(4));
  CHECK(is_readable(queue.fd()));
  CHECK_OK(queue.take(events, 4, -1, &count));
  CHECK_EQ(count, 1u);
  CHECK(!is_readable(queue.fd()));
}

void event_queue_wakes_and_closes() {
  EventQueue queue;
  std::thread pusher([&] { queue.push(event_of(7)); });
  ldr_event_t event;
  uint32_t count;
  CHECK_OK(queue.take(&event, 1, -1, &count));
  CHECK_EQ(event.id, uint64_t(7));
  pusher.join();
  std::thread closer([&] {
    queue.push(event_of(8));
    queue.close();
  });
  CHECK_OK(queue.take(&event, 1, -1, &count));
  CHECK_EQ(event.id, uint64_t(8));
  CHECK_CODE(queue.take(&event, 1, -1, &count), LDR_ERR_CLOSED);
  closer.join();
  CHECK(is_readable(queue.fd()));
}

}  // namespace

int main() {
  test("start and stop", start_and_stop);
  test("posts in order from many threads", posts_in_order_from_many_threads);
  test("timers", timers);
  test("a timer set while the loop sleeps", timer_set_while_the_loop_sleeps);
  test("watching", watching);
  test("stale event of a re-used descriptor", stale_event_of_a_reused_descriptor);
  test("exceptions", exceptions);
  test("event queue", event_queue);
  test("event queue: wakes and closes", event_queue_wakes_and_closes);
}
