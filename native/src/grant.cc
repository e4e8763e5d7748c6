#include "grant.h"

#include <deque>
#include <map>
#include <unordered_map>

#include "auth.h"
#include "engine.h"
#include "peer_table.h"
#include "plan.h"

namespace ldr {
namespace {

constexpr size_t kKeptEnds = 65536;  // afterwards an ended grant is just CONSUMED

struct Grant {
  uint64_t nonce, generation;
  uint32_t slot;
  uint64_t version;
  CachePtr cache;
  std::vector<uint64_t> blocks;
  uint64_t num_tokens, layout_digest;
  uint64_t sink_incarnation = 0, open_id = 0;  // open id 0: OFFERED, else OPEN
};

// How a grant ended: OK (closed), CANCELLED (by the sink), REVOKED, EXPIRED (its sink was lost).
struct End {
  uint64_t sequence, nonce, sink_incarnation, open_id;
  ldr_status_t how;
};

Status read_blocks(const ldr_block_list_t &list, uint64_t num_entries, std::vector<uint64_t> *blocks_p) {
  if (list.count == 0) return fail(LDR_ERR_INVALID, "mint grant: give at least one block");
  if (list.count > kMaxFrameBytes / 8) return fail(LDR_ERR_INVALID, "mint grant: %llu blocks are too many", (unsigned long long)list.count);
  if (Status s = widen_blocks("mint grant", list, blocks_p); !s.ok()) return s;
  for (size_t i = 0; i < blocks_p->size(); ++i) {
    const uint64_t block = (*blocks_p)[i];
    if (block < num_entries) continue;
    return fail(LDR_ERR_INVALID, "mint grant: block %lld at position %zu; the cache has %llu", (long long)block, i, (unsigned long long)num_entries);
  }
  return Status::success();
}

}  // namespace

struct GrantTable::Impl {
  explicit Impl(Engine &engine_in) : engine(engine_in) {}

  Engine &engine;
  mutable std::mutex mutex;  // a grant's state and its version word change under it, together
  std::map<uint64_t, Grant> live;  // by sequence
  std::unordered_map<uint64_t, End> ended;
  std::deque<uint64_t> ended_order;
  std::vector<uint32_t> free_slots;
  uint32_t num_slots = 0;
  uint64_t last_sequence = 0;
  ldr_grant_stats_t counts{};

  std::map<uint64_t, Grant>::iterator end(std::map<uint64_t, Grant>::iterator it, ldr_status_t how) {
    const auto &[sequence, grant] = *it;
    engine.page->advance_grant(grant.slot);  // before anybody may use the blocks again
    free_slots.push_back(grant.slot);
    ended[sequence] = {sequence, grant.nonce, grant.sink_incarnation, grant.open_id, how};
    ended_order.push_back(sequence);
    if (ended_order.size() > kKeptEnds) {
      ended.erase(ended_order.front());
      ended_order.pop_front();
    }
    switch (how) {
      case LDR_OK: ++counts.closed; break;
      case LDR_ERR_REVOKED: ++counts.reclaimed_revoked; break;
      case LDR_ERR_CANCELLED: ++counts.reclaimed_cancelled; break;
      default: ++counts.reclaimed_peer_lost; break;
    }
    ldr_event_t event{};
    event.id = sequence;
    event.status = how;
    event.kind = LDR_EVENT_GRANT_ENDED;
    auto next = live.erase(it);
    engine.events.push(event);
    return next;
  }

  Status refuse(const Status &why) {
    switch (why.code) {
      case LDR_ERR_STALE: ++counts.refused_stale; break;
      case LDR_ERR_CONSUMED: ++counts.refused_consumed; break;
      case LDR_ERR_EXPIRED: ++counts.refused_expired; break;
      case LDR_ERR_UNKNOWN_GRANT: ++counts.refused_unknown; break;
      case LDR_ERR_REVOKED: ++counts.refused_revoked; break;
      case LDR_ERR_LAYOUT: ++counts.refused_layout; break;
      default: break;
    }
    return why;
  }

