// Operations that are stopped while the peer does not do its part: they end in bounded time, and what is left over harms neither engine nor link.
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "raw_peer.h"
#include "transfer.h"

using namespace ldr_test;

namespace {

// Waits for a state that other threads bring about.
template <class F> void await(F is_reached) {
  for (const int64_t until = now_ns() + 30 * kSecond; !is_reached(); std::this_thread::yield()) CHECK(now_ns() < until);
}

std::vector<uint8_t> read_data(uint64_t chunk, uint32_t size_bytes, uint32_t sent_bytes) {
  FrameHeader header{size_bytes, uint16_t(FrameType::kReadData), 0, chunk};
  std::vector<uint8_t> bytes(sizeof(header) + sent_bytes, 0xAB);
  memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

// The peer answers a request that it was not sent yet; the answer's place must not be taken back while bytes come in.
void answered_early(FrameType type) {
  RawPeer peer(LDR_ENGINE_REMOTE_ACCESS, 4096);
  TestCache local(*peer.engine, 1, kMiB, 1);
  Run run(peer.link, type == FrameType::kReadData ? LDR_PULL : LDR_PUSH, local.cache, local.cache);
  for (uint64_t i = 0; i < kMiB / 64; ++i) run.piece(local.cache->addresses[0] + i * 64, 0, i * 64, 64);  // requests of 65 KiB each, of which one has begun
  run.start();
  std::vector<uint8_t> early = read_data(4, 256 << 10, 1000);
  if (type == FrameType::kWriteDone) {
    FrameHeader header{4, uint16_t(type), 0, 4};
    early.assign(sizeof(header) + 3, 0);  // of 4 bytes
    memcpy(early.data(), &header, sizeof(header));
  }
  peer.send(early.data(), early.size());
  CHECK_CODE(run.wait(), LDR_ERR_LINK_BROKEN);
  peer.check_broken("answered before it was asked for");
}

// Answers that are owed for stopped reads do not add up to what the peer takes for a flood.
void owed_answers_are_bounded() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, 8 * kMiB, 1), other(*peer.engine, 1, 4096, 2);
  size_t num_stopped = 0;
  for (int i = 0; i < 40; ++i) {
    Run run(peer.link, LDR_PULL, local.cache, local.cache);
    run.everything().start();
    run.stop(LDR_ERR_TIMEOUT, "too slow");
    CHECK_CODE(run.wait(), LDR_ERR_TIMEOUT);
    ++num_stopped;
  }
  CHECK_EQ(num_stopped, 40u);
  Run last(peer.link, LDR_PULL, local.cache, local.cache);
  last.piece(local.cache->addresses[0], 0, 0, 4096).start();
  // Now the peer reads again. It meets the requests of the first operations, and that of the last one when there is room for it.
  std::vector<uint8_t> answer;
  int num_requests = 0;
  while (!last.is_done()) {
    uint64_t chunk = 0;
    const uint32_t size = uint32_t(peer.receive_request(FrameType::kRead, &chunk).size_bytes);
    CHECK(++num_requests <= 33);
    answer = read_data(chunk, size, size + 4);
    memset(&answer[sizeof(FrameHeader) + size], 0, 4);
    peer.send(answer.data(), answer.size());
    if (size == 4096) break;
  }
  CHECK_OK(last.wait());
  CHECK(num_requests >= 28);
  for (int i = 0; i < 4096; ++i) CHECK_EQ(local.tensors[0][size_t(i)], 0xAB);
  CHECK(peer.link->ready());
  peer.check_in_step(other);
}

// Parked operations end when they are stopped, and with the connection.
void parked_ones_end() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, 8 * kMiB, 1);
  std::vector<Run> runs;
  for (int i = 0; i < 10; ++i) {
    runs.emplace_back(peer.link, LDR_PULL, local.cache, local.cache);
    runs.back().everything().start();
  }
  runs[9].stop(LDR_ERR_CANCELLED, "no longer wanted");
  CHECK_CODE(runs[9].wait(), LDR_ERR_CANCELLED);
  peer.data.reset();
  for (int i = 0; i < 9; ++i) CHECK_CODE(runs[size_t(i)].wait(), LDR_ERR_LINK_BROKEN);
}

ldr_transfer_params_t push_of(const TestCache &local, int64_t timeout_ns) {
  ldr_transfer_params_t params{};
  params.struct_size = sizeof(params);
  params.direction = LDR_PUSH;
  params.cluster_id = 2;
  params.move = LDR_MOVE_ENTRY;
  params.local_cache_id = local.cache->id;
  params.remote_cache_id = 7;
  params.size_bytes = -1;
  params.timeout_ns = timeout_ns;
  return params;
}

// Answers the engine's question for the cache table with one cache like local, under id 7.
void give_table(RawPeer &peer, const TestCache &local) {
  FrameHeader header;
  CHECK_EQ(recv(peer.control.get(), &header, sizeof(header), MSG_WAITALL), ssize_t(sizeof(header)));
  while (FrameType(header.type) == FrameType::kHeartbeat) CHECK_EQ(recv(peer.control.get(), &header, sizeof(header), MSG_WAITALL), ssize_t(sizeof(header)));
  CHECK_EQ(header.type, uint16_t(FrameType::kTable));
  Cache remote = *local.cache;
  remote.id = 7;
  Writer payload;
  payload.u32(0);  // OK
  payload.text("");
  payload.u32(1);
  encode_cache(remote, true, payload);
  FrameHeader reply{uint32_t(payload.bytes().size()), uint16_t(FrameType::kReply), 0, header.call_id};
  CHECK_EQ(::send(peer.control.get(), &reply, sizeof(reply), MSG_NOSIGNAL), ssize_t(sizeof(reply)));
  CHECK_EQ(::send(peer.control.get(), payload.bytes().data(), payload.bytes().size(), MSG_NOSIGNAL), ssize_t(payload.bytes().size()));
}

