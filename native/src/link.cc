#include "link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <unordered_map>

#include "clock.h"
#include "engine.h"
#include "paths/stream.h"
#include "serve.h"
#include "socket.h"

namespace ldr {
namespace {

constexpr size_t kMaxQueuedBytes = 64u << 20;
constexpr int64_t kDeathLookNs = 50 * kMillisecond;  // while somebody waits for the peer
constexpr int64_t kQuietLookNs = 5 * kMillisecond;   // while a running transfer keeps the link or its mappings
constexpr int64_t kAnswerReserveNs = 100 * kMillisecond;
constexpr int kFramesPerWake = 64;

struct Outgoing {
  std::vector<uint8_t> bytes;
  size_t sent = 0;
  Fd passed;
};

struct Call {
  Link::OnReply on_reply;
  TimerId timer = 0;
};

}  // namespace

struct Link::Impl {
  Impl(Engine &engine, LinkFacts facts) : engine(engine), facts(std::move(facts)) {}

  Engine &engine;
  const LinkFacts facts;
  std::shared_ptr<PeerPage> page;
  std::vector<std::shared_ptr<StreamConnection>> data;
  std::atomic<bool> ready{true};
  std::atomic<int64_t> last_heard_ns{now_ns()};

  mutable std::mutex pidfd_mutex;
  Fd pidfd;

  mutable std::mutex mutex;
  Fd control;
  Status why;
  bool announced = false, waits_for_room = false;
  std::deque<Outgoing> queue;
  size_t queued_bytes = 0;
  std::unordered_map<uint64_t, Call> calls;
  uint64_t last_call = 0;
  TimerId tick_timer = 0;
  int64_t next_tick_ns = kNever;

  // Loop thread only.
  FrameReader reader{kMaxFrameBytes};
  int64_t next_heartbeat_ns = 0;

  bool take_call(uint64_t id, Call *call_p) {
    std::lock_guard lock(mutex);
    auto at = calls.find(id);
    if (at == calls.end()) return false;
    *call_p = std::move(at->second);
    calls.erase(at);
    return true;
  }

  void start_on_loop(const LinkPtr &self);
  void on_control(Link &link, uint32_t events);
  void dispatch(Link &link, Frame &frame);
  void on_answer(Link &link, Frame &frame);
  void try_unlink(const LinkPtr &self, uint64_t call_id, int64_t deadline_ns);
  void schedule_tick(const LinkPtr &self, int64_t when_ns);
  void tick(const LinkPtr &self);
  Status flush();
  bool go_down(const LinkPtr &self, const Status &why, bool unlinked);
  void tear_down(const LinkPtr &self);
  void drop_mappings_when_quiet(const LinkPtr &self);
};

Link::Link() = default;

Link::~Link() = default;

LinkPtr Link::create(Engine &engine, LinkFacts facts, Fd control, Fd pidfd, std::shared_ptr<PeerPage> page,
                     std::vector<std::shared_ptr<StreamConnection>> data) {
  std::shared_ptr<Link> link(new Link);
  link->impl_ = std::make_unique<Impl>(engine, std::move(facts));
  link->impl_->control = std::move(control);
  link->impl_->pidfd = std::move(pidfd);
  link->impl_->page = std::move(page);
  link->impl_->data = std::move(data);
  for (auto &connection : link->impl_->data) connection->start(link);
  return link;
}

Engine &Link::engine() const { return impl_->engine; }
const LinkFacts &Link::facts() const { return impl_->facts; }
std::string Link::name() const { return "cluster " + std::to_string(impl_->facts.cluster_id) + " (" + impl_->facts.address + ")"; }
bool Link::ready() const { return impl_->ready.load(std::memory_order_acquire); }
PeerPage *Link::page() const { return impl_->page.get(); }
int64_t Link::last_heard_ns() const { return impl_->last_heard_ns.load(std::memory_order_relaxed); }
const std::vector<std::shared_ptr<StreamConnection>> &Link::data() const { return impl_->data; }

Status Link::why_down() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->why;
}

bool Link::peer_gone() const {
  if (impl_->page && impl_->page->owner_gone()) return true;
  std::lock_guard lock(impl_->pidfd_mutex);
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
      LinkPtr link = weak.lock();
      if (link) link->fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s: process %d of the peer has ended", link->name().c_str(), int(link->facts().peer_pid)));
    });
  }
  if (!status.ok()) return self->fail(status);
  tick(self);
}

// ---- sending

void Link::send(FrameType type, uint64_t call_id, const Writer &payload, int pass_fd) {
  Outgoing out{encode_frame(type, call_id, payload, pass_fd >= 0), 0, Fd()};
  Status status;
  {
    std::lock_guard lock(impl_->mutex);
    if (!ready()) return;
    if (pass_fd >= 0) out.passed = Fd(fcntl(pass_fd, F_DUPFD_CLOEXEC, 0));
    impl_->queued_bytes += out.bytes.size();
    impl_->queue.push_back(std::move(out));
    status = impl_->flush();
  }
  if (!status.ok()) fail(status);
}

