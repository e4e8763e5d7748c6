#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "../engine.h"
#include "../socket.h"
#include "stream_connection.h"

namespace ldr {
namespace {

constexpr uint64_t kMaxSendBytes = 512u << 10;  // bounds how long the mutex and the caches' guard are held
constexpr unsigned kMaxParts = 1024;            // IOV_MAX
uint8_t zeros[64 << 10];                        // only ever read

}  // namespace

void StreamConnection::Impl::queue_chunks(const std::shared_ptr<StreamJob> &job, uint32_t count, StepResult &result) {
  while (count-- > 0) {
    result.settled.reserve(result.settled.size() + 1);
    ChunkRequest request;
    StreamChunk chunk;
    OutgoingFrame frame{};
    frame.chunk_id = next_chunk_id++;
    bool is_claimed = false;
    try {
      if (!(is_claimed = job->claim(&request, &chunk.local))) return;
      Writer payload;
      encode_request(request, payload);
      frame.type = job->is_write() ? FrameType::kWrite : FrameType::kRead;
      frame.head = encode_frame(frame.type, frame.chunk_id, payload);
      chunk.job = job;
      chunk.size_bytes = request.size_bytes;
      chunk.is_write = job->is_write();
      if (chunk.is_write) frame.body = std::move(chunk.local);
      chunks.emplace(frame.chunk_id, std::move(chunk));
      outgoing.push_back(std::move(frame));
    } catch (const std::bad_alloc &) {
      chunks.erase(frame.chunk_id);
      if (!is_claimed) job->hold();
      result.settled.push_back({job, out_of_memory(), 0});
      return;
    }
  }
}

void StreamConnection::Impl::admit_parked(StepResult &result) {
  while (!parked.empty() && has_room()) {
    result.settled.reserve(result.settled.size() + 2);
    const std::shared_ptr<StreamJob> job = parked.front();
    queue_chunks(job, kWindow, result);
    result.settled.push_back({job, Status::success(), 0});
    parked.pop_front();
  }
}

bool StreamConnection::Impl::is_unsent(uint64_t chunk_id) const {
  return std::any_of(outgoing.begin(), outgoing.end(), [&](const OutgoingFrame &frame) { return frame.is_request() && frame.chunk_id == chunk_id; });
}

void StreamConnection::Impl::queue_answer(FrameType type, uint64_t chunk_id, ldr_status_t status, const ChunkRequest *served, Scatter body) {
  OutgoingFrame frame{};
  frame.type = type;
  frame.chunk_id = chunk_id;
  frame.status = status;
  Writer payload;
  if (type == FrameType::kWriteDone) payload.u32(uint32_t(status));
  frame.head = encode_frame(type, chunk_id, payload);
  if (served) {
    const uint32_t body_bytes = uint32_t(body.left());
    memcpy(&frame.head[offsetof(FrameHeader, payload_bytes)], &body_bytes, sizeof(body_bytes));
    frame.served = *served;
  }
  frame.body = std::move(body);
  outgoing.push_back(std::move(frame));
  ++num_answers_queued;
}

bool StreamConnection::Impl::local_is_gone(StreamChunk &chunk) {
  if (!chunk.job || !chunk.failure.ok()) return false;
  const Cache &local = *chunk.job->copy().local;
  if (engine.caches.find_slot(local.slot, local.version)) return false;
  chunk.failure = fail(LDR_ERR_NO_CACHE, "local cache %lld was unregistered", (long long)local.id);
  return true;
}

// A write whose memory cannot be read (any more): dropped if the peer has seen nothing of it, else filled up, because the peer waits for its bytes.
void StreamConnection::Impl::give_up_write(OutgoingFrame &frame, StepResult &result) {
  if (frame.started()) {
    frame.body.redirect(zeros, sizeof(zeros));
    return;
  }
  StreamChunk &chunk = chunks.at(frame.chunk_id);
  settle(chunk, Status(chunk.failure), result);
  chunks.erase(frame.chunk_id);
  outgoing.pop_front();
}

// The memory may have gone away since the last step. False: the frame is gone too.
bool StreamConnection::Impl::prepare_body(OutgoingFrame &frame, StepResult &result) {
  if (frame.type == FrameType::kReadData && frame.status == LDR_OK) {
    frame.status = recheck_chunk(engine, frame.served);
    if (frame.status != LDR_OK) frame.body.redirect(zeros, sizeof(zeros));
  } else if (frame.type == FrameType::kWrite && local_is_gone(chunks.at(frame.chunk_id))) {
    const bool is_dropped = !frame.started();
    give_up_write(frame, result);
    return !is_dropped;
  }
  return true;
}

// The kernel could not read the body. Nothing was sent by that call.
void StreamConnection::Impl::on_send_fault(OutgoingFrame &frame, StepResult &result) {
  if (frame.type == FrameType::kReadData) {
    frame.status = LDR_ERR_NO_CACHE;
    frame.body.redirect(zeros, sizeof(zeros));
  } else {
    chunks.at(frame.chunk_id).failure = fail(LDR_ERR_INVALID, "memory of the local cache cannot be read");
    give_up_write(frame, result);
  }
}

// The head and body are out: true when a trailer follows.
bool StreamConnection::Impl::next_part(OutgoingFrame &frame) {
  if (frame.type != FrameType::kReadData || frame.has_status) return false;
  // Only now: everything was taken from the memory before this look at its version words.
  if (frame.status == LDR_OK) frame.status = recheck_chunk(engine, frame.served);
  if (frame.status == LDR_OK) engine.bytes_served[path] += frame.served.size_bytes;
  int32_t status = frame.status;
  frame.head.resize(sizeof(status));
  memcpy(frame.head.data(), &status, sizeof(status));
  frame.head_sent = 0;
  frame.has_status = true;
  return true;
}

void StreamConnection::Impl::send_step(StepResult &result) {
  if (outgoing.empty()) return;
  OutgoingFrame &frame = outgoing.front();
  iovec parts[kMaxParts];
  msghdr message{};
  message.msg_iov = parts;
  ssize_t sent;
  {
    auto guard = engine.caches.read_guard();
    if (!prepare_body(frame, result)) {
      result.moved = true;
      return;
    }
    unsigned count = 0;
    if (frame.head_sent < frame.head.size()) parts[count++] = {frame.head.data() + frame.head_sent, frame.head.size() - frame.head_sent};
    message.msg_iovlen = count + frame.body.fill(parts + count, kMaxParts - count, kMaxSendBytes);
    const bool more = frame.type == FrameType::kReadData && !frame.has_status;
    do {
      sent = sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    } while (sent < 0 && errno == EINTR);
  }
  if (sent < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (errno == EFAULT) {
      result.moved = true;
      return on_send_fault(frame, result);
    }
    result.broken = fail_errno(LDR_ERR_LINK_BROKEN, "%s: sending on a %s data connection", peer_name().c_str(), path_name(path));
    return;
  }
  note_moved(result);
  size_t of_head = std::min<size_t>(size_t(sent), frame.head.size() - frame.head_sent);
  frame.head_sent += of_head;
  frame.body.consume(uint64_t(sent) - of_head);
  if (frame.head_sent < frame.head.size() || frame.body.left() > 0 || next_part(frame)) return;
  if (frame.type == FrameType::kReadData || frame.type == FrameType::kWriteDone) --num_answers_queued;
  outgoing.pop_front();
}

}  // namespace ldr
