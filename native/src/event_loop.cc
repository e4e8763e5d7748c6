#include "event_loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "fd.h"

namespace ldr {
namespace {

constexpr int kMaxEvents = 64;

// A descriptor number comes back soon after a close; the generation tells its watches apart.
uint64_t key_of(int fd, uint32_t generation) { return uint64_t(generation) << 32 | uint32_t(fd); }

// The last resort: whoever can do more than lose this one step catches earlier.
template <class F> void survive(const char *what, const F &step) {
  try {
    step();
  } catch (const std::exception &error) {
    fprintf(stderr, "llm_datadist_ray: a %s of the event loop was given up: %s\n", what, error.what());
  }
}

// Signals belong to the threads of the application; a new thread inherits the mask.
struct SignalsBlocked {
  sigset_t before;
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

}  // namespace

struct EventLoop::Impl {
  struct Watch {
    uint32_t generation;
    std::shared_ptr<IoHandler> handler;
  };

  Fd epoll{make_private([] { return epoll_create1(EPOLL_CLOEXEC); })};
  Fd wake_fd{make_private([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })};
  std::thread thread;
  std::atomic<std::thread::id> thread_id{};

  std::mutex mutex;
  std::unordered_map<int, Watch> watches;
  uint32_t last_generation = 0;
  std::vector<Task> tasks;
  std::map<std::pair<int64_t, TimerId>, Task> timers;
  std::unordered_map<TimerId, int64_t> timer_times;
  TimerId last_timer = 0;
  bool stopping = false, stopped = false;