  // Finds the live grant, or says why there is none. end_p (may be left null) is set for an end that is still remembered.
  Status look_up(const ldr_grant_id_t &id, Grant **grant_p, const End **end_p) {
    const auto sequence = (unsigned long long)id.sequence;
    *grant_p = nullptr;
    *end_p = nullptr;
    if (id.incarnation != engine.incarnation) return fail(LDR_ERR_STALE, "grant %llu is of an earlier incarnation of its source", sequence);
    if (id.sequence == 0 || id.sequence > last_sequence) return fail(LDR_ERR_UNKNOWN_GRANT, "grant %llu was never minted", sequence);
    if (auto it = live.find(id.sequence); it != live.end()) {
      if (it->second.nonce != id.nonce) return fail(LDR_ERR_UNKNOWN_GRANT, "grant %llu has other random bits", sequence);
      *grant_p = &it->second;
      return Status::success();
    }
    auto it = ended.find(id.sequence);
    if (it == ended.end()) return fail(LDR_ERR_CONSUMED, "grant %llu ended long ago", sequence);
    if (it->second.nonce != id.nonce) return fail(LDR_ERR_UNKNOWN_GRANT, "grant %llu has other random bits", sequence);
    *end_p = &it->second;
    switch (it->second.how) {
      case LDR_ERR_REVOKED: return fail(LDR_ERR_REVOKED, "grant %llu was revoked by its source", sequence);
      case LDR_ERR_EXPIRED: return fail(LDR_ERR_EXPIRED, "grant %llu ended because the sink that had it open was lost", sequence);
      case LDR_ERR_CANCELLED: return fail(LDR_ERR_CONSUMED, "grant %llu was cancelled by the sink that had it open", sequence);
      default: return fail(LDR_ERR_CONSUMED, "grant %llu was closed by its sink", sequence);
    }
  }

  Status open(uint64_t sink_incarnation, const ldr_grant_open_params_t &asked, Writer &out) {
    Grant *grant;
    const End *end_found;
    if (Status status = look_up(asked.grant, &grant, &end_found); !status.ok()) return status;
    const auto sequence = (unsigned long long)asked.grant.sequence;
    if (grant->generation != asked.generation) {
      return fail(LDR_ERR_STALE, "grant %llu is in generation %llu, not %llu", sequence, (unsigned long long)grant->generation,
                  (unsigned long long)asked.generation);
    }
    if (grant->num_tokens != asked.num_tokens) {
      return fail(LDR_ERR_STALE, "grant %llu holds %llu tokens, the sink was told %llu", sequence, (unsigned long long)grant->num_tokens,
                  (unsigned long long)asked.num_tokens);
    }
    if (grant->layout_digest != asked.layout_digest) {
      return fail(LDR_ERR_LAYOUT, "grant %llu has layout %#llx, the sink expects %#llx", sequence, (unsigned long long)grant->layout_digest,
                  (unsigned long long)asked.layout_digest);
    }
    if (grant->open_id != 0 && (grant->open_id != asked.open_id || grant->sink_incarnation != sink_incarnation)) {
      return fail(LDR_ERR_CONSUMED, "grant %llu is open for another sink", sequence);
    }
    if (!engine.caches.find_slot(grant->cache->slot, grant->cache->version)) {
      return fail(LDR_ERR_NO_CACHE, "cache %lld of grant %llu was unregistered", (long long)grant->cache->id, sequence);
    }
    grant->open_id = asked.open_id;
    grant->sink_incarnation = sink_incarnation;
    out.u32(grant->slot);
    out.u64(grant->version);
    encode_cache(*grant->cache, false, out);
    out.u32(uint32_t(grant->blocks.size()));
    for (uint64_t block : grant->blocks) out.u64(block);
    return Status::success();
  }

