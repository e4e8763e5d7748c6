// The other end of a link, played by hand: slow, silent, hostile.
#pragma once

#include <cerrno>
#include <thread>

#include "paths/stream_frames.h"
#include "stream_fixture.h"

namespace ldr_test {

// A look at memory that another thread fills meanwhile: on purpose, so it is hidden from the thread sanitizer.
__attribute__((noinline, no_sanitize("thread"))) inline uint8_t peek(const uint8_t *byte) { return *const_cast<const volatile uint8_t *>(byte); }

inline void await_byte(const uint8_t *byte, uint8_t value) {
  for (int64_t until = now_ns() + 30 * kSecond; peek(byte) != value;) {
    CHECK(now_ns() < until);
    std::this_thread::yield();
  }
}

// The peer's side of one data connection, by hand.
struct RawPeer {
  explicit RawPeer(uint32_t flags = LDR_ENGINE_REMOTE_ACCESS, int send_buffer_bytes = 0) : engine(make_engine(1, flags)) {
    Fd control_a;
    std::vector<Fd> data_a(1);
    socket_pair(&control_a, &control);
    socket_pair(&data_a[0], &data);
    if (send_buffer_bytes) CHECK_EQ(setsockopt(data_a[0].get(), SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof(send_buffer_bytes)), 0);
    timeval patience{30, 0};
    setsockopt(data.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    LinkFacts facts;
    facts.cluster_id = 2;
    facts.incarnation = 1002;
    CHECK_OK(engine->links.adopt(facts, engine->links.last_epoch(), [&](uint64_t) {
      return link = create_link(*engine, 2, std::move(control_a), std::move(data_a));
    }));
  }
  ~RawPeer() {
    if (engine) (void)link->close(true, kNever);
  }

  void send(const void *bytes, size_t size) { CHECK_EQ(::send(data.get(), bytes, size, MSG_NOSIGNAL), ssize_t(size)); }
  void send_frame(FrameType type, uint64_t call_id, const std::vector<uint8_t> &payload) {
    FrameHeader header{uint32_t(payload.size()), uint16_t(type), 0, call_id};
    send_with_header(header, payload);
  }
  // In one piece: a header that is refused at once must not make the rest fail here.
  void send_with_header(const FrameHeader &header, const std::vector<uint8_t> &rest) {
    std::vector<uint8_t> bytes(sizeof(header) + rest.size());
    memcpy(bytes.data(), &header, sizeof(header));
    std::copy(rest.begin(), rest.end(), bytes.begin() + sizeof(header));
    send(bytes.data(), bytes.size());
  }
  void send_request(FrameType type, uint64_t call_id, const ChunkRequest &request) {
    Writer payload;
    encode_request(request, payload);
    send_frame(type, call_id, payload.bytes());
  }
  void receive(void *bytes, size_t size) { CHECK_EQ(recv(data.get(), bytes, size, MSG_WAITALL), ssize_t(size)); }
  FrameHeader receive_header(FrameType type) {
    FrameHeader header;
    receive(&header, sizeof(header));
    CHECK_EQ(header.type, uint16_t(type));
    return header;
  }
  ChunkRequest receive_request(FrameType type, uint64_t *call_id_p) {
    FrameHeader header = receive_header(type);
    std::vector<uint8_t> payload(header.payload_bytes);
    receive(payload.data(), payload.size());
    ChunkRequest request;
    CHECK(decode_request(Reader(payload.data(), payload.size()), &request));
    *call_id_p = header.call_id;
    return request;
  }
  int32_t receive_status() {
    int32_t status;
    receive(&status, sizeof(status));
    return status;
  }
  int32_t receive_write_done(uint64_t call_id) {
    FrameHeader header = receive_header(FrameType::kWriteDone);
    CHECK_EQ(header.call_id, call_id);
    CHECK_EQ(header.payload_bytes, 4u);
    return receive_status();
  }
  // The engine closed the connection and gave up the link.
  void check_broken(const char *text_part) {
    uint8_t rest[4096];
    ssize_t count;
    while ((count = recv(data.get(), rest, sizeof(rest), 0)) > 0) {}
    CHECK(count == 0 || errno == ECONNRESET);
    CHECK(!link->ready());
    CHECK_CODE(link->why_down(), LDR_ERR_LINK_BROKEN);
    CHECK_CONTAINS(link->why_down().text, text_part);
  }
  // Still in step: an ordinary read of this cache gives its bytes.
  void check_in_step(const TestCache &of) {
    send_request(FrameType::kRead, 4242, whole(*of.cache, 4096));
    FrameHeader header = receive_header(FrameType::kReadData);
    CHECK_EQ(header.call_id, 4242u);
    CHECK_EQ(header.payload_bytes, 4096u);
    std::vector<uint8_t> bytes(4096);
    receive(bytes.data(), bytes.size());
    CHECK_EQ(memcmp(bytes.data(), of.tensors[0].data(), 4096), 0);
    CHECK_EQ(receive_status(), LDR_OK);
  }
  static ChunkRequest whole(const Cache &cache, uint64_t size) {
    ChunkRequest request;
    request.cache_slot = cache.slot;
    request.cache_version = cache.version;
    request.pieces = {{0, uint32_t(size), 0}};
    request.size_bytes = size;
    return request;
  }

  std::unique_ptr<Engine> engine;
  Fd control, data;
  LinkPtr link;
};

}  // namespace ldr_test
