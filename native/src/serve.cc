#include "serve.h"

#include <cerrno>

#include "engine.h"
#include "link.h"
#include "shared_memory.h"

namespace ldr {
namespace {

Status serve_table(Link &link, Reader in, Writer &out) {
  if (!in.finished()) return fail(LDR_ERR_LINK_BROKEN, "malformed request for the cache table");
  if (!link.engine().config.remote_access) return fail(LDR_ERR_INVALID, "a two-sided engine shows no cache table");
  link.engine().caches.encode(out);
  return Status::success();
}

constexpr size_t kMaxPinsOfLink = 1024;  // a peer of ours has one, and those that it gave up and we have not heard of yet

struct LookUp {
  uint32_t by;
  int64_t cache_id;
  uint64_t key_id, model_id;
  uint32_t batch_index;
  uint32_t first_tensor, num_tensors, flags;
  uint64_t extent_bytes;  // by address: what will be written there
  int64_t timeout_ns;
};

bool decode_look_up(Reader in, LookUp *asked_p) {
  LookUp &asked = *asked_p;
  asked.by = in.u32();
  asked.cache_id = in.i64();
  asked.key_id = in.u64();
  asked.model_id = in.u64();
  asked.batch_index = in.u32();
  asked.first_tensor = in.u32();
  asked.num_tensors = in.u32();
  asked.flags = in.u32();
  asked.extent_bytes = in.u64();
  asked.timeout_ns = in.i64();
  return in.finished();
}

// Spec api-cachemanager 5.5: where a key or an id leads. A key that is bound to (cache id, batch) is bound to that very cache, so the id alone decides.
Status find_asked(const CacheTable &caches, LookUp &asked, CachePtr *cache_p) {
  CachePtr cache;
  switch (asked.by) {
    case LDR_BY_CACHE_ID: cache = caches.find_shown(asked.cache_id); break;
    case LDR_BY_REQUEST_KEY: cache = caches.find_key(LDR_KEY_REQUEST, asked.key_id, asked.model_id, &asked.batch_index); break;
    case LDR_BY_PREFIX_KEY: cache = caches.find_key(LDR_KEY_PREFIX, asked.key_id, asked.model_id, &asked.batch_index); break;
    case LDR_BY_BLOCKS_KEY: cache = caches.find_key(LDR_KEY_BLOCKS, kNoKeyId, asked.model_id, &asked.batch_index); break;
    default: return fail(LDR_ERR_LINK_BROKEN, "cache look-up of unknown kind %u", asked.by);
  }
  if (!cache) {
    return fail(LDR_ERR_NO_CACHE, "the peer has no such cache (look-up %u: cache id %lld, key %llu, model %llu)", asked.by, (long long)asked.cache_id,
                (unsigned long long)asked.key_id, (unsigned long long)asked.model_id);
  }
  if (asked.batch_index >= cache->num_entries) {
    return fail(LDR_ERR_NO_CACHE, "the peer's cache %lld has %llu entries, entry %u was asked for", (long long)cache->id,
                (unsigned long long)cache->num_entries, asked.batch_index);
  }
  *cache_p = std::move(cache);
  return Status::success();
}

// The key that success consumes: the request key of the entry, also when it was asked for by id. Prefix and blocks keys stay.
void note_key(const LookUp &asked, const Cache &cache, Pin *pin) {
  if (asked.flags & LDR_TRANSFER_KEEP_KEY || cache.kind != LDR_CACHE_CONTIGUOUS) return;
  if (asked.by == LDR_BY_REQUEST_KEY) {
    pin->consumes = true;
    pin->key = key_name(LDR_KEY_REQUEST, asked.key_id, asked.model_id);
  } else if (asked.by == LDR_BY_CACHE_ID) {
    pin->consumes = CacheTable::request_key(cache, asked.batch_index, &pin->key);
  }
}

// Spec api-cachemanager 8.3, TransferConfig: the peer will write there.
Status find_target(const CacheTable &caches, const LookUp &asked, Pin *pin) {
  if (asked.extent_bytes > 0) pin->cache = caches.find_address(asked.key_id, asked.extent_bytes, &pin->tensor);
  if (!pin->cache) {
    return fail(LDR_ERR_INVALID, "dst_addrs: %#llx with %llu bytes lies in no region that the peer registered", (unsigned long long)asked.key_id,
                (unsigned long long)asked.extent_bytes);
  }
  pin->is_window = true;
  pin->offset_bytes = asked.key_id - pin->cache->addresses[pin->tensor];
  pin->size_bytes = asked.extent_bytes;
  return Status::success();
}

// Two-sided mode. The answer: the id of the pin that the peer ends with kDone (0: nothing is held for it), the batch entry or the tensor that was found, the cache.
Status serve_lookup(Link &link, Reader in, Writer &out) {
  Engine &engine = link.engine();
  LookUp asked;
  if (!decode_look_up(in, &asked)) return fail(LDR_ERR_LINK_BROKEN, "malformed cache look-up");
  if (engine.config.remote_access) return fail(LDR_ERR_INVALID, "a remote-access engine answers no look-ups; fetch its cache table");
  Pin pin;
  const bool is_push = asked.by == LDR_BY_ADDRESS;
  Status status = is_push ? find_target(engine.caches, asked, &pin) : find_asked(engine.caches, asked, &pin.cache);
  if (!status.ok()) return status;
  const CachePtr cache = pin.cache;
  const uint32_t found = is_push ? pin.tensor : asked.batch_index;
  uint64_t pin_id = 0;
  if (is_push || cache->is_allocated()) {
    if (engine.pins.count(link) >= kMaxPinsOfLink) return fail(LDR_ERR_BUSY, "the peer holds %zu look-ups of this link, and none was ended", kMaxPinsOfLink);
    if (!is_push) note_key(asked, *cache, &pin);
    pin.first_tensor = asked.first_tensor;
    pin.num_tensors = asked.num_tensors;
    pin_id = engine.pins.add(link, std::move(pin), asked.timeout_ns);
    if (pin_id == 0) return fail(LDR_ERR_NO_CACHE, "the peer's cache %lld was deallocated just now", (long long)cache->id);
  }
  out.u64(pin_id);
  out.u32(found);
  encode_cache(*cache, false, out);
  // The link may have failed just now, after its pins were ended: this one must not stay behind.
  if (!link.ready()) engine.pins.on_link_lost(link);
  return Status::success();
}

Status serve_mapping(Link &link, Reader in, Fd &passed) {
  uint64_t mapping_id = in.u64();
  if (!in.finished()) return fail(LDR_ERR_LINK_BROKEN, "malformed request for a shared mapping");
  if (!link.facts().is_same_host) return fail(LDR_ERR_INVALID, "shared mappings are for peers on one host");
  passed = shared_fd(mapping_id);
  if (!passed && errno != ENOENT) return fail_errno(LDR_ERR_BUSY, "the peer cannot pass its shared mapping %llu", (unsigned long long)mapping_id);
  if (!passed) return fail(LDR_ERR_NO_CACHE, "the peer has no shared mapping %llu (any more)", (unsigned long long)mapping_id);
  return Status::success();
}

Status serve_grant_open(Link &link, Reader in, Writer &out) {
  GrantTable &grants = link.engine().grants;
  Status status = grants.serve_open(link.facts().incarnation, in, out);
  // The link may have failed just now, after its grants were ended: this one must not stay behind.
  if (status.ok() && !link.ready()) grants.on_peer_lost(link.facts().incarnation);
  return status;
}

}  // namespace

void serve_frame(Link &link, FrameType type, uint64_t call_id, Reader payload) {
  Writer out;
  Fd passed;
  Status status;
  switch (type) {
    case FrameType::kTable: status = serve_table(link, payload, out); break;
    case FrameType::kLookup: status = serve_lookup(link, payload, out); break;
    case FrameType::kMapping: status = serve_mapping(link, payload, passed); break;
    case FrameType::kGrantOpen: status = serve_grant_open(link, payload, out); break;
    case FrameType::kDone: return link.engine().pins.serve_done(link, call_id, payload);
    case FrameType::kGrantClose: status = link.engine().grants.serve_close(link.facts().incarnation, payload); break;
    default: status = fail(LDR_ERR_LINK_BROKEN, "frame type %u does not belong on a control connection", unsigned(type));
  }
  if (status.code == LDR_ERR_LINK_BROKEN) {
    link.fail(fail(LDR_ERR_LINK_BROKEN, "%s: %s", link.name().c_str(), status.text.c_str()));
    return;
  }
  link.reply(call_id, status, out, std::move(passed));
}

}  // namespace ldr
