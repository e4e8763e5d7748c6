// Offsets inside entries, and the block size that a pusher states, through the C functions on each data path.
#include <cstddef>

#include "end_to_end.h"

using namespace ldr_test;

namespace {

void pull_with_offsets(const Setting &setting, Pair &pair) {
  TestCache source(pair.source, setting.shared, LDR_CACHE_CONTIGUOUS, 2, 4, 5000, 4);
  TestCache sink(pair.sink, false, LDR_CACHE_CONTIGUOUS, 2, 3, 4000, 5);
  ldr_transfer_params_t p = transfer(LDR_PULL, kSourceId, LDR_MOVE_ENTRY, source.id, sink.id);
  p.remote_batch_index = 2;
  p.local_batch_index = 1;
  p.local_offset_bytes = 1001;
  std::vector<uint8_t> expected = sink.bytes();
  ldr_transfer_result_t result;
  p.remote_offset_bytes = 2002;
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "2999 bytes do not fit");
  CHECK(sink.bytes() == expected);
  p.remote_offset_bytes = 2001;  // with -1: 2999 bytes, up to the end on both sides
  for (uint32_t t = 0; t < 2; ++t) expect(expected, sink, t, 4000 + 1001, source, t, 2 * 5000 + 2001, 2999);
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 2 * 2999);
  CHECK(sink.bytes() == expected);

  p.local_offset_bytes = 0;
  p.remote_offset_bytes = 4990;
  p.size_bytes = 10;
  for (uint32_t t = 0; t < 2; ++t) expect(expected, sink, t, 4000, source, t, 2 * 5000 + 4990, 10);
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  CHECK(sink.bytes() == expected);

  // A caller that does not know the fields has none, whatever follows its struct.
  p.struct_size = uint32_t(offsetof(ldr_transfer_params_t, local_offset_bytes));
  p.size_bytes = 20;
  p.local_offset_bytes = p.remote_offset_bytes = 7;
  for (uint32_t t = 0; t < 2; ++t) expect(expected, sink, t, 4000, source, t, 2 * 5000, 20);
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_OK);
  CHECK(sink.bytes() == expected);
}

void push_with_block_bytes(const Setting &setting, Pair &pair) {
  if (!setting.remote_access) return;
  TestCache from(pair.sink, false, LDR_CACHE_CONTIGUOUS, 2, 3, 5000, 7);
  TestCache to(pair.source, setting.shared, LDR_CACHE_BLOCKS, 2, 8, 1536, 8);
  const std::vector<int32_t> blocks = {6, 0, 3, 2};  // 5000 = 3 * 1536 + 392
  ldr_transfer_params_t p = transfer(LDR_PUSH, kSourceId, LDR_MOVE_ENTRY_TO_BLOCKS, to.id, from.id);
  p.local_batch_index = 1;
  p.dst_blocks = list(blocks);
  std::vector<uint8_t> expected = to.bytes();
  p.dst_block_bytes = 1535;
  CHECK_C(ldr_transfer(pair.sink, &p, nullptr), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "dst_block_bytes is 1535");
  CHECK(to.bytes() == expected);
  p.dst_block_bytes = 1536;
  for (uint32_t t = 0; t < 2; ++t) {
    for (uint64_t k = 0; k < 4; ++k) expect(expected, to, t, blocks[k] * 1536, from, t, 5000 + k * 1536, k == 3 ? 392 : 1536);
  }
  ldr_transfer_result_t result;
  CHECK_C(ldr_transfer(pair.sink, &p, &result), LDR_OK);
  check_moved(setting, result, 10000);
  CHECK(to.bytes() == expected);
}

}  // namespace

int main(int argc, char **argv) {
  for_each_setting(argc, argv, [](const Setting &setting) {
    Pair pair(setting.path_set(), setting.remote_access);
    pull_with_offsets(setting, pair);
    push_with_block_bytes(setting, pair);
  });
}
