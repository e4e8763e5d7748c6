#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "../engine.h"
#include "stream_connection.h"

namespace ldr {
namespace {

constexpr uint64_t kMaxReceiveBytes = 512u << 10;
constexpr unsigned kMaxParts = 1024;  // IOV_MAX
constexpr size_t kScratchBytes = 64 << 10;
constexpr uint32_t kMaxAnswersQueued = 64;  // a peer of ours has at most a window of requests out

const char *refusal_text(ldr_status_t status) {
  if (status == LDR_ERR_NO_CACHE) return "its cache is gone";
  return status == LDR_ERR_STALE ? "the grant has ended" : "outside its cache, or not accessible";
}

}  // namespace

Status StreamConnection::Impl::malformed(const char *what) const {
  return fail(LDR_ERR_LINK_BROKEN, "%s sent a malformed frame (type %u, %u bytes) on a %s data connection: %s", peer_name().c_str(), unsigned(header.type),
              header.payload_bytes, path_name(path), what);
}

void StreamConnection::Impl::drop_incoming() {
  scratch.resize(kScratchBytes);
  incoming.redirect(scratch.data(), scratch.size());
}

void StreamConnection::Impl::next_frame() {
  stage = Stage::kHeader;
  got = 0;
}

// True when target holds size bytes.
bool StreamConnection::Impl::receive_into(void *target, size_t size, StepResult &result) {
  ssize_t count = 0;
  if (got < size) {
    do {
      count = recv(socket.get(), static_cast<uint8_t *>(target) + got, size - got, MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    if (count == 0) {
      result.broken = fail(LDR_ERR_LINK_BROKEN, "%s closed a %s data connection", peer_name().c_str(), path_name(path));
    } else if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      result.broken = fail_errno(LDR_ERR_LINK_BROKEN, "%s: receiving on a %s data connection", peer_name().c_str(), path_name(path));
    }
    if (count <= 0) return false;
    note_moved(result);
    got += size_t(count);
  }
  return got == size;
}

Status StreamConnection::Impl::on_header() {
  got = 0;
  stage = Stage::kPayload;
  switch (FrameType(header.type)) {
    case FrameType::kRead:
    case FrameType::kWrite:
      if (header.payload_bytes > kMaxRequestBytes) return malformed("too long");
      break;
    case FrameType::kWriteDone:
      if (header.payload_bytes != sizeof(int32_t)) return malformed("a status has 4 bytes");
      if (is_unsent(header.call_id)) return malformed("answered before it was asked for");
      break;
    case FrameType::kReadData: {
      auto it = chunks.find(header.call_id);
      if (it == chunks.end() || it->second.is_write) return malformed("no such chunk was asked for");
      if (is_unsent(header.call_id)) return malformed("answered before it was asked for");  // it could be taken back while the answer comes in
      if (header.payload_bytes != 0 && header.payload_bytes != it->second.size_bytes) return malformed("not the size that was asked for");
      incoming = Scatter();
      if (header.payload_bytes > 0) {
        incoming = std::move(it->second.local);
        if (!it->second.job) {
          incoming.add(0, header.payload_bytes);
          drop_incoming();
        }
      }
      stage = header.payload_bytes > 0 ? Stage::kBody : Stage::kStatus;
      return Status::success();
    }
    default: return malformed("unknown type");
  }
  payload.resize(header.payload_bytes);
  return Status::success();
}

Status StreamConnection::Impl::on_payload(StepResult &result) {
  Reader in(payload.data(), payload.size());
  if (FrameType(header.type) == FrameType::kWriteDone) return on_chunk_end(ldr_status_t(in.u32()), result);
  if (num_answers_queued >= kMaxAnswersQueued) return malformed("too many requests at once");
  const bool is_write = FrameType(header.type) == FrameType::kWrite;
  ChunkRequest request;
  if (!decode_request(in, &request)) return malformed("bad request");
  Scatter memory;
  const LinkPtr owner = link.lock();
  if (owner && !owner->serves_peer()) return malformed("asked over a one-way link that it did not open");
  ldr_status_t status = locate_chunk(engine, owner.get(), is_write, &request, &memory);
  if (!is_write) {
    queue_answer(FrameType::kReadData, header.call_id, status, &request, std::move(memory));
    next_frame();
    return Status::success();
  }
  incoming = std::move(memory);
  if (status != LDR_OK) {
    incoming = Scatter();
    incoming.add(0, request.size_bytes);
    drop_incoming();
  }
  write_request = std::move(request);
  write_status = status;
  stage = Stage::kBody;
  got = 0;
  return Status::success();
}

// One receive straight into its place in a cache of ours, for a read of ours or a write of the peer's.
void StreamConnection::Impl::receive_body(StepResult &result) {
  iovec parts[kMaxParts];
  msghdr message{};
  message.msg_iov = parts;
  const bool is_write = FrameType(header.type) == FrameType::kWrite;
  ssize_t count;
  {
    auto guard = engine.caches.read_guard();
    if (is_write) {
      if (write_status == LDR_OK && (write_status = recheck_chunk(engine, write_request)) != LDR_OK) drop_incoming();
    } else if (local_is_gone(chunks.at(header.call_id))) {
      drop_incoming();
    }
    unsigned filled = incoming.fill(parts, kMaxParts - 1, kMaxReceiveBytes);
    uint64_t in_parts = 0;
    for (unsigned i = 0; i < filled; ++i) in_parts += parts[i].iov_len;
    // The status of a read comes right behind the body: take it along.
    if (!is_write && in_parts == incoming.left()) parts[filled++] = {&read_status, sizeof(read_status)};
    message.msg_iovlen = filled;
    do {
      count = recvmsg(socket.get(), &message, MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
  }
  if (count > 0) {
    note_moved(result);
    uint64_t of_body = uint64_t(count) < incoming.left() ? uint64_t(count) : incoming.left();
    incoming.consume(of_body);
    got = size_t(uint64_t(count) - of_body);
  } else if (count == 0) {
    result.broken = fail(LDR_ERR_LINK_BROKEN, "%s closed a %s data connection in the middle of a frame", peer_name().c_str(), path_name(path));
  } else if (errno == EFAULT) {
    // The kernel could not write there; what it could not place is still in the socket.
    result.moved = true;
    if (is_write) {
      write_status = LDR_ERR_NO_CACHE;
    } else {
      chunks.at(header.call_id).failure = fail(LDR_ERR_INVALID, "memory of the local cache cannot be written");
    }
    drop_incoming();
  } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
    result.broken = fail_errno(LDR_ERR_LINK_BROKEN, "%s: receiving on a %s data connection", peer_name().c_str(), path_name(path));
  }
}

void StreamConnection::Impl::on_write_end() {
  if (write_status == LDR_OK) write_status = recheck_chunk(engine, write_request);
  if (write_status == LDR_OK) engine.bytes_served[path] += write_request.size_bytes;
  queue_answer(FrameType::kWriteDone, header.call_id, write_status, nullptr, Scatter());
  next_frame();
}

// The peer has said how a chunk of ours went.
Status StreamConnection::Impl::on_chunk_end(ldr_status_t status, StepResult &result) {
  auto it = chunks.find(header.call_id);
  const bool is_write = FrameType(header.type) == FrameType::kWriteDone;
  if (it == chunks.end() || it->second.is_write != is_write) return malformed("no such chunk was asked for");
  if (!is_chunk_status(status)) return malformed("unknown status");
  if (!is_write && status == LDR_OK && header.payload_bytes == 0) return malformed("success without bytes");
  result.settled.reserve(result.settled.size() + 2);  // from here on nothing may be lost
  StreamChunk chunk = std::move(it->second);
  chunks.erase(it);
  next_frame();
  if (chunk.job) {
    const std::shared_ptr<StreamJob> job = chunk.job;
    Status outcome = chunk.failure;
    if (outcome.ok() && status != LDR_OK) {
      outcome = fail(status, "%s refused %llu bytes on %s: %s", peer_name().c_str(), (unsigned long long)chunk.size_bytes, path_name(path),
                     refusal_text(status));
    }
    if (outcome.ok()) queue_chunks(job, 1, result);  // before this one is settled, so that the job is not over in between
    settle(chunk, outcome, result);
  }
  admit_parked(result);
  return Status::success();
}

void StreamConnection::Impl::receive_step(StepResult &result) {
  switch (stage) {
    case Stage::kHeader:
      if (receive_into(&header, sizeof(header), result)) result.broken = on_header();
      break;
    case Stage::kPayload:
      if (receive_into(payload.data(), payload.size(), result)) result.broken = on_payload(result);
      break;
    case Stage::kBody:
      receive_body(result);
      if (!result.broken.ok() || incoming.left() > 0) break;
      if (FrameType(header.type) == FrameType::kWrite) {
        on_write_end();
        break;
      }
      stage = Stage::kStatus;
      if (got == sizeof(read_status)) result.broken = on_chunk_end(read_status, result);
      break;
    case Stage::kStatus:
      if (receive_into(&read_status, sizeof(read_status), result)) result.broken = on_chunk_end(read_status, result);
      break;
  }
}

}  // namespace ldr
