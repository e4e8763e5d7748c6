// The planner against a naive oracle that moves one byte at a time, and every refusal in the order of the specification.
#include "plan.h"

#include <cstring>
#include <functional>
#include <random>

#include "check.h"

using namespace ldr;
using ldr_test::test;

namespace {

struct Case {
  Cache local{}, remote{};
  PlanInput in;
};

Cache make_cache(int64_t id, uint32_t kind, uint32_t num_tensors, uint64_t num_entries, uint64_t stride) {
  Cache cache{};
  cache.id = id;
  cache.kind = kind;
  cache.placement = LDR_PLACEMENT_DEVICE;
  cache.remote_accessible = true;
  cache.num_entries = num_entries;
  cache.tensor_bytes = stride * num_entries;
  cache.addresses.assign(num_tensors, 0);
  return cache;
}

Status run(Case &c, std::vector<Piece> *pieces) {
  c.in.local = &c.local;
  c.in.remote = &c.remote;
  if (Status s = check_before_link(c.in); !s.ok()) return s;
  if (Status s = check_before_remote(c.in); !s.ok()) return s;
  return plan_pieces(c.in, pieces);
}

using Memory = std::vector<std::vector<uint8_t>>;  // by tensor

Memory random_memory(const Cache &cache, std::mt19937_64 &random) {
  Memory memory(cache.num_tensors());
  for (auto &tensor : memory) {
    tensor.resize(cache.tensor_bytes);
    for (uint8_t &byte : tensor) byte = uint8_t(random());
  }
  return memory;
}

// Spec api-cachemanager 5.6, 7: written down as it stands there.
void oracle(const Case &c, const Memory &source, Memory &target) {
  const bool is_pull = c.in.direction == LDR_PULL;
  const Cache &from = is_pull ? c.remote : c.local, &to = is_pull ? c.local : c.remote;
  uint64_t from_stride = from.tensor_bytes / from.num_entries, to_stride = to.tensor_bytes / to.num_entries;
  uint32_t local_first = c.in.local_num_tensors ? c.in.local_first_tensor : 0, remote_first = c.in.remote_num_tensors ? c.in.remote_first_tensor : 0;
  uint32_t m = c.in.local_num_tensors ? c.in.local_num_tensors : c.local.num_tensors();
  uint64_t from_batch = is_pull ? c.in.remote_batch_index : c.in.local_batch_index, to_batch = is_pull ? c.in.local_batch_index : c.in.remote_batch_index;
  uint64_t local_stride = is_pull ? to_stride : from_stride;
  for (uint32_t i = 0; i < m; ++i) {
    const auto &s = source[(is_pull ? remote_first : local_first) + i];
    auto &t = target[(is_pull ? local_first : remote_first) + i];
    if (c.in.move == LDR_MOVE_ENTRY) {
      uint64_t length = c.in.size_bytes > 0 ? uint64_t(c.in.size_bytes) : local_stride - c.in.local_offset_bytes;
      uint64_t to_offset = c.in.local_offset_bytes, from_offset = c.in.remote_offset_bytes;  // a push has none
      for (uint64_t b = 0; b < length; ++b) t.at(to_batch * to_stride + to_offset + b) = s.at(from_batch * from_stride + from_offset + b);
      continue;
    }
    for (uint64_t k = 0; k < c.in.dst_blocks.size(); ++k) {
      for (uint64_t b = 0; b < to_stride; ++b) {
        if (c.in.move == LDR_MOVE_BLOCKS) {
          t.at(c.in.dst_blocks[k] * to_stride + b) = s.at(c.in.src_blocks[k] * from_stride + b);
        } else if (k * to_stride + b < from_stride) {
          t.at(c.in.dst_blocks[k] * to_stride + b) = s.at(from_batch * from_stride + k * to_stride + b);
        }
      }
    }
  }
}

void select_tensors(Case &c, uint32_t num_local, uint32_t num_remote, std::mt19937_64 &random) {
  uint32_t m = 1 + random() % std::min(num_local, num_remote);
  c.in.local_num_tensors = m == num_local && random() % 2 ? 0 : m;
  c.in.remote_num_tensors = m == num_remote && random() % 2 ? 0 : m;
  c.in.local_first_tensor = c.in.local_num_tensors ? uint32_t(random() % (num_local - m + 1)) : 0;
  c.in.remote_first_tensor = c.in.remote_num_tensors ? uint32_t(random() % (num_remote - m + 1)) : 0;
}

std::vector<uint64_t> random_blocks(uint64_t num_blocks, size_t count, bool unique, std::mt19937_64 &random) {
  std::vector<uint64_t> all(num_blocks), result;
  for (uint64_t i = 0; i < num_blocks; ++i) all[i] = i;
  if (random() % 2) std::shuffle(all.begin(), all.end(), random);  // else adjacent ones, to be merged
  for (size_t k = 0; k < count; ++k) result.push_back(unique ? all[k] : all[random() % num_blocks]);
  return result;
}

Case random_case(std::mt19937_64 &random) {
  Case c;
  uint32_t num_local = 1 + random() % 4, num_remote = 1 + random() % 4;
  c.in.direction = random() % 2 ? LDR_PULL : LDR_PUSH;
  c.in.move = uint32_t(random() % 3);
  c.in.need_accessible = c.in.direction == LDR_PUSH || random() % 2;
  uint64_t from_entries = 1 + random() % 6, to_entries = 1 + random() % 6, from_stride = 1 + random() % 40, to_stride = 1 + random() % 40;
  uint32_t from_kind = LDR_CACHE_CONTIGUOUS, to_kind = LDR_CACHE_CONTIGUOUS;
  if (c.in.move == LDR_MOVE_ENTRY) {
    if (c.in.direction == LDR_PULL && random() % 2) {
      c.in.local_offset_bytes = random() % to_stride;
      c.in.remote_offset_bytes = random() % from_stride;
    }
    const uint64_t from_room = from_stride - c.in.remote_offset_bytes, to_room = to_stride - c.in.local_offset_bytes, least = std::min(from_room, to_room);
    const uint64_t local_room = c.in.direction == LDR_PULL ? to_room : from_room;
    c.in.size_bytes = local_room > least || random() % 2 ? int64_t(1 + random() % least) : -1;
  } else {
    to_kind = LDR_CACHE_BLOCKS;
    size_t count = 1 + random() % to_entries;
    if (c.in.move == LDR_MOVE_BLOCKS) {
      from_kind = LDR_CACHE_BLOCKS;
      to_stride = from_stride;
      c.in.src_blocks = random_blocks(from_entries, count, count <= from_entries && random() % 2, random);
    } else {
      from_stride = 2 + from_stride;
      to_stride = 1 + to_stride % (from_stride - 1);  // less than an entry: right for both directions
      count = std::min<size_t>(count, (from_stride + to_stride - 1) / to_stride);
    }
    c.in.dst_blocks = random_blocks(to_entries, count, true, random);
    if (c.in.direction == LDR_PUSH && random() % 2) c.in.dst_block_bytes = to_stride;
  }
  const bool is_pull = c.in.direction == LDR_PULL;
  Cache from = make_cache(is_pull ? 2 : 1, from_kind, is_pull ? num_remote : num_local, from_entries, from_stride);
  Cache to = make_cache(is_pull ? 1 : 2, to_kind, is_pull ? num_local : num_remote, to_entries, to_stride);
  c.local = is_pull ? to : from;
  c.remote = is_pull ? from : to;
  if (from_kind == LDR_CACHE_CONTIGUOUS) (is_pull ? c.in.remote_batch_index : c.in.local_batch_index) = uint32_t(random() % from_entries);
  if (to_kind == LDR_CACHE_CONTIGUOUS) (is_pull ? c.in.local_batch_index : c.in.remote_batch_index) = uint32_t(random() % to_entries);
  select_tensors(c, num_local, num_remote, random);
  return c;
}

void check_merged(const std::vector<Piece> &pieces) {
  for (size_t i = 1; i < pieces.size(); ++i) {
    const Piece &a = pieces[i - 1], &b = pieces[i];
    CHECK(a.remote_tensor <= b.remote_tensor);
    bool adjacent = a.remote_tensor == b.remote_tensor && a.local_address + a.size_bytes == b.local_address && a.remote_offset + a.size_bytes == b.remote_offset;
    CHECK(!adjacent);
  }
}

void random_layouts() {
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    std::mt19937_64 random(seed);
    Case c = random_case(random);
    const bool is_pull = c.in.direction == LDR_PULL;
    Memory local = random_memory(c.local, random), remote = random_memory(c.remote, random);
    for (uint32_t i = 0; i < c.local.num_tensors(); ++i) c.local.addresses[i] = reinterpret_cast<uint64_t>(local[i].data());
    Memory expected = is_pull ? local : remote;
    oracle(c, is_pull ? remote : local, expected);
    std::vector<Piece> pieces;
    CHECK_OK(run(c, &pieces));
    check_merged(pieces);
    for (const Piece &piece : pieces) {
      CHECK(piece.size_bytes > 0);
      auto &tensor = remote.at(piece.remote_tensor);
      CHECK(piece.remote_offset + piece.size_bytes <= tensor.size());
      void *local_at = reinterpret_cast<void *>(piece.local_address);  // a wrong one is found by the sanitizer, or by the comparison
      if (is_pull) memcpy(local_at, &tensor[piece.remote_offset], piece.size_bytes);
      else memcpy(&tensor[piece.remote_offset], local_at, piece.size_bytes);
    }
    if ((is_pull ? local : remote) != expected) ldr_test::failed(__FILE__, __LINE__, "bytes differ, seed " + std::to_string(seed));
  }
}

