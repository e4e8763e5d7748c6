#include "event_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "clock.h"
#include "fd.h"

namespace ldr {

struct EventQueue::Impl {
  struct Queued {
    uint64_t number;
    ldr_event_t event;
  };

  Fd fd{make_private([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })};
  std::mutex mutex;
  std::condition_variable filled;
  std::deque<Queued> links, others;  // links: LINK_UP and LINK_DOWN; together ordered by number
  uint64_t last_number = 0;
  bool signalled = false;  // the eventfd is readable
  bool closed = false;

  bool empty() const { return links.empty() && others.empty(); }
  void push(const ldr_event_t &event) {
    const bool is_link = event.kind == LDR_EVENT_LINK_UP || event.kind == LDR_EVENT_LINK_DOWN;
    (is_link ? links : others).push_back({++last_number, event});
    if (links.size() > kMaxLinkEvents) links.pop_front();
  }
  ldr_event_t pop() {
    const bool is_link = others.empty() || (!links.empty() && links.front().number < others.front().number);
    std::deque<Queued> &from = is_link ? links : others;
    const ldr_event_t event = from.front().event;
    from.pop_front();
    return event;
  }

  // The eventfd is readable while there is something to learn: events, or that no more will come.
  void update_fd() {
    bool wanted = !empty() || closed;
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
  impl_->push(event);
  impl_->update_fd();
  impl_->filled.notify_one();
}

Status EventQueue::take(ldr_event_t *events, uint32_t capacity, int64_t timeout_ns, uint32_t *count_p) {
  int64_t deadline = deadline_after(timeout_ns);
  std::unique_lock lock(impl_->mutex);
  auto ready = [this] { return !impl_->empty() || impl_->closed; };
  wait_until(impl_->filled, lock, deadline, ready);
  if (impl_->empty() && impl_->closed) return fail(LDR_ERR_CLOSED, "the engine is being destroyed; no more events will come");
  uint32_t count = 0;
  while (count < capacity && !impl_->empty()) events[count++] = impl_->pop();
  impl_->update_fd();
  if (!impl_->empty()) impl_->filled.notify_one();
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
