// What a look-up holds at the owner, and what ends it: the peer of these links is made of frames.
#include <poll.h>
#include <sys/mman.h>

#include <thread>

#include "paths/stream_frames.h"
#include "peer_table.h"
#include "socket.h"
#include "stream_fixture.h"
#include "transfer.h"

using namespace ldr;
using namespace ldr_test;

namespace {

constexpr int64_t kPatienceNs = 20 * kSecond;

template <class F> void await(F condition) {
  for (const int64_t until = now_ns() + kPatienceNs; !condition(); std::this_thread::yield()) CHECK(now_ns() < until);
}

struct Found {
  ldr_status_t code = LDR_OK;
  uint64_t pin_id = 0;
  uint32_t found = 0;
  CachePtr cache;
};

// A control and a data connection to an engine, by hand.
struct Peer {
  Peer(Engine &engine, uint64_t cluster_id) {
    Fd control;
    std::vector<Fd> served(1);
    socket_pair(&control, &socket);
    socket_pair(&served[0], &data);
    timeval patience{20, 0};
    setsockopt(data.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    LinkFacts facts;
    facts.cluster_id = cluster_id;
    facts.incarnation = 1000 + cluster_id;
    CHECK_OK(engine.links.adopt(facts, engine.links.last_epoch(), [&](uint64_t) {
      return link = create_link(engine, cluster_id, std::move(control), std::move(served));
    }));
  }
  ~Peer() {
    if (link) (void)link->close(true, kNever);
  }
  void frame(FrameType type, uint64_t call_id, const Writer &payload) {
    const std::vector<uint8_t> bytes = encode_frame(type, call_id, payload);
    CHECK_EQ(send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  Frame answer(uint64_t call_id) {
    Frame frame = expect(FrameType::kReply);
    CHECK_EQ(frame.header.call_id, call_id);
    return frame;
  }
  Frame expect(FrameType type) {
    Frame frame;
    for (;;) {
      const FrameReader::Result result = reader.read(socket.get(), &frame);
      if (result == FrameReader::kWouldBlock) {
        CHECK_OK(wait_for(socket.get(), POLLIN, deadline_after(kPatienceNs), -1));
        continue;
      }
      CHECK_EQ(int(result), int(FrameReader::kFrame));
      if (frame.type() == FrameType::kHeartbeat) continue;
      CHECK_EQ(frame.type(), type);
      return frame;
    }
  }
  Found look_up(uint32_t by, int64_t cache_id, uint64_t key_id, uint32_t batch = 0, uint32_t first = 0, uint32_t num = 0, uint32_t flags = 0,
                uint64_t extent = 0, int64_t timeout_ns = -1) {
    Writer w;
    w.u32(by), w.i64(cache_id), w.u64(key_id), w.u64(0), w.u32(batch), w.u32(first), w.u32(num), w.u32(flags), w.u64(extent), w.i64(timeout_ns);
    frame(FrameType::kLookup, ++calls, w);
    Frame reply = answer(calls);
    Reader in = reply.reader();
    Found found;
    found.code = ldr_status_t(in.u32());
    text = in.text();
    if (found.code != LDR_OK) return found;
    found.pin_id = in.u64();
    found.found = in.u32();
    CHECK((found.cache = decode_cache(in)) != nullptr);
    CHECK(in.finished());
    return found;
  }
  Found by_key(uint64_t key_id, uint32_t first = 0, uint32_t num = 0, uint32_t flags = 0, int64_t timeout_ns = -1) {
    Found found = look_up(LDR_BY_REQUEST_KEY, 0, key_id, 0, first, num, flags, 0, timeout_ns);
    CHECK_EQ(found.code, LDR_OK);
    CHECK(found.pin_id != 0);
    return found;
  }
  ldr_status_t done(uint64_t pin_id, ldr_status_t outcome) {
    Writer w;
    w.u64(pin_id), w.u32(uint32_t(outcome));
    frame(FrameType::kDone, ++calls, w);
    Frame reply = answer(calls);
    return ldr_status_t(reply.reader().u32());
  }
  // The status of one write of these bytes.
  int32_t write(const Cache &cache, uint32_t tensor, uint64_t offset, const std::vector<uint8_t> &bytes) {
    ChunkRequest request;
    request.cache_slot = cache.slot;
    request.cache_version = cache.version;
    request.pieces = {{tensor, uint32_t(bytes.size()), offset}};
    Writer payload;
    encode_request(request, payload);
    std::vector<uint8_t> out = encode_frame(FrameType::kWrite, ++calls, payload);
    out.insert(out.end(), bytes.begin(), bytes.end());
    CHECK_EQ(send(data.get(), out.data(), out.size(), MSG_NOSIGNAL), ssize_t(out.size()));
    struct { FrameHeader header; int32_t status; } __attribute__((packed)) reply;
    CHECK_EQ(recv(data.get(), &reply, sizeof(reply), MSG_WAITALL), ssize_t(sizeof(reply)));
    CHECK_EQ(reply.header.type, uint16_t(FrameType::kWriteDone));
    CHECK_EQ(reply.header.call_id, calls);
    return reply.status;
  }

  Fd socket, data;
  FrameReader reader{kMaxFrameBytes};
  LinkPtr link;
  uint64_t calls = 0;
  std::string text;
};

struct Owner {
  explicit Owner(uint32_t flags = 0) : engine(make_engine(1, flags)) {
    ldr_pool_params_t params{};
    params.placement = LDR_PLACEMENT_DEVICE;
    params.size_bytes = 1u << 20;
    params.page_shift = 12;
    CHECK_OK(engine->pools.create(params));
    pool = engine->pools.find(LDR_PLACEMENT_DEVICE);
  }
  CachePtr allocate(std::vector<ldr_cache_key_t> keys, uint32_t kind = LDR_CACHE_CONTIGUOUS) {
    ldr_cache_params_t params{};
    params.kind = kind;
    params.placement = LDR_PLACEMENT_DEVICE;
    params.num_tensors = 2;
    params.num_entries = 4;
    params.tensor_bytes = 4096;
    params.keys = keys.data();
    params.num_keys = uint32_t(keys.size());
    PoolMemory memory;
    std::vector<uint64_t> addresses;
    CHECK_OK(pool->allocate(params.tensor_bytes, 2, &memory, &addresses));
    params.addresses = addresses.data();
    int64_t id = 0;
    CHECK_OK(engine->caches.add(params, &id, std::move(memory)));
    return engine->caches.find(id);
  }
  bool is_bound(uint64_t key_id) const {
    uint32_t batch;
    return engine->caches.find_key(LDR_KEY_REQUEST, key_id, 0, &batch) != nullptr;
  }
  uint64_t used() const { return pool->info().used_bytes; }

  std::unique_ptr<Engine> engine;
  std::shared_ptr<Pool> pool;
};

void two_pulls_of_one_key() {
  Owner owner;
  Peer a(*owner.engine, 2), b(*owner.engine, 3);
  int64_t id = owner.allocate({{LDR_KEY_REQUEST, 1, 7, 0}})->id;
  CHECK_OK(owner.engine->caches.drop_id(id));
  Found first = a.by_key(7), second = b.look_up(LDR_BY_CACHE_ID, id, 0, 1);  // by id leads to the same key
  CHECK_EQ(first.found, 1u);
  CHECK_EQ(first.cache->id, id);
  CHECK_EQ(second.found, 1u);
  CHECK(second.pin_id != first.pin_id);
  CHECK_EQ(b.done(first.pin_id, LDR_OK), LDR_ERR_TIMEOUT);  // not his
  CHECK(owner.is_bound(7));
  CHECK_EQ(a.done(first.pin_id, LDR_OK), LDR_OK);
  CHECK(!owner.is_bound(7));  // the first success; the cache is retired now
  CHECK_EQ(owner.used(), uint64_t(8192));
  CHECK_EQ(a.look_up(LDR_BY_REQUEST_KEY, 0, 7).code, LDR_ERR_NO_CACHE);
  CHECK_EQ(a.look_up(LDR_BY_CACHE_ID, id, 0, 1).code, LDR_ERR_NO_CACHE);
  CHECK(owner.engine->caches.find_slot(second.cache->slot, second.cache->version) != nullptr);  // the second is still served
  CHECK_EQ(owner.engine->page->cache_version(second.cache->slot), second.cache->version);
  CHECK_EQ(b.done(second.pin_id, LDR_OK), LDR_OK);
  CHECK_EQ(owner.used(), uint64_t(0));  // with the answer
  CHECK_EQ(owner.engine->page->cache_version(second.cache->slot), second.cache->version + 1);
  CHECK_EQ(owner.engine->caches.size(), 0u);
  CHECK_EQ(owner.engine->pins.size(), size_t(0));
  CHECK_EQ(a.done(first.pin_id, LDR_OK), LDR_ERR_TIMEOUT);  // it is over
}

void what_consumes() {
  Owner owner;
  Peer peer(*owner.engine, 2);
  const CachePtr cache = owner.allocate({{LDR_KEY_REQUEST, 0, 1, 0}, {LDR_KEY_PREFIX, 1, 2, 0}, {LDR_KEY_REQUEST, 2, 3, 0}});
  CHECK_EQ(peer.done(peer.by_key(1).pin_id, LDR_ERR_TIMEOUT), LDR_OK);  // failure
  CHECK(owner.is_bound(1));
  CHECK_EQ(peer.done(peer.by_key(1, 0, 0, LDR_TRANSFER_KEEP_KEY).pin_id, LDR_OK), LDR_OK);
  CHECK(owner.is_bound(1));
  CHECK_EQ(peer.done(peer.by_key(1, 1, 1).pin_id, LDR_OK), LDR_OK);  // tensor by tensor
  CHECK_EQ(peer.done(peer.by_key(3, 0, 1).pin_id, LDR_OK), LDR_OK);
  CHECK_EQ(peer.done(peer.by_key(1, 0, 1).pin_id, LDR_ERR_INVALID), LDR_OK);
  CHECK(owner.is_bound(1) && owner.is_bound(3));
  CHECK_EQ(peer.done(peer.by_key(1, 0, 1).pin_id, LDR_OK), LDR_OK);
  CHECK(!owner.is_bound(1) && owner.is_bound(3));
  for (int i = 0; i < 2; ++i) {  // prefix keys stay
    Found found = peer.look_up(LDR_BY_PREFIX_KEY, 0, 2);
    CHECK_EQ(peer.done(found.pin_id, LDR_OK), LDR_OK);
    found = peer.look_up(LDR_BY_CACHE_ID, cache->id, 0, 1);
    CHECK_EQ(peer.done(found.pin_id, LDR_OK), LDR_OK);
  }
  for (int i = 0; i < 2; ++i) CHECK_EQ(peer.done(peer.look_up(LDR_BY_CACHE_ID, cache->id, 0, 2).pin_id, LDR_OK), LDR_OK);
  CHECK(!owner.is_bound(3));
  // A blocks key stays as well.
  owner.allocate({{LDR_KEY_BLOCKS, 0, 0, 0}}, LDR_CACHE_BLOCKS);
  for (int i = 0; i < 2; ++i) CHECK_EQ(peer.done(peer.look_up(LDR_BY_BLOCKS_KEY, 0, 0).pin_id, LDR_OK), LDR_OK);
  // Of a registered cache nothing is held.
  TestCache registered(*owner.engine, 1, 4096, 1);
  CHECK_EQ(peer.look_up(LDR_BY_CACHE_ID, registered.cache->id, 0).pin_id, uint64_t(0));
  CHECK_EQ(peer.look_up(LDR_BY_CACHE_ID, 0, 0).code, LDR_ERR_NO_CACHE);
  CHECK_EQ(peer.look_up(LDR_BY_CACHE_ID, -1, 1).code, LDR_ERR_NO_CACHE);
}

void pins_end_by_time_and_death() {
  Owner owner;
  Peer peer(*owner.engine, 2);
  auto other = std::make_unique<Peer>(*owner.engine, 3);
  const int64_t id = owner.allocate({{LDR_KEY_REQUEST, 0, 1, 0}})->id;
  const int64_t begin = now_ns();
  Found timed = peer.by_key(1, 0, 0, 0, 200 * kMillisecond);
  Found endless = other->by_key(1);
  CHECK_OK(owner.engine->caches.drop_id(id));
  owner.engine->caches.unbind({LDR_KEY_REQUEST, 0, 1, 0});
  CHECK_EQ(owner.used(), uint64_t(8192));
  await([&] { return owner.engine->pins.size() == 1; });
  CHECK(now_ns() - begin >= 200 * kMillisecond);
  CHECK_EQ(owner.used(), uint64_t(8192));  // the other one still reads
  CHECK_EQ(peer.done(timed.pin_id, LDR_OK), LDR_ERR_TIMEOUT);
  other->socket.reset();
  await([&] { return owner.used() == 0; });
  CHECK_EQ(owner.engine->pins.size(), size_t(0));
  CHECK_EQ(owner.engine->page->cache_version(endless.cache->slot), endless.cache->version + 1);
  // A lost key is not consumed by any of that.
  owner.allocate({{LDR_KEY_REQUEST, 0, 1, 0}});
  other = std::make_unique<Peer>(*owner.engine, 4);
  peer.by_key(1, 0, 0, 0, 0);
  other->by_key(1);
  other->socket.reset();
  await([&] { return owner.engine->pins.size() == 0; });
  CHECK(owner.is_bound(1));
}

// A kDone that nobody waits for is not answered, but heard.
void done_without_answer() {
  Owner owner;
  Peer peer(*owner.engine, 2);
  owner.allocate({{LDR_KEY_REQUEST, 0, 1, 0}});
  Writer w;
  w.u64(peer.by_key(1).pin_id), w.u32(uint32_t(LDR_ERR_CANCELLED));
  peer.frame(FrameType::kDone, 0, w);
  await([&] { return owner.engine->pins.size() == 0; });
  CHECK(owner.is_bound(1));
  CHECK_EQ(peer.done(0, LDR_OK), LDR_ERR_TIMEOUT);  // the next answer is that of the next call
}

void hostile_frames() {
  for (int which = 0; which < 3; ++which) {
    Owner owner;
    Peer peer(*owner.engine, 2);
    Writer w;
    w.u64(1);
    if (which == 0) w.u32(5);  // no status is positive
    if (which == 2) w.u32(0), w.u32(0);
    peer.frame(which == 1 ? FrameType::kLookup : FrameType::kDone, 1, w);
    await([&] { return !peer.link->ready(); });
    CHECK_CONTAINS(peer.link->why_down().text, "malformed");
  }
  Owner owner(LDR_ENGINE_REMOTE_ACCESS);
  Peer peer(*owner.engine, 2);
  owner.allocate({{LDR_KEY_REQUEST, 0, 1, 0}});
  CHECK_EQ(peer.look_up(LDR_BY_REQUEST_KEY, 0, 1).code, LDR_ERR_INVALID);
  CHECK(owner.is_bound(1));
  CHECK_EQ(owner.engine->pins.size(), size_t(0));
}

void windows() {
  Owner owner;
  Peer peer(*owner.engine, 2), other(*owner.engine, 3);
  TestCache registered(*owner.engine, 2, 8192, 1);
  const CachePtr allocated = owner.allocate({{LDR_KEY_BLOCKS, 0, 0, 0}}, LDR_CACHE_BLOCKS);
  for (const CachePtr &cache : {registered.cache, allocated}) {
    auto *memory = reinterpret_cast<uint8_t *>(cache->addresses[1]);
    const std::vector<uint8_t> before(memory, memory + 4096);
    std::vector<uint8_t> bytes(100, 0xAB);
    auto refused = [&](Peer &by, uint32_t tensor, uint64_t offset, size_t size) {
      std::vector<uint8_t> other_bytes(size, 0xCD), now(memory, memory + 4096);
      CHECK_EQ(by.write(*cache, tensor, offset, other_bytes), int32_t(LDR_ERR_INVALID));
      CHECK(now == std::vector<uint8_t>(memory, memory + 4096));
    };
    refused(peer, 1, 1000, 100);  // no window
    Found found = peer.look_up(LDR_BY_ADDRESS, 0, cache->addresses[1] + 1000, 0, 0, 0, 0, 100);
    CHECK_EQ(found.code, LDR_OK);
    CHECK_EQ(found.cache->id, cache->id);
    CHECK_EQ(found.found, 1u);
    CHECK(found.pin_id != 0);
    refused(peer, 1, 999, 100);
    refused(peer, 1, 1001, 100);
    refused(peer, 1, 1100, 1);
    refused(peer, 0, 1000, 100);
    refused(other, 1, 1000, 100);  // a window of another link
    CHECK_EQ(peer.write(*cache, 1, 1000, bytes), int32_t(LDR_OK));
    CHECK(memcmp(memory + 1000, bytes.data(), 100) == 0);
    CHECK(memcmp(memory, before.data(), 1000) == 0);
    CHECK(memcmp(memory + 1100, before.data() + 1100, 2996) == 0);
    CHECK_EQ(peer.done(found.pin_id, LDR_OK), LDR_OK);
    refused(peer, 1, 1000, 100);
    // By time.
    found = peer.look_up(LDR_BY_ADDRESS, 0, cache->addresses[1], 0, 0, 0, 0, 4096, 0);
    await([&] { return owner.engine->pins.size() == 0; });
    refused(peer, 1, 0, 100);
  }
  // A deallocated target stays until the writer is done.
  Found found = peer.look_up(LDR_BY_ADDRESS, 0, allocated->addresses[0], 0, 0, 0, 0, 4096);
  CHECK_OK(owner.engine->caches.drop_id(allocated->id));
  CHECK_EQ(peer.write(*allocated, 0, 96, std::vector<uint8_t>(4000, 1)), int32_t(LDR_OK));
  CHECK_EQ(peer.look_up(LDR_BY_ADDRESS, 0, allocated->addresses[0], 0, 0, 0, 0, 4096).code, LDR_ERR_INVALID);
  CHECK_CONTAINS(peer.text, "lies in no region that the peer registered");
  CHECK_EQ(peer.done(found.pin_id, LDR_OK), LDR_OK);
  CHECK_EQ(peer.write(*allocated, 0, 96, std::vector<uint8_t>(4000, 1)), int32_t(LDR_ERR_NO_CACHE));
  const uint64_t address = registered.cache->addresses[0];
  for (auto [at, extent] : {std::pair<uint64_t, uint64_t>{address, 8193}, {address - 1, 2}, {address, 0}, {0, 1}, {UINT64_MAX, UINT64_MAX}}) {
    CHECK_EQ(peer.look_up(LDR_BY_ADDRESS, 0, at, 0, 0, 0, 0, extent).code, LDR_ERR_INVALID);
  }
  CHECK_EQ(owner.engine->pins.size(), size_t(0));
}

// The puller's side: whatever it does not finish it gives back, also what it hears of too late.
void what_is_not_read_is_given_back() {
  auto engine = make_engine(1, 0);
  Peer owner(*engine, 2);
  TestCache local(*engine, 1, 4096, 1), larger(*engine, 1, 8192, 2);
  const int64_t block = 0;
  ldr_transfer_params_t params{};
  params.direction = LDR_PULL;
  params.cluster_id = 2;
  params.remote_by = LDR_BY_BLOCKS_KEY;
  params.move = LDR_MOVE_BLOCKS;
  params.local_cache_id = local.cache->id;
  params.src_blocks = params.dst_blocks = {&block, 1, 8, 0};
  params.timeout_ns = -1;
  auto pull = [&](OpPtr *op_p) {
    CHECK_OK(transfer_submit(*engine, params, false, 0, op_p));
    return owner.expect(FrameType::kLookup).header.call_id;
  };
  auto answer = [&](uint64_t call_id, uint64_t pin_id, const Cache &cache) {
    Writer w;
    w.u32(LDR_OK), w.text(""), w.u64(pin_id), w.u32(0);
    encode_cache(cache, false, w);
    owner.frame(FrameType::kReply, call_id, w);
  };
  auto given_back = [&](uint64_t pin_id, ldr_status_t why) {
    Frame done = owner.expect(FrameType::kDone);
    CHECK_EQ(done.header.call_id, uint64_t(0));  // nobody waits
    Reader in = done.reader();
    CHECK_EQ(in.u64(), pin_id);
    CHECK_EQ(ldr_status_t(in.u32()), why);
    CHECK(in.finished());
  };
  OpPtr op;
  uint64_t call_id = pull(&op);
  answer(call_id, 77, *larger.cache);  // no plan fits
  given_back(77, LDR_ERR_INVALID);
  call_id = pull(&op);
  CHECK(op->stop(LDR_ERR_CANCELLED, "cancelled"));
  await([&] { return engine->ops.in_flight() == 0; });
  answer(call_id, 78, *local.cache);
  given_back(78, LDR_ERR_CANCELLED);
  call_id = pull(&op);
  CHECK(op->stop(LDR_ERR_CANCELLED, "cancelled"));
  answer(call_id, 0, *local.cache);  // nothing to give back: the next words are the next look-up
  call_id = pull(&op);
  CHECK(op->stop(LDR_ERR_CANCELLED, "cancelled"));
}

// A peer that never ends what it looked up is refused, and costs no more than so much.
void look_ups_are_bounded() {
  auto engine = make_engine(1, 0);
  TestCache cache(*engine, 1, 4096, 1);
  Peer peer(*engine, 2), other(*engine, 3);
  const uint64_t address = cache.cache->addresses[0];
  uint64_t last_pin = 0;
  for (int i = 0; i < 1024; ++i) last_pin = peer.look_up(LDR_BY_ADDRESS, 0, address, 0, 0, 0, 0, 16).pin_id;
  CHECK_EQ(peer.look_up(LDR_BY_ADDRESS, 0, address, 0, 0, 0, 0, 16).code, LDR_ERR_BUSY);
  CHECK_EQ(engine->pins.size(), size_t(1024));
  CHECK_EQ(other.look_up(LDR_BY_ADDRESS, 0, address, 0, 0, 0, 0, 16).code, LDR_OK);
  CHECK_EQ(peer.done(last_pin, LDR_OK), LDR_OK);
  CHECK_EQ(peer.look_up(LDR_BY_ADDRESS, 0, address, 0, 0, 0, 0, 16).code, LDR_OK);
}

}  // namespace

int main() {
  test("look-ups are bounded", look_ups_are_bounded);
  test("two pulls of one key", two_pulls_of_one_key);
  test("what consumes", what_consumes);
  test("pins end by time and death", pins_end_by_time_and_death);
  test("done without an answer", done_without_answer);
  test("hostile frames", hostile_frames);
  test("windows", windows);
  test("what is not read is given back", what_is_not_read_is_given_back);
}