void merges() {
  Case c;
  c.local = make_cache(1, LDR_CACHE_BLOCKS, 2, 16, 100);
  c.remote = make_cache(2, LDR_CACHE_BLOCKS, 2, 16, 100);
  c.local.addresses = {10000, 20000};
  c.in.move = LDR_MOVE_BLOCKS;
  c.in.src_blocks = {3, 4, 5, 7, 6, 0};
  c.in.dst_blocks = {8, 9, 10, 11, 12, 1};
  std::vector<Piece> pieces;
  CHECK_OK(run(c, &pieces));
  CHECK_EQ(pieces.size(), size_t(8));
  CHECK_EQ(pieces[0].size_bytes, uint64_t(300));
  CHECK_EQ(pieces[0].local_address, uint64_t(10800));
  CHECK_EQ(pieces[0].remote_offset, uint64_t(300));
  CHECK_EQ(pieces[4].local_address, uint64_t(20800));
  CHECK_EQ(pieces[4].remote_tensor, 1u);
}

// One thing wrong. Those with the same letter touch the same field, so they are not tried together.
struct Fault {
  char field;
  ldr_status_t code;
  const char *text;
  std::function<void(Case &)> apply;
};

// Each fault alone gives its own code and text; of two at once, the one that the specification checks first is told.
void check_order(const std::function<Case()> &good, const std::vector<Fault> &faults) {
  std::vector<Piece> pieces;
  Case fine = good();
  CHECK_OK(run(fine, &pieces));
  for (size_t i = 0; i < faults.size(); ++i) {
    for (size_t j = i; j < faults.size(); ++j) {
      if (i != j && faults[i].field == faults[j].field) continue;
      Case c = good();
      faults[j].apply(c);
      if (i != j) faults[i].apply(c);
      pieces.clear();
      Status status = run(c, &pieces);
      CHECK_CODE(status, faults[i].code);
      CHECK_CONTAINS(status.text, faults[i].text);
      CHECK(pieces.empty());
    }
  }
}

