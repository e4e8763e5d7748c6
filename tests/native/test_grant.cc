#include "grant.h"

#include <map>
#include <random>

#include "check.h"
#include "clock.h"
#include "engine.h"
#include "link.h"

using namespace ldr;
using ldr_test::test;

namespace {

constexpr uint64_t kSink = 7001, kOtherSink = 7002;  // incarnations
constexpr uint64_t kTokens = 30, kLayout = 0xABCD;

std::unique_ptr<Engine> make_engine(uint64_t cluster_id, bool listens = false) {
  ldr_engine_params_t params{};
  params.struct_size = sizeof(params);
  params.flags = LDR_ENGINE_REMOTE_ACCESS | LDR_ENGINE_INSECURE;
  params.cluster_id = cluster_id;
  params.num_copy_threads = 1;
  if (listens) params.listen_ip = "127.0.0.1";
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::create(params, &engine));
  return engine;
}

int64_t add_cache(Engine &engine, uint32_t kind = LDR_CACHE_BLOCKS) {
  uint64_t addresses[] = {0x10000, 0x20000};
  ldr_cache_params_t params{};
  params.kind = kind;
  params.remote_accessible = 1;
  params.num_tensors = 2;
  params.num_entries = 16;
  params.tensor_bytes = 16 * 1024;
  params.addresses = addresses;
  int64_t id = 0;
  CHECK_OK(engine.caches.add(params, &id));
  return id;
}

struct Source {
  explicit Source(bool listens = false) : engine(make_engine(1, listens)), cache_id(add_cache(*engine)) {}

  ldr_grant_id_t mint(std::vector<int32_t> blocks = {3, 1, 2}) {
    ldr_grant_params_t params{};
    params.cache_id = cache_id;
    params.blocks = {blocks.data(), blocks.size(), 4, 0};
    params.num_tokens = kTokens;
    params.layout_digest = kLayout;
    ldr_grant_id_t id{};
    uint64_t generation = 0;
    CHECK_OK(engine->grants.mint(params, &id, &generation));
    CHECK_EQ(generation, 1u);
    return id;
  }

  Status open(const ldr_grant_id_t &id, uint64_t open_id, uint64_t sink = kSink, uint64_t generation = 1, uint64_t tokens = kTokens,
              uint64_t layout = kLayout) {
    Writer in;
    for (uint64_t value : {id.incarnation, id.sequence, id.nonce, generation, tokens, layout, open_id}) in.u64(value);
    answer = Writer();
    return engine->grants.serve_open(sink, Reader(in.bytes().data(), in.bytes().size()), answer);
  }

  Status close(const ldr_grant_id_t &id, uint64_t open_id, uint32_t outcome = LDR_CLOSE_OK, uint64_t sink = kSink) {
    Writer in;
    for (uint64_t value : {id.incarnation, id.sequence, id.nonce, open_id}) in.u64(value);
    in.u32(outcome);
    return engine->grants.serve_close(sink, Reader(in.bytes().data(), in.bytes().size()));
  }

  // The next end that was told, or sequence 0.
  std::pair<uint64_t, int32_t> end() {
    ldr_event_t event{};
    uint32_t count = 0;
    CHECK_OK(engine->events.take(&event, 1, 0, &count));
    if (count == 0) return {0, 0};
    CHECK_EQ(event.kind, LDR_EVENT_GRANT_ENDED);
    return {event.id, event.status};
  }

  void check_conserved() {
    ldr_grant_stats_t s = engine->grants.stats();
    CHECK_EQ(s.granted, s.closed + s.live + s.reclaimed);
    CHECK_EQ(s.reclaimed, s.reclaimed_revoked + s.reclaimed_cancelled + s.reclaimed_peer_lost);
  }

  std::unique_ptr<Engine> engine;
  int64_t cache_id;
  Writer answer;
};

void ended_with(Source &source, const ldr_grant_id_t &id, int32_t status) {
  auto [sequence, how] = source.end();
  CHECK_EQ(sequence, id.sequence);
  CHECK_EQ(how, status);
}

