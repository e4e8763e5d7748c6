// Engines whose links carry transfers only of the side that opened them (spec api-datadist 4.4).
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "barrier.h"
#include "end_to_end.h"
#include "engines.h"
#include "link.h"

using namespace ldr_test;
using ldr::now_ns;

namespace {

constexpr uint32_t kOneWay = LDR_ENGINE_REMOTE_ACCESS | LDR_ENGINE_ONE_WAY;

EngineOptions one_way(uint64_t cluster_id, const char *paths = "", uint32_t flags = kOneWay) { return {cluster_id, flags, paths}; }

ldr_status_t link_as(const TestEngine &from, const TestEngine &to, uint64_t cluster_id, ldr_link_info_t *info_p = nullptr, uint32_t flags = LDR_LINK_AS) {
  ldr_link_params_t params{};
  params.struct_size = sizeof(params);
  params.ip = "127.0.0.1";
  params.port = to.port();
  params.timeout_ns = kPatienceNs;
  params.flags = flags;
  params.cluster_id = cluster_id;
  return ldr_link_open(from, &params, info_p);
}

std::vector<ldr_link_info_t> inbound_of(const TestEngine &engine) {
  std::vector<ldr_link_info_t> found;
  for (const ldr_link_info_t &info : engine.list()) {
    if (info.is_inbound) found.push_back(info);
  }
  return found;
}

// The end of an inbound half has no event.
void await_inbound(const TestEngine &engine, size_t count) {
  for (const int64_t until = now_ns() + kPatienceNs; inbound_of(engine).size() != count; std::this_thread::yield()) CHECK(now_ns() < until);
}

void check_not_linked(const TestEngine &engine, uint64_t cluster_id) {
  ldr_link_info_t info;
  CHECK_C(ldr_link_query(engine, cluster_id, &info), LDR_ERR_NOT_LINKED);
  CHECK_C(ldr_link_probe(engine, cluster_id, kPatienceNs), LDR_ERR_NOT_LINKED);
  ldr_transfer_params_t push = transfer(LDR_PUSH, cluster_id, LDR_MOVE_ENTRY, 1, 1);
  TestCache cache(engine, false, LDR_CACHE_CONTIGUOUS, 1, 1, 4096, 1);
  push.local_cache_id = cache.id;
  CHECK_C(ldr_transfer(engine, &push, nullptr), LDR_ERR_NOT_LINKED);
}

void only_the_opener_has_a_link() {
  TestEngine a(one_way(1)), b(one_way(2));
  ldr_link_info_t at_a;
  CHECK_C(a.link(b, &at_a), LDR_OK);
  CHECK_EQ(at_a.cluster_id, uint64_t(2));
  CHECK_EQ(at_a.is_inbound, 0u);
  CHECK_EQ(a.info().num_links, 1u);
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_UP).id, uint64_t(2));
  CHECK_C(ldr_link_probe(a, 2, kPatienceNs), LDR_OK);

  std::vector<ldr_link_info_t> at_b = b.list();
  CHECK_EQ(at_b.size(), size_t(1));
  CHECK_EQ(at_b[0].is_inbound, 1u);
  CHECK_EQ(at_b[0].cluster_id, uint64_t(1));
  CHECK_EQ(at_b[0].incarnation, a.info().incarnation);
  CHECK_EQ(at_b[0].state, uint32_t(LDR_LINK_READY));
  CHECK_EQ(at_b[0].path_set, at_a.path_set);
  CHECK_EQ(b.info().num_links, 0u);
  check_not_linked(b, 1);
  CHECK_C(b.unlink(1), LDR_OK);  // there is none: nothing happens
  CHECK_C(b.unlink(1, true), LDR_OK);
  CHECK_EQ(b.list().size(), size_t(1));
  CHECK_C(ldr_link_probe(a, 2, kPatienceNs), LDR_OK);
  CHECK_C(a.link(b), LDR_ERR_ALREADY_LINKED);
  CHECK_EQ(b.list().size(), size_t(1));

  CHECK_C(b.link(a), LDR_OK);  // the other way, in addition
  CHECK_EQ(b.info().num_links, 1u);
  CHECK_EQ(a.list().size(), size_t(2));
  CHECK_EQ(inbound_of(a).size(), size_t(1));
  CHECK_EQ(a.list()[0].is_inbound, 0u);  // ours come first
  CHECK_C(ldr_link_probe(b, 1, kPatienceNs), LDR_OK);
  CHECK_EQ(b.next_event(LDR_EVENT_LINK_UP).id, uint64_t(1));

  CHECK_C(a.unlink(2), LDR_OK);
  await_inbound(b, 0);
  CHECK_EQ(b.query(1).state, uint32_t(LDR_LINK_READY));
  CHECK_C(ldr_link_probe(b, 1, kPatienceNs), LDR_OK);
  CHECK_EQ(inbound_of(a).size(), size_t(1));
  check_not_linked(a, 2);
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_OK));
  CHECK(!a.has_event() && !b.has_event());  // inbound halves raise none
}

