// What is moved over each data path, what must not change, and what is refused.
#include "end_to_end.h"

using namespace ldr_test;

namespace {

void pull_blocks(const Setting &setting, Pair &pair, uint64_t stride, uint64_t num_blocks) {
  TestCache source(pair.source, setting.shared, LDR_CACHE_BLOCKS, 3, num_blocks, stride, 1, {{LDR_KEY_BLOCKS, 0, 0, 5}});
  TestCache sink(pair.sink, false, LDR_CACHE_BLOCKS, 2, num_blocks, stride, 2);
  std::vector<int32_t> from, to;
  std::mt19937 random(3);
  for (uint64_t i = 0; i < num_blocks; ++i) to.push_back(int32_t(i));
  std::shuffle(to.begin(), to.end(), random);  // distinct, else the winner is undefined
  to.resize(num_blocks / 2);
  for (size_t k = 0; k < to.size(); ++k) from.push_back(int32_t(random() % num_blocks));
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, 0, sink.id);
  p.remote_by = LDR_BY_BLOCKS_KEY;
  p.remote_model_id = 5;
  p.remote_first_tensor = 1;
  p.remote_num_tensors = 2;
  p.src_blocks = list(from);
  p.dst_blocks = list(to);
  std::vector<uint8_t> expected = sink.bytes(), source_before = source.bytes();
  for (size_t k = 0; k < to.size(); ++k) {
    for (uint32_t t = 0; t < 2; ++t) expect(expected, sink, t, to[k] * stride, source, t + 1, from[k] * stride, stride);
  }
  ldr_transfer_result_t result;
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, to.size() * stride * 2);
  CHECK(sink.bytes() == expected);
  CHECK(source.bytes() == source_before);
  ldr_engine_info_t info;
  CHECK_C(ldr_engine_info(pair.sink, &info), LDR_OK);
  CHECK(info.bytes_pulled[setting.path] >= result.bytes);
  CHECK_EQ(info.num_ops_in_flight, 0u);
}

void pull_entries(const Setting &setting, Pair &pair) {
  TestCache source(pair.source, setting.shared, LDR_CACHE_CONTIGUOUS, 2, 4, 5000, 4, {{LDR_KEY_REQUEST, 3, 9, 1}, {LDR_KEY_PREFIX, 1, 9, 1}});
  TestCache entry(pair.sink, false, LDR_CACHE_CONTIGUOUS, 2, 3, 4000, 5);
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_ENTRY, source.id, entry.id);
  p.remote_batch_index = 2;
  p.local_batch_index = 1;
  p.size_bytes = 3001;
  std::vector<uint8_t> expected = entry.bytes();
  for (uint32_t t = 0; t < 2; ++t) expect(expected, entry, t, 4000, source, t, 2 * 5000, 3001);
  ldr_transfer_result_t result;
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 6002);
  CHECK(entry.bytes() == expected);

  TestCache blocks(pair.sink, false, LDR_CACHE_BLOCKS, 2, 8, 1536, 6);  // 5000 = 3 * 1536 + 392
  std::vector<int32_t> to = {6, 0, 3, 2};
  p = transfer(LDR_PULL, kSourceId, LDR_MOVE_ENTRY_TO_BLOCKS, 0, blocks.id);
  p.remote_by = LDR_BY_REQUEST_KEY;
  p.remote_key_id = 9;
  p.remote_model_id = 1;
  p.dst_blocks = list(to);
  expected = blocks.bytes();
  for (uint32_t t = 0; t < 2; ++t) {
    for (uint64_t k = 0; k < 4; ++k) expect(expected, blocks, t, to[k] * 1536, source, t, 3 * 5000 + k * 1536, k == 3 ? 392 : 1536);
  }
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 10000);
  CHECK(blocks.bytes() == expected);
  p.remote_by = LDR_BY_PREFIX_KEY;
  if (setting.remote_access) {
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);
    CHECK(blocks.bytes() == expected);
  } else {
    for (uint32_t t = 0; t < 2; ++t) {
      for (uint64_t k = 0; k < 4; ++k) expect(expected, blocks, t, to[k] * 1536, source, t, 5000 + k * 1536, k == 3 ? 392 : 1536);
    }
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
    CHECK(blocks.bytes() == expected);
  }
}