Case good_case(uint32_t direction, uint32_t move) {
  Case c;
  const bool is_pull = direction == LDR_PULL;
  c.in.direction = direction;
  c.in.move = move;
  c.in.need_accessible = true;
  Cache from = make_cache(is_pull ? 2 : 1, move == LDR_MOVE_BLOCKS ? LDR_CACHE_BLOCKS : LDR_CACHE_CONTIGUOUS, 3, 8, 64);
  Cache to = make_cache(is_pull ? 1 : 2, move == LDR_MOVE_ENTRY ? LDR_CACHE_CONTIGUOUS : LDR_CACHE_BLOCKS, 3, 8, move == LDR_MOVE_ENTRY_TO_BLOCKS ? 24 : 64);
  c.local = is_pull ? to : from;
  c.remote = is_pull ? from : to;
  c.local.addresses.assign(3, 4096);
  if (move != LDR_MOVE_ENTRY) c.in.dst_blocks = {1, 5, 2};
  if (move == LDR_MOVE_BLOCKS) c.in.src_blocks = {0, 7, 3};
  return c;
}

const Fault kLocalSelection{'t', LDR_ERR_INVALID, "but the local cache", [](Case &c) { c.in.local_first_tensor = 2, c.in.local_num_tensors = 2; }};
const Fault kRemoteSelection{'t', LDR_ERR_INVALID, "but the remote cache", [](Case &c) { c.in.remote_first_tensor = 3, c.in.remote_num_tensors = 1; }};
const Fault kCounts{'t', LDR_ERR_INVALID, "local tensors selected, but", [](Case &c) { c.in.remote_num_tensors = 2; }};
const Fault kLocalAccess{'a', LDR_ERR_INVALID, "the local cache 1 is not remote accessible", [](Case &c) { c.local.remote_accessible = false; }};
const Fault kRemoteAccess{'A', LDR_ERR_INVALID, "the remote cache 2 is not remote accessible", [](Case &c) { c.remote.remote_accessible = false; }};