void mint_checks() {
  Source source;
  ldr_grant_id_t id = source.mint(), next = source.mint();
  CHECK_EQ(id.sequence, 1u);
  CHECK_EQ(next.sequence, 2u);
  CHECK_EQ(id.incarnation, source.engine->incarnation);
  CHECK(id.nonce != next.nonce);
  auto refused = [&](int64_t cache_id, const void *indices, uint64_t count, uint32_t item_bytes, ldr_status_t expected) {
    ldr_grant_params_t params{};
    params.cache_id = cache_id;
    params.blocks = {indices, count, item_bytes, 0};
    uint64_t generation = 0;
    CHECK_CODE(source.engine->grants.mint(params, &id, &generation), expected);
  };
  int64_t wide[] = {0, 15}, negative[] = {-1}, beyond[] = {16};
  refused(99, wide, 2, 8, LDR_ERR_NO_CACHE);
  refused(add_cache(*source.engine, LDR_CACHE_CONTIGUOUS), wide, 2, 8, LDR_ERR_INVALID);
  refused(source.cache_id, wide, 0, 8, LDR_ERR_INVALID);
  refused(source.cache_id, nullptr, 2, 8, LDR_ERR_INVALID);
  refused(source.cache_id, wide, 2, 3, LDR_ERR_INVALID);
  refused(source.cache_id, negative, 1, 8, LDR_ERR_INVALID);
  refused(source.cache_id, beyond, 1, 8, LDR_ERR_INVALID);
  CHECK_EQ(source.engine->grants.stats().granted, 2u);
  source.check_conserved();
}

void answer_holds_our_own_table() {
  Source source;
  ldr_grant_id_t id = source.mint();
  CHECK_OK(source.open(id, 55));
  Reader in(source.answer.bytes().data(), source.answer.bytes().size());
  uint32_t slot = in.u32();
  uint64_t version = in.u64();
  CHECK_EQ(source.engine->page->grant_version(slot), version);
  CachePtr cache = decode_cache(in);
  CHECK(cache && cache->id == source.cache_id && cache->num_entries == 16);
  CHECK_EQ(in.u32(), 3u);
  for (uint64_t block : {3, 1, 2}) CHECK_EQ(in.u64(), block);
  CHECK(in.finished());
}

void open_close() {
  Source source;
  ldr_grant_id_t id = source.mint();
  CHECK_OK(source.open(id, 55));
  std::vector<uint8_t> first = source.answer.bytes();
  CHECK_OK(source.open(id, 55));
  CHECK(source.answer.bytes() == first);
  CHECK_CODE(source.open(id, 56), LDR_ERR_CONSUMED);
  CHECK_CODE(source.open(id, 55, kOtherSink), LDR_ERR_CONSUMED);
  CHECK_CODE(source.close(id, 56), LDR_ERR_CONSUMED);
  CHECK_CODE(source.close(id, 55, LDR_CLOSE_OK, kOtherSink), LDR_ERR_CONSUMED);
  CHECK_EQ(source.end().first, 0u);
  uint32_t slot = Reader(first.data(), first.size()).u32();
  uint64_t version = source.engine->page->grant_version(slot);
  CHECK_OK(source.close(id, 55));
  CHECK(source.engine->page->grant_version(slot) > version);
  ended_with(source, id, LDR_OK);
  CHECK_OK(source.close(id, 55));
  CHECK_CODE(source.close(id, 55, LDR_CLOSE_CANCELLED), LDR_ERR_CONSUMED);
  CHECK_CODE(source.close(id, 55, LDR_CLOSE_OK, kOtherSink), LDR_ERR_CONSUMED);
  CHECK_CODE(source.open(id, 55), LDR_ERR_CONSUMED);
  source.engine->grants.revoke(id.sequence);
  CHECK_EQ(source.end().first, 0u);
  ldr_grant_stats_t stats = source.engine->grants.stats();
  CHECK_EQ(stats.closed, 1u);
  CHECK_EQ(stats.live, 0u);
  CHECK_EQ(stats.refused_consumed, 7u);
  source.check_conserved();
}

void cancel() {
  Source source;
  ldr_grant_id_t id = source.mint();
  CHECK_OK(source.open(id, 55));
  CHECK_OK(source.close(id, 55, LDR_CLOSE_CANCELLED));
  ended_with(source, id, LDR_ERR_CANCELLED);
  CHECK_OK(source.close(id, 55, LDR_CLOSE_CANCELLED));
  CHECK_CODE(source.close(id, 55, LDR_CLOSE_OK), LDR_ERR_CONSUMED);
  CHECK_CODE(source.open(id, 55), LDR_ERR_CONSUMED);
  CHECK_EQ(source.engine->grants.stats().reclaimed_cancelled, 1u);
  CHECK_EQ(source.end().first, 0u);
  source.check_conserved();
}

