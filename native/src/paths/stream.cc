#include "stream.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "../clock.h"
#include "../engine.h"
#include "../socket.h"
#include "stream_connection.h"

namespace ldr {
namespace {

constexpr int64_t kBurstNs = 10 * kMillisecond;          // then the thread is given to others
constexpr int64_t kPatienceNs = 2 * kMillisecond;        // how long a driver waits for more before it parks the connection
constexpr int64_t kShortPatienceNs = kMillisecond / 5;   // when nothing is due
constexpr int64_t kWriteGraceNs = 500 * kMillisecond;    // how long nothing may move while a stopped operation waits for the end of a write

void wait_ready(int fd, bool for_sending, int64_t timeout_ns) {
  pollfd entry{fd, short(POLLIN | (for_sending ? POLLOUT : 0)), 0};
  timespec timeout{time_t(timeout_ns / kSecond), long(timeout_ns % kSecond)};
  ppoll(&entry, 1, &timeout, nullptr);  // whatever it says: the next step finds out
}

}  // namespace

StreamConnection::StreamConnection(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::shared_ptr<StreamConnection> StreamConnection::create(Engine &engine, Fd socket, uint32_t path) {
  if (path == LDR_PATH_TCP) limit_silence(socket.get(), engine.config.liveness_budget_ns);  // nothing but the control connection has heartbeats
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
  std::unordered_map<uint64_t, StreamChunk> chunks;
  std::deque<std::shared_ptr<StreamJob>> parked;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->is_closed) return;
    impl_->why_closed = why;
    impl_->is_closed = true;
    chunks.swap(impl_->chunks);
    parked.swap(impl_->parked);
    impl_->outgoing.clear();
    ::shutdown(impl_->socket.get(), SHUT_RDWR);  // wakes a driver that waits
    if (!impl_->has_driver) impl_->close_socket();
  }
  for (auto &[id, chunk] : chunks) {
    if (chunk.job) chunk.job->settle(why, 0);
  }
  for (auto &job : parked) job->settle(why, 0);
}

void StreamConnection::abandon(const Op &op) {
  const Status why = op.stop_status();
  auto is_ours = [&](const std::shared_ptr<StreamJob> &job) { return job && job->copy().op.get() == &op; };
  std::shared_ptr<StreamJob> begun;
  uint64_t num_moved = 0;
  StepResult result;
  {
    std::lock_guard lock(impl_->mutex);
    auto &chunks = impl_->chunks;
    result.settled.reserve(chunks.size() + impl_->parked.size());  // all or nothing, if memory is short
    for (auto job = impl_->parked.begin(); job != impl_->parked.end();) {
      if (!is_ours(*job)) {
        ++job;
        continue;
      }
      result.settled.push_back({std::move(*job), why, 0});
      job = impl_->parked.erase(job);
    }
    for (auto frame = impl_->outgoing.begin(); frame != impl_->outgoing.end();) {
      auto chunk = frame->is_request() && !frame->started() ? chunks.find(frame->chunk_id) : chunks.end();
      if (chunk == chunks.end() || !is_ours(chunk->second.job)) {
        ++frame;
        continue;
      }
      impl_->settle(chunk->second, why, result);
      chunks.erase(chunk);
      frame = impl_->outgoing.erase(frame);
    }
    for (auto &[id, chunk] : chunks) {
      if (!is_ours(chunk.job)) continue;
      if (chunk.is_write) {
        begun = chunk.job;
        continue;
      }
      chunk.local = Scatter();
      if (impl_->stage == Impl::Stage::kBody && FrameType(impl_->header.type) == FrameType::kReadData && impl_->header.call_id == id) impl_->drop_incoming();
      impl_->settle(chunk, why, result);
    }
    impl_->admit_parked(result);
    num_moved = impl_->num_moved;
  }
  result.settle();
  if (begun) impl_->await_answer(begun, num_moved, now_ns() + impl_->engine.config.liveness_budget_ns);
}