// Under the mutex. What the socket does not take stays queued until it is writable.
Status Link::Impl::flush() {
  while (!queue.empty()) {
    Outgoing &out = queue.front();
    ssize_t n = send_some(control.get(), out.bytes.data() + out.sent, out.bytes.size() - out.sent, out.sent == 0 ? out.passed.get() : -1);
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) return ldr::fail(LDR_ERR_LINK_BROKEN, "cluster %llu (%s): sending failed: %s", (unsigned long long)facts.cluster_id, facts.address.c_str(), strerror(errno));
    out.sent += size_t(n);
    queued_bytes -= size_t(n);
    if (out.sent == out.bytes.size()) queue.pop_front();
  }
  if (queued_bytes > kMaxQueuedBytes)
    return ldr::fail(LDR_ERR_LINK_BROKEN, "cluster %llu (%s) does not read: %zu bytes wait for it", (unsigned long long)facts.cluster_id, facts.address.c_str(), queued_bytes);
  if (waits_for_room != !queue.empty()) {
    waits_for_room = !queue.empty();
    engine.loop.rearm(control.get(), EPOLLIN | (waits_for_room ? uint32_t(EPOLLOUT) : 0));
  }
  return Status::success();
}

void Link::call(FrameType type, const Writer &payload, int64_t deadline_ns, OnReply on_reply) {
  uint64_t id = 0;
  Status down;
  {
    std::lock_guard lock(impl_->mutex);
    if (ready()) {
      id = ++impl_->last_call;
      Call &call = impl_->calls[id];
      call.on_reply = std::move(on_reply);
      if (deadline_ns != kNever) {
        call.timer = impl_->engine.loop.at(deadline_ns, [weak = weak_from_this(), id] {
          LinkPtr link = weak.lock();
          Call late;
          if (!link || !link->impl_->take_call(id, &late)) return;
          Fd none;
          late.on_reply(ldr::fail(LDR_ERR_TIMEOUT, "%s did not answer in time", link->name().c_str()), Reader(), none);
        });
      }
    } else {
      down = impl_->why;
    }
  }
  if (!id) {
    Fd none;
    on_reply(ldr::fail(LDR_ERR_LINK_BROKEN, "%s", down.text.c_str()), Reader(), none);
    return;
  }
  if (impl_->page) impl_->schedule_tick(shared_from_this(), now_ns() + kDeathLookNs);
  send(type, id, payload);
}

void Link::reply(uint64_t call_id, const Status &status, const Writer &payload, int pass_fd) {
  Writer out;
  out.u32(uint32_t(status.code));
  out.text(status.text);
  if (status.ok()) out.raw(payload.bytes().data(), payload.bytes().size());
  send(FrameType::kReply, call_id, out, status.ok() ? pass_fd : -1);
}

// ---- receiving, on the loop thread

void Link::Impl::on_control(Link &link, uint32_t events) {
  if (events & EPOLLOUT) {
    Status status;
    {
      std::lock_guard lock(mutex);
      if (ready) status = flush();
    }
    if (!status.ok()) link.fail(status);
  }
  if (!(events & ~uint32_t(EPOLLOUT))) return;
  for (int i = 0; i < kFramesPerWake && ready; ++i) {
    Frame frame;
    switch (reader.read(control.get(), &frame)) {
      case FrameReader::kWouldBlock: return;
      case FrameReader::kEnd: return link.fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s: %s", link.name().c_str(), reader.why().c_str()));
      case FrameReader::kBad: return link.fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s sent %s", link.name().c_str(), reader.why().c_str()));
      case FrameReader::kFrame: break;
    }
    last_heard_ns.store(now_ns(), std::memory_order_relaxed);
    try {
      dispatch(link, frame);
    } catch (const std::exception &error) {  // out of memory: this link is lost, the engine is not
      return link.fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s: frame type %u could not be handled: %s", link.name().c_str(), frame.header.type, error.what()));
    }
  }
}

void Link::Impl::dispatch(Link &link, Frame &frame) {
  switch (frame.type()) {
    case FrameType::kHeartbeat: return;
    case FrameType::kReply: return on_answer(link, frame);
    case FrameType::kTable: case FrameType::kLookup: case FrameType::kMapping: case FrameType::kGrantOpen: case FrameType::kGrantClose:
      return serve_frame(link, frame.type(), frame.header.call_id, frame.reader());
    case FrameType::kUnlink: {
      Reader in = frame.reader();
      int64_t timeout_ns = in.i64();
      if (!in.finished()) break;
      return try_unlink(link.shared_from_this(), frame.header.call_id, deadline_after(timeout_ns));
    }
    default: break;
  }
  link.fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s sent a malformed frame of type %u", link.name().c_str(), frame.header.type));
}