// Neither waits for the other, and neither is refused for it.
void both_at_once() {
  TestEngine a(one_way(1)), b(one_way(2));
  for (int round = 0; round < 25; ++round) {
    std::thread other([&] { CHECK_C(b.link(a), LDR_OK); });
    CHECK_C(a.link(b), LDR_OK);
    other.join();
    CHECK_C(ldr_link_probe(a, 2, kPatienceNs), LDR_OK);
    CHECK_C(ldr_link_probe(b, 1, kPatienceNs), LDR_OK);
    CHECK_EQ(inbound_of(a).size(), size_t(1));
    CHECK_EQ(inbound_of(b).size(), size_t(1));
    std::thread unlinker([&] { CHECK_C(b.unlink(1, round % 2), LDR_OK); });
    CHECK_C(a.unlink(2), LDR_OK);
    unlinker.join();
    CHECK_EQ(a.info().num_links + b.info().num_links, 0u);
  }
  await_inbound(a, 0);
  await_inbound(b, 0);
}

// One end of transfers that go on at both ends at once: a source that the peer pulls from, a sink for what it pulls, a target of the peer's pushes.
struct End {
  End(const TestEngine &engine, bool shared, uint8_t seed)
      : source(engine, shared, LDR_CACHE_BLOCKS, 2, 8, 32768, seed, {{LDR_KEY_BLOCKS, 0, 0, 5}}),
        sink(engine, shared, LDR_CACHE_BLOCKS, 2, 8, 32768, uint8_t(seed + 1)),
        target(engine, shared, LDR_CACHE_BLOCKS, 2, 8, 32768, uint8_t(seed + 2)) {}
  TestCache source, sink, target;
};

void move_all(const TestEngine &engine, End &own, End &peers, uint64_t peer, bool remote_access) {
  const std::vector<int32_t> from{0, 1, 2, 3, 4, 5, 6, 7}, to{7, 6, 5, 4, 3, 2, 1, 0};
  for (int round = 0; round < 8; ++round) {
    memset(own.sink.memory, 0, own.sink.size);
    ldr_transfer_params_t pull = transfer(LDR_PULL, peer, LDR_MOVE_BLOCKS, peers.source.id, own.sink.id);
    if (!remote_access) {
      pull.remote_by = LDR_BY_BLOCKS_KEY;
      pull.remote_model_id = 5;
    }
    pull.src_blocks = list(from);
    pull.dst_blocks = list(to);
    CHECK_C(ldr_transfer(engine, &pull, nullptr), LDR_OK);
    std::vector<uint8_t> expected(own.sink.size);
    for (uint32_t tensor = 0; tensor < 2; ++tensor) {
      for (uint64_t block = 0; block < 8; ++block) expect(expected, own.sink, tensor, (7 - block) * 32768, peers.source, tensor, block * 32768, 32768);
    }
    CHECK(own.sink.bytes() == expected);
    if (!remote_access) continue;
    ldr_transfer_params_t push = transfer(LDR_PUSH, peer, LDR_MOVE_BLOCKS, peers.target.id, own.source.id);
    push.src_blocks = push.dst_blocks = list(from);
    CHECK_C(ldr_transfer(engine, &push, nullptr), LDR_OK);
  }
  if (remote_access) CHECK(peers.target.bytes() == own.source.bytes());
}

void transfers_both_ways_at_once() {
  for (const char *path : {"shm", "cma", "unix", "tcp"}) {
    for (bool remote_access : {true, false}) {
      const uint32_t flags = remote_access ? kOneWay : uint32_t(LDR_ENGINE_ONE_WAY);
      TestEngine a(one_way(1, path, flags)), b(one_way(2, path, flags));
      End at_a(a, true, 10), at_b(b, true, 20);
      CHECK_C(a.link(b), LDR_OK);
      CHECK_C(link_as(b, a, 901), LDR_OK);
      std::thread other([&] { move_all(b, at_b, at_a, 901, remote_access); });
      move_all(a, at_a, at_b, 2, remote_access);
      other.join();
      CHECK_C(a.unlink(2), LDR_OK);
      move_all(b, at_b, at_a, 901, remote_access);  // it does not need the other one
    }
  }
}

