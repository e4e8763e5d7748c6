#include "event_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "clock.h"
#include "fd.h"

namespace ldr {

struct EventQueue::Impl {
  Fd fd{make_private([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })};
  std::mutex mutex;
  std::condition_variable filled;
  std::deque<ldr_event_t> events;
  bool signalled = false;  // the eventfd is readable
  bool closed = false;

  // The eventfd is readable while there is something to learn: events, or that no more will come.
  void update_fd() {
    bool wanted = !events.empty() || closed;
    if (wanted == signalled) return;
    uint64_t count = 1;
    ssize_t n;
    do n = wanted ? write(fd.get(), &count, sizeof(count)) : read(fd.get(), &count, sizeof(count));
    while (n < 0 && errno == EINTR);
    signalled = wanted;
  }
};

EventQueue::EventQueue() : impl_(new Impl) {}

EventQueue::~EventQueue() = default;

void EventQueue::push(const ldr_event_t &event) {
  std::lock_guard lock(impl_->mutex);
  impl_->events.push_back(event);
  impl_->update_fd();
  impl_->filled.notify_one();
}

Status EventQueue::take(ldr_event_t *events, uint32_t capacity, int64_t timeout_ns, uint32_t *count_p) {
  int64_t deadline = deadline_after(timeout_ns);
  std::unique_lock lock(impl_->mutex);
  auto ready = [this] { return !impl_->events.empty() || impl_->closed; };
  wait_until(impl_->filled, lock, deadline, ready);
  if (impl_->events.empty() && impl_->closed) return fail(LDR_ERR_CLOSED, "the engine is being destroyed; no more events will come");
  uint32_t count = uint32_t(std::min<size_t>(capacity, impl_->events.size()));
  std::copy_n(impl_->events.begin(), count, events);
  impl_->events.erase(impl_->events.begin(), impl_->events.begin() + count);
  impl_->update_fd();
  if (!impl_->events.empty()) impl_->filled.notify_one();
  *count_p = count;
  return Status::success();
}

int EventQueue::fd() const { return impl_->fd.get(); }

void EventQueue::close() {
  std::lock_guard lock(impl_->mutex);
  impl_->closed = true;
  impl_->update_fd();
  impl_->filled.notify_all();
}

}  // namespace ldr