void revoking() {
  Source source;
  ldr_grant_id_t offered = source.mint(), open = source.mint();
  CHECK_OK(source.open(open, 55));
  uint32_t slot = Reader(source.answer.bytes().data(), source.answer.bytes().size()).u32();
  uint64_t version = source.engine->page->grant_version(slot);
  source.engine->grants.revoke(offered.sequence);
  ended_with(source, offered, LDR_ERR_REVOKED);
  CHECK_EQ(source.engine->page->grant_version(slot), version);
  source.engine->grants.revoke(open.sequence);
  CHECK(source.engine->page->grant_version(slot) > version);
  ended_with(source, open, LDR_ERR_REVOKED);
  source.engine->grants.revoke(open.sequence);
  source.engine->grants.revoke(12345);
  CHECK_EQ(source.end().first, 0u);
  CHECK_CODE(source.open(offered, 1), LDR_ERR_REVOKED);
  CHECK_CODE(source.open(open, 55), LDR_ERR_REVOKED);
  CHECK_CODE(source.close(open, 55), LDR_ERR_REVOKED);
  CHECK_EQ(source.engine->grants.stats().reclaimed_revoked, 2u);
  CHECK_EQ(source.engine->grants.stats().refused_revoked, 3u);
  source.check_conserved();
}

void peer_lost() {
  Source source;
  ldr_grant_id_t open = source.mint(), of_other = source.mint(), offered = source.mint();
  CHECK_OK(source.open(open, 55));
  CHECK_OK(source.open(of_other, 66, kOtherSink));
  source.engine->grants.on_peer_lost(kSink);
  ended_with(source, open, LDR_ERR_EXPIRED);
  CHECK_EQ(source.end().first, 0u);
  source.engine->grants.on_peer_lost(kSink);
  CHECK_EQ(source.end().first, 0u);
  CHECK_CODE(source.open(open, 55), LDR_ERR_EXPIRED);
  CHECK_CODE(source.close(open, 55), LDR_ERR_EXPIRED);
  CHECK_OK(source.close(of_other, 66, LDR_CLOSE_OK, kOtherSink));
  CHECK_OK(source.open(offered, 77));
  CHECK_EQ(source.engine->grants.stats().reclaimed_peer_lost, 1u);
  CHECK_EQ(source.engine->grants.stats().refused_expired, 2u);
  source.check_conserved();
}

void refusals() {
  Source source;
  ldr_grant_id_t id = source.mint(), wrong = id;
  wrong.incarnation ^= 1;
  CHECK_CODE(source.open(wrong, 1), LDR_ERR_STALE);
  CHECK_CODE(source.close(wrong, 1), LDR_ERR_STALE);
  (wrong = id).nonce ^= 1;
  CHECK_CODE(source.open(wrong, 1), LDR_ERR_UNKNOWN_GRANT);
  for (uint64_t sequence : {uint64_t(0), id.sequence + 1, UINT64_MAX}) {
    (wrong = id).sequence = sequence;
    CHECK_CODE(source.open(wrong, 1), LDR_ERR_UNKNOWN_GRANT);
  }
  CHECK_CODE(source.close(id, 1), LDR_ERR_UNKNOWN_GRANT);  // not open
  CHECK_CODE(source.open(id, 1, kSink, 0), LDR_ERR_STALE);
  CHECK_CODE(source.open(id, 1, kSink, 2), LDR_ERR_STALE);
  CHECK_CODE(source.open(id, 1, kSink, 1, kTokens + 1), LDR_ERR_STALE);
  CHECK_CODE(source.open(id, 1, kSink, 1, kTokens, kLayout + 1), LDR_ERR_LAYOUT);
  CHECK(source.answer.bytes().empty());
  CHECK_OK(source.open(id, 1));
  (wrong = id).nonce ^= 1;
  CHECK_CODE(source.close(wrong, 1), LDR_ERR_UNKNOWN_GRANT);
  CHECK_OK(source.close(id, 1));
  CHECK_CODE(source.open(wrong, 1), LDR_ERR_UNKNOWN_GRANT);  // the random bits count after the end, too
  ldr_grant_stats_t stats = source.engine->grants.stats();
  CHECK_EQ(stats.refused_stale, 5u);
  CHECK_EQ(stats.refused_unknown, 7u);
  CHECK_EQ(stats.refused_layout, 1u);
  CHECK_EQ(stats.refused_consumed + stats.refused_expired + stats.refused_revoked, 0u);

  ldr_grant_id_t orphan = source.mint();
  source.engine->caches.remove(source.cache_id);
  CHECK_CODE(source.open(orphan, 2), LDR_ERR_NO_CACHE);
}

