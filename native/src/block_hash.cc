// KV bytes out of nothing and one number over all of them: what stands in for a model where only the bytes matter.
#include "barrier.h"

namespace ldr {
namespace {

using ull = unsigned long long;

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
constexpr uint64_t kOddFactor = 0xd6e8feb86659fd93;
constexpr uint64_t kLanes = 8;  // enough to hide the multiplier's latency: below that the pass is slower than memory

uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Each step is a bijection of the lane for a given word and of the word for a given lane, so a difference never gets lost.
struct Lanes {
  uint64_t lane[kLanes];

  explicit Lanes(uint64_t seed) {
    for (uint64_t k = 0; k < kLanes; ++k) lane[k] = mix64(seed + (k + 1) * kGolden);
  }
  static uint64_t step(uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * kOddFactor;
    return lane << 29 | lane >> 35;
  }
  void add(const uint64_t *words, uint64_t count) {
    uint64_t local[kLanes];
    memcpy(local, lane, sizeof(local));
    uint64_t at = 0;
    for (; at + kLanes <= count; at += kLanes)
      for (uint64_t k = 0; k < kLanes; ++k) local[k] = step(local[k], words[at + k]);
    for (uint64_t k = 0; at < count; ++k, ++at) local[k] = step(local[k], words[at]);
    memcpy(lane, local, sizeof(local));
  }
  uint64_t finish(uint64_t hash) const {
    for (uint64_t value : lane) hash = mix64((hash ^ value) + kGolden);
    return hash;
  }
};

uint64_t block_at(const ldr_block_list_t &list, uint64_t index) {
  if (list.item_bytes == 4) return uint64_t(int64_t(static_cast<const int32_t *>(list.indices)[index]));
  return static_cast<const uint64_t *>(list.indices)[index];
}

Status check_shape(const ldr_sequence_t &s) {
  if (!s.num_tensors || !s.addresses) return fail(LDR_ERR_INVALID, "%u tensors at %p", s.num_tensors, static_cast<const void *>(s.addresses));
  if (!s.token_bytes || s.token_bytes % 8) return fail(LDR_ERR_INVALID, "token_bytes is %llu, not a multiple of 8", ull(s.token_bytes));
  if (!s.block_bytes || s.block_bytes % s.token_bytes)
    return fail(LDR_ERR_INVALID, "block_bytes is %llu, not a multiple of the token's %llu", ull(s.block_bytes), ull(s.token_bytes));
  for (uint32_t t = 0; t < s.num_tensors; ++t)
    if (!s.addresses[t] || s.addresses[t] % 8) return fail(LDR_ERR_INVALID, "tensor %u is at %#llx, not a multiple of 8", t, ull(s.addresses[t]));
  return Status::success();
}

// Whether positions [0, end) lie in blocks that exist.
Status check_blocks(const ldr_sequence_t &s, uint64_t end) {
  const ldr_block_list_t &list = s.blocks;
  if (list.count && !list.indices) return fail(LDR_ERR_INVALID, "blocks: count is %llu, but indices is NULL", ull(list.count));
  if (list.count && list.item_bytes != 4 && list.item_bytes != 8) return fail(LDR_ERR_INVALID, "blocks: item_bytes is %u, not 4 or 8", list.item_bytes);
  uint64_t per_block = s.block_bytes / s.token_bytes, needed = end / per_block + (end % per_block != 0);
  if (list.count < needed) return fail(LDR_ERR_INVALID, "%llu positions need %llu blocks, not %llu", ull(end), ull(needed), ull(list.count));
  for (uint64_t k = 0; k < needed; ++k) {
    uint64_t block = block_at(list, k);
    if (block >= s.num_blocks) return fail(LDR_ERR_INVALID, "block %lld of a tensor with %llu blocks", (long long)block, ull(s.num_blocks));
  }
  return Status::success();
}

// f(words, count, position) for every stretch of positions [begin, end) of a tensor that is contiguous in memory, in order.
template <class F> void for_each_run(const ldr_sequence_t &s, uint32_t tensor, uint64_t begin, uint64_t end, F f) {
  uint64_t per_block = s.block_bytes / s.token_bytes;
  for (uint64_t position = begin; position < end;) {
    uint64_t inside = position % per_block, count = std::min(per_block - inside, end - position);
    uint64_t address = s.addresses[tensor] + block_at(s.blocks, position / per_block) * s.block_bytes + inside * s.token_bytes;
    f(reinterpret_cast<uint64_t *>(address), count * s.token_bytes / 8, position);
    position += count;
  }
}

void fill_position(uint64_t *words, uint64_t count, uint64_t start) {
  for (uint64_t w = 0; w < count; ++w) words[w] = mix64(start + w * kGolden);
}

}  // namespace
}  // namespace ldr

using namespace ldr;

ldr_status_t ldr_blocks_hash(const ldr_sequence_t *sequence, uint64_t num_positions, uint64_t seed, uint64_t *hash_p) {
  return guarded([&]() -> Status {
    ldr_sequence_t s;
    if (Status status = read_params(sequence, &s); !status.ok()) return status;
    if (!hash_p) return fail(LDR_ERR_INVALID, "hash_p is NULL");
    if (Status status = check_shape(s); !status.ok()) return status;
    if (Status status = check_blocks(s, num_positions); !status.ok()) return status;
    Lanes lanes(seed);
    for (uint32_t t = 0; t < s.num_tensors; ++t)
      for_each_run(s, t, 0, num_positions, [&](const uint64_t *words, uint64_t count, uint64_t) { lanes.add(words, count); });
    *hash_p = lanes.finish(mix64(num_positions + kGolden));
    return Status::success();
  });
}

ldr_status_t ldr_blocks_fill(const ldr_sequence_t *sequence, uint32_t first_tensor, uint32_t num_tensors, uint64_t first_position,
                             const uint64_t *position_seeds, uint64_t num_positions) {
  return guarded([&]() -> Status {
    ldr_sequence_t s;
    if (Status status = read_params(sequence, &s); !status.ok()) return status;
    if (!position_seeds && num_positions) return fail(LDR_ERR_INVALID, "position_seeds is NULL");
    if (Status status = check_shape(s); !status.ok()) return status;
    if (first_tensor > s.num_tensors || num_tensors > s.num_tensors - first_tensor)
      return fail(LDR_ERR_INVALID, "tensors %u and %u more, of %u", first_tensor, num_tensors, s.num_tensors);
    uint64_t end = first_position + num_positions;
    if (end < first_position) return fail(LDR_ERR_INVALID, "position %llu and %llu more", ull(first_position), ull(num_positions));
    if (Status status = check_blocks(s, end); !status.ok()) return status;
    uint64_t token_words = s.token_bytes / 8;
    for (uint32_t t = first_tensor; t < first_tensor + num_tensors; ++t)
      for_each_run(s, t, first_position, end, [&](uint64_t *words, uint64_t count, uint64_t position) {
        for (uint64_t at = 0; at < count; at += token_words, ++position)
          fill_position(words + at, token_words, position_seeds[position - first_position] + t * token_words * kGolden);
      });
    return Status::success();
  });
}
