// What this engine knows of a peer's caches: a snapshot of its table, fetched over the link on the first need and again on a miss (spec api-cachemanager 5.7),
// and the peer's shared mappings that are mapped here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cache_table.h"

namespace ldr {

class PeerPage;

class PeerTable {
 public:
  Status replace(Reader in);  // decodes and checks
  bool filled() const;
  CachePtr find(int64_t cache_id) const;
  CachePtr find_key(uint32_t key_kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p) const;

 private:
  mutable std::mutex mutex_;
  bool filled_ = false;
  std::map<int64_t, CachePtr> caches_;
  KeyMap keys_;
};

// One cache as it travels (table entries; lookup replies and grants, which need no keys). Decoding refuses nonsense (sizes that do not divide or overflow)
// with nullptr.
void encode_cache(const Cache &cache, bool with_keys, Writer &out);
CachePtr decode_cache(Reader &in);

class PeerMappings {
 public:
  ~PeerMappings();
  // Of a tensor of a peer's cache; nullptr when its mapping is not here, or too small. The mapping is kept while that cache lives.
  uint8_t *address(const Cache &cache, uint32_t tensor);
  Status add(uint64_t mapping_id, int fd);  // refuses unsealed descriptors
  // Unmaps what no living cache was reached through, as the page says: memory that the peer has freed. Pools stay. By the transfer that has the link, between copies.
  void drop_unused(const PeerPage &page);
  void drop();  // when the link is down and no copy runs

 private:
  struct Mapping {
    uint8_t *base;
    uint64_t size_bytes;
    bool is_pool;  // it lives as long as the peer, and the next cache in it comes soon
    std::map<uint32_t, uint64_t> users;  // cache slot -> version; one of them is kept as long as one lives
  };
  using Mappings = std::map<uint64_t, Mapping>;
  static void unmap(Mappings &mappings);
  mutable std::mutex mutex_;
  Mappings mappings_;
};

}  // namespace ldr
