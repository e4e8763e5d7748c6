// Ranges that a copy moves, the same in every tensor: how adjacent pairs merge, for transfers and local copies alike.
#pragma once

#include <cstdint>
#include <vector>

namespace ldr {

struct Run {
  uint64_t src_offset, dst_offset, size_bytes;  // offsets inside a tensor
};

// One that continues the last on both sides makes it longer.
inline void append_run(std::vector<Run> &runs, const Run &next) {
  if (!runs.empty()) {
    Run &last = runs.back();
    if (last.src_offset + last.size_bytes == next.src_offset && last.dst_offset + last.size_bytes == next.dst_offset) {
      last.size_bytes += next.size_bytes;
      return;
    }
  }
  runs.push_back(next);
}

// src_blocks[k] to dst_blocks[k], all of block_bytes; the lists have equal length.
inline std::vector<Run> block_runs(const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks, uint64_t block_bytes) {
  std::vector<Run> runs;
  runs.reserve(dst_blocks.size());
  for (size_t k = 0; k < dst_blocks.size(); ++k) append_run(runs, {src_blocks[k] * block_bytes, dst_blocks[k] * block_bytes, block_bytes});
  return runs;
}

}  // namespace ldr
