#include "stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "../clock.h"
#include "../engine.h"
#include "stream_connection.h"

namespace ldr {
namespace {

constexpr uint32_t kWindow = 4;                          // chunks asked for and not yet answered, on each connection
constexpr int64_t kBurstNs = 10 * kMillisecond;          // then the thread is given to others
constexpr int64_t kPatienceNs = 2 * kMillisecond;        // how long a driver waits for more before it parks the connection
constexpr int64_t kShortPatienceNs = kMillisecond / 5;   // when nothing is due

void wait_ready(int fd, bool for_sending, int64_t timeout_ns) {
  pollfd entry{fd, short(POLLIN | (for_sending ? POLLOUT : 0)), 0};
  timespec timeout{time_t(timeout_ns / kSecond), long(timeout_ns % kSecond)};
  ppoll(&entry, 1, &timeout, nullptr);  // whatever it says: the next step finds out
}

}  // namespace

StreamConnection::StreamConnection(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::shared_ptr<StreamConnection> StreamConnection::create(Engine &engine, Fd socket, uint32_t path) {
  if (path == LDR_PATH_TCP) {
    int on = 1;  // answers and requests must not wait for one another; nothing is lost if it is refused
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  std::shared_ptr<StreamConnection> connection(new StreamConnection(std::make_unique<Impl>(engine, std::move(socket), path)));
  connection->impl_->self = connection;
  return connection;
}

StreamConnection::~StreamConnection() { shutdown(fail(LDR_ERR_CLOSED, "the data connection was closed")); }

void StreamConnection::start(const std::shared_ptr<Link> &link) {
  Status status;
  {
    std::lock_guard lock(impl_->mutex);
    impl_->link = link;
    if (impl_->is_closed) return;
    std::weak_ptr<StreamConnection> weak = weak_from_this();
    status = impl_->engine.loop.watch(impl_->socket.get(), EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, [weak](uint32_t) {
      if (auto connection = weak.lock()) connection->impl_->on_ready();
    });
    impl_->is_watched = status.ok();
  }
  if (!status.ok()) link->fail(status);
}

void StreamConnection::shutdown(const Status &why) {
  StepResult result;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->is_closed) return;
    impl_->is_closed = true;
    impl_->why_closed = why;
    for (auto &[id, chunk] : impl_->chunks) impl_->settle(chunk, why, result);
    impl_->chunks.clear();
    impl_->outgoing.clear();
    ::shutdown(impl_->socket.get(), SHUT_RDWR);  // wakes a driver that waits
    if (!impl_->has_driver) impl_->close_socket();
  }
  impl_->finish(result);
}

void StreamConnection::abandon(const Op &op) {
  StepResult result;
  {
    std::lock_guard lock(impl_->mutex);
    for (auto frame = impl_->outgoing.begin(); frame != impl_->outgoing.end();) {
      auto chunk = impl_->chunks.find(frame->chunk_id);
      const bool is_request = frame->type == FrameType::kRead || frame->type == FrameType::kWrite;
      if (!is_request || frame->started() || !chunk->second.job || chunk->second.job->copy().op.get() != &op) {
        ++frame;
        continue;
      }
      impl_->settle(chunk->second, op.stop_status(), result);
      impl_->chunks.erase(chunk);
      frame = impl_->outgoing.erase(frame);
    }
    for (auto &[id, chunk] : impl_->chunks) {
      // A write whose frame has begun ends with the peer's answer: until then its bytes can still arrive there.
      if (chunk.is_write || !chunk.job || chunk.job->copy().op.get() != &op) continue;
      chunk.local = Scatter();
      if (impl_->stage == Impl::Stage::kBody && FrameType(impl_->header.type) == FrameType::kReadData && impl_->header.call_id == id) impl_->drop_incoming();
      impl_->settle(chunk, op.stop_status(), result);
    }
  }
  impl_->finish(result);
}

// Moves the job reference out: what is left of the chunk belongs to nobody.
void StreamConnection::Impl::settle(StreamChunk &chunk, const Status &status, StepResult &result) {
  if (chunk.job) result.settled.push_back({std::move(chunk.job), status, status.ok() ? chunk.size_bytes : 0});
  chunk.job = nullptr;
}

std::string StreamConnection::Impl::peer_name() const {
  auto owner = link.lock();
  return owner ? owner->name() : "a peer";
}

void StreamConnection::Impl::close_socket() {
  if (is_watched) engine.loop.unwatch(socket.get());
  is_watched = false;
  socket.reset();
}

void StreamConnection::Impl::arm() {
  has_driver = false;
  if (is_watched) engine.loop.rearm(socket.get(), EPOLLIN | EPOLLRDHUP | EPOLLONESHOT | (outgoing.empty() ? 0u : uint32_t(EPOLLOUT)));
}

void StreamConnection::Impl::finish(StepResult &result) {
  for (auto &settled : result.settled) settled.job->settle(settled.status, settled.bytes);
  result.settled.clear();
}

void StreamConnection::Impl::attach(const std::shared_ptr<StreamJob> &job, bool may_run_inline) {
  StepResult result;
  bool is_driver = false;
  {
    std::lock_guard lock(mutex);
    if (is_closed) {
      result.broken = why_closed;
      job->hold();
      result.settled.push_back({job, why_closed, 0});
    } else {
      queue_chunks(job, kWindow);
      send_step(result);
      if (result.broken.ok() && !has_driver) is_driver = has_driver = true;
    }
  }
  finish(result);
  if (!result.broken.ok()) {
    if (auto owner = link.lock()) owner->fail(result.broken);
    if (auto connection = self.lock()) connection->shutdown(result.broken);
  } else if (is_driver) {
    if (may_run_inline) {
      drive(true);
    } else {
      engine.pool.submit([connection = self.lock()] { connection->impl_->drive(false); });
    }
  }
}

void StreamConnection::Impl::on_ready() {
  {
    std::lock_guard lock(mutex);
    if (is_closed || has_driver) return;  // a driver arms the socket when it leaves, and then hears of this again
    has_driver = true;
  }
  engine.pool.submit([connection = self.lock()] { connection->impl_->drive(false); });
}

void StreamConnection::Impl::drive(bool is_caller) {
  const auto keep_alive = self.lock();
  const int64_t burst_end_ns = now_ns() + kBurstNs;
  bool has_waited = false;
  while (true) {
    StepResult result;
    bool is_quiet_end = false, for_sending = false;
    int64_t patience_ns = 0;
    {
      std::lock_guard lock(mutex);
      if (is_closed) {
        has_driver = false;
        close_socket();
        return;
      }
      const bool was_idle = !expects_more();
      receive_step(result);
      if (result.broken.ok()) send_step(result);
      // An end of stream between frames with nothing under way is how a peer leaves: the control connection says why.
      is_quiet_end = !result.broken.ok() && was_idle && !expects_more();
      for_sending = !outgoing.empty();
      patience_ns = expects_more() ? kPatienceNs : kShortPatienceNs;
      // A caller that has what it came for goes back at once; a copy thread is patient, because requests often follow one another.
      if (result.broken.ok() && !result.moved && (has_waited || (is_caller && !expects_more()))) {
        arm();
        return;
      }
    }
    finish(result);
    if (!result.broken.ok()) {
      auto owner = link.lock();
      if (owner && !is_quiet_end) owner->fail(result.broken);
      keep_alive->shutdown(result.broken);
      continue;  // sees that it is closed
    }
    if (result.moved) {
      has_waited = false;
      if (now_ns() < burst_end_ns) continue;
      engine.pool.submit([keep_alive] { keep_alive->impl_->drive(false); });
      return;
    }
    wait_ready(socket.get(), for_sending, patience_ns);
    has_waited = true;
  }
}

}  // namespace ldr