void filed_as_asked() {
  TestEngine a(one_way(1)), b(one_way(2)), c(one_way(3)), plain(4), plain_peer(5);
  ldr_link_info_t info;
  CHECK_C(link_as(a, b, 77, &info), LDR_OK);
  CHECK_EQ(info.cluster_id, uint64_t(77));
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_UP).id, uint64_t(77));
  CHECK_EQ(a.query(77).incarnation, b.info().incarnation);
  check_not_linked(a, 2);
  CHECK_EQ(b.list()[0].cluster_id, uint64_t(1));  // the peer's own word
  CHECK_C(link_as(a, b, 78), LDR_ERR_ALREADY_LINKED);  // one peer, one link
  CHECK_CONTAINS(ldr_last_error(), "linked already, as cluster 77");
  CHECK_C(a.link(b), LDR_ERR_ALREADY_LINKED);
  CHECK_C(link_as(a, c, 77), LDR_ERR_ALREADY_LINKED);  // one id, one link
  CHECK_C(link_as(a, c, 2), LDR_OK);  // an id means what a says
  CHECK_EQ(a.query(2).incarnation, c.info().incarnation);
  CHECK_C(a.unlink(77), LDR_OK);
  CHECK_C(link_as(a, b, 78), LDR_OK);
  CHECK_EQ(a.info().num_links, 2u);

  CHECK_C(link_as(plain, plain_peer, 5), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "one-way");
  CHECK_C(link_as(c, b, 5, nullptr, 6), LDR_ERR_INVALID);
  CHECK_EQ(plain.info().num_links + c.info().num_links, 0u);
}

void many_ids_for_one_peer() {
  TestEngine a(one_way(1)), b(one_way(2));
  std::vector<std::thread> threads;
  std::atomic<int> linked{0}, already{0};
  for (uint64_t id = 10; id < 16; ++id) {
    threads.emplace_back([&, id] {
      ldr_status_t status = link_as(a, b, id);
      linked += status == LDR_OK;
      already += status == LDR_ERR_ALREADY_LINKED;
    });
  }
  for (std::thread &thread : threads) thread.join();
  CHECK_EQ(linked.load(), 1);
  CHECK_EQ(already.load(), 5);
  CHECK_EQ(inbound_of(b).size(), size_t(1));
}

void not_to_oneself() {
  TestEngine a(one_way(1));
  CHECK_C(a.link(a), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "this engine");
  CHECK_C(link_as(a, a, 9), LDR_ERR_INVALID);
  CHECK(a.list().empty());
}

void both_ends_alike() {
  TestEngine a(one_way(1)), b(2);
  for (auto [from, to] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    CHECK_C(from->link(*to), LDR_ERR_MODE_MISMATCH);
    CHECK_CONTAINS(ldr_last_error(), "cluster 1 has one-way links, cluster 2 has links for both sides");
  }
  CHECK(a.list().empty() && b.list().empty());
}

// Stands for a transfer that runs as long as the test wants.
struct Occupant : ldr::Transfer {
  std::atomic<int> stopped{0};
  void start_turn() override {}
  void refuse(const ldr::Status &) override {}
  void stop(const ldr::Status &) override { ++stopped; }
};

// Without the peer: its address is not looked at, and a transfer that does not end only delays it.
void unlink_is_the_openers_own_affair() {
  TestEngine a(one_way(1)), b(one_way(2));
  CHECK_C(a.link(b), LDR_OK);
  CHECK_C(ldr_engine_listen(b, nullptr, 0), LDR_OK);
  CHECK_C(ldr_link_close(a, 2, 0, "127.0.0.1", 1, kPatienceNs), LDR_OK);  // nobody listens there
  await_inbound(b, 0);
  CHECK_C(ldr_engine_listen(b, "127.0.0.1", 0), LDR_OK);
  CHECK_C(a.link(b), LDR_OK);
  ldr::LinkPtr link = static_cast<ldr_engine_t *>(a)->engine->links.find(2);
  auto running = std::make_shared<Occupant>();
  CHECK(link->transfers.enter(running));
  CHECK_C(a.unlink(2, false, 20 * kMillisecond), LDR_OK);
  CHECK_EQ(running->stopped.load(), 1);
  link->transfers.leave(*running);
  await_inbound(b, 0);
}

