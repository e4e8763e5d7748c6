// Grants between two engines, over each data path: mint, open, pull, close, and every refusal.
#include "end_to_end.h"

using namespace ldr_test;

namespace {

struct GrantTest {
  explicit GrantTest(const Setting &setting, uint64_t stride = 4096)
      : pair(setting.path_set(), setting.remote_access),
        source(pair.source, setting.shared, LDR_CACHE_BLOCKS, 2, 16, stride, 1),
        sink(pair.sink, false, LDR_CACHE_BLOCKS, 2, 16, stride, 2) {}

  void mint() {
    ldr_grant_params_t p{};
    p.struct_size = sizeof(p);
    p.cache_id = source.id;
    p.blocks = list(granted);
    p.num_tokens = 40;
    p.layout_digest = 77;
    CHECK_C(ldr_grant_mint(pair.source, &p, &grant, &generation), LDR_OK);
  }
  ldr_grant_open_params_t open_params(uint64_t open_id) const {
    ldr_grant_open_params_t p{};
    p.struct_size = sizeof(p);
    p.cluster_id = kSourceId;
    p.grant = grant;
    p.generation = generation;
    p.num_tokens = 40;
    p.layout_digest = 77;
    p.open_id = open_id;
    p.timeout_ns = kTimeout;
    return p;
  }
  ldr_status_t open(uint64_t open_id) {
    ldr_grant_open_params_t p = open_params(open_id);
    return ldr_grant_open(pair.sink, &p, &num_blocks);
  }
  ldr_transfer_params_t pull(uint64_t open_id, const std::vector<int32_t> &to) {
    ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, 0, sink.id);
    p.remote_by = LDR_BY_OPEN_GRANT;
    p.remote_key_id = open_id;
    p.dst_blocks = list(to);
    return p;
  }
  ldr_grant_stats_t stats() {
    ldr_grant_stats_t s;
    CHECK_C(ldr_grant_stats(pair.source, &s), LDR_OK);
    CHECK_EQ(s.granted, s.closed + s.live + s.reclaimed);
    return s;
  }
  ldr_event_t ended() {
    for (;;) {
      ldr_event_t event;
      uint32_t count = 0;
      CHECK_C(ldr_poll(pair.source, &event, 1, kTimeout, &count), LDR_OK);
      CHECK_EQ(count, 1u);
      if (event.kind == LDR_EVENT_GRANT_ENDED) return event;
    }
  }

  Pair pair;
  TestCache source, sink;
  std::vector<int32_t> granted = {9, 2, 14, 5};
  ldr_grant_id_t grant{};
  uint64_t generation = 0, num_blocks = 0;
};