void refusals_of_pulls() {
  const Fault remote_batch{'b', LDR_ERR_NO_CACHE, "batch index 8, but the remote", [](Case &c) { c.in.remote_batch_index = 8; }};
  const Fault dst_blocks{'d', LDR_ERR_INVALID, "dst_blocks[1] is -3", [](Case &c) { c.in.dst_blocks[1] = uint64_t(-3); }};
  auto kind = [](char field, const char *text, bool is_local, uint32_t kind) {
    return Fault{field, LDR_ERR_INVALID, text, [=](Case &c) { (is_local ? c.local : c.remote).kind = kind; }};
  };
  check_order([] { return good_case(LDR_PULL, LDR_MOVE_ENTRY); },
              {{'B', LDR_ERR_INVALID, "batch index 8, but the local", [](Case &c) { c.in.local_batch_index = 8; }},
               kind('k', "the local cache 1 is a blocks", true, LDR_CACHE_BLOCKS),
               {'s', LDR_ERR_INVALID, "65 bytes do not fit at offset 0 of an entry of the local", [](Case &c) { c.in.size_bytes = 65; }},
               kLocalSelection, kLocalAccess, kRemoteAccess, remote_batch, kRemoteSelection, kCounts,
               kind('K', "the remote cache 2 is a blocks", false, LDR_CACHE_BLOCKS),
               {'S', LDR_ERR_INVALID, "do not fit: source entries have 63", [](Case &c) { c.remote.tensor_bytes = 63 * 8; }}});
  check_order([] { return good_case(LDR_PULL, LDR_MOVE_BLOCKS); },
              {kind('k', "the local cache 1 is a contiguous", true, LDR_CACHE_CONTIGUOUS), kLocalSelection, kLocalAccess, dst_blocks, kRemoteAccess, kRemoteSelection,
               kCounts, kind('K', "the remote cache 2 is a contiguous", false, LDR_CACHE_CONTIGUOUS),
               {'d', LDR_ERR_INVALID, "3 source blocks for 4", [](Case &c) { c.in.dst_blocks.push_back(0); }},
               {'S', LDR_ERR_INVALID, "source blocks have 32 bytes", [](Case &c) { c.remote.tensor_bytes = 32 * 8; }},
               {'i', LDR_ERR_INVALID, "src_blocks[2] is 8", [](Case &c) { c.in.src_blocks[2] = 8; }}});
  check_order([] { return good_case(LDR_PULL, LDR_MOVE_ENTRY_TO_BLOCKS); },
              {kind('k', "the local cache 1 is a contiguous", true, LDR_CACHE_CONTIGUOUS), kLocalSelection, kLocalAccess, dst_blocks, kRemoteAccess, remote_batch,
               kRemoteSelection, kCounts, kind('K', "the remote cache 2 is a blocks", false, LDR_CACHE_BLOCKS),
               {'S', LDR_ERR_INVALID, "too large for source entries of 16", [](Case &c) { c.remote.tensor_bytes = 16 * 8; }},
               {'d', LDR_ERR_INVALID, "4 destination blocks of 24 bytes for a source entry of 64", [](Case &c) { c.in.dst_blocks.push_back(0); }}});
}

