#include "link.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "link_impl.h"
#include "paths/stream.h"

namespace ldr {

Link::Link() = default;

Link::~Link() = default;

LinkPtr Link::create(Engine &engine, LinkFacts facts, Fd control, Fd pidfd, std::shared_ptr<PeerPage> page,
                     std::vector<std::shared_ptr<StreamConnection>> data) {
  std::shared_ptr<Link> link(new Link);
  link->impl_ = std::make_unique<Impl>(engine, std::move(facts));
  link->impl_->control = std::move(control);
  if (!link->impl_->facts.is_same_host) limit_silence(link->impl_->control.get(), engine.config.liveness_budget_ns);
  link->impl_->pidfd = std::move(pidfd);
  link->impl_->page = std::move(page);
  link->impl_->data = std::move(data);
  for (auto &connection : link->impl_->data) connection->start(link);
  return link;
}

Engine &Link::engine() const { return impl_->engine; }
const LinkFacts &Link::facts() const { return impl_->facts; }
std::string Link::name() const { return impl_->name(); }
bool Link::serves_peer() const { return impl_->serves_peer(); }
bool Link::ready() const { return impl_->ready.load(std::memory_order_acquire); }
int64_t Link::last_heard_ns() const { return impl_->last_heard_ns.load(std::memory_order_relaxed); }

PeerPage *Link::page() const {
  std::lock_guard lock(impl_->peer_mutex);
  return impl_->page.get();
}

std::vector<std::shared_ptr<StreamConnection>> Link::data() const {
  std::lock_guard lock(impl_->peer_mutex);
  return impl_->data;
}

Status Link::why_down() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->why;
}

bool Link::peer_gone() const {
  std::lock_guard lock(impl_->peer_mutex);
  if (impl_->page && impl_->page->owner_gone()) return true;
  if (!impl_->pidfd) return false;
  pollfd look{impl_->pidfd.get(), POLLIN, 0};
  return poll(&look, 1, 0) == 1;
}

void Link::announce() {
  std::lock_guard lock(impl_->mutex);
  if (!ready()) return;
  impl_->announced = true;
  ldr_event_t event{};
  event.kind = LDR_EVENT_LINK_UP;
  event.id = impl_->facts.cluster_id;
  event.user_tag = impl_->facts.incarnation;
  impl_->engine.events.push(event);
}

void Link::start() {
  impl_->engine.loop.post([self = shared_from_this()] { self->impl_->start_on_loop(self); });
}

void Link::Impl::start_on_loop(const LinkPtr &self) {
  std::weak_ptr<Link> weak = self;
  Status status;
  {
    std::lock_guard lock(mutex);
    if (!ready) return;
    uint32_t wanted = EPOLLIN | (waits_for_room ? uint32_t(EPOLLOUT) : 0);
    status = engine.loop.watch(control.get(), wanted, [weak](uint32_t events) {
      if (LinkPtr link = weak.lock()) link->impl_->on_control(*link, events);
    });
  }
  if (status.ok() && pidfd) {
    status = engine.loop.watch(pidfd.get(), EPOLLIN, [weak](uint32_t) {
      if (LinkPtr link = weak.lock()) link->fail(link->impl_->process_ended());
    });
  }
  if (!status.ok()) return self->fail(status);
  tick(self);
}

// Brings the next tick forward; a later one than planned changes nothing.
void Link::Impl::schedule_tick(const LinkPtr &self, int64_t when_ns) {
  std::lock_guard lock(mutex);
  if (!ready || when_ns >= next_tick_ns) return;
  engine.loop.cancel(tick_timer);
  next_tick_ns = when_ns;
  tick_timer = engine.loop.at(when_ns, [weak = std::weak_ptr<Link>(self)] {
    LinkPtr link = weak.lock();
    if (!link) return;
    {
      std::lock_guard lock(link->impl_->mutex);
      link->impl_->next_tick_ns = kNever;
    }
    link->impl_->tick(link);
  });
}