// The peer meets the new connection before it has seen the old one's end.
void linked_again_at_once() {
  TestEngine a(one_way(1)), b(one_way(2));
  for (int round = 0; round < 50; ++round) {
    CHECK_C(a.link(b), LDR_OK);
    CHECK_EQ(inbound_of(b).size(), size_t(1));
    CHECK_C(ldr_link_probe(a, 2, kPatienceNs), LDR_OK);
    if (round < 49) CHECK_C(a.unlink(2), LDR_OK);
  }
  CHECK_EQ(inbound_of(b)[0].incarnation, a.info().incarnation);
}

void openers_with_one_id() {
  TestEngine hub(one_way(1));
  {
    TestEngine b(one_way(2));
    CHECK_C(b.link(hub), LDR_OK);
    TestEngine twin(one_way(2));  // lives beside it: both keep their links
    CHECK_C(twin.link(hub), LDR_OK);
    CHECK_EQ(inbound_of(hub).size(), size_t(2));
    CHECK_C(ldr_link_probe(b, 1, kPatienceNs), LDR_OK);
    CHECK_C(ldr_link_probe(twin, 1, kPatienceNs), LDR_OK);
  }
  TestEngine b(one_way(2));  // restarted: what the dead left is gone or replaced
  CHECK_C(b.link(hub), LDR_OK);
  CHECK_EQ(inbound_of(hub).size(), size_t(1));
  CHECK_EQ(inbound_of(hub)[0].incarnation, b.info().incarnation);
  CHECK(!hub.has_event());
}

// The listening side dies: the opener has a broken link, which a new one replaces, under the same id or another one.
void restarted_target() {
  TestEngine a(one_way(1));
  {
    TestEngine b(one_way(2));
    CHECK_C(link_as(a, b, 7), LDR_OK);
    a.next_event(LDR_EVENT_LINK_UP);
  }
  CHECK_EQ(a.next_event(LDR_EVENT_LINK_DOWN).status, int32_t(LDR_ERR_LINK_BROKEN));
  CHECK_EQ(a.query(7).state, uint32_t(LDR_LINK_BROKEN));
  TestEngine b(one_way(2));
  CHECK_C(link_as(a, b, 7), LDR_OK);
  CHECK_EQ(a.query(7).incarnation, b.info().incarnation);
}

struct Granted {
  Granted(const TestEngine &source, const TestEngine &sink, uint64_t source_id) : cache(source, false, LDR_CACHE_BLOCKS, 1, 8, 4096, 3), source(source) {
    const std::vector<int32_t> blocks{1, 2};
    ldr_grant_params_t params{};
    params.struct_size = sizeof(params);
    params.cache_id = cache.id;
    params.blocks = list(blocks);
    params.num_tokens = 2;
    ldr_grant_open_params_t open{};
    open.struct_size = sizeof(open);
    CHECK_C(ldr_grant_mint(source, &params, &open.grant, &open.generation), LDR_OK);
    sequence = open.grant.sequence;
    open.cluster_id = source_id;
    open.num_tokens = 2;
    open.open_id = 99;
    open.timeout_ns = kPatienceNs;
    uint64_t num_blocks = 0;
    CHECK_C(ldr_grant_open(sink, &open, &num_blocks), LDR_OK);
    CHECK_EQ(num_blocks, uint64_t(2));
  }
  uint64_t live() const {
    ldr_grant_stats_t stats;
    CHECK_C(ldr_grant_stats(source, &stats), LDR_OK);
    return stats.live;
  }
  TestCache cache;
  const TestEngine &source;
  uint64_t sequence;
};

// A grant lives as long as the sink's link, over which it was opened; the source's own link to the sink has nothing to do with it.
void grants_end_with_the_sinks_link() {
  TestEngine source(one_way(1)), sink(one_way(2));
  CHECK_C(sink.link(source), LDR_OK);
  CHECK_C(source.link(sink), LDR_OK);
  source.next_event(LDR_EVENT_LINK_UP);
  Granted granted(source, sink, 1);
  CHECK_C(source.unlink(2), LDR_OK);
  source.next_event(LDR_EVENT_LINK_DOWN);
  CHECK_EQ(granted.live(), uint64_t(1));
  CHECK_C(source.link(sink), LDR_OK);
  source.next_event(LDR_EVENT_LINK_UP);
  CHECK_EQ(granted.live(), uint64_t(1));
  CHECK_C(sink.unlink(1), LDR_OK);
  ldr_event_t ended = source.next_event(LDR_EVENT_GRANT_ENDED);
  CHECK_EQ(ended.id, granted.sequence);
  CHECK_EQ(ended.status, int32_t(LDR_ERR_EXPIRED));
  CHECK_EQ(source.query(2).state, uint32_t(LDR_LINK_READY));
}

