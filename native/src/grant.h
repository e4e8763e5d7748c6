// Grants (design section 5, first form). Source side: OFFERED -> OPEN(sink incarnation, open id) -> CLOSED, or ended for a reason; the state moves atomically with the
// version word. Sink side: what this engine has open at its peers.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cache_table.h"
#include "status.h"
#include "wire.h"

namespace ldr {

class Engine;
class Link;

class GrantTable {
 public:
  explicit GrantTable(Engine &engine);
  ~GrantTable();
  Status mint(const ldr_grant_params_t &params, ldr_grant_id_t *grant_p, uint64_t *generation_p);
  void revoke(uint64_t sequence);
  ldr_grant_stats_t stats() const;
  // The loop thread, on frames from a peer. The reply holds slot, version, the cache and the block ids from our own table.
  Status serve_open(uint64_t sink_incarnation, Reader in, Writer &out);
  Status serve_close(uint64_t sink_incarnation, Reader in);
  void on_peer_lost(uint64_t sink_incarnation);  // its open grants end, their blocks are free

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A grant that this engine has open at a peer.
struct OpenGrant {
  uint64_t cluster_id, source_incarnation, open_id;
  uint32_t slot;
  uint64_t version;
  CachePtr cache;  // the peer's
  std::vector<uint64_t> blocks;
};

class OpenGrants {
 public:
  explicit OpenGrants(Engine &engine);
  ~OpenGrants();
  Status open(const ldr_grant_open_params_t &params, uint64_t *num_blocks_p);  // blocks for one round trip
  Status close(uint64_t open_id, uint32_t outcome, int64_t timeout_ns);        // likewise
  std::shared_ptr<const OpenGrant> find(uint64_t open_id) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ldr
