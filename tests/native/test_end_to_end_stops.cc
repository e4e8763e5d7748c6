// How transfers end before their time, over each data path: once, and with nothing that moves afterwards.
#include "end_to_end.h"

using namespace ldr_test;

namespace {

// One that runs for many seconds, 128 GiB: the same megabyte again and again.
struct Endless {
  Endless(const Setting &setting, Pair &pair)
      : source(pair.source, setting.shared, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 1), sink(pair.sink, false, LDR_CACHE_BLOCKS, 1, 2, 1 << 20, 2), blocks(1 << 17, 0) {
    params = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
    params.src_blocks = params.dst_blocks = list(blocks);
    params.timeout_ns = -1;
  }
  TestCache source, sink;
  std::vector<int32_t> blocks;
  ldr_transfer_params_t params;
};

// After its completion no byte of a transfer may arrive: another transfer goes over the same ways, and what was there before it stays.
void check_quiet(Pair &pair, Endless &endless) {
  memset(endless.sink.memory, 0xEE, endless.sink.size);
  std::vector<int32_t> second = {1};
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, endless.source.id, endless.sink.id);
  p.src_blocks = p.dst_blocks = list(second);
  for (int i = 0; i < 5; ++i) CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  for (uint64_t i = 0; i < endless.sink.stride; ++i) CHECK_EQ(endless.sink.memory[i], uint8_t(0xEE));
  CHECK(memcmp(endless.sink.memory + endless.sink.stride, endless.source.memory + endless.source.stride, endless.sink.stride) == 0);
}

void cancelled(const Setting &setting) {
  Pair pair(setting.path_set(), setting.remote_access);
  Endless endless(setting, pair);
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(pair.sink, &endless.params, 9, &op_id), LDR_OK);
  wait_until_moving(pair.sink, op_id);

  // Those that wait for the link go in the order in which they came; one of them is cancelled while it waits.
  std::vector<int32_t> second = {1};
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_BLOCKS, endless.source.id, endless.sink.id);
  p.src_blocks = p.dst_blocks = list(second);
  p.timeout_ns = kTimeout;
  std::vector<uint64_t> waiting(10);
  for (size_t i = 0; i < waiting.size(); ++i) CHECK_C(ldr_transfer_submit(pair.sink, &p, i, &waiting[i]), LDR_OK);
  uint64_t done = 1, total = 1;
  CHECK_C(ldr_op_progress(pair.sink, waiting[9], &done, &total), LDR_OK);
  CHECK_EQ(total, uint64_t(0));
  CHECK_C(ldr_op_cancel(pair.sink, waiting[4]), LDR_OK);
  ldr_event_t event = next_op_event(pair.sink);
  CHECK_EQ(event.id, waiting[4]);
  CHECK_EQ(event.status, int32_t(LDR_ERR_CANCELLED));

  CHECK_C(ldr_op_cancel(pair.sink, op_id), LDR_OK);
  event = next_op_event(pair.sink);
  CHECK_EQ(event.id, op_id);
  CHECK_EQ(event.status, int32_t(LDR_ERR_CANCELLED));
  CHECK(event.bytes > 0);
  CHECK_CONTAINS(op_error(pair.sink, op_id), "cancelled");
  for (size_t i = 0; i < waiting.size(); ++i) {
    if (i == 4) continue;
    event = next_op_event(pair.sink);
    CHECK_EQ(event.id, waiting[i]);
    CHECK_EQ(event.status, int32_t(LDR_OK));
  }
  check_quiet(pair, endless);
  check_no_op_event(pair.sink);
}

void timed_out(const Setting &setting) {
  Pair pair(setting.path_set(), setting.remote_access);
  Endless endless(setting, pair);
  endless.params.timeout_ns = 500 * kMillisecond;
  const int64_t begin = ldr::now_ns();
  CHECK_C(ldr_transfer(pair.sink, &endless.params, nullptr), LDR_ERR_TIMEOUT);
  CHECK(ldr::now_ns() - begin >= 500 * kMillisecond);
  CHECK_CONTAINS(ldr_last_error(), "500 ms");
  CHECK_CONTAINS(ldr_last_error(), "cluster 11");
  CHECK_CONTAINS(ldr_last_error(), ldr_path_name(setting.path));
  check_quiet(pair, endless);
}

void unregistered(const Setting &setting, bool at_source) {
  Pair pair(setting.path_set(), setting.remote_access);
  Endless endless(setting, pair);
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(pair.sink, &endless.params, 9, &op_id), LDR_OK);
  wait_until_moving(pair.sink, op_id);
  TestCache &cache = at_source ? endless.source : endless.sink;
  cache.drop();
  if (!at_source) memset(endless.sink.memory, 0xEE, endless.sink.size);
  ldr_event_t event = next_op_event(pair.sink);
  CHECK_EQ(event.status, int32_t(LDR_ERR_NO_CACHE));
  if (!at_source) {
    // Unregistering the local end waits for whoever writes there.
    for (uint64_t i = 0; i < endless.sink.size; ++i) CHECK_EQ(endless.sink.memory[i], uint8_t(0xEE));
  } else {
    CHECK_C(ldr_transfer(pair.sink, &endless.params, nullptr), LDR_ERR_NO_CACHE);
  }
}

void destroyed(const Setting &setting, bool at_source) {
  auto pair = std::make_unique<Pair>(setting.path_set(), setting.remote_access);
  auto endless = std::make_unique<Endless>(setting, *pair);
  uint64_t op_id = 0;
  CHECK_C(ldr_transfer_submit(pair->sink, &endless->params, 9, &op_id), LDR_OK);
  wait_until_moving(pair->sink, op_id);
  if (at_source) {
    ldr_engine_destroy(pair->source);
    pair->source = nullptr;
    endless->source.id = 0;
    CHECK_EQ(next_op_event(pair->sink).status, int32_t(LDR_ERR_LINK_BROKEN));
    CHECK_C(ldr_transfer(pair->sink, &endless->params, nullptr), LDR_ERR_NOT_LINKED);
  } else {
    ldr_engine_destroy(pair->sink);  // completes the operation with CLOSED, or it would not return
    pair->sink = nullptr;
    endless->sink.id = 0;
    memset(endless->sink.memory, 0xEE, endless->sink.size);
    for (uint64_t i = 0; i < endless->sink.size; ++i) CHECK_EQ(endless->sink.memory[i], uint8_t(0xEE));
  }
  endless.reset();
}

}  // namespace

int main(int argc, char **argv) {
  for_each_setting(argc, argv, [](const Setting &setting) {
    test("cancelled, and in order", [&] { cancelled(setting); });
    test("timed out", [&] { timed_out(setting); });
    test("source unregistered", [&] { unregistered(setting, true); });
    test("sink unregistered", [&] { unregistered(setting, false); });
    test("source engine destroyed", [&] { destroyed(setting, true); });
    test("sink engine destroyed", [&] { destroyed(setting, false); });
  });
}