void Link::Impl::on_answer(Link &link, Frame &frame) {
  Reader in = frame.reader();
  Status status;
  status.code = ldr_status_t(in.u32());
  status.text = in.text();
  if (!in.ok() || status.code > 0) return link.fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s sent a malformed reply", link.name().c_str()));
  Call call;
  if (!take_call(frame.header.call_id, &call)) return;  // it timed out before
  if (call.timer) engine.loop.cancel(call.timer);
  call.on_reply(status, in, frame.passed);
}

// The peer asks us to drop our half. A transfer of ours that runs on it may end first.
void Link::Impl::try_unlink(const LinkPtr &self, uint64_t call_id, int64_t deadline_ns) {
  if (!ready) return;
  int64_t now = now_ns();
  if (self->transfers.close(now)) {
    engine.links.remove(*self);
    self->reply(call_id, Status::success(), Writer());
    go_down(self, ldr::fail(LDR_ERR_NOT_LINKED, "%s was unlinked by the peer", self->name().c_str()), true);
  } else if (now >= deadline_ns) {
    self->transfers.reopen();
    self->reply(call_id, ldr::fail(LDR_ERR_UNLINK_FAILED, "a transfer of cluster %llu still runs on the link", (unsigned long long)engine.config.cluster_id), Writer());
  } else {
    engine.loop.at(std::min(now + kQuietLookNs, deadline_ns), [self, call_id, deadline_ns] { self->impl_->try_unlink(self, call_id, deadline_ns); });
  }
}

// ---- signs of life

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
  if (page && page->owner_gone())
    return self->fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s: the peer's engine has ended (process %d)", self->name().c_str(), int(facts.peer_pid)));
  int64_t now = now_ns(), silent_ns = now - last_heard_ns.load(std::memory_order_relaxed);
  if (silent_ns > engine.config.liveness_budget_ns)
    return self->fail(ldr::fail(LDR_ERR_LINK_BROKEN, "%s: no sign of life for %lld ms", self->name().c_str(), (long long)(silent_ns / kMillisecond)));
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
  if (page && awaited) next = std::min(next, now + kDeathLookNs);
  schedule_tick(self, next);
}

// ---- the end

void Link::fail(const Status &why) { impl_->go_down(shared_from_this(), why, false); }

bool Link::Impl::go_down(const LinkPtr &self, const Status &reason, bool unlinked) {
  {
    std::lock_guard lock(mutex);
    if (!ready) return false;
    why = reason;
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
  engine.loop.post([self] { self->impl_->tear_down(self); });
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
  {
    std::lock_guard lock(pidfd_mutex);
    engine.loop.unwatch(pidfd.get());
    pidfd.reset();
  }
  for (auto &connection : data) connection->shutdown(why);
  self->transfers.fail(why);
  engine.grants.on_peer_lost(facts.incarnation);
  for (auto &[id, call] : ended) {
    engine.loop.cancel(call.timer);
    Fd none;
    call.on_reply(ldr::fail(LDR_ERR_LINK_BROKEN, "%s", why.text.c_str()), Reader(), none);
  }
  if (facts.is_self && facts.is_server_half) engine.links.remove(*self);
  drop_mappings_when_quiet(self);
}

void Link::Impl::drop_mappings_when_quiet(const LinkPtr &self) {
  if (self->transfers.close(now_ns())) return self->mappings.drop();
  engine.loop.at(now_ns() + kQuietLookNs, [self] { self->impl_->drop_mappings_when_quiet(self); });
}

Status Link::close(bool force, int64_t deadline_ns) {
  if (!ready()) return Status::success();
  const Status unlinked = ldr::fail(LDR_ERR_NOT_LINKED, "%s was unlinked", name().c_str());
  bool quiet = transfers.close(deadline_ns);
  if (!force) {
    Status status;
    if (!quiet) {
      status = ldr::fail(LDR_ERR_TIMEOUT, "a transfer still runs on it");
    } else {
      // The peer gets a little less time than we have, so that its own word comes before our deadline.
      int64_t left_ns = std::max<int64_t>(0, deadline_ns - now_ns());
      Writer payload;
      payload.i64(deadline_ns == kNever ? -1 : left_ns - std::min(left_ns / 4, kAnswerReserveNs));
      std::promise<Status> answer;
      call(FrameType::kUnlink, payload, deadline_ns, [&](const Status &reply, Reader, Fd &) {
        if (reply.ok()) impl_->go_down(shared_from_this(), unlinked, true);  // now: the end of the peer's half comes next, and would be a break
        answer.set_value(reply);
      });
      status = answer.get_future().get();
    }
    // A link that ended meanwhile, because the peer unlinked too or died, is what was asked for.
    if (!status.ok() && ready()) {
      transfers.reopen();
      return ldr::fail(status.code, "unlink of %s: %s; the link is kept", name().c_str(), status.text.c_str());
    }
  }
  impl_->go_down(shared_from_this(), unlinked, true);
  if (engine().loop.in_loop_thread()) return Status::success();
  std::promise<void> torn_down;  // its descriptors are closed when we return
  if (engine().loop.post([&] { torn_down.set_value(); })) torn_down.get_future().wait();
  return Status::success();
}

}  // namespace ldr