void grants_end_with_the_sink() {
  TestEngine source(one_way(1));
  TestEngine sink(one_way(2));
  CHECK_C(sink.link(source), LDR_OK);
  Granted granted(source, sink, 1);
  sink.destroy();
  CHECK_EQ(source.next_event(LDR_EVENT_GRANT_ENDED).status, int32_t(LDR_ERR_EXPIRED));
  CHECK_EQ(granted.live(), uint64_t(0));
}

// The peer of a link that we opened may only answer.
void an_openers_half_serves_nothing() {
  for (ldr::FrameType type : {ldr::FrameType::kTable, ldr::FrameType::kProbe, ldr::FrameType::kUnlink}) {
    for (bool is_inbound : {true, false}) {
      TestEngine engine(one_way(1));
      int sockets[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets), 0);
      ldr::Fd own(sockets[0]), peer(sockets[1]);
      ldr::Engine &core = *static_cast<ldr_engine_t *>(engine)->engine;
      ldr::LinkFacts facts;
      facts.cluster_id = 2;
      facts.incarnation = 1002;
      facts.is_inbound = is_inbound;
      ldr::LinkPtr link;
      CHECK_OK(core.links.adopt(facts, core.links.last_epoch(), [&](uint64_t) {
        return link = ldr::Link::create(core, facts, std::move(own), ldr::Fd(), nullptr, {});
      }));
      ldr::Writer payload;
      if (type == ldr::FrameType::kUnlink) payload.i64(-1);
      std::vector<uint8_t> frame = ldr::encode_frame(type, 5, payload);
      CHECK_EQ(ldr::send_some(peer.get(), frame.data(), frame.size(), -1), ssize_t(frame.size()));
      ldr::FrameReader reader(ldr::kMaxFrameBytes);
      ldr::Frame answer;
      ldr::FrameReader::Result result;
      do {
        while ((result = reader.read(peer.get(), &answer)) == ldr::FrameReader::kWouldBlock)
          CHECK_OK(ldr::wait_for(peer.get(), 1 /* POLLIN */, ldr::deadline_after(kPatienceNs), -1));
      } while (result == ldr::FrameReader::kFrame && answer.type() == ldr::FrameType::kHeartbeat);
      if (is_inbound) {
        CHECK_EQ(result, ldr::FrameReader::kFrame);
        CHECK_EQ(answer.type(), ldr::FrameType::kReply);
        CHECK_EQ(answer.header.call_id, uint64_t(5));
      } else {
        CHECK_EQ(result, ldr::FrameReader::kEnd);
        CHECK_CONTAINS(link->why_down().text, "did not open");
      }
    }
  }
}

void nothing_is_left_behind() {
  int fds = count_entries("fd"), threads = count_entries("task");
  for (const char *paths : {"", "unix", "tcp"}) {
    TestEngine a(one_way(1, paths)), b(one_way(2, paths));
    int before = count_entries("fd");
    CHECK_C(a.link(b), LDR_OK);
    CHECK_C(b.link(a), LDR_OK);
    CHECK(count_entries("fd") > before);
    CHECK_C(a.unlink(2), LDR_OK);
    CHECK_C(b.unlink(1), LDR_OK);
    await_inbound(a, 0);
    await_inbound(b, 0);
    CHECK_C(a.link(b), LDR_OK);
    CHECK_C(b.link(a), LDR_OK);
    b.destroy();
    await_inbound(a, 0);
    CHECK_EQ(a.list().size(), size_t(1));  // its own link is kept, to tell why it broke
  }
  CHECK_EQ(count_entries("fd"), fds);
  CHECK_EQ(count_entries("task"), threads);
}

}  // namespace

int main() {
  test("only the opener has a link", only_the_opener_has_a_link);
  test("both at once", both_at_once);
  test("transfers both ways at once", transfers_both_ways_at_once);
  test("filed as asked", filed_as_asked);
  test("many ids for one peer", many_ids_for_one_peer);
  test("not to oneself", not_to_oneself);
  test("both ends alike", both_ends_alike);
  test("unlink is the opener's own affair", unlink_is_the_openers_own_affair);
  test("linked again at once", linked_again_at_once);
  test("openers with one id", openers_with_one_id);
  test("restarted target", restarted_target);
  test("grants end with the sink's link", grants_end_with_the_sinks_link);
  test("grants end with the sink", grants_end_with_the_sink);
  test("an opener's half serves nothing", an_openers_half_serves_nothing);
  test("nothing is left behind", nothing_is_left_behind);
}