void malformed_frames() {
  Source source;
  ldr_grant_id_t id = source.mint();
  CHECK_CODE(source.open(id, 0), LDR_ERR_LINK_BROKEN);
  CHECK_CODE(source.close(id, 0), LDR_ERR_LINK_BROKEN);
  CHECK_CODE(source.close(id, 1, 2), LDR_ERR_LINK_BROKEN);
  std::vector<uint8_t> bytes(64, 1);
  for (size_t size = 0; size <= bytes.size(); ++size) {
    std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + long(size));
    Writer out;
    if (size != 56) CHECK_CODE(source.engine->grants.serve_open(kSink, Reader(cut.data(), cut.size()), out), LDR_ERR_LINK_BROKEN);
    if (size != 36) CHECK_CODE(source.engine->grants.serve_close(kSink, Reader(cut.data(), cut.size())), LDR_ERR_LINK_BROKEN);
  }
  CHECK_EQ(source.engine->grants.stats().live, 1u);
}

void ends_are_remembered_for_a_while() {
  Source source;
  ldr_grant_id_t oldest = source.mint(), second = source.mint();
  source.engine->grants.revoke(oldest.sequence);
  source.engine->grants.revoke(second.sequence);
  for (int i = 0; i < 65535; ++i) source.engine->grants.revoke(source.mint({0}).sequence);
  CHECK_CODE(source.open(oldest, 1), LDR_ERR_CONSUMED);
  CHECK_CODE(source.open(second, 1), LDR_ERR_REVOKED);
  source.check_conserved();
}

void live_grants_are_bounded() {
  Source source;
  for (uint32_t i = 0; i < kNumGrantSlots; ++i) source.mint({0});
  ldr_grant_params_t params{};
  int32_t block = 0;
  params.cache_id = source.cache_id;
  params.blocks = {&block, 1, 4, 0};
  ldr_grant_id_t id{};
  uint64_t generation = 0;
  CHECK_CODE(source.engine->grants.mint(params, &id, &generation), LDR_ERR_BUSY);
  source.engine->grants.revoke(17);
  CHECK_OK(source.engine->grants.mint(params, &id, &generation));
  source.check_conserved();
}

// Against a model with three states and a reason.
void random_sequences() {
  std::mt19937_64 random(99);
  auto pick = [&](uint64_t n) { return random() % n; };
  Source source;
  struct Model {
    ldr_grant_id_t id;
    uint64_t sink = 0, open_id = 0;
    bool ended = false;
    int32_t how = 0;
  };
  std::vector<Model> grants;
  std::map<uint64_t, int32_t> told, expected;
  auto end_model = [&](Model &m, int32_t how) {
    m.ended = true;
    m.how = how;
    expected[m.id.sequence] = how;
  };
  for (int step = 0; step < 20000; ++step) {
    uint64_t action = pick(12);
    if (action == 0 || grants.empty()) {
      grants.push_back({source.mint()});
      continue;
    }
    Model &m = grants[grants.size() - 1 - pick(std::min<size_t>(grants.size(), 12))];
    uint64_t sink = kSink + pick(2), open_id = 1 + pick(2);
    if (action < 5) {
      ldr_status_t refusal = m.how == LDR_ERR_REVOKED || m.how == LDR_ERR_EXPIRED ? m.how : LDR_ERR_CONSUMED;
      bool is_ok = !m.ended && (m.open_id == 0 || (m.open_id == open_id && m.sink == sink));
      CHECK_CODE(source.open(m.id, open_id, sink), is_ok ? LDR_OK : refusal);
      if (is_ok) m.sink = sink, m.open_id = open_id;
    } else if (action < 9) {
      uint32_t outcome = pick(2) ? LDR_CLOSE_OK : LDR_CLOSE_CANCELLED;
      int32_t how = outcome == LDR_CLOSE_OK ? LDR_OK : LDR_ERR_CANCELLED;
      bool is_ours = m.open_id == open_id && m.sink == sink;
      Status status = source.close(m.id, open_id, outcome, sink);
      bool is_ok = is_ours && (!m.ended || m.how == how);
      CHECK_EQ(status.ok(), is_ok);
      if (is_ok && !m.ended) end_model(m, how);
    } else if (action < 11) {
      source.engine->grants.revoke(m.id.sequence);
      if (!m.ended) end_model(m, LDR_ERR_REVOKED);
    } else if (pick(10) == 0) {
      source.engine->grants.on_peer_lost(sink);
      for (Model &each : grants) {
        if (!each.ended && each.open_id != 0 && each.sink == sink) end_model(each, LDR_ERR_EXPIRED);
      }
    }
    source.check_conserved();
  }
  for (auto end = source.end(); end.first != 0; end = source.end()) CHECK(told.emplace(end).second);  // one end for each grant
  CHECK(told == expected);
  uint64_t live = 0;
  for (const Model &m : grants) live += !m.ended;
  ldr_grant_stats_t stats = source.engine->grants.stats();
  CHECK_EQ(stats.live, live);
  CHECK_EQ(stats.granted, grants.size());
}