// The whole of both entries from offset 16 on; what goes beyond either end is refused there.
void refusals_of_offsets() {
  auto good = [] {
    Case c = good_case(LDR_PULL, LDR_MOVE_ENTRY);
    c.in.local_offset_bytes = 16;
    c.in.remote_offset_bytes = 16;
    return c;
  };
  check_order(good, {{'B', LDR_ERR_INVALID, "batch index 8, but the local", [](Case &c) { c.in.local_batch_index = 8; }},
                     {'s', LDR_ERR_INVALID, "49 bytes do not fit at offset 16 of", [](Case &c) { c.in.size_bytes = 49; }},
                     {'s', LDR_ERR_INVALID, "-1 bytes do not fit at offset 64 of", [](Case &c) { c.in.local_offset_bytes = 64; }},
                     {'s', LDR_ERR_INVALID, "-1 bytes do not fit at offset 18446744073709551615 of", [](Case &c) { c.in.local_offset_bytes = UINT64_MAX; }},
                     kLocalSelection, kRemoteAccess,
                     {'b', LDR_ERR_NO_CACHE, "batch index 8, but the remote", [](Case &c) { c.in.remote_batch_index = 8; }},
                     kRemoteSelection, kCounts,
                     {'o', LDR_ERR_INVALID, "48 bytes do not fit: source entries have 64", [](Case &c) { c.in.remote_offset_bytes = 17; }},
                     {'o', LDR_ERR_INVALID, "offsets are 16 (local) and 64 (remote)", [](Case &c) { c.in.remote_offset_bytes = 64; }},
                     {'o', LDR_ERR_INVALID, "18446744073709551615 (remote)", [](Case &c) { c.in.remote_offset_bytes = UINT64_MAX; }}});
}

void extras_of_other_moves() {
  std::vector<Piece> pieces;
  for (uint32_t direction : {LDR_PULL, LDR_PUSH}) {
    for (uint32_t move : {LDR_MOVE_ENTRY, LDR_MOVE_BLOCKS, LDR_MOVE_ENTRY_TO_BLOCKS}) {
      Case local = good_case(direction, move), remote = local, block = local;
      local.in.local_offset_bytes = 1, local.in.size_bytes = 1;
      remote.in.remote_offset_bytes = 1, remote.in.size_bytes = 1;
      const bool takes_offsets = direction == LDR_PULL && move == LDR_MOVE_ENTRY;
      CHECK_CODE(run(local, &pieces), takes_offsets ? LDR_OK : LDR_ERR_INVALID);
      CHECK_CODE(run(remote, &pieces), takes_offsets ? LDR_OK : LDR_ERR_INVALID);
      block.in.dst_block_bytes = (direction == LDR_PULL ? block.local : block.remote).stride();
      CHECK_CODE(run(block, &pieces), direction == LDR_PUSH && move != LDR_MOVE_ENTRY ? LDR_OK : LDR_ERR_INVALID);
      block.local.remote_accessible = false;  // what no such move takes is told before anything else
      if (direction == LDR_PULL) CHECK_CONTAINS(run(block, &pieces).text, "dst_block_bytes");
    }
  }
}

