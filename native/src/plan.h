// Block lists become byte ranges: one planner for pull, push, entry, blocks and entry-to-blocks (spec api-cachemanager 5.6, 7). Pure functions, no locks.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_table.h"

namespace ldr {

// size_bytes at local memory <-> at offset remote_offset of the remote cache's tensor remote_tensor.
struct Piece {
  uint64_t local_address;
  uint64_t remote_offset;
  uint64_t size_bytes;
  uint32_t remote_tensor;
};
uint64_t sum_bytes(const std::vector<Piece> &pieces);

struct PlanInput {
  uint32_t direction = LDR_PULL;  // LDR_PULL: remote is the source
  uint32_t move = LDR_MOVE_ENTRY;
  bool need_accessible = false;     // remote-access mode: both ends (spec 5.7)
  bool restrict_placements = false; // two-sided mode (spec 6); a grant is ours, so not there
  const Cache *local = nullptr;
  const Cache *remote = nullptr;
  uint32_t local_batch_index = 0, remote_batch_index = 0;
  uint32_t local_first_tensor = 0, local_num_tensors = 0, remote_first_tensor = 0, remote_num_tensors = 0;  // a count of 0: all
  int64_t size_bytes = -1;                                  // MOVE_ENTRY; -1: the local entry from local_offset_bytes on
  uint64_t local_offset_bytes = 0, remote_offset_bytes = 0;  // inside the entry on each side; pulls of MOVE_ENTRY only (spec api-kvcachemanager 4)
  uint64_t dst_block_bytes = 0;                              // what a pusher takes for a destination block; 0: not said (spec api-cachemanager 8.3)
  std::vector<uint64_t> src_blocks, dst_blocks;  // from widen_blocks()
};

// A caller's list, copied. Negative values become huge ones that no range check lets pass.
Status widen_blocks(const char *name, const ldr_block_list_t &list, std::vector<uint64_t> *blocks_p);
// One block list against a cache: side says whose. Also for local copies.
Status check_blocks(const char *list, const char *side, const Cache &cache, const std::vector<uint64_t> &blocks);
// The rows of spec 5.4 that come before the link is looked at; of a push only what no move of its kind takes (spec 7).
Status check_before_link(const PlanInput &input);
// The rows between the link and the remote cache.
Status check_before_remote(const PlanInput &input);
// Checks the rows of spec 5.4 / 5.6 / 7 that need both caches, then fills pieces: ordered by tensor, adjacent pairs merged.
Status plan_pieces(const PlanInput &input, std::vector<Piece> *pieces_p);

}  // namespace ldr
