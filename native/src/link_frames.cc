// What goes over the control connection: frames out of a queue, frames in, and who waits for which answer.
#include <sys/epoll.h>

#include <cerrno>
#include <cstring>
#include <future>

#include "link_impl.h"
#include "serve.h"

namespace ldr {
namespace {

constexpr size_t kMaxQueuedBytes = 64u << 20;
constexpr size_t kMaxQueuedFds = 64;
constexpr int kFramesPerWake = 64;

}  // namespace

void Link::send(FrameType type, uint64_t call_id, const Writer &payload, Fd passed) {
  Impl::Outgoing out{encode_frame(type, call_id, payload, bool(passed)), 0, std::move(passed)};
  Status status;
  {
    std::lock_guard lock(impl_->mutex);
    if (!ready()) return;
    impl_->queued_bytes += out.cost();
    impl_->queued_fds += bool(out.passed);
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
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) {
      // The reader meets the end, after the peer's last words: the answer to an unlink perhaps.
      queue.clear();
      queued_bytes = queued_fds = 0;
      break;
    }
    if (n < 0) return broken(std::string("sending failed: ") + strerror(errno));
    out.sent += size_t(n);
    if (out.sent < out.bytes.size()) continue;
    queued_bytes -= out.cost();
    queued_fds -= bool(out.passed);
    queue.pop_front();
  }
  if (queued_bytes > kMaxQueuedBytes || queued_fds > kMaxQueuedFds)
    return broken("the peer does not read: " + std::to_string(queued_bytes) + " bytes and " + std::to_string(queued_fds) + " descriptors wait for it");
  if (waits_for_room != !queue.empty()) {
    waits_for_room = !queue.empty();
    engine.loop.rearm(control.get(), EPOLLIN | (waits_for_room ? uint32_t(EPOLLOUT) : 0));
  }
  return Status::success();
}

bool Link::Impl::take_call(uint64_t id, Call *call_p) {
  std::lock_guard lock(mutex);
  auto at = calls.find(id);
  if (at == calls.end()) return false;
  *call_p = std::move(at->second);
  calls.erase(at);
  return true;
}

void Link::call(FrameType type, const Writer &payload, int64_t deadline_ns, OnReply on_reply) {
  uint64_t id = 0;
  Status down;
  {
    std::lock_guard lock(impl_->mutex);
    if (ready()) {
      id = ++impl_->last_call;
      Impl::Call &call = impl_->calls[id];
      call.on_reply = std::move(on_reply);
      if (deadline_ns != kNever) {
        call.timer = impl_->engine.loop.at(deadline_ns, [weak = weak_from_this(), id] {
          LinkPtr link = weak.lock();
          Impl::Call late;
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
  if (impl_->facts.is_same_host) impl_->schedule_tick(shared_from_this(), now_ns() + Impl::kDeathLookNs);
  send(type, id, payload);
}

// The answer of a link that goes down meanwhile says why it did: unlinked is not broken.
Status Link::probe(int64_t deadline_ns) {
  auto answer = std::make_shared<std::promise<Status>>();
  std::future<Status> answered = answer->get_future();
  call(FrameType::kProbe, Writer(), deadline_ns, [answer](const Status &status, Reader, Fd &) { answer->set_value(status); });
  Status status = answered.get();
  if (status.code == LDR_ERR_LINK_BROKEN && !ready()) status = why_down();
  return status.ok() ? status : ldr::fail(status.code, "probe: %s", status.text.c_str());
}

void Link::reply(uint64_t call_id, const Status &status, const Writer &payload, Fd passed) {
  Writer out;
  out.u32(uint32_t(status.code));
  out.text(status.text);
  if (status.ok()) out.raw(payload.bytes().data(), payload.bytes().size());
  send(FrameType::kReply, call_id, out, status.ok() ? std::move(passed) : Fd());
}

// On the loop thread, as all that follows.
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
  try {
    read_frames(link);
  } catch (const std::exception &error) {  // out of memory: this link is lost, the engine is not
    link.fail(broken(std::string("a frame of the peer could not be handled: ") + error.what()));
  }
}

void Link::Impl::read_frames(Link &link) {
  for (int i = 0; i < kFramesPerWake && ready; ++i) {
    Frame frame;
    switch (reader.read(control.get(), &frame)) {
      case FrameReader::kWouldBlock: return;
      case FrameReader::kEnd: return link.fail(broken(reader.why()));
      case FrameReader::kBad: return link.fail(broken("the peer sent " + reader.why()));
      case FrameReader::kFrame: break;
    }
    last_heard_ns.store(now_ns(), std::memory_order_relaxed);
    dispatch(link, frame);
  }
}

void Link::Impl::dispatch(Link &link, Frame &frame) {
  if (frame.type() == FrameType::kHeartbeat) return;
  if (frame.type() == FrameType::kReply) return on_answer(link, frame);
  if (!serves_peer()) return link.fail(broken("the peer asks for something over a one-way link that it did not open"));
  switch (frame.type()) {
    case FrameType::kProbe:
      if (frame.payload.empty()) return link.reply(frame.header.call_id, Status::success(), Writer());
      break;
    case FrameType::kTable: case FrameType::kLookup: case FrameType::kMapping: case FrameType::kGrantOpen: case FrameType::kGrantClose:
    case FrameType::kDone:
      return serve_frame(link, frame.type(), frame.header.call_id, frame.reader());
    case FrameType::kUnlink: {
      Reader in = frame.reader();
      int64_t timeout_ns = in.i64();
      if (!in.finished()) break;
      return begin_unlink(link.shared_from_this(), frame.header.call_id, deadline_after(timeout_ns));
    }
    default: break;
  }
  link.fail(broken("the peer sent a malformed frame of type " + std::to_string(frame.header.type)));
}

void Link::Impl::on_answer(Link &link, Frame &frame) {
  Reader in = frame.reader();
  Status status;
  status.code = ldr_status_t(in.u32());
  status.text = in.text();
  if (!in.ok() || status.code > 0) return link.fail(broken("the peer sent a malformed reply"));
  Call call;
  if (!take_call(frame.header.call_id, &call)) return;  // it timed out before
  if (call.timer) engine.loop.cancel(call.timer);
  if (frame.lost_descriptor()) status = ldr::fail(LDR_ERR_BUSY, "what %s passed was not taken: this process has no descriptor left", name().c_str());
  call.on_reply(status, in, frame.passed);
}

}  // namespace ldr