void push_to_a_silent_peer_times_out() {
  RawPeer peer;  // with a liveness budget of 100 s
  TestCache local(*peer.engine, 1, kMiB, 1);
  const int64_t begin = now_ns();
  OpPtr op;
  CHECK_OK(transfer_submit(*peer.engine, push_of(local, 200 * kMillisecond), true, 0, &op));
  std::thread answers([&] { give_table(peer, local); });
  Status status = peer.engine->ops.wait(op);
  answers.join();
  CHECK_CODE(status, LDR_ERR_TIMEOUT);
  CHECK(now_ns() - begin < 20 * kSecond);
  await([&] { return !peer.link->ready(); });
  CHECK_CONTAINS(peer.link->why_down().text, "does not take the bytes");
}

// The peer is slow, but it is there: the link lives on.
void push_to_a_slow_peer_keeps_the_link() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, 8 * kMiB, 1), other(*peer.engine, 1, 4096, 2);
  Run run(peer.link, LDR_PUSH, local.cache, local.cache);
  run.everything().start();
  uint64_t id = 0;
  ChunkRequest request = peer.receive_request(FrameType::kWrite, &id);
  run.stop(LDR_ERR_TIMEOUT, "too slow");
  std::vector<uint8_t> bytes(request.size_bytes);
  for (uint64_t at = 0; at < bytes.size();) {  // 1.5 s, three times the patience of the engine
    const uint64_t size = std::min<uint64_t>(bytes.size() - at, bytes.size() / 15 + 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    peer.receive(&bytes[at], size);
    at += size;
  }
  CHECK(!run.is_done());
  peer.send_frame(FrameType::kWriteDone, id, {0, 0, 0, 0});
  CHECK_CODE(run.wait(), LDR_ERR_TIMEOUT);
  peer.check_in_step(other);
}

void destroyed_while_pushing_to_a_silent_peer() {
  RawPeer peer;
  auto local = std::make_unique<TestCache>(*peer.engine, 1, kMiB, 1);
  OpPtr op;
  CHECK_OK(transfer_submit(*peer.engine, push_of(*local, -1), false, 0, &op));
  give_table(peer, *local);
  uint64_t id = 0;
  peer.receive_request(FrameType::kWrite, &id);
  const int64_t begin = now_ns();
  peer.engine->shutdown();
  CHECK(now_ns() - begin < 20 * kSecond);
  CHECK(op->stop_status().code == LDR_ERR_CLOSED);
  local.reset();
  peer.engine.reset();
}

// An answer that is not one ends the link, not only the operation.
void malformed_answer() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, kMiB, 1);
  OpPtr op;
  CHECK_OK(transfer_submit(*peer.engine, push_of(local, 20 * kSecond), true, 0, &op));
  std::thread answers([&] {
    struct {
      FrameHeader header{10, uint16_t(FrameType::kReply), 0, 1};
      uint8_t payload[10] = {0, 0, 0, 0, 0, 0, 5, 0, 0, 0};  // OK, no text, a table of 5 caches that are not there
    } reply;
    CHECK_EQ(::send(peer.control.get(), &reply, 26, MSG_NOSIGNAL), ssize_t(26));
  });
  CHECK_CODE(peer.engine->ops.wait(op), LDR_ERR_LINK_BROKEN);
  answers.join();
  CHECK(!peer.link->ready());
  CHECK_CONTAINS(peer.link->why_down().text, "table is malformed");
}

void tcp_data_sockets_notice_death() {
  auto engine = make_engine(1);  // a liveness budget of 100 s
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int fd = socket.get();
  auto connection = StreamConnection::create(*engine, std::move(socket), LDR_PATH_TCP);
  auto get = [fd](int level, int option) {
    int value = -1;
    socklen_t size = sizeof(value);
    CHECK_EQ(getsockopt(fd, level, option, &value, &size), 0);
    return value;
  };
  CHECK_EQ(get(IPPROTO_TCP, TCP_USER_TIMEOUT), 100'000);
  CHECK_EQ(get(SOL_SOCKET, SO_KEEPALIVE), 1);
  CHECK_EQ(get(IPPROTO_TCP, TCP_KEEPIDLE), 100);
}

}  // namespace

int main() {
  test("a read answered early", [] { answered_early(FrameType::kReadData); });
  test("a write answered early", [] { answered_early(FrameType::kWriteDone); });
  test("owed answers are bounded", owed_answers_are_bounded);
  test("parked operations end", parked_ones_end);
  test("a push to a silent peer times out", push_to_a_silent_peer_times_out);
  test("a push to a slow peer keeps the link", push_to_a_slow_peer_keeps_the_link);
  test("destroyed while pushing to a silent peer", destroyed_while_pushing_to_a_silent_peer);
  test("a malformed answer ends the link", malformed_answer);
  test("TCP data sockets notice death", tcp_data_sockets_notice_death);
}
