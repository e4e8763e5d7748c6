// Copies inside this process (spec api-cachemanager 9): between caches of the table, or between raw addresses. The calling thread moves the bytes.
#pragma once

#include <functional>

#include "cache_table.h"
#include "run.h"

namespace ldr {

// One copy of the runs in every tensor, done a bounded part at a time. Source and destination of a run may overlap.
class LocalMove {
 public:
  LocalMove(std::vector<uint64_t> src_addresses, std::vector<uint64_t> dst_addresses, std::vector<Run> runs)
      : src_addresses_(std::move(src_addresses)), dst_addresses_(std::move(dst_addresses)), runs_(std::move(runs)) {}

  bool done() const { return runs_.empty() || tensor_ == src_addresses_.size(); }
  void move_some(uint64_t max_bytes, uint32_t max_runs);

 private:
  const std::vector<uint64_t> src_addresses_, dst_addresses_;
  const std::vector<Run> runs_;
  size_t tensor_ = 0, run_ = 0;
  uint64_t run_bytes_done_ = 0;
};

// As ldr_cache_copy. go_on is asked before each batch, without the table's guard; what it says when it does not succeed ends the copy.
Status copy_caches(const CacheTable &caches, const ldr_local_copy_params_t &params, const std::function<Status()> &go_on);
// As ldr_raw_copy.
Status copy_raw(const ldr_raw_copy_params_t &params);

}  // namespace ldr
