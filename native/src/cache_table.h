// The caches of this engine and their keys; what a peer may ask for (spec api-cachemanager 2).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "page.h"
#include "status.h"
#include "wire.h"

namespace ldr {

// One registered cache; immutable once in the table.
struct Cache {
  int64_t id;
  uint32_t slot;     // version word in the page
  uint64_t version;  // its value while this cache lives
  uint32_t kind, placement;
  bool remote_accessible;
  uint64_t num_entries, tensor_bytes;
  std::vector<uint64_t> addresses;
  // Where the shm path finds each tensor: mapping id and offset; id 0 = not in a shared mapping.
  std::vector<uint64_t> mapping_ids, mapping_offsets;
  std::vector<ldr_cache_key_t> keys;  // the ones that are bound to it

  uint64_t stride() const { return tensor_bytes / num_entries; }
  uint32_t num_tensors() const { return uint32_t(addresses.size()); }
};
using CachePtr = std::shared_ptr<const Cache>;

constexpr uint32_t kMaxTensors = 65536;  // of one cache: its encoding fits into a frame
constexpr uint64_t kNoKeyId = UINT64_MAX;  // a key with this id is a placeholder and binds nothing; also the id of every BLOCKS key

// Prefix keys have a table of their own; REQUEST and BLOCKS keys share one (spec api-cachemanager 2.2).
using KeyName = std::tuple<bool, uint64_t, uint64_t>;  // is prefix, id, model id
KeyName key_name(uint32_t key_kind, uint64_t id, uint64_t model_id);
using KeyMap = std::map<KeyName, std::pair<int64_t, uint32_t>>;  // cache id, batch index

class CacheTable {
 public:
  CacheTable(Page &page, bool remote_access);
  ~CacheTable();
  Status add(const ldr_cache_params_t &params, int64_t *cache_id_p);
  void remove(int64_t cache_id);  // advances the version word, then waits for whoever holds a ReadGuard
  CachePtr find(int64_t cache_id) const;
  CachePtr find_key(uint32_t key_kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p) const;
  CachePtr find_slot(uint32_t slot, uint64_t version) const;
  void encode(Writer &out) const;  // the whole table, for PeerTable
  uint32_t size() const;

  // Held around each sendmsg / recvmsg into a cache's memory on behalf of a peer, never across a wait: while it is held no cache goes away.
  std::shared_lock<std::shared_mutex> read_guard() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