  void wake() {
    uint64_t one = 1;
    while (write(wake_fd.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  void run(const Task &on_start, const Task &on_stop) {
    thread_id = std::this_thread::get_id();
    if (on_start) on_start();
    epoll_event events[kMaxEvents];
    for (;;) {
      int n = epoll_wait(epoll.get(), events, kMaxEvents, wait_ms());
      for (int i = 0; i < n; ++i) handle(events[i]);
      run_tasks();
      run_timers();
      std::lock_guard lock(mutex);
      if (stopping && tasks.empty()) {
        stopped = true;
        break;
      }
    }
    if (on_stop) on_stop();
  }

  int wait_ms() {
    std::lock_guard lock(mutex);
    if (!tasks.empty() || stopping) return 0;
    if (timers.empty()) return -1;
    int64_t left_ns = timers.begin()->first.first - now_ns();
    if (left_ns <= 0) return 0;
    return int(std::min<int64_t>((left_ns + kMillisecond - 1) / kMillisecond, 60'000));
  }

  void handle(const epoll_event &event) {
    int fd = int(uint32_t(event.data.u64));
    if (fd == wake_fd.get()) {
      uint64_t count;
      while (read(fd, &count, sizeof(count)) < 0 && errno == EINTR) {
      }
      return;
    }
    std::shared_ptr<IoHandler> handler;
    {
      std::lock_guard lock(mutex);
      auto at = watches.find(fd);
      if (at == watches.end() || key_of(fd, at->second.generation) != event.data.u64) return;
      handler = at->second.handler;
    }
    survive("descriptor event", [&] { (*handler)(event.events); });
  }

  void run_tasks() {
    std::vector<Task> now;
    {
      std::lock_guard lock(mutex);
      now.swap(tasks);
    }
    for (Task &task : now) {
      survive("task", task);
      task = nullptr;  // what it holds goes before the next one runs
    }
  }

  void run_timers() {
    int64_t now = now_ns();
    for (;;) {
      Task task;
      {
        std::lock_guard lock(mutex);
        auto first = timers.begin();
        if (first == timers.end() || first->first.first > now) return;
        task = std::move(first->second);
        timer_times.erase(first->first.second);
        timers.erase(first);
      }
      survive("timer", task);
    }
  }
};

EventLoop::EventLoop() : impl_(new Impl) {}

EventLoop::~EventLoop() { stop(); }

Status EventLoop::start(Task on_start, Task on_stop) {
  if (!impl_->epoll || !impl_->wake_fd) return fail_errno(LDR_ERR_SYSTEM, "epoll or eventfd for the event loop");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key_of(impl_->wake_fd.get(), 0);
  if (epoll_ctl(impl_->epoll.get(), EPOLL_CTL_ADD, impl_->wake_fd.get(), &event) < 0) return fail_errno(LDR_ERR_SYSTEM, "epoll_ctl");
  SignalsBlocked blocked;
  impl_->thread = std::thread([impl = impl_.get(), on_start = std::move(on_start), on_stop = std::move(on_stop)] { impl->run(on_start, on_stop); });
  pthread_setname_np(impl_->thread.native_handle(), "ldr-loop");
  return Status::success();
}

void EventLoop::stop() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  if (impl_->thread.joinable()) {
    impl_->wake();
    impl_->thread.join();
  }
  // What is left holds references to others: drop it outside the lock.
  std::vector<Task> tasks;
  std::map<std::pair<int64_t, TimerId>, Task> timers;
  std::unordered_map<int, Impl::Watch> watches;
  std::lock_guard lock(impl_->mutex);
  impl_->stopped = true;
  tasks.swap(impl_->tasks);
  timers.swap(impl_->timers);
  watches.swap(impl_->watches);
}

bool EventLoop::in_loop_thread() const { return impl_->thread_id == std::this_thread::get_id(); }

bool EventLoop::post(Task task) {
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->stopped) return false;
    impl_->tasks.push_back(std::move(task));
    if (impl_->tasks.size() > 1) return true;  // the wake-up of the first one is on its way
  }
  impl_->wake();
  return true;
}

bool EventLoop::run(const Task &task) {
  if (in_loop_thread()) {
    task();
    return true;
  }
  auto done = std::make_shared<std::promise<void>>();  // the loop may still be inside of it when this thread is gone
  std::future<void> ended = done->get_future();
  bool runs = post([&task, done] {
    try {
      task();
      done->set_value();
    } catch (...) {
      done->set_exception(std::current_exception());
    }
  });
  if (runs) ended.get();
  return runs;
}

Status EventLoop::watch(int fd, uint32_t epoll_events, IoHandler handler) {
  std::shared_ptr<IoHandler> replaced;  // of a descriptor that was closed without unwatch()
  std::lock_guard lock(impl_->mutex);
  if (impl_->stopped) return fail(LDR_ERR_CLOSED, "the event loop has ended");
  uint32_t generation = ++impl_->last_generation;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = key_of(fd, generation);
  if (epoll_ctl(impl_->epoll.get(), EPOLL_CTL_ADD, fd, &event) < 0) return fail_errno(LDR_ERR_SYSTEM, "epoll_ctl add of descriptor %d", fd);
  Impl::Watch &watch = impl_->watches[fd];
  replaced = std::exchange(watch.handler, std::make_shared<IoHandler>(std::move(handler)));
  watch.generation = generation;
  return Status::success();
}

void EventLoop::rearm(int fd, uint32_t epoll_events) {
  std::lock_guard lock(impl_->mutex);
  auto at = impl_->watches.find(fd);
  if (at == impl_->watches.end()) return;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = key_of(fd, at->second.generation);
  epoll_ctl(impl_->epoll.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::unwatch(int fd) {
  std::shared_ptr<IoHandler> handler;  // destroyed after the lock is gone: it may hold the last reference to its owner
  std::lock_guard lock(impl_->mutex);
  auto at = impl_->watches.find(fd);
  if (at == impl_->watches.end()) return;
  handler = std::move(at->second.handler);
  impl_->watches.erase(at);
  epoll_ctl(impl_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
}

TimerId EventLoop::at(int64_t when_ns, Task task) {
  TimerId id;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->stopped) return 0;
    id = ++impl_->last_timer;
    impl_->timers.emplace(std::pair(when_ns, id), std::move(task));
    impl_->timer_times[id] = when_ns;
    if (impl_->timers.begin()->first.second != id) return id;  // not the next one: the loop wakes early enough
  }
  if (!in_loop_thread()) impl_->wake();
  return id;
}

void EventLoop::cancel(TimerId id) {
  Task task;  // likewise destroyed after the lock is gone
  std::lock_guard lock(impl_->mutex);
  auto at = impl_->timer_times.find(id);
  if (at == impl_->timer_times.end()) return;
  auto timer = impl_->timers.find({at->second, id});
  task = std::move(timer->second);
  impl_->timers.erase(timer);
  impl_->timer_times.erase(at);
}

}  // namespace ldr