void refusals_of_pushes() {
  const Fault dst_blocks{'d', LDR_ERR_INVALID, "dst_blocks[0] is 8", [](Case &c) { c.in.dst_blocks[0] = 8; }};
  const Fault remote_kind{'K', LDR_ERR_INVALID, "the remote cache 2 is a contiguous", [](Case &c) { c.remote.kind = LDR_CACHE_CONTIGUOUS; }};
  const Fault local_batch{'B', LDR_ERR_INVALID, "batch index 8, but the local", [](Case &c) { c.in.local_batch_index = 8; }};
  check_order([] { return good_case(LDR_PUSH, LDR_MOVE_ENTRY); },
              {kLocalAccess, kRemoteAccess, kRemoteSelection,
               {'b', LDR_ERR_INVALID, "batch index 8, but the remote", [](Case &c) { c.in.remote_batch_index = 8; }},
               kLocalSelection, kCounts, local_batch,
               {'S', LDR_ERR_INVALID, "destination entries 63", [](Case &c) { c.remote.tensor_bytes = 63 * 8; }}});
  check_order([] { return good_case(LDR_PUSH, LDR_MOVE_BLOCKS); },
              {kLocalAccess, kRemoteAccess, kRemoteSelection, remote_kind, dst_blocks, kLocalSelection, kCounts,
               {'k', LDR_ERR_INVALID, "the local cache 1 is a contiguous", [](Case &c) { c.local.kind = LDR_CACHE_CONTIGUOUS; }},
               {'i', LDR_ERR_INVALID, "0 source blocks for 3", [](Case &c) { c.in.src_blocks.clear(); }},
               {'i', LDR_ERR_INVALID, "src_blocks[0] is -1", [](Case &c) { c.in.src_blocks[0] = UINT64_MAX; }},
               {'M', LDR_ERR_INVALID, "dst_block_bytes is 32, but source blocks have 64", [](Case &c) { c.in.dst_block_bytes = 32; }},
               {'S', LDR_ERR_INVALID, "destination blocks 32", [](Case &c) { c.remote.tensor_bytes = 32 * 8; }}});
  check_order([] { return good_case(LDR_PUSH, LDR_MOVE_ENTRY_TO_BLOCKS); },
              {kLocalAccess, kRemoteAccess, kRemoteSelection, remote_kind, dst_blocks, kLocalSelection, kCounts, local_batch,
               {'M', LDR_ERR_INVALID, "dst_block_bytes is 32, but the destination blocks of cache 2 have", [](Case &c) { c.in.dst_block_bytes = 32; }},
               {'S', LDR_ERR_INVALID, "too large", [](Case &c) { c.remote.tensor_bytes = 64 * 8 * 8; }},
               {'d', LDR_ERR_INVALID, "4 destination blocks of 24", [](Case &c) { c.in.dst_blocks.push_back(0); }}});
  Case c = good_case(LDR_PUSH, LDR_MOVE_BLOCKS);  // right for the source, wrong for the destination
  c.in.dst_block_bytes = 64;
  c.remote.tensor_bytes = 32 * 8;
  std::vector<Piece> pieces;
  CHECK_CONTAINS(run(c, &pieces).text, "dst_block_bytes is 64, but the destination blocks of cache 2 have 32");
}

void placements() {
  std::vector<Piece> pieces;
  for (uint32_t move : {LDR_MOVE_ENTRY, LDR_MOVE_BLOCKS, LDR_MOVE_ENTRY_TO_BLOCKS}) {
    for (uint32_t from : {LDR_PLACEMENT_HOST, LDR_PLACEMENT_DEVICE}) {
      for (uint32_t to : {LDR_PLACEMENT_HOST, LDR_PLACEMENT_DEVICE}) {
        Case c = good_case(LDR_PULL, move);
        c.local.placement = to;
        c.remote.placement = from;
        CHECK_OK(run(c, &pieces));  // remote access, or a grant
        c.in.need_accessible = false;
        c.in.restrict_placements = true;
        ldr_status_t expected = LDR_OK;
        if (from == LDR_PLACEMENT_HOST && to == LDR_PLACEMENT_HOST) expected = LDR_ERR_UNSUPPORTED;
        if (from == LDR_PLACEMENT_HOST && to == LDR_PLACEMENT_DEVICE && move == LDR_MOVE_ENTRY_TO_BLOCKS) expected = LDR_ERR_INVALID;
        CHECK_CODE(run(c, &pieces), expected);
        c.remote.tensor_bytes = 8 * 8;  // a size fault is told first
        CHECK_CODE(run(c, &pieces), LDR_ERR_INVALID);
      }
    }
  }
}

void pushed_blocks_cache_is_one_entry() {
  Case c = good_case(LDR_PUSH, LDR_MOVE_ENTRY);
  c.remote.kind = LDR_CACHE_BLOCKS;
  std::vector<Piece> pieces;
  CHECK_OK(run(c, &pieces));
  c.in.remote_batch_index = 1;
  CHECK_CODE(run(c, &pieces), LDR_ERR_INVALID);
  c = good_case(LDR_PUSH, LDR_MOVE_ENTRY);
  c.local.kind = LDR_CACHE_BLOCKS;
  CHECK_OK(run(c, &pieces));
  c.in.local_batch_index = 1;
  CHECK_CODE(run(c, &pieces), LDR_ERR_INVALID);
}

}  // namespace

int main() {
  test("random layouts, both directions, all moves", random_layouts);
  test("adjacent pairs merge", merges);
  test("refusals of pulls, in order", refusals_of_pulls);
  test("refusals of offsets, in order", refusals_of_offsets);
  test("what other moves do not take", extras_of_other_moves);
  test("refusals of pushes, in order", refusals_of_pushes);
  test("placements in two-sided mode", placements);
  test("in a push a blocks cache is one entry", pushed_blocks_cache_is_one_entry);
}