// Both sides, over a real link.
void over_a_link() {
  Source source(true);
  std::unique_ptr<Engine> sink = make_engine(2);
  ldr_link_params_t params{};
  params.struct_size = sizeof(params);
  params.ip = "127.0.0.1";
  params.port = source.engine->listener.port();
  params.timeout_ns = 10 * kSecond;
  LinkPtr link;
  CHECK_OK(sink->links.open(params, &link));
  auto asked = [&](const ldr_grant_id_t &id, uint64_t open_id) {
    ldr_grant_open_params_t open{};
    open.cluster_id = 1;
    open.grant = id;
    open.generation = 1;
    open.num_tokens = kTokens;
    open.layout_digest = kLayout;
    open.open_id = open_id;
    open.timeout_ns = 10 * kSecond;
    return open;
  };
  uint64_t num_blocks = 0;
  ldr_grant_id_t id = source.mint();
  CHECK_OK(sink->open_grants.open(asked(id, 5), &num_blocks));
  CHECK_EQ(num_blocks, 3u);
  CHECK_OK(sink->open_grants.open(asked(id, 5), &num_blocks));
  auto open = sink->open_grants.find(5);
  CHECK(open && (open->blocks == std::vector<uint64_t>{3, 1, 2}) && open->cache->id == source.cache_id);
  CHECK(open->source_incarnation == source.engine->incarnation && open->cluster_id == 1 && open->open_id == 5);
  CHECK_CODE(sink->open_grants.open(asked(id, 6), &num_blocks), LDR_ERR_CONSUMED);
  CHECK(!sink->open_grants.find(6));
  CHECK_CODE(sink->open_grants.open(asked(source.mint(), 5), &num_blocks), LDR_ERR_INVALID);
  // Refused a second time, it is still open after the first.
  ldr_grant_open_params_t other = asked(id, 5);
  other.num_tokens += 1;
  CHECK_CODE(sink->open_grants.open(other, &num_blocks), LDR_ERR_STALE);
  CHECK(sink->open_grants.find(5) == open);
  CHECK_CODE(sink->open_grants.close(5, 9, kSecond), LDR_ERR_INVALID);
  CHECK_OK(sink->open_grants.close(5, LDR_CLOSE_OK, 10 * kSecond));
  CHECK(!sink->open_grants.find(5));
  CHECK_CODE(sink->open_grants.close(5, LDR_CLOSE_OK, kSecond), LDR_ERR_NOT_FOUND);
  ldr_grant_open_params_t unlinked = asked(id, 7);
  unlinked.cluster_id = 3;
  CHECK_CODE(sink->open_grants.open(unlinked, &num_blocks), LDR_ERR_NOT_LINKED);
  CHECK_CODE(sink->open_grants.close(7, LDR_CLOSE_OK, kSecond), LDR_ERR_NOT_FOUND);

  // The sink goes away with one grant open: the source gets its blocks back.
  ldr_grant_id_t left_open = source.mint();
  CHECK_OK(sink->open_grants.open(asked(left_open, 8), &num_blocks));
  sink.reset();
  ldr_event_t event{};
  uint32_t count = 0;
  do {
    CHECK_OK(source.engine->events.take(&event, 1, 10 * kSecond, &count));
    CHECK_EQ(count, 1u);
  } while (event.kind != LDR_EVENT_GRANT_ENDED || event.id != left_open.sequence);
  CHECK_EQ(event.status, LDR_ERR_EXPIRED);
  source.check_conserved();
}

}  // namespace

int main() {
  test("mint checks", mint_checks);
  test("the answer holds our own table", answer_holds_our_own_table);
  test("open and close", open_close);
  test("cancel", cancel);
  test("revoke", revoking);
  test("peer lost", peer_lost);
  test("refusals", refusals);
  test("malformed frames", malformed_frames);
  test("ends are remembered for a while", ends_are_remembered_for_a_while);
  test("live grants are bounded", live_grants_are_bounded);
  test("random sequences", random_sequences);
  test("over a link", over_a_link);
  return 0;
}