  Status close(uint64_t sink_incarnation, const ldr_grant_id_t &id, uint64_t open_id, uint32_t outcome) {
    const ldr_status_t how = outcome == LDR_CLOSE_OK ? LDR_OK : LDR_ERR_CANCELLED;
    Grant *grant;
    const End *ended_before;
    Status status = look_up(id, &grant, &ended_before);
    if (ended_before && ended_before->open_id == open_id && ended_before->sink_incarnation == sink_incarnation && ended_before->how == how) {
      return Status::success();
    }
    if (!status.ok()) return status;
    if (grant->open_id == 0) return fail(LDR_ERR_UNKNOWN_GRANT, "grant %llu is not open", (unsigned long long)id.sequence);
    if (grant->open_id != open_id || grant->sink_incarnation != sink_incarnation) {
      return fail(LDR_ERR_CONSUMED, "grant %llu is open for another sink", (unsigned long long)id.sequence);
    }
    end(live.find(id.sequence), how);
    return Status::success();
  }
};

GrantTable::GrantTable(Engine &engine) : impl_(std::make_unique<Impl>(engine)) {}
GrantTable::~GrantTable() = default;

Status GrantTable::mint(const ldr_grant_params_t &params, ldr_grant_id_t *grant_p, uint64_t *generation_p) {
  if (!grant_p || !generation_p) return fail(LDR_ERR_INVALID, "mint grant: no place for its id or generation");
  CachePtr cache = impl_->engine.caches.find(params.cache_id);
  if (!cache) return fail(LDR_ERR_NO_CACHE, "mint grant: cache %lld is not registered", (long long)params.cache_id);
  if (cache->kind != LDR_CACHE_BLOCKS) return fail(LDR_ERR_INVALID, "mint grant: cache %lld is not a blocks cache", (long long)params.cache_id);
  Grant grant{};
  if (Status status = read_blocks(params.blocks, cache->num_entries, &grant.blocks); !status.ok()) return status;
  if (grant.blocks.size() * 8 + cache->addresses.size() * 28 + 256 > kMaxFrameBytes) {
    return fail(LDR_ERR_INVALID, "mint grant: %zu blocks of %u tensors do not fit into one answer", grant.blocks.size(), cache->num_tensors());
  }
  if (Status status = random_bytes(&grant.nonce, sizeof(grant.nonce)); !status.ok()) return status;
  grant.generation = 1;
  auto shown = std::make_shared<Cache>(*cache);
  shown->memory = nullptr;  // a grant promises its blocks to the sink, but does not keep what its owner gives back
  grant.cache = std::move(shown);
  grant.num_tokens = params.num_tokens;
  grant.layout_digest = params.layout_digest;

  std::lock_guard lock(impl_->mutex);
  if (impl_->free_slots.empty()) {
    if (impl_->num_slots == kNumGrantSlots) return fail(LDR_ERR_BUSY, "mint grant: %u grants are live, which is the limit", kNumGrantSlots);
    impl_->free_slots.push_back(impl_->num_slots++);
  }
  grant.slot = impl_->free_slots.back();
  impl_->free_slots.pop_back();
  grant.version = impl_->engine.page->grant_version(grant.slot);
  *grant_p = {impl_->engine.incarnation, ++impl_->last_sequence, grant.nonce};
  *generation_p = grant.generation;
  impl_->live.emplace(grant_p->sequence, std::move(grant));
  ++impl_->counts.granted;
  return Status::success();
}

void GrantTable::revoke(uint64_t sequence) {
  std::lock_guard lock(impl_->mutex);
  if (auto it = impl_->live.find(sequence); it != impl_->live.end()) impl_->end(it, LDR_ERR_REVOKED);
}

ldr_grant_stats_t GrantTable::stats() const {
  std::lock_guard lock(impl_->mutex);
  ldr_grant_stats_t stats = impl_->counts;
  stats.live = 0;
  for (auto it = impl_->live.begin(); it != impl_->live.end(); ++it) ++stats.live;
  stats.reclaimed = stats.reclaimed_revoked + stats.reclaimed_cancelled + stats.reclaimed_peer_lost;
  return stats;
}

Status GrantTable::serve_open(uint64_t sink_incarnation, Reader in, Writer &out) {
  ldr_grant_open_params_t asked{};
  asked.grant.incarnation = in.u64();
  asked.grant.sequence = in.u64();
  asked.grant.nonce = in.u64();
  asked.generation = in.u64();
  asked.num_tokens = in.u64();
  asked.layout_digest = in.u64();
  asked.open_id = in.u64();
  if (!in.finished() || asked.open_id == 0) return fail(LDR_ERR_LINK_BROKEN, "malformed request to open a grant");
  std::lock_guard lock(impl_->mutex);
  return impl_->refuse(impl_->open(sink_incarnation, asked, out));
}

Status GrantTable::serve_close(uint64_t sink_incarnation, Reader in) {
  ldr_grant_id_t id{};
  id.incarnation = in.u64();
  id.sequence = in.u64();
  id.nonce = in.u64();
  uint64_t open_id = in.u64();
  uint32_t outcome = in.u32();
  if (!in.finished() || open_id == 0 || outcome > LDR_CLOSE_CANCELLED) return fail(LDR_ERR_LINK_BROKEN, "malformed request to close a grant");
  std::lock_guard lock(impl_->mutex);
  return impl_->refuse(impl_->close(sink_incarnation, id, open_id, outcome));
}

void GrantTable::on_peer_lost(uint64_t sink_incarnation) {
  std::lock_guard lock(impl_->mutex);
  for (auto it = impl_->live.begin(); it != impl_->live.end();) {
    bool is_lost = it->second.open_id != 0 && it->second.sink_incarnation == sink_incarnation;
    it = is_lost ? impl_->end(it, LDR_ERR_EXPIRED) : std::next(it);
  }
}

}  // namespace ldr