void grant_pulled(const Setting &setting) {
  GrantTest t(setting);
  t.mint();
  CHECK_C(t.open(1001), LDR_OK);
  CHECK_EQ(t.num_blocks, uint64_t(4));
  CHECK_C(t.open(1001), LDR_OK);  // idempotent
  std::vector<int32_t> to = {0, 1, 2, 7};
  std::vector<uint8_t> expected = t.sink.bytes();
  for (uint32_t i = 0; i < 2; ++i) {
    for (size_t k = 0; k < to.size(); ++k) expect(expected, t.sink, i, to[k] * 4096, t.source, i, t.granted[k] * 4096, 4096);
  }
  ldr_transfer_params_t p = t.pull(1001, to);
  ldr_transfer_result_t result;
  CHECK_C(ldr_transfer(t.pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 4 * 2 * 4096);
  CHECK(t.sink.bytes() == expected);

  // Positions in the grant: the tail only, and no more than there are.
  std::vector<int32_t> positions = {3, 2}, tail = {12, 13}, beyond = {4, 0};
  p = t.pull(1001, tail);
  p.src_blocks = list(positions);
  for (uint32_t i = 0; i < 2; ++i) {
    expect(expected, t.sink, i, 12 * 4096, t.source, i, 5 * 4096, 4096);
    expect(expected, t.sink, i, 13 * 4096, t.source, i, 14 * 4096, 4096);
  }
  CHECK_C(ldr_transfer(t.pair.sink, &p, nullptr), LDR_OK);
  CHECK(t.sink.bytes() == expected);
  p.src_blocks = list(beyond);
  CHECK_C(ldr_transfer(t.pair.sink, &p, nullptr), LDR_ERR_INVALID);
  p = t.pull(1001, tail);  // two destinations for four blocks
  CHECK_C(ldr_transfer(t.pair.sink, &p, nullptr), LDR_ERR_INVALID);
  p = t.pull(1001, to);
  p.direction = LDR_PUSH;
  CHECK_C(ldr_transfer(t.pair.sink, &p, nullptr), LDR_ERR_INVALID);
  CHECK(t.sink.bytes() == expected);

  CHECK_C(ldr_grant_close(t.pair.sink, 1001, LDR_CLOSE_OK, kTimeout), LDR_OK);
  ldr_event_t event = t.ended();
  CHECK_EQ(event.id, t.grant.sequence);
  CHECK_EQ(event.status, int32_t(LDR_OK));
  CHECK_EQ(t.stats().closed, uint64_t(1));
  CHECK_EQ(t.stats().live, uint64_t(0));
  CHECK_C(ldr_grant_close(t.pair.sink, 1001, LDR_CLOSE_OK, kTimeout), LDR_ERR_NOT_FOUND);
  p = t.pull(1001, to);
  CHECK_C(ldr_transfer(t.pair.sink, &p, nullptr), LDR_ERR_NOT_FOUND);
  CHECK_C(t.open(1002), LDR_ERR_CONSUMED);
}

void grant_refused(const Setting &setting) {
  GrantTest t(setting);
  t.mint();
  auto refused = [&](ldr_status_t code, auto change) {
    ldr_grant_open_params_t p = t.open_params(2000);
    change(p);
    uint64_t num_blocks = 0;
    CHECK_C(ldr_grant_open(t.pair.sink, &p, &num_blocks), code);
  };
  refused(LDR_ERR_STALE, [](auto &p) { ++p.grant.incarnation; });
  refused(LDR_ERR_STALE, [](auto &p) { ++p.generation; });
  refused(LDR_ERR_STALE, [](auto &p) { ++p.num_tokens; });
  refused(LDR_ERR_LAYOUT, [](auto &p) { ++p.layout_digest; });
  refused(LDR_ERR_UNKNOWN_GRANT, [](auto &p) { ++p.grant.sequence; });
  refused(LDR_ERR_UNKNOWN_GRANT, [](auto &p) { ++p.grant.nonce; });
  refused(LDR_ERR_NOT_LINKED, [](auto &p) { p.cluster_id = 33; });
  refused(LDR_ERR_INVALID, [](auto &p) { p.open_id = 0; });
  CHECK_C(t.open(2001), LDR_OK);
  refused(LDR_ERR_CONSUMED, [](auto &) {});  // open for another
  CHECK_C(ldr_grant_close(t.pair.sink, 2001, LDR_CLOSE_CANCELLED, kTimeout), LDR_OK);
  CHECK_EQ(t.ended().status, int32_t(LDR_ERR_CANCELLED));
  t.mint();
  CHECK_C(ldr_grant_revoke(t.pair.source, t.grant.sequence), LDR_OK);
  CHECK_C(ldr_grant_revoke(t.pair.source, t.grant.sequence), LDR_OK);
  CHECK_C(t.open(2002), LDR_ERR_REVOKED);
  ldr_grant_stats_t stats = t.stats();
  CHECK_EQ(stats.granted, uint64_t(2));
  CHECK_EQ(stats.reclaimed, uint64_t(2));
  CHECK_EQ(stats.reclaimed_cancelled, uint64_t(1));
  CHECK_EQ(stats.reclaimed_revoked, uint64_t(1));
  CHECK_EQ(stats.refused_stale, uint64_t(3));
  CHECK_EQ(stats.refused_unknown, uint64_t(2));
  CHECK_EQ(stats.refused_layout, uint64_t(1));
  CHECK_EQ(stats.refused_consumed, uint64_t(1));
  CHECK_EQ(stats.refused_revoked, uint64_t(1));
}

void grant_revoked_while_read(const Setting &setting) {
  GrantTest t(setting, 1 << 20);
  t.mint();
  CHECK_C(t.open(3001), LDR_OK);
  std::vector<int32_t> positions(1 << 17, 0);
  ldr_transfer_params_t p = t.pull(3001, positions);
  p.src_blocks = list(positions);
  p.timeout_ns = -1;
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(t.pair.sink, &p, 0, &op_id), LDR_OK);
  wait_until_moving(t.pair.sink, op_id);
  CHECK_C(ldr_grant_revoke(t.pair.source, t.grant.sequence), LDR_OK);
  CHECK_EQ(next_op_event(t.pair.sink).status, int32_t(LDR_ERR_STALE));
  CHECK_EQ(t.ended().status, int32_t(LDR_ERR_REVOKED));
}

void grant_of_a_lost_sink(const Setting &setting) {
  GrantTest t(setting);
  t.mint();
  CHECK_C(t.open(4001), LDR_OK);
  t.sink.drop();
  ldr_engine_destroy(t.pair.sink);
  t.pair.sink = nullptr;
  CHECK_EQ(t.ended().id, t.grant.sequence);
  CHECK_EQ(t.stats().reclaimed_peer_lost, uint64_t(1));
}

}  // namespace

int main(int argc, char **argv) {
  for_each_setting(argc, argv, [](const Setting &setting) {
    test("grant pulled", [&] { grant_pulled(setting); });
    test("grant refused", [&] { grant_refused(setting); });
    test("grant revoked while it is read", [&] { grant_revoked_while_read(setting); });
    test("grant of a lost sink", [&] { grant_of_a_lost_sink(setting); });
  });
}
