// One engine's data connection against a peer that is played by hand: slow, silent, hostile.
#include "raw_peer.h"

using namespace ldr_test;

namespace {

// The owner forgets a cache (or ends a grant) while a peer that reads slowly is in the middle of it.
void owner_goes_in_mid_read(bool is_grant) {
  RawPeer peer;
  TestCache cache(*peer.engine, 1, kMiB, 1), other(*peer.engine, 1, 4096, 2);
  ChunkRequest request = RawPeer::whole(*cache.cache, kMiB);
  request.has_grant = true;
  request.grant_slot = 3;
  request.grant_version = peer.engine->page->grant_version(3);
  peer.send_request(FrameType::kRead, 1, request);
  FrameHeader header = peer.receive_header(FrameType::kReadData);
  CHECK_EQ(header.payload_bytes, kMiB);
  std::vector<uint8_t> bytes(kMiB);
  peer.receive(bytes.data(), 1000);
  is_grant ? peer.engine->page->advance_grant(3) : cache.remove();
  std::vector<uint8_t> copy = cache.tensors[0];
  std::fill(cache.tensors[0].begin(), cache.tensors[0].end(), 0xEE);  // used for something else at once
  peer.receive(&bytes[1000], kMiB - 1000);
  CHECK_EQ(peer.receive_status(), is_grant ? LDR_ERR_STALE : LDR_ERR_NO_CACHE);
  size_t same = 0;
  while (same < kMiB && bytes[same] == copy[same]) ++same;
  CHECK(same >= 1000 && same < kMiB);
  if (!is_grant) {
    for (size_t i = same; i < kMiB; ++i) CHECK(bytes[i] == 0);  // never what was put there afterwards
  }
  peer.check_in_step(other);
}

// Hidden from the thread sanitizer: the engine may read it at the same time, on purpose.
__attribute__((noinline, no_sanitize("thread"))) void refill(std::vector<uint8_t> &bytes, uint64_t value) {
  auto *words = reinterpret_cast<volatile uint64_t *>(bytes.data());
  for (size_t i = bytes.size() / 8; i-- > 0;) words[i] = value;  // towards a reader that is on its way
}

// Blocks are used again as soon as their grant has ended, at any moment of a read: what is called good is what was granted.
void grants_end_under_readers() {
  constexpr uint64_t kSize = 96 * 1024;
  RawPeer peer;
  TestCache cache(*peer.engine, 1, kSize, 1);
  std::mt19937_64 random(17);
  ChunkRequest request = RawPeer::whole(*cache.cache, kSize);
  request.has_grant = true;
  std::vector<uint8_t> bytes(kSize);
  uint64_t num_good = 0, num_stale = 0, value = 0;
  const int64_t give_up_ns = now_ns() + 60 * kSecond;
  for (int round = 0; round < 2000 || num_good < 20 || num_stale < 20; ++round) {
    CHECK(now_ns() < give_up_ns);
    refill(cache.tensors[0], ++value);
    request.grant_version = peer.engine->page->grant_version(0);
    peer.send_request(FrameType::kRead, 1, request);
    for (int64_t until = now_ns() + int64_t(random() % 200'000); now_ns() < until;) {}
    peer.engine->page->advance_grant(0);
    refill(cache.tensors[0], UINT64_MAX);
    peer.receive(bytes.data(), peer.receive_header(FrameType::kReadData).payload_bytes);
    int32_t status = peer.receive_status();
    CHECK(status == LDR_OK || status == LDR_ERR_STALE);
    ++(status == LDR_OK ? num_good : num_stale);
    for (size_t at = 0; status == LDR_OK && at < kSize; at += 8) CHECK(memcmp(&bytes[at], &value, 8) == 0);
  }
}

void owner_goes_in_mid_write() {
  RawPeer peer;
  TestCache cache(*peer.engine, 1, kMiB, 1), other(*peer.engine, 1, 4096, 2);
  std::vector<uint8_t> bytes(kMiB, 0x77);
  peer.send_request(FrameType::kWrite, 9, RawPeer::whole(*cache.cache, kMiB));
  peer.send(bytes.data(), 1000);
  // The first bytes arrive.
  await_byte(&cache.tensors[0][999], 0x77);
  cache.remove();
  std::vector<uint8_t> after = cache.tensors[0];
  peer.send(&bytes[1000], kMiB - 1000);
  CHECK_EQ(peer.receive_write_done(9), LDR_ERR_NO_CACHE);
  CHECK(cache.tensors[0] == after);
  peer.check_in_step(other);
}

// The initiator's own cache is unregistered while the bytes come in.
void local_cache_goes_in_mid_read() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, kMiB, 1), other(*peer.engine, 1, 4096, 2);
  Run run(peer.link, LDR_PULL, local.cache, local.cache);
  run.piece(local.cache->addresses[0], 0, 0, 200 * 1024).start();
  uint64_t chunk = 0;
  ChunkRequest request = peer.receive_request(FrameType::kRead, &chunk);
  CHECK_EQ(request.size_bytes, 200u * 1024);
  local.remove();
  std::vector<uint8_t> before = local.tensors[0], bytes(request.size_bytes + 4, 0x55);
  memset(&bytes[request.size_bytes], 0, 4);
  FrameHeader header{uint32_t(request.size_bytes), uint16_t(FrameType::kReadData), 0, chunk};
  peer.send(&header, sizeof(header));
  peer.send(bytes.data(), bytes.size());
  CHECK_CODE(run.wait(), LDR_ERR_NO_CACHE);
  CHECK(local.tensors[0] == before);
  peer.check_in_step(other);
}

void abandoned_read() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, 8 * kMiB, 1), other(*peer.engine, 1, 4096, 2);
  Run run(peer.link, LDR_PULL, local.cache, local.cache);
  run.everything().start();
  std::vector<std::pair<uint64_t, uint64_t>> chunks;  // id, size: the whole window is asked for
  for (int i = 0; i < 4; ++i) {
    uint64_t id = 0;
    uint64_t size = peer.receive_request(FrameType::kRead, &id).size_bytes;
    chunks.push_back({id, size});
  }
  std::vector<uint8_t> bytes(kMiB + 4, 0x55);
  FrameHeader header{uint32_t(chunks[0].second), uint16_t(FrameType::kReadData), 0, chunks[0].first};
  peer.send(&header, sizeof(header));
  peer.send(bytes.data(), 5000);
  await_byte(&local.tensors[0][4999], 0x55);
  CHECK(!run.is_done());
  run.stop(LDR_ERR_TIMEOUT, "too slow");
  CHECK_CODE(run.wait(), LDR_ERR_TIMEOUT);
  std::vector<uint8_t> before = local.tensors[0];
  // The rest arrives late and goes nowhere.
  std::vector<uint8_t> late(kMiB, 0x66);
  int32_t ok = LDR_OK;
  peer.send(late.data(), chunks[0].second - 5000);
  peer.send(&ok, sizeof(ok));
  for (int i = 1; i < 4; ++i) {
    header.payload_bytes = i == 2 ? 0 : uint32_t(chunks[size_t(i)].second);
    header.call_id = chunks[size_t(i)].first;
    int32_t status = i == 2 ? LDR_ERR_NO_CACHE : LDR_OK;
    peer.send(&header, sizeof(header));
    peer.send(late.data(), header.payload_bytes);
    peer.send(&status, sizeof(status));
  }
  peer.check_in_step(other);
  CHECK(local.tensors[0] == before);
}