void Link::Impl::tick(const LinkPtr &self) {
  if (!ready) return;
  PeerPage *const shown = self->page();  // goes after tear_down() only, which is on this thread
  if (shown && shown->owner_gone()) return self->fail(broken("the peer's engine has ended (process " + std::to_string(facts.peer_pid) + ")"));
  int64_t now = now_ns(), silent_ns = now - last_heard_ns.load(std::memory_order_relaxed);
  if (silent_ns > engine.config.liveness_budget_ns)
    return self->fail(broken("no sign of life for " + std::to_string(silent_ns / kMillisecond) + " ms"));
  if (now >= next_heartbeat_ns) {
    self->send(FrameType::kHeartbeat, 0, Writer());
    next_heartbeat_ns = now + engine.config.heartbeat_interval_ns;
  }
  int64_t next = std::min(next_heartbeat_ns, now - silent_ns + engine.config.liveness_budget_ns + kMillisecond);
  bool awaited = engine.ops.in_flight() > 0;
  {
    std::lock_guard lock(mutex);
    awaited = awaited || !calls.empty();
  }
  if (shown && awaited) next = std::min(next, now + kDeathLookNs);
  schedule_tick(self, next);
}

void Link::fail(const Status &why) { impl_->go_down(shared_from_this(), why, false); }

void Link::data_failed(const Status &why) {
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->own_unlinks > 0) {
      impl_->data_failure = why;
      return;
    }
  }
  fail(why);
}

bool Link::Impl::go_down(const LinkPtr &self, const Status &reason, bool unlinked) {
  {
    std::lock_guard lock(mutex);
    if (!ready) return false;
    why = reason;
    // Under the mutex, for which it waits: whoever finds the link down and starts another one to the same peer comes to the loop after it
    // (grants end by incarnation).
    engine.loop.post([self] { self->impl_->tear_down(self); });
    ready.store(false, std::memory_order_release);
    if (!unlinked) ::shutdown(control.get(), SHUT_RDWR);
    if (announced) {
      ldr_event_t event{};
      event.kind = LDR_EVENT_LINK_DOWN;
      event.id = facts.cluster_id;
      event.user_tag = facts.incarnation;
      event.status = unlinked ? LDR_OK : reason.code;
      engine.events.push(event);
    }
  }
  return true;
}

// On the loop thread, so that no callback runs under a lock of whoever noticed the end.
void Link::Impl::tear_down(const LinkPtr &self) {
  std::unordered_map<uint64_t, Call> ended;
  std::deque<Outgoing> unsent;
  {
    std::lock_guard lock(mutex);
    engine.loop.unwatch(control.get());
    (void)flush();  // the answer to an unlink
    control.reset();
    engine.loop.cancel(tick_timer);
    ended.swap(calls);
    unsent.swap(queue);
  }
  for (const auto &[call_id, timer] : unlinks) engine.loop.cancel(timer);
  unlinks.clear();
  {
    std::lock_guard lock(peer_mutex);
    engine.loop.unwatch(pidfd.get());
    pidfd.reset();
  }
  for (auto &connection : self->data()) connection->shutdown(why);
  self->transfers.fail(why);
  if (serves_peer()) engine.grants.on_peer_lost(facts.incarnation);
  engine.pins.on_link_lost(*self);
  for (auto &[id, call] : ended) {
    engine.loop.cancel(call.timer);
    Fd none;
    call.on_reply(ldr::fail(LDR_ERR_LINK_BROKEN, "%s", why.text.c_str()), Reader(), none);
  }
  if (facts.is_inbound || (facts.is_self && facts.is_server_half)) engine.links.remove(*self);  // nobody here would ever close it
  drop_when_quiet(self);
}

// What only transfers use. On a copy thread: unmapping a pool takes its time, and the loop has heartbeats to send.
void Link::Impl::drop_when_quiet(const LinkPtr &self) {
  auto drop = [self] {
    self->mappings.drop();
    std::shared_ptr<PeerPage> page;
    std::vector<std::shared_ptr<StreamConnection>> data;  // both end without the mutex
    std::lock_guard lock(self->impl_->peer_mutex);
    page.swap(self->impl_->page);
    data.swap(self->impl_->data);
  };
  self->transfers.on_idle([self, drop] {
    try {
      self->impl_->engine.pool.submit(drop);
    } catch (const std::bad_alloc &) {
      drop();
    }
  });
}

}  // namespace ldr
