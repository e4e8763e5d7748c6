// The bytes that a fill writes, word for word, and that a hash sees every byte and where it stands, and nothing behind the sequence.
#include <cstring>
#include <set>
#include <vector>

#include "check.h"

using namespace ldr_test;

namespace {

constexpr uint64_t kTokenBytes = 24, kBlockTokens = 4, kBlocks = 6, kTensors = 3;
constexpr uint8_t kPoison = 0xee;

uint64_t mix64(uint64_t x) {  // written anew: an oracle does not share code
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct Memory {
  std::vector<std::vector<uint8_t>> tensors{kTensors, std::vector<uint8_t>(kBlocks * kBlockTokens * kTokenBytes, kPoison)};
  std::vector<uint64_t> addresses;
  std::vector<int64_t> table;
  ldr_sequence_t sequence{};

  explicit Memory(std::vector<int64_t> blocks) : table(std::move(blocks)) {
    for (auto &tensor : tensors) addresses.push_back(reinterpret_cast<uint64_t>(tensor.data()));
    sequence = {sizeof(sequence), kTensors, addresses.data(), kBlocks, kBlockTokens * kTokenBytes, kTokenBytes, {table.data(), table.size(), 8, 0}};
  }
  uint8_t *at(uint32_t tensor, uint64_t position) {
    return &tensors[tensor][(uint64_t(table[position / kBlockTokens]) * kBlockTokens + position % kBlockTokens) * kTokenBytes];
  }
  uint64_t hash(uint64_t num_positions, uint64_t seed = 0) {
    uint64_t hash = 0;
    CHECK_C(ldr_blocks_hash(&sequence, num_positions, seed, &hash), LDR_OK);
    return hash;
  }
  void fill(uint64_t first, const std::vector<uint64_t> &seeds, uint32_t first_tensor = 0, uint32_t num_tensors = kTensors) {
    CHECK_C(ldr_blocks_fill(&sequence, first_tensor, num_tensors, first, seeds.data(), seeds.size()), LDR_OK);
  }
};

const std::vector<uint64_t> kSeeds = {11, 12, 13, 14, 15, 16, 17, 18, 19, 20};  // two blocks and a half

void fill_writes_what_the_header_says() {
  Memory memory({4, 1, 3});
  memory.fill(0, {kSeeds.begin(), kSeeds.begin() + 7});
  memory.fill(7, {kSeeds.begin() + 7, kSeeds.end()}, 0, 1);
  memory.fill(7, {kSeeds.begin() + 7, kSeeds.end()}, 1, 2);
  std::vector<std::vector<uint8_t>> expected{kTensors, std::vector<uint8_t>(kBlocks * kBlockTokens * kTokenBytes, kPoison)};
  for (uint64_t t = 0; t < kTensors; ++t)
    for (uint64_t p = 0; p < kSeeds.size(); ++p)
      for (uint64_t w = 0; w < kTokenBytes / 8; ++w) {
        uint64_t word = mix64(kSeeds[p] + (t * (kTokenBytes / 8) + w) * 0x9e3779b97f4a7c15);
        memcpy(&expected[t][(uint64_t(memory.table[p / kBlockTokens]) * kBlockTokens + p % kBlockTokens) * kTokenBytes + w * 8], &word, 8);
      }
  CHECK(memory.tensors == expected);
}

void hash_follows_the_table() {
  Memory one({4, 1, 3}), two({0, 5, 2});
  one.fill(0, kSeeds);
  two.fill(0, kSeeds);
  CHECK_EQ(one.hash(10), two.hash(10));
  std::vector<int32_t> narrow = {0, 5, 2};
  two.sequence.blocks = {narrow.data(), 3, 4, 0};
  CHECK_EQ(one.hash(10), two.hash(10));
  std::set<uint64_t> hashes;  // all lengths and seeds differ
  for (uint64_t n = 0; n <= 10; ++n)
    for (uint64_t seed = 0; seed < 3; ++seed) hashes.insert(one.hash(n, seed));
  CHECK_EQ(hashes.size(), size_t(33));
}

void hash_sees_every_byte_of_the_sequence_only() {
  Memory memory({4, 1, 3});
  memory.fill(0, kSeeds);
  uint64_t hash = memory.hash(10);
  std::set<uint64_t> hashes = {hash};
  size_t inside = 0;
  for (uint32_t t = 0; t < kTensors; ++t)
    for (uint64_t p = 0; p < 10; ++p)
      for (uint64_t byte = 0; byte < kTokenBytes; ++byte, ++inside) {
        uint8_t *at = memory.at(t, p) + byte;
        *at ^= 1;
        hashes.insert(memory.hash(10));
        *at ^= 1;
      }
  CHECK_EQ(hashes.size(), inside + 1);
  for (uint32_t t = 0; t < kTensors; ++t) {
    memset(memory.at(t, 10), 0, 2 * kTokenBytes);
    for (uint64_t block : {0, 2, 5}) memset(&memory.tensors[t][block * kBlockTokens * kTokenBytes], 0x55, kBlockTokens * kTokenBytes);
  }
  CHECK_EQ(memory.hash(10), hash);
}

void hash_sees_order() {
  Memory memory({4, 1, 3});
  memory.fill(0, kSeeds);
  std::set<uint64_t> hashes = {memory.hash(8)};
  std::swap(memory.table[0], memory.table[1]);
  hashes.insert(memory.hash(8));
  std::swap(memory.table[0], memory.table[1]);
  std::swap(memory.addresses[0], memory.addresses[1]);
  hashes.insert(memory.hash(8));
  std::swap(memory.addresses[0], memory.addresses[1]);
  std::swap_ranges(memory.at(2, 1), memory.at(2, 1) + kTokenBytes, memory.at(2, 2));
  hashes.insert(memory.hash(8));
  std::swap_ranges(memory.at(2, 1), memory.at(2, 1) + kTokenBytes, memory.at(2, 2));
  std::swap_ranges(memory.at(0, 5), memory.at(0, 5) + kTokenBytes, memory.at(1, 5));  // one position's K and V
  hashes.insert(memory.hash(8));
  CHECK_EQ(hashes.size(), size_t(5));
}

void wrong_arguments_touch_nothing() {
  Memory memory({4, 1, 3});
  auto before = memory.tensors;
  uint64_t hash = 77;
  auto refused = [&](const char *part) {
    CHECK_C(ldr_blocks_hash(&memory.sequence, 10, 0, &hash), LDR_ERR_INVALID);
    CHECK_CONTAINS(ldr_last_error(), part);
    CHECK_C(ldr_blocks_fill(&memory.sequence, 0, kTensors, 0, kSeeds.data(), 10), LDR_ERR_INVALID);
    CHECK_CONTAINS(ldr_last_error(), part);
  };
  auto with = [&](auto change, const char *part) {
    ldr_sequence_t good = memory.sequence;
    change(memory.sequence);
    refused(part);
    memory.sequence = good;
  };
  with([](ldr_sequence_t &s) { s.struct_size = 0; }, "struct_size");
  with([](ldr_sequence_t &s) { s.addresses = nullptr; }, "3 tensors at");
  with([](ldr_sequence_t &s) { s.num_tensors = 0; }, "0 tensors");
  with([](ldr_sequence_t &s) { s.token_bytes = 0; }, "token_bytes is 0");
  with([](ldr_sequence_t &s) { s.token_bytes = 12; }, "token_bytes is 12");
  with([](ldr_sequence_t &s) { s.block_bytes = 0; }, "block_bytes is 0");
  with([](ldr_sequence_t &s) { s.block_bytes = 100; }, "block_bytes is 100");
  with([](ldr_sequence_t &s) { s.blocks.count = 2; }, "10 positions need 3 blocks, not 2");
  with([](ldr_sequence_t &s) { s.blocks.indices = nullptr; }, "indices is NULL");
  with([](ldr_sequence_t &s) { s.blocks.item_bytes = 2; }, "item_bytes is 2");
  with([](ldr_sequence_t &s) { s.num_blocks = 4; }, "block 4 of a tensor with 4 blocks");
  memory.table[2] = -1;
  refused("block -1 of a tensor");
  memory.table[2] = 3;
  memory.addresses[1] += 4;
  refused("tensor 1 is at");
  memory.addresses[1] = 0;
  refused("tensor 1 is at 0");
  memory.addresses[1] = reinterpret_cast<uint64_t>(memory.tensors[1].data());

  CHECK_C(ldr_blocks_hash(nullptr, 1, 0, &hash), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_hash(&memory.sequence, 1, 0, nullptr), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_hash(&memory.sequence, UINT64_MAX, 0, &hash), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_fill(&memory.sequence, 0, 1, 0, nullptr, 1), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_fill(&memory.sequence, 2, 2, 0, kSeeds.data(), 1), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_fill(&memory.sequence, 4, 0, 0, kSeeds.data(), 1), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_fill(&memory.sequence, 0, 1, UINT64_MAX, kSeeds.data(), 2), LDR_ERR_INVALID);
  CHECK_C(ldr_blocks_fill(&memory.sequence, 0, 1, 11, kSeeds.data(), 2), LDR_ERR_INVALID);
  CHECK_EQ(hash, uint64_t(77));
  CHECK(memory.tensors == before);
}

}  // namespace

int main() {
  test("fill writes what the header says", fill_writes_what_the_header_says);
  test("a hash follows the block table", hash_follows_the_table);
  test("a hash sees every byte of the sequence, and only those", hash_sees_every_byte_of_the_sequence_only);
  test("a hash sees the order of blocks, tensors and positions", hash_sees_order);
  test("wrong arguments touch nothing", wrong_arguments_touch_nothing);
}