// A write that has begun ends with the peer's answer, because its bytes can arrive until then; one that has not is taken back.
void abandoned_write() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, 8 * kMiB, 1), other(*peer.engine, 1, 4096, 2);
  Run run(peer.link, LDR_PUSH, local.cache, local.cache);
  run.everything().start();
  uint64_t id = 0;
  ChunkRequest request = peer.receive_request(FrameType::kWrite, &id);
  run.stop(LDR_ERR_CANCELLED, "no longer wanted");
  CHECK(!run.is_done());
  std::vector<uint8_t> bytes(request.size_bytes);
  peer.receive(bytes.data(), bytes.size());
  CHECK_EQ(memcmp(bytes.data(), local.tensors[0].data(), bytes.size()), 0);
  CHECK(!run.is_done());
  peer.send_frame(FrameType::kWriteDone, id, {0, 0, 0, 0});
  CHECK_CODE(run.wait(), LDR_ERR_CANCELLED);
  peer.check_in_step(other);
}

void shutdown_ends_everything() {
  RawPeer peer;
  TestCache local(*peer.engine, 1, 8 * kMiB, 1);
  Run pull(peer.link, LDR_PULL, local.cache, local.cache), push(peer.link, LDR_PUSH, local.cache, local.cache);
  const auto connection = peer.link->data()[0];  // the link gives it up
  pull.everything().start();
  push.everything().start();
  uint64_t id = 0;
  peer.receive_request(FrameType::kRead, &id);
  peer.data.reset();
  CHECK_CODE(pull.wait(), LDR_ERR_LINK_BROKEN);
  CHECK_CODE(push.wait(), LDR_ERR_LINK_BROKEN);
  CHECK(!peer.link->ready());
  CHECK_CODE(Run(peer.link, LDR_PULL, local.cache, local.cache).everything().start().wait(), LDR_ERR_LINK_BROKEN);
  connection->shutdown(fail(LDR_ERR_CLOSED, "again"));
}

