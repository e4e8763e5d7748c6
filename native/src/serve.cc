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

// Spec api-cachemanager 5.5: where a key or an id leads. A key that is bound to (cache id, batch) is bound to that very cache, so the id alone decides.
Status serve_lookup(Link &link, Reader in, Writer &out) {
  uint32_t by = in.u32();
  int64_t cache_id = in.i64();
  uint64_t key_id = in.u64(), model_id = in.u64();
  uint32_t batch_index = in.u32();
  if (!in.finished()) return fail(LDR_ERR_LINK_BROKEN, "malformed cache look-up");
  const CacheTable &caches = link.engine().caches;
  CachePtr cache;
  switch (by) {
    case LDR_BY_CACHE_ID: cache = caches.find(cache_id); break;
    case LDR_BY_REQUEST_KEY: cache = caches.find_key(LDR_KEY_REQUEST, key_id, model_id, &batch_index); break;
    case LDR_BY_PREFIX_KEY: cache = caches.find_key(LDR_KEY_PREFIX, key_id, model_id, &batch_index); break;
    case LDR_BY_BLOCKS_KEY: cache = caches.find_key(LDR_KEY_BLOCKS, kNoKeyId, model_id, &batch_index); break;
    default: return fail(LDR_ERR_LINK_BROKEN, "cache look-up of unknown kind %u", by);
  }
  if (!cache) {
    return fail(LDR_ERR_NO_CACHE, "the peer has no such cache (look-up %u: cache id %lld, key %llu, model %llu)", by, (long long)cache_id,
                (unsigned long long)key_id, (unsigned long long)model_id);
  }
  if (batch_index >= cache->num_entries) {
    return fail(LDR_ERR_NO_CACHE, "the peer's cache %lld has %llu entries, entry %u was asked for", (long long)cache->id,
                (unsigned long long)cache->num_entries, batch_index);
  }
  encode_cache(*cache, false, out);
  out.u32(batch_index);
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
