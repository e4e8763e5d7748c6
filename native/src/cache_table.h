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
#include "pool.h"
#include "status.h"
#include "wire.h"

namespace ldr {

// One cache; immutable once in the table.
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
  PoolMemory memory;  // of an allocated cache: its own, for as long as anybody holds this; nullptr when it is registered, or a peer's
  bool in_pool = false;  // allocated; also known of a peer's

  bool is_allocated() const { return memory != nullptr; }
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

Status check_shape(const ldr_cache_params_t &params);  // what can be said without addresses and keys

// What keeps an allocated cache (spec api-cachemanager 2.4): its id, of a contiguous one also its keys. Without them it is retired: nobody finds it any more.
// While readers have it pinned it keeps slot, version and memory; then its version word is advanced, whoever still touches it is waited for, and its memory goes.
// A registered cache is there until remove().
class CacheTable {
 public:
  CacheTable(Page &page, bool remote_access);
  ~CacheTable();
  // With memory it is an allocation: bound keys are an error (KEY_BOUND). Without, it is a registration and they are ignored or replaced (spec 2.3).
  Status add(const ldr_cache_params_t &params, int64_t *cache_id_p, PoolMemory memory = nullptr);
  // These three wait for whoever holds a ReadGuard when a cache goes away with them: not for the loop thread.
  void remove(int64_t cache_id);     // with its keys
  Status drop_id(int64_t cache_id);  // of an allocated cache; NO_CACHE when the id is unknown
  void unbind(const ldr_cache_key_t &key);  // of an allocated cache

  CachePtr find(int64_t cache_id) const;      // for us: by a living id
  CachePtr find_shown(int64_t cache_id) const;  // for peers: while an id or a key keeps it
  CachePtr find_key(uint32_t key_kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p) const;
  // One of whose tensors holds [address, address + size); that tensor, too.
  CachePtr find_address(uint64_t address, uint64_t size_bytes, uint32_t *tensor_p) const;
  CachePtr find_slot(uint32_t slot, uint64_t version) const;  // also a retired one
  void encode(Writer &out) const;  // the whole table, for PeerTable
  uint32_t size() const;           // with those that only readers keep

  // Any thread, without waiting. False: it is not allocated, or was retired since it was found.
  bool pin(const Cache &cache);
  // The request key that a read of this entry consumes: the one bound to it. False: none is.
  static bool request_key(const Cache &cache, uint32_t batch_index, KeyName *name_p);
  // A pinned cache's tensors were read under this key (a count of 0: all). The key goes when none is left unread.
  void consume(int64_t cache_id, const KeyName &key, uint32_t first_tensor, uint32_t num_tensors);
  // nullptr, or the cache that went away with its last pin: give it to let_go(), which waits as remove() does, so that its memory is not used again too early.
  [[nodiscard]] CachePtr unpin(int64_t cache_id);
  void let_go(CachePtr gone);

  // Held around each sendmsg / recvmsg into a cache's memory on behalf of a peer, never across a wait: while it is held no cache goes away.
  std::shared_lock<std::shared_mutex> read_guard() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
