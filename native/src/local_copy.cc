#include "local_copy.h"

#include <algorithm>
#include <cstring>

#include "plan.h"

namespace ldr {

namespace {

using ull = unsigned long long;

constexpr uint64_t kBatchBytes = 4u << 20;  // about a millisecond: how long an unregistration waits
constexpr uint32_t kBatchRuns = 65536;

Status check_arguments(const ldr_local_copy_params_t &p) {
  if (p.move == LDR_MOVE_BLOCKS) return Status::success();
  if (p.move != LDR_MOVE_ENTRY) return fail(LDR_ERR_INVALID, "local copy: move %u; an entry or blocks can be copied", p.move);
  if (p.size_bytes != -1 && p.size_bytes <= 0) return fail(LDR_ERR_INVALID, "local copy: size_bytes is %lld; -1 or more than 0 is allowed", (long long)p.size_bytes);
  if (p.src_blocks.count || p.dst_blocks.count) return fail(LDR_ERR_INVALID, "local copy: block lists given for the copy of one entry");
  return Status::success();
}

Status check_entry(const char *side, const Cache &cache, uint32_t batch_index) {
  if (batch_index < cache.num_entries) return Status::success();
  return fail(LDR_ERR_INVALID, "local copy: batch index %u, but the %s cache %lld has %llu entries", batch_index, side, (long long)cache.id, ull(cache.num_entries));
}

// Spec api-cachemanager 9.1.
Status entry_run(const ldr_local_copy_params_t &p, const Cache &src, const Cache &dst, std::vector<Run> *runs_p) {
  if (Status s = check_entry("source", src, p.src_batch_index); !s.ok()) return s;
  if (Status s = check_entry("destination", dst, p.dst_batch_index); !s.ok()) return s;
  const uint64_t most = std::min(src.stride(), dst.stride());
  if (p.offset_bytes >= most) {
    return fail(LDR_ERR_INVALID, "local copy: offset %llu is not inside both the source entries of %llu bytes and the destination entries of %llu", ull(p.offset_bytes),
                ull(src.stride()), ull(dst.stride()));
  }
  const uint64_t size = p.size_bytes > 0 ? uint64_t(p.size_bytes) : src.stride() - p.offset_bytes;
  if (size > most - p.offset_bytes) {
    return fail(LDR_ERR_INVALID, "local copy: %llu bytes at offset %llu do not fit: source entries have %llu bytes, destination entries %llu", ull(size),
                ull(p.offset_bytes), ull(src.stride()), ull(dst.stride()));
  }
  *runs_p = {{p.src_batch_index * src.stride() + p.offset_bytes, p.dst_batch_index * dst.stride() + p.offset_bytes, size}};
  return Status::success();
}

struct Pairs {
  std::vector<uint64_t> src, dst;
};

Status read_pairs(const ldr_block_list_t &src_blocks, const ldr_block_list_t &dst_blocks, Pairs *pairs_p) {
  if (Status s = widen_blocks("src_blocks", src_blocks, &pairs_p->src); !s.ok()) return s;
  if (Status s = widen_blocks("dst_blocks", dst_blocks, &pairs_p->dst); !s.ok()) return s;
  if (pairs_p->src.size() == pairs_p->dst.size()) return Status::success();
  return fail(LDR_ERR_INVALID, "local copy: %zu source blocks for %zu destination blocks", pairs_p->src.size(), pairs_p->dst.size());
}

// Spec api-cachemanager 9.2.
Status pair_runs(const Pairs &pairs, const Cache &src, const Cache &dst, std::vector<Run> *runs_p) {
  if (src.stride() != dst.stride()) {
    return fail(LDR_ERR_INVALID, "local copy: source blocks have %llu bytes, destination blocks %llu", ull(src.stride()), ull(dst.stride()));
  }
  if (Status s = check_blocks("src_blocks", "source", src, pairs.src); !s.ok()) return s;
  if (Status s = check_blocks("dst_blocks", "destination", dst, pairs.dst); !s.ok()) return s;
  *runs_p = block_runs(pairs.src, pairs.dst, src.stride());
  return Status::success();
}

Status find(const CacheTable &caches, const char *side, int64_t cache_id, CachePtr *cache_p) {
  *cache_p = caches.find(cache_id);
  if (*cache_p) return Status::success();
  return fail(LDR_ERR_NO_CACHE, "local copy: there is no %s cache %lld", side, (long long)cache_id);
}

// The ranges of all listed blocks must not leave the address space; what lies there is the caller's business.
Status check_raw(const char *list, const uint64_t *addresses, uint32_t num_tensors, const std::vector<uint64_t> &blocks, uint64_t block_bytes) {
  if (!addresses) return fail(LDR_ERR_INVALID, "raw copy: the addresses for %s are NULL", list);
  const uint64_t highest = *std::max_element(blocks.begin(), blocks.end());
  for (uint32_t i = 0; i < num_tensors; ++i) {
    if (addresses[i] != 0 && highest < (UINT64_MAX - addresses[i]) / block_bytes) continue;
    return fail(LDR_ERR_INVALID, "raw copy: %s reaches block %lld of %llu bytes, which tensor %u at address %#llx cannot have", list, (long long)highest,
                ull(block_bytes), i, ull(addresses[i]));
  }
  return Status::success();
}

}  // namespace

void LocalMove::move_some(uint64_t max_bytes, uint32_t max_runs) {
  while (!done() && max_bytes > 0 && max_runs-- > 0) {
    const Run &run = runs_[run_];
    const uint64_t src = src_addresses_[tensor_] + run.src_offset, dst = dst_addresses_[tensor_] + run.dst_offset;
    const uint64_t size = std::min(run.size_bytes - run_bytes_done_, max_bytes);
    // A destination that begins inside the source is filled from its end, so that no part overwrites what a later one reads.
    const bool from_end = dst > src && dst - src < run.size_bytes;
    const uint64_t at = from_end ? run.size_bytes - run_bytes_done_ - size : run_bytes_done_;
    memmove(reinterpret_cast<void *>(dst + at), reinterpret_cast<const void *>(src + at), size);
    max_bytes -= size;
    run_bytes_done_ += size;
    if (run_bytes_done_ < run.size_bytes) continue;
    run_bytes_done_ = 0;
    if (++run_ < runs_.size()) continue;
    run_ = 0;
    ++tensor_;
  }
}

Status copy_caches(const CacheTable &caches, const ldr_local_copy_params_t &p, const std::function<Status()> &go_on) {
  CachePtr src, dst;
  Pairs pairs;
  std::vector<Run> runs;
  if (Status s = check_arguments(p); !s.ok()) return s;
  if (Status s = read_pairs(p.src_blocks, p.dst_blocks, &pairs); !s.ok()) return s;
  if (Status s = find(caches, "source", p.src_cache_id, &src); !s.ok()) return s;
  if (Status s = find(caches, "destination", p.dst_cache_id, &dst); !s.ok()) return s;
  if (src->num_tensors() != dst->num_tensors()) {
    return fail(LDR_ERR_INVALID, "local copy: the source cache has %u tensors, the destination cache %u", src->num_tensors(), dst->num_tensors());
  }
  if (Status s = p.move == LDR_MOVE_ENTRY ? entry_run(p, *src, *dst, &runs) : pair_runs(pairs, *src, *dst, &runs); !s.ok()) return s;
  LocalMove move(src->addresses, dst->addresses, std::move(runs));
  while (!move.done()) {
    if (Status s = go_on(); !s.ok()) return s;
    // An unregistration waits for the guard; afterwards the cache is not found here.
    auto guard = caches.read_guard();
    if (Status s = find(caches, "source", p.src_cache_id, &src); !s.ok()) return s;
    if (Status s = find(caches, "destination", p.dst_cache_id, &dst); !s.ok()) return s;
    move.move_some(kBatchBytes, kBatchRuns);
  }
  return Status::success();
}

Status copy_raw(const ldr_raw_copy_params_t &p) {
  Pairs pairs;
  if (Status s = read_pairs(p.src_blocks, p.dst_blocks, &pairs); !s.ok()) return s;
  if (p.num_tensors == 0 || pairs.src.empty()) return Status::success();
  if (p.block_bytes == 0) return fail(LDR_ERR_INVALID, "raw copy: block_bytes is 0");
  if (Status s = check_raw("src_blocks", p.src_addresses, p.num_tensors, pairs.src, p.block_bytes); !s.ok()) return s;
  if (Status s = check_raw("dst_blocks", p.dst_addresses, p.num_tensors, pairs.dst, p.block_bytes); !s.ok()) return s;
  LocalMove move({p.src_addresses, p.src_addresses + p.num_tensors}, {p.dst_addresses, p.dst_addresses + p.num_tensors},
                 block_runs(pairs.src, pairs.dst, p.block_bytes));
  while (!move.done()) move.move_some(UINT64_MAX, UINT32_MAX);
  return Status::success();
}

}  // namespace ldr