void malformed_frames() {
  using Bytes = std::vector<uint8_t>;
  auto broken = [](FrameType type, const Bytes &payload, const char *text) {
    RawPeer peer;
    peer.send_frame(type, 1, payload);
    peer.check_broken(text);
  };
  broken(FrameType::kRead, {}, "bad request");
  broken(FrameType::kWrite, Bytes(37, 0), "bad request");
  broken(FrameType::kWriteDone, Bytes(8, 0), "4 bytes");
  broken(FrameType::kWriteDone, Bytes(4, 0), "no such chunk");
  broken(FrameType::kReadData, {}, "no such chunk");
  broken(FrameType::kHeartbeat, {}, "unknown type");
  broken(FrameType(9999), {}, "unknown type");
  {
    RawPeer peer;
    FrameHeader header{kMaxRequestBytes + 1, uint16_t(FrameType::kRead), 0, 1};
    peer.send(&header, sizeof(header));
    peer.check_broken("too long");
  }
  auto answered = [](uint32_t size, int32_t status, const char *text) {  // to a read of 4096 bytes
    RawPeer peer;
    TestCache local(*peer.engine, 1, 4096, 1);
    Run run(peer.link, LDR_PULL, local.cache, local.cache);
    run.everything().start();
    uint64_t id = 0;
    peer.receive_request(FrameType::kRead, &id);
    FrameHeader header{size, uint16_t(FrameType::kReadData), 0, id};
    Bytes rest(size + 4);
    memcpy(&rest[size], &status, 4);
    peer.send_with_header(header, rest);
    CHECK_CODE(run.wait(), LDR_ERR_LINK_BROKEN);
    peer.check_broken(text);
  };
  answered(4095, LDR_OK, "not the size");
  answered(4097, LDR_OK, "not the size");
  answered(0, LDR_OK, "success without bytes");
  answered(4096, LDR_ERR_INTERNAL, "unknown status");
  answered(0, 5, "unknown status");
}

void request_limits() {
  ChunkRequest good, back;
  good.pieces.assign(kMaxChunkPieces, {0, 256, 0});
  auto decodes = [&](const ChunkRequest &request) {
    Writer out;
    encode_request(request, out);
    CHECK(out.bytes().size() <= kMaxRequestBytes + 16);
    return decode_request(Reader(out.bytes().data(), out.bytes().size()), &back);
  };
  CHECK(decodes(good));
  CHECK_EQ(back.size_bytes, kMiB);
  CHECK_EQ(back.pieces.size(), size_t(kMaxChunkPieces));
  ChunkRequest bad = good;
  bad.pieces[5].size_bytes = 257;
  CHECK(!decodes(bad));
  (bad = good).pieces[5].size_bytes = 0;
  CHECK(!decodes(bad));
  (bad = good).pieces[5].size_bytes = UINT32_MAX;
  CHECK(!decodes(bad));
  (bad = good).pieces.push_back({0, 1, 0});
  CHECK(!decodes(bad));
  bad.pieces.clear();
  CHECK(!decodes(bad));
  Writer out;
  good.pieces.resize(3);
  encode_request(good, out);
  for (size_t size = 0; size < out.bytes().size(); ++size) {
    std::vector<uint8_t> cut(out.bytes().begin(), out.bytes().begin() + long(size));
    CHECK(!decode_request(Reader(cut.data(), cut.size()), &back));
  }
}

// A peer that asks and asks, and never reads: bounded.
void flood_of_requests() {
  RawPeer peer;
  TestCache cache(*peer.engine, 1, kMiB, 1);
  Writer payload;
  encode_request(RawPeer::whole(*cache.cache, kMiB), payload);
  FrameHeader header{uint32_t(payload.bytes().size()), uint16_t(FrameType::kRead), 0, 1};
  for (int i = 0; i < 100; ++i) {
    if (::send(peer.data.get(), &header, sizeof(header), MSG_NOSIGNAL) < 0) break;
    if (::send(peer.data.get(), payload.bytes().data(), payload.bytes().size(), MSG_NOSIGNAL) < 0) break;
  }
  peer.check_broken("too many requests");
}

// Its link carries our transfers only: what the peer asks over it is refused on the data connection too.
void nothing_is_served_over_our_own_one_way_link() {
  RawPeer peer(LDR_ENGINE_REMOTE_ACCESS | LDR_ENGINE_ONE_WAY);
  TestCache cache(*peer.engine, 1, 4096, 5);
  const std::vector<uint8_t> before = cache.tensors[0];
  peer.send_request(FrameType::kRead, 1, RawPeer::whole(*cache.cache, 4096));
  peer.check_broken("one-way link");
  CHECK(cache.tensors[0] == before);
}

}  // namespace

int main() {
  test("nothing is served over our own one-way link", nothing_is_served_over_our_own_one_way_link);
  test("the cache goes in mid-read", [] { owner_goes_in_mid_read(false); });
  test("the grant ends in mid-read", [] { owner_goes_in_mid_read(true); });
  test("grants end under readers", grants_end_under_readers);
  test("the cache goes in mid-write", owner_goes_in_mid_write);
  test("the local cache goes in mid-read", local_cache_goes_in_mid_read);
  test("abandoned read", abandoned_read);
  test("abandoned write", abandoned_write);
  test("shutdown ends everything", shutdown_ends_everything);
  test("malformed frames", malformed_frames);
  test("request limits", request_limits);
  test("flood of requests", flood_of_requests);
  return 0;
}