// A write that has begun ends with the peer's answer. A peer that neither takes the bytes nor answers does not hold the operation: its link is given up.
void StreamConnection::Impl::await_answer(std::weak_ptr<StreamJob> job, uint64_t moved_before, int64_t give_up_ns) {
  engine.loop.at(std::min(now_ns() + kWriteGraceNs, give_up_ns), [weak = self, job = std::move(job), moved_before, give_up_ns] {
    auto connection = weak.lock();
    auto running = job.lock();
    if (!connection || !running) return;
    Impl &impl = connection->impl();
    uint64_t num_moved;
    {
      std::lock_guard lock(impl.mutex);
      auto is_its_write = [&](const auto &entry) { return entry.second.job == running; };
      if (std::none_of(impl.chunks.begin(), impl.chunks.end(), is_its_write)) return;
      num_moved = impl.num_moved;
    }
    if (num_moved != moved_before && now_ns() < give_up_ns) return impl.await_answer(running, num_moved, give_up_ns);
    impl.break_off(fail(LDR_ERR_LINK_BROKEN, "%s does not take the bytes that were pushed to it on a %s data connection", impl.peer_name().c_str(),
                        path_name(impl.path)));
  });
}

void StreamConnection::Impl::break_off(const Status &why) {
  auto connection = self.lock();
  try {
    if (auto owner = link.lock()) owner->data_failed(why);  // first: whoever hears of a broken link finds it down
  } catch (const std::bad_alloc &) {
    if (connection) connection->shutdown(why);
    throw;
  }
  if (connection) connection->shutdown(why);
}

// Moves the job reference out: what is left of the chunk belongs to nobody.
void StreamConnection::Impl::settle(StreamChunk &chunk, const Status &status, StepResult &result) {
  if (!chunk.job) return;
  result.settled.reserve(result.settled.size() + 1);  // an exception leaves the job with the chunk
  result.settled.push_back({std::move(chunk.job), status, status.ok() ? chunk.size_bytes : 0});
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

void StreamConnection::Impl::attach(const std::shared_ptr<StreamJob> &job, bool drive_here) {
  StepResult result;
  bool is_driver = false;
  {
    std::lock_guard lock(mutex);
    if (is_closed) {
      result.broken = why_closed;
      result.settled.push_back({job, why_closed, 0});
      job->hold();
    } else {
      if (has_room()) {
        queue_chunks(job, kWindow, result);
      } else {
        parked.push_back(job);
        job->hold();
      }
      send_step(result);
      if (result.broken.ok() && !has_driver) is_driver = has_driver = true;
    }
  }
  result.settle();
  if (!result.broken.ok()) {
    break_off(result.broken);
  } else if (is_driver) {
    drive_here ? drive(true) : hand_over();
  }
}

void StreamConnection::Impl::on_ready() {
  {
    std::lock_guard lock(mutex);
    if (is_closed || has_driver) return;  // a driver arms the socket when it leaves, and then hears of this again
    has_driver = true;
  }
  hand_over();
}

void StreamConnection::Impl::hand_over() {
  try {
    engine.pool.submit([connection = self.lock()] { connection->impl_->drive(false); });
  } catch (const std::bad_alloc &) {
    leave_without_memory();
  }
}

void StreamConnection::Impl::drive(bool is_caller) {
  try {
    drive_on(is_caller);
  } catch (const std::bad_alloc &) {
    leave_without_memory();
  }
}

// Nobody knows how far the step came, so the connection is of no use any more.
void StreamConnection::Impl::leave_without_memory() {
  {
    std::lock_guard lock(mutex);
    has_driver = false;
  }
  break_off({LDR_ERR_LINK_BROKEN, "out of memory"});
}

void StreamConnection::Impl::drive_on(bool is_caller) {
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
    result.settle();
    if (!result.broken.ok()) {
      auto owner = link.lock();
      if (owner && !is_quiet_end) owner->data_failed(result.broken);
      keep_alive->shutdown(result.broken);
      continue;  // sees that it is closed
    }
    if (result.moved) {
      has_waited = false;
      if (now_ns() < burst_end_ns) continue;
      return hand_over();
    }
    wait_ready(socket.get(), for_sending, patience_ns);
    has_waited = true;
  }
}

}  // namespace ldr
