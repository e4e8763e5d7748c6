// The one thread of an engine that owns sockets and timers: epoll, an eventfd for work posted by other threads, a timer heap.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "status.h"

namespace ldr {

using Task = std::function<void()>;
using IoHandler = std::function<void(uint32_t epoll_events)>;
using TimerId = uint64_t;

class EventLoop {
 public:
  EventLoop();
  ~EventLoop();  // stop() must have been called

  // on_start runs first on the loop thread, on_stop last (the death word is taken and given back there).
  Status start(Task on_start, Task on_stop);
  // Runs the tasks posted so far, then joins. Idempotent.
  void stop();
  bool in_loop_thread() const;

  // Tasks, handlers and timers that throw (out of memory) are reported on stderr and end there; the loop goes on.
  // Any thread. A handler never runs after unwatch() returned on the loop thread, and a stale event of a re-used descriptor is dropped.
  bool post(Task task);  // false: the loop has ended and the task was dropped; else it will run
  bool run(const Task &task);  // post(), and back when it has run; at once on the loop thread itself. What it throws comes back too.
  Status watch(int fd, uint32_t epoll_events, IoHandler handler);  // level triggered unless EPOLLONESHOT / EPOLLET is given
  void rearm(int fd, uint32_t epoll_events);                       // EPOLL_CTL_MOD
  void unwatch(int fd);
  TimerId at(int64_t when_ns, Task task);
  void cancel(TimerId id);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