void push(const Setting &setting, Pair &pair) {
  TestCache from(pair.sink, false, LDR_CACHE_BLOCKS, 2, 300, 8192, 7);
  TestCache to(pair.source, setting.shared, LDR_CACHE_BLOCKS, 2, 300, 8192, 8, {{LDR_KEY_BLOCKS, 0, 0, 6}});
  std::vector<int32_t> src, dst;
  for (int32_t i = 0; i < 150; ++i) src.push_back((i * 37) % 300), dst.push_back(299 - i);
  ldr_transfer_params_t p = transfer(LDR_PUSH, kSourceId, LDR_MOVE_BLOCKS, to.id, from.id);
  p.src_blocks = list(src);
  p.dst_blocks = list(dst);
  std::vector<uint8_t> expected = to.bytes(), from_before = from.bytes();
  if (!setting.remote_access) {
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_INVALID);
    CHECK(to.bytes() == expected);
    return;
  }
  for (uint32_t t = 0; t < 2; ++t) {
    for (size_t k = 0; k < src.size(); ++k) expect(expected, to, t, dst[k] * 8192, from, t, src[k] * 8192, 8192);
  }
  ldr_transfer_result_t result;
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 150 * 2 * 8192);
  CHECK(to.bytes() == expected);
  CHECK(from.bytes() == from_before);
  ldr_link_info_t link;
  CHECK_C(ldr_link_query(pair.sink, kSourceId, &link), LDR_OK);
  CHECK_EQ(link.bytes_pushed[setting.path], result.bytes);
}

// The side that was linked to may pull as well.
void pull_backwards(const Setting &setting, Pair &pair) {
  TestCache from(pair.sink, setting.shared, LDR_CACHE_BLOCKS, 1, 16, 4096, 9, {{LDR_KEY_BLOCKS, 0, 0, 7}});
  TestCache to(pair.source, false, LDR_CACHE_BLOCKS, 1, 16, 4096, 10);
  std::vector<int32_t> src = {3, 4, 5, 9}, dst = {0, 1, 2, 15};
  ldr_transfer_params_t p = transfer(LDR_PULL, kSinkId, LDR_MOVE_BLOCKS, from.id, to.id);
  p.src_blocks = list(src);
  p.dst_blocks = list(dst);
  std::vector<uint8_t> expected = to.bytes();
  for (size_t k = 0; k < src.size(); ++k) expect(expected, to, 0, dst[k] * 4096, from, 0, src[k] * 4096, 4096);
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(pair.source, &p, 1234, &op_id), LDR_OK);
  ldr_event_t event = next_op_event(pair.source);
  CHECK_EQ(event.id, op_id);
  CHECK_EQ(event.user_tag, uint64_t(1234));
  CHECK_EQ(event.status, int32_t(LDR_OK));
  CHECK_EQ(event.bytes, uint64_t(4 * 4096));
  CHECK_EQ(event.path, uint16_t(setting.path));
  CHECK(to.bytes() == expected);
  CHECK_C(ldr_op_cancel(pair.source, op_id), LDR_ERR_NOT_FOUND);
  check_no_op_event(pair.source);
}

void no_path() {
  Pair pair(1u << LDR_PATH_SHM, true);
  TestCache plain(pair.source, false, LDR_CACHE_BLOCKS, 1, 4, 4096, 1), sink(pair.sink, true, LDR_CACHE_BLOCKS, 1, 4, 4096, 2);
  std::vector<int32_t> blocks = {0, 2};
  for (uint32_t direction : {LDR_PULL, LDR_PUSH}) {
    ldr_transfer_params_t p = transfer(direction, kSourceId, LDR_MOVE_BLOCKS, plain.id, sink.id);
    p.src_blocks = p.dst_blocks = list(blocks);
    std::vector<uint8_t> before = sink.bytes(), source_before = plain.bytes();
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_PATH);
    CHECK_CONTAINS(ldr_last_error(), "tensor 0");
    CHECK_CONTAINS(ldr_last_error(), "shm");
    CHECK(sink.bytes() == before);
    CHECK(plain.bytes() == source_before);
  }
}

