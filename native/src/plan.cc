#include "plan.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "run.h"

namespace ldr {

namespace {

using ull = unsigned long long;

bool moves_entry(const PlanInput &in) { return in.move != LDR_MOVE_BLOCKS; }
bool is_pull(const PlanInput &in) { return in.direction == LDR_PULL; }

uint32_t num_selected(const Cache &cache, uint32_t num_tensors) { return num_tensors == 0 ? cache.num_tensors() : num_tensors; }
uint32_t first_selected(uint32_t first_tensor, uint32_t num_tensors) { return num_tensors == 0 ? 0 : first_tensor; }

Status check_selection(const char *side, const Cache &cache, uint32_t first_tensor, uint32_t num_tensors) {
  if (num_tensors == 0 || uint64_t(first_tensor) + num_tensors <= cache.num_tensors()) return Status::success();
  return fail(LDR_ERR_INVALID, "tensors [%u, %llu) selected, but the %s cache %lld has %u", first_tensor, ull(first_tensor) + num_tensors, side,
              (long long)cache.id, cache.num_tensors());
}

Status check_kind(const char *side, const Cache &cache, uint32_t kind) {
  if (cache.kind == kind) return Status::success();
  return fail(LDR_ERR_INVALID, "the %s cache %lld is a %s cache; this move needs a %s cache there", side, (long long)cache.id,
              cache.kind == LDR_CACHE_BLOCKS ? "blocks" : "contiguous", kind == LDR_CACHE_BLOCKS ? "blocks" : "contiguous");
}

Status check_accessible(const PlanInput &in, const char *side, const Cache &cache) {
  if (!in.need_accessible || cache.remote_accessible) return Status::success();
  return fail(LDR_ERR_INVALID, "the %s cache %lld is not remote accessible; in remote-access mode both ends must be", side, (long long)cache.id);
}

Status check_counts(const PlanInput &in) {
  uint32_t local = num_selected(*in.local, in.local_num_tensors), remote = num_selected(*in.remote, in.remote_num_tensors);
  if (local == remote) return Status::success();
  return fail(LDR_ERR_INVALID, "%u local tensors selected, but %u remote ones", local, remote);
}

Status check_lists(const PlanInput &in) {
  if (!in.dst_blocks.empty() && in.src_blocks.size() == in.dst_blocks.size()) return Status::success();
  return fail(LDR_ERR_INVALID, "%zu source blocks for %zu destination blocks", in.src_blocks.size(), in.dst_blocks.size());
}

// A move of -1 from an offset beyond the local entry has 0 bytes, which fit nowhere.
uint64_t entry_bytes(const PlanInput &in) {
  return in.size_bytes > 0 ? uint64_t(in.size_bytes) : in.local->stride() - std::min(in.local->stride(), in.local_offset_bytes);
}

bool entry_fits(const PlanInput &in, const Cache &cache, uint64_t offset) {
  return offset < cache.stride() && entry_bytes(in) <= cache.stride() - offset;
}

// What would be ignored silently is refused.
Status check_extras(const PlanInput &in) {
  if ((in.local_offset_bytes || in.remote_offset_bytes) && !(is_pull(in) && in.move == LDR_MOVE_ENTRY)) {
    return fail(LDR_ERR_INVALID, "offsets %llu (local) and %llu (remote) given for a move other than the pull of an entry", ull(in.local_offset_bytes),
                ull(in.remote_offset_bytes));
  }
  if (in.dst_block_bytes && (is_pull(in) || in.move == LDR_MOVE_ENTRY)) {
    return fail(LDR_ERR_INVALID, "dst_block_bytes is %llu, but only a push into blocks takes it", ull(in.dst_block_bytes));
  }
  return Status::success();
}

// What a pusher takes for a destination block must be one (spec 8.3).
Status check_block_bytes(const PlanInput &in) {
  if (in.dst_block_bytes == 0 || is_pull(in)) return Status::success();
  const uint64_t source = in.local->stride(), target = in.remote->stride();
  if (in.move == LDR_MOVE_BLOCKS && in.dst_block_bytes != source) {
    return fail(LDR_ERR_INVALID, "dst_block_bytes is %llu, but source blocks have %llu bytes", ull(in.dst_block_bytes), ull(source));
  }
  if (in.dst_block_bytes == target) return Status::success();
  return fail(LDR_ERR_INVALID, "dst_block_bytes is %llu, but the destination blocks of cache %lld have %llu bytes", ull(in.dst_block_bytes),
              (long long)in.remote->id, ull(target));
}

// Strides against each other: the last rows of spec 5.6 and 7.
Status check_sizes(const PlanInput &in) {
  const Cache &source = is_pull(in) ? *in.remote : *in.local;
  const Cache &target = is_pull(in) ? *in.local : *in.remote;
  if (in.move == LDR_MOVE_ENTRY) {
    if (entry_fits(in, *in.local, in.local_offset_bytes) && entry_fits(in, *in.remote, in.remote_offset_bytes)) return Status::success();
    return fail(LDR_ERR_INVALID, "%llu bytes do not fit: source entries have %llu, destination entries %llu, offsets are %llu (local) and %llu (remote)",
                ull(entry_bytes(in)), ull(source.stride()), ull(target.stride()), ull(in.local_offset_bytes), ull(in.remote_offset_bytes));
  }
  if (Status s = check_block_bytes(in); !s.ok()) return s;
  if (in.move == LDR_MOVE_BLOCKS) {
    if (source.stride() == target.stride()) return Status::success();
    return fail(LDR_ERR_INVALID, "source blocks have %llu bytes, destination blocks %llu", ull(source.stride()), ull(target.stride()));
  }
  uint64_t block = target.stride(), entry = source.stride();
  if (is_pull(in) ? block > entry : block >= source.tensor_bytes) {
    return fail(LDR_ERR_INVALID, "destination blocks of %llu bytes are too large for source entries of %llu", ull(block), ull(entry));
  }
  if (in.dst_blocks.size() > (entry + block - 1) / block) {
    return fail(LDR_ERR_INVALID, "%zu destination blocks of %llu bytes for a source entry of %llu bytes", in.dst_blocks.size(), ull(block), ull(entry));
  }
  return Status::success();
}

Status check_placements(const PlanInput &in) {
  if (!in.restrict_placements || in.remote->placement != LDR_PLACEMENT_HOST) return Status::success();
  if (in.local->placement == LDR_PLACEMENT_HOST) {
    return fail(LDR_ERR_UNSUPPORTED, "a host cache cannot be pulled into a host cache in two-sided mode");
  }
  if (in.move != LDR_MOVE_ENTRY_TO_BLOCKS) return Status::success();
  return fail(LDR_ERR_INVALID, "a contiguous host cache cannot be pulled into a blocks device cache in two-sided mode");
}

Status check_pull(const PlanInput &in) {
  const Cache &remote = *in.remote;
  if (Status s = check_accessible(in, "remote", remote); !s.ok()) return s;
  if (moves_entry(in) && in.remote_batch_index >= remote.num_entries) {
    return fail(LDR_ERR_NO_CACHE, "batch index %u, but the remote cache %lld has %llu entries", in.remote_batch_index, (long long)remote.id, ull(remote.num_entries));
  }
  if (Status s = check_selection("remote", remote, in.remote_first_tensor, in.remote_num_tensors); !s.ok()) return s;
  if (Status s = check_counts(in); !s.ok()) return s;
  if (Status s = check_kind("remote", remote, moves_entry(in) ? LDR_CACHE_CONTIGUOUS : LDR_CACHE_BLOCKS); !s.ok()) return s;
  if (in.move == LDR_MOVE_BLOCKS) {
    if (Status s = check_lists(in); !s.ok()) return s;
    if (Status s = check_sizes(in); !s.ok()) return s;
    if (Status s = check_blocks("src_blocks", "remote", remote, in.src_blocks); !s.ok()) return s;
  } else if (Status s = check_sizes(in); !s.ok()) {
    return s;
  }
  return check_placements(in);
}

// In a push a blocks cache counts as one entry, its block 0 (spec 7, 8.3).
Status check_entry(const char *side, const Cache &cache, uint32_t batch_index) {
  uint64_t num_entries = cache.kind == LDR_CACHE_CONTIGUOUS ? cache.num_entries : 1;
  if (batch_index < num_entries) return Status::success();
  return fail(LDR_ERR_INVALID, "batch index %u, but the %s cache %lld has %llu entries", batch_index, side, (long long)cache.id, ull(num_entries));
}

Status check_push(const PlanInput &in) {
  const Cache &local = *in.local, &remote = *in.remote;
  if (Status s = check_accessible(in, "remote", remote); !s.ok()) return s;
  if (Status s = check_selection("remote", remote, in.remote_first_tensor, in.remote_num_tensors); !s.ok()) return s;
  if (in.move == LDR_MOVE_ENTRY) {
    if (Status s = check_entry("remote", remote, in.remote_batch_index); !s.ok()) return s;
  } else {
    if (Status s = check_kind("remote", remote, LDR_CACHE_BLOCKS); !s.ok()) return s;
    if (Status s = check_blocks("dst_blocks", "remote", remote, in.dst_blocks); !s.ok()) return s;
  }
  if (Status s = check_selection("local", local, in.local_first_tensor, in.local_num_tensors); !s.ok()) return s;
  if (Status s = check_counts(in); !s.ok()) return s;
  if (moves_entry(in)) {
    if (Status s = check_entry("local", local, in.local_batch_index); !s.ok()) return s;
  } else {
    if (Status s = check_kind("local", local, LDR_CACHE_BLOCKS); !s.ok()) return s;
    if (Status s = check_lists(in); !s.ok()) return s;
    if (Status s = check_blocks("src_blocks", "local", local, in.src_blocks); !s.ok()) return s;
  }
  return check_sizes(in);
}

std::vector<Run> make_runs(const PlanInput &in) {
  const Cache &source = is_pull(in) ? *in.remote : *in.local;
  const Cache &target = is_pull(in) ? *in.local : *in.remote;
  const uint64_t block = target.stride(), entry = source.stride();
  if (in.move == LDR_MOVE_BLOCKS) return block_runs(in.src_blocks, in.dst_blocks, block);
  const uint64_t source_at = (is_pull(in) ? in.remote_batch_index : in.local_batch_index) * entry;
  if (in.move == LDR_MOVE_ENTRY) {
    const uint64_t target_at = (is_pull(in) ? in.local_batch_index : in.remote_batch_index) * block;
    // Only pulls have offsets.
    return {{source_at + in.remote_offset_bytes, target_at + in.local_offset_bytes, entry_bytes(in)}};
  }
  std::vector<Run> runs;
  runs.reserve(in.dst_blocks.size());
  for (uint64_t k = 0; k < in.dst_blocks.size(); ++k) {
    append_run(runs, {source_at + k * block, in.dst_blocks[k] * block, std::min(block, entry - k * block)});
  }
  return runs;
}

}  // namespace

uint64_t sum_bytes(const std::vector<Piece> &pieces) {
  uint64_t sum = 0;
  for (const Piece &piece : pieces) sum += piece.size_bytes;
  return sum;
}

Status widen_blocks(const char *name, const ldr_block_list_t &list, std::vector<uint64_t> *blocks_p) {
  if (list.count == 0) return Status::success();
  if (!list.indices) return fail(LDR_ERR_INVALID, "%s: count is %llu, but indices is NULL", name, ull(list.count));
  if (list.item_bytes != 4 && list.item_bytes != 8) return fail(LDR_ERR_INVALID, "%s: item_bytes is %u, not 4 or 8", name, list.item_bytes);
  blocks_p->resize(list.count);
  if (list.item_bytes == 4) {
    const int32_t *from = static_cast<const int32_t *>(list.indices);
    for (uint64_t k = 0; k < list.count; ++k) (*blocks_p)[k] = uint64_t(int64_t(from[k]));
  } else {
    memcpy(blocks_p->data(), list.indices, list.count * 8);
  }
  return Status::success();
}

Status check_blocks(const char *list, const char *side, const Cache &cache, const std::vector<uint64_t> &blocks) {
  for (size_t k = 0; k < blocks.size(); ++k) {
    if (blocks[k] < cache.num_entries) continue;
    return fail(LDR_ERR_INVALID, "%s[%zu] is %lld, but the %s cache %lld has %llu blocks", list, k, (long long)blocks[k], side, (long long)cache.id,
                ull(cache.num_entries));
  }
  return Status::success();
}

Status check_before_link(const PlanInput &in) {
  if (Status s = check_extras(in); !s.ok()) return s;
  if (!is_pull(in)) return Status::success();
  const Cache &local = *in.local;
  if (in.move == LDR_MOVE_ENTRY && in.local_batch_index >= local.num_entries) {
    return fail(LDR_ERR_INVALID, "batch index %u, but the local cache %lld has %llu entries", in.local_batch_index, (long long)local.id, ull(local.num_entries));
  }
  if (Status s = check_kind("local", local, in.move == LDR_MOVE_ENTRY ? LDR_CACHE_CONTIGUOUS : LDR_CACHE_BLOCKS); !s.ok()) return s;
  if (in.move == LDR_MOVE_ENTRY && !entry_fits(in, local, in.local_offset_bytes)) {
    return fail(LDR_ERR_INVALID, "%" PRId64 " bytes do not fit at offset %llu of an entry of the local cache %lld, which has %llu", in.size_bytes,
                ull(in.local_offset_bytes), (long long)local.id, ull(local.stride()));
  }
  return check_selection("local", local, in.local_first_tensor, in.local_num_tensors);
}

Status check_before_remote(const PlanInput &in) {
  if (Status s = check_accessible(in, "local", *in.local); !s.ok()) return s;
  if (!is_pull(in) || in.move == LDR_MOVE_ENTRY) return Status::success();
  return check_blocks("dst_blocks", "local", *in.local, in.dst_blocks);
}

Status plan_pieces(const PlanInput &in, std::vector<Piece> *pieces_p) {
  if (Status s = is_pull(in) ? check_pull(in) : check_push(in); !s.ok()) return s;
  std::vector<Run> runs = make_runs(in);
  uint32_t num_tensors = num_selected(*in.local, in.local_num_tensors);
  uint32_t local_first = first_selected(in.local_first_tensor, in.local_num_tensors);
  uint32_t remote_first = first_selected(in.remote_first_tensor, in.remote_num_tensors);
  pieces_p->clear();
  pieces_p->reserve(runs.size() * num_tensors);
  for (uint32_t i = 0; i < num_tensors; ++i) {
    uint64_t base = in.local->addresses[local_first + i];
    for (const Run &run : runs) {
      const uint64_t local_offset = is_pull(in) ? run.dst_offset : run.src_offset, remote_offset = is_pull(in) ? run.src_offset : run.dst_offset;
      pieces_p->push_back({base + local_offset, remote_offset, run.size_bytes, remote_first + i});
    }
  }
  return Status::success();
}

}  // namespace ldr