void refusals(bool remote_access) {
  Pair pair(1u << LDR_PATH_CMA, remote_access);
  TestCache source(pair.source, false, LDR_CACHE_BLOCKS, 1, 4, 4096, 1), sink(pair.sink, false, LDR_CACHE_BLOCKS, 1, 4, 4096, 2);
  TestCache hidden(pair.source, false, LDR_CACHE_BLOCKS, 1, 4, 4096, 3, {}, false);
  std::vector<int32_t> blocks = {0, 2}, negative = {0, -1}, one = {1};
  ldr_transfer_params_t good = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
  good.src_blocks = good.dst_blocks = list(blocks);
  std::vector<uint8_t> before = sink.bytes();
  auto refused = [&](ldr_status_t code, const char *text, auto change) {
    ldr_transfer_params_t p = good;
    change(p);
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), code);
    CHECK_CONTAINS(ldr_last_error(), text);
    CHECK(sink.bytes() == before);
  };
  refused(LDR_ERR_INVALID, "own cluster", [](auto &p) { p.cluster_id = kSinkId; });
  refused(LDR_ERR_INVALID, "own cluster", [](auto &p) { p.cluster_id = kSinkId, p.local_cache_id = 99; });
  refused(LDR_ERR_NO_CACHE, "no local cache 99", [](auto &p) { p.local_cache_id = 99, p.cluster_id = 33; });
  refused(LDR_ERR_INVALID, "blocks cache", [](auto &p) { p.move = LDR_MOVE_ENTRY, p.cluster_id = 33, p.src_blocks = p.dst_blocks = {}; });
  refused(LDR_ERR_NOT_LINKED, "cluster 33", [&](auto &p) { p.cluster_id = 33, p.dst_blocks = list(negative); });
  refused(LDR_ERR_INVALID, "dst_blocks[1] is -1", [&](auto &p) { p.dst_blocks = list(negative), p.remote_cache_id = 99; });
  refused(LDR_ERR_NO_CACHE, "", [&](auto &p) { p.remote_cache_id = 99, p.src_blocks = list(one); });
  refused(LDR_ERR_NO_CACHE, "", [&](auto &p) { p.remote_cache_id = -1; });
  refused(LDR_ERR_NO_CACHE, "", [&](auto &p) { p.remote_by = LDR_BY_BLOCKS_KEY; });
  refused(LDR_ERR_INVALID, "1 source blocks for 2", [&](auto &p) { p.src_blocks = list(one); });
  refused(LDR_ERR_INVALID, "src_blocks[1] is -1", [&](auto &p) { p.src_blocks = list(negative); });
  refused(LDR_ERR_INVALID, "dst_blocks is empty", [](auto &p) { p.dst_blocks = {}; });
  refused(LDR_ERR_INVALID, "item_bytes", [](auto &p) { p.dst_blocks.item_bytes = 2; });
  refused(LDR_ERR_INVALID, "direction", [](auto &p) { p.direction = 2; });
  refused(LDR_ERR_INVALID, "move", [](auto &p) { p.move = 3; });
  refused(LDR_ERR_NOT_FOUND, "no grant", [](auto &p) { p.remote_by = LDR_BY_OPEN_GRANT; });
  refused(LDR_ERR_TIMEOUT, "limit", [](auto &p) { p.timeout_ns = 0; });
  if (remote_access) {
    refused(LDR_ERR_INVALID, "not remote accessible", [&](auto &p) { p.remote_cache_id = hidden.id; });
  } else {
    ldr_transfer_params_t p = good;
    p.remote_cache_id = hidden.id;
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  }
  uint64_t op_id = 0;
  ldr_transfer_params_t p = good;
  p.local_cache_id = 99;
  CHECK_C(ldr_transfer_submit(pair.sink, &p, 1, &op_id), LDR_ERR_NO_CACHE);
  check_no_op_event(pair.sink);  // refused at once: no event
  p = good;
  p.remote_cache_id = 99;
  CHECK_C(ldr_transfer_submit(pair.sink, &p, 1, &op_id), LDR_OK);
  CHECK_EQ(next_op_event(pair.sink).status, int32_t(LDR_ERR_NO_CACHE));
  CHECK_CONTAINS(op_error(pair.sink, op_id), "cluster 11");
}

// Registered, forgotten and registered again after the peer's table was fetched.
void later_registrations(const Setting &setting) {
  Pair pair(setting.path_set(), setting.remote_access);
  TestCache sink(pair.sink, false, LDR_CACHE_BLOCKS, 1, 4, 4096, 1);
  std::vector<int32_t> blocks = {1, 3};
  for (uint8_t round = 2; round < 5; ++round) {
    TestCache source(pair.source, setting.shared, LDR_CACHE_BLOCKS, 1, 4, 4096, round, {{LDR_KEY_BLOCKS, 0, 0, 5}});
    ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
    p.src_blocks = p.dst_blocks = list(blocks);
    for (uint32_t by : {LDR_BY_BLOCKS_KEY, LDR_BY_CACHE_ID}) {
      p.remote_by = by;
      p.remote_model_id = 5;
      memset(sink.memory, 0, sink.size);
      CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
      for (int32_t block : blocks) CHECK(memcmp(sink.memory + block * 4096, source.memory + block * 4096, 4096) == 0);
    }
    source.drop();
    CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_NO_CACHE);
  }
}

}  // namespace

int main(int argc, char **argv) {
  test("no path for plain memory", no_path);
  test("refusals, two-sided", [] { refusals(false); });
  test("refusals, remote access", [] { refusals(true); });
  for_each_setting(argc, argv, [](const Setting &setting) {
    Pair pair(setting.path_set(), setting.remote_access);
    test("pull blocks", [&] { pull_blocks(setting, pair, 4096, 64); });
    test("pull odd blocks", [&] { pull_blocks(setting, pair, 1001, 333); });
    test("pull large", [&] { pull_blocks(setting, pair, 65536, 256); });
    test("pull entries", [&] { pull_entries(setting, pair); });
    test("push", [&] { push(setting, pair); });
    test("pull backwards", [&] { pull_backwards(setting, pair); });
    test("later registrations", [&] { later_registrations(setting); });
  });
}
