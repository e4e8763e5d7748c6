#include "cache_table.h"

#include <algorithm>
#include <mutex>

#include "peer_table.h"
#include "shared_memory.h"

namespace ldr {
namespace {

constexpr uint64_t kMaxTableBytes = 1u << 20;  // spec api-cachemanager 3.4, by its own arithmetic

uint64_t spec_bytes(const Cache &cache) { return 64 + 8 * uint64_t(cache.addresses.size()) + 24 * uint64_t(cache.keys.size()); }

uint64_t wire_bytes(const Cache &cache) {
  Writer out;
  encode_cache(cache, true, out);
  return out.bytes().size();
}

Status check_keys(const ldr_cache_params_t &params) {
  const bool is_blocks = params.kind == LDR_CACHE_BLOCKS;
  if (params.num_keys > 0 && !params.keys) return fail(LDR_ERR_INVALID, "register cache: %u keys without a list", params.num_keys);
  const uint64_t max_keys = is_blocks ? 1 : params.num_entries;
  if (params.num_keys > max_keys) {
    return fail(LDR_ERR_INVALID, "register cache: %u keys, but at most %llu fit", params.num_keys, (unsigned long long)max_keys);
  }
  for (uint32_t i = 0; i < params.num_keys; ++i) {
    const ldr_cache_key_t &key = params.keys[i];
    if (key.kind > LDR_KEY_BLOCKS || (key.kind == LDR_KEY_BLOCKS) != is_blocks) {
      return fail(LDR_ERR_INVALID, "register cache: key %u is of kind %u, which a %s cache does not take", i, key.kind, is_blocks ? "blocks" : "contiguous");
    }
    if (key.batch_index >= params.num_entries) {
      return fail(LDR_ERR_INVALID, "register cache: key %u names entry %u of %llu", i, key.batch_index, (unsigned long long)params.num_entries);
    }
  }
  return Status::success();
}

Status check_params(const ldr_cache_params_t &params) {
  if (params.kind > LDR_CACHE_BLOCKS) return fail(LDR_ERR_INVALID, "register cache: unknown kind %u", params.kind);
  if (params.placement > LDR_PLACEMENT_DEVICE) return fail(LDR_ERR_INVALID, "register cache: unknown placement %u", params.placement);
  if (params.num_tensors == 0 || params.num_tensors > kMaxTensors || !params.addresses) {
    return fail(LDR_ERR_INVALID, "register cache: %u tensors; give 1 to %u addresses", params.num_tensors, kMaxTensors);
  }
  if (params.num_entries == 0 || params.tensor_bytes == 0 || params.tensor_bytes % params.num_entries != 0) {
    return fail(LDR_ERR_INVALID, "register cache: %llu bytes do not divide into %llu entries", (unsigned long long)params.tensor_bytes,
                (unsigned long long)params.num_entries);
  }
  for (uint32_t i = 0; i < params.num_tensors; ++i) {
    if (params.addresses[i] == 0 || params.tensor_bytes > UINT64_MAX - params.addresses[i]) {
      return fail(LDR_ERR_INVALID, "register cache: tensor %u at address %#llx with %llu bytes cannot be", i, (unsigned long long)params.addresses[i],
                  (unsigned long long)params.tensor_bytes);
    }
  }
  return check_keys(params);
}

std::shared_ptr<Cache> make_cache(const ldr_cache_params_t &params) {
  auto cache = std::make_shared<Cache>();
  cache->kind = params.kind;
  cache->placement = params.placement;
  cache->remote_accessible = params.remote_accessible != 0;
  cache->num_entries = params.num_entries;
  cache->tensor_bytes = params.tensor_bytes;
  cache->addresses.assign(params.addresses, params.addresses + params.num_tensors);
  cache->mapping_ids.resize(params.num_tensors);
  cache->mapping_offsets.resize(params.num_tensors);
  for (uint32_t i = 0; i < params.num_tensors; ++i) {
    shared_find(params.addresses[i], params.tensor_bytes, &cache->mapping_ids[i], &cache->mapping_offsets[i]);
  }
  return cache;
}

}  // namespace

KeyName key_name(uint32_t key_kind, uint64_t id, uint64_t model_id) {
  return {key_kind == LDR_KEY_PREFIX, key_kind == LDR_KEY_BLOCKS ? kNoKeyId : id, model_id};
}

struct CacheTable::Impl {
  Impl(Page &page_in, bool remote_access_in) : page(page_in), remote_access(remote_access_in) {}

  Page &page;
  const bool remote_access;
  mutable std::mutex mutex;  // the members below
  std::map<int64_t, std::shared_ptr<Cache>> caches;
  KeyMap keys;
  std::vector<std::shared_ptr<Cache>> slots;
  std::vector<uint32_t> free_slots;
  int64_t next_id = 1;
  uint64_t total_spec_bytes = 24, total_wire_bytes = 24;

  // The turnstile lets a remover in between readers that follow one another closely.
  std::mutex turnstile;
  std::shared_mutex guard;

  // The keys of a registration that are free to be bound: for a contiguous cache the first binding of a key stays and the last entry of one call wins, for a
  // blocks cache the newest wins (spec api-cachemanager 2.3).
  std::vector<ldr_cache_key_t> bindable(const ldr_cache_params_t &params) const {
    std::map<KeyName, ldr_cache_key_t> chosen;
    for (uint32_t i = 0; i < params.num_keys; ++i) {
      const ldr_cache_key_t &key = params.keys[i];
      if (key.kind != LDR_KEY_BLOCKS && key.id == kNoKeyId) continue;
      KeyName name = key_name(key.kind, key.id, key.model_id);
      if (key.kind == LDR_KEY_BLOCKS || keys.count(name) == 0) chosen[name] = key;
    }
    std::vector<ldr_cache_key_t> result;
    for (const auto &[name, key] : chosen) result.push_back(key);
    return result;
  }

  // Caches are immutable for those who hold one, so the loser of a key is replaced by a copy without it.
  void take_key_away(const KeyName &name, int64_t owner_id) {
    std::shared_ptr<Cache> &owner = caches.at(owner_id);
    uint64_t spec_before = spec_bytes(*owner), wire_before = wire_bytes(*owner);
    auto copy = std::make_shared<Cache>(*owner);
    auto is_it = [&](const ldr_cache_key_t &key) { return key_name(key.kind, key.id, key.model_id) == name; };
    copy->keys.erase(std::remove_if(copy->keys.begin(), copy->keys.end(), is_it), copy->keys.end());
    owner = slots[copy->slot] = copy;
    total_spec_bytes -= spec_before - spec_bytes(*copy);
    total_wire_bytes -= wire_before - wire_bytes(*copy);
  }

  void bind(const std::shared_ptr<Cache> &cache) {
    for (const ldr_cache_key_t &key : cache->keys) {
      KeyName name = key_name(key.kind, key.id, key.model_id);
      if (auto it = keys.find(name); it != keys.end()) take_key_away(name, it->second.first);
      keys[name] = {cache->id, key.batch_index};
    }
  }
};

CacheTable::CacheTable(Page &page, bool remote_access) : impl_(std::make_unique<Impl>(page, remote_access)) {}
CacheTable::~CacheTable() = default;

Status CacheTable::add(const ldr_cache_params_t &params, int64_t *cache_id_p) {
  if (!cache_id_p) return fail(LDR_ERR_INVALID, "register cache: no place for the id");
  if (Status status = check_params(params); !status.ok()) return status;
  std::shared_ptr<Cache> cache = make_cache(params);

  std::lock_guard lock(impl_->mutex);
  cache->keys = impl_->bindable(params);
  if (impl_->remote_access && (impl_->total_spec_bytes + spec_bytes(*cache) > kMaxTableBytes ||
                               impl_->total_wire_bytes + wire_bytes(*cache) > kMaxFrameBytes)) {
    return fail(LDR_ERR_INVALID, "register cache: the table that peers fetch would exceed 1 MiB with it (%zu caches now); unregister some or use fewer tensors",
                impl_->caches.size());
  }
  if (impl_->free_slots.empty()) {
    if (impl_->slots.size() >= kNumCacheSlots) return fail(LDR_ERR_BUSY, "register cache: %u caches are registered, which is the limit", kNumCacheSlots);
    impl_->free_slots.push_back(uint32_t(impl_->slots.size()));
    impl_->slots.emplace_back();
  }
  cache->id = impl_->next_id++;
  cache->slot = impl_->free_slots.back();
  cache->version = impl_->page.cache_version(cache->slot);
  impl_->free_slots.pop_back();
  impl_->slots[cache->slot] = cache;
  impl_->caches[cache->id] = cache;
  impl_->bind(cache);
  impl_->total_spec_bytes += spec_bytes(*cache);
  impl_->total_wire_bytes += wire_bytes(*cache);
  impl_->page.advance_table();
  *cache_id_p = cache->id;
  return Status::success();
}

void CacheTable::remove(int64_t cache_id) {
  {
    std::lock_guard lock(impl_->mutex);
    auto it = impl_->caches.find(cache_id);
    if (it == impl_->caches.end()) return;
    std::shared_ptr<Cache> cache = it->second;
    impl_->page.advance_cache(cache->slot);
    for (const ldr_cache_key_t &key : cache->keys) impl_->keys.erase(key_name(key.kind, key.id, key.model_id));
    impl_->total_spec_bytes -= spec_bytes(*cache);
    impl_->total_wire_bytes -= wire_bytes(*cache);
    impl_->slots[cache->slot].reset();
    impl_->free_slots.push_back(cache->slot);
    impl_->caches.erase(it);
    impl_->page.advance_table();
  }
  // Whoever takes the guard from now on does not find the cache any more; wait for those who had it before.
  std::lock_guard turn(impl_->turnstile);
  std::unique_lock barrier(impl_->guard);
}

CachePtr CacheTable::find(int64_t cache_id) const {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->caches.find(cache_id);
  return it == impl_->caches.end() ? nullptr : it->second;
}

CachePtr CacheTable::find_key(uint32_t key_kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p) const {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->keys.find(key_name(key_kind, id, model_id));
  if (it == impl_->keys.end()) return nullptr;
  *batch_index_p = it->second.second;
  return impl_->caches.at(it->second.first);
}

CachePtr CacheTable::find_slot(uint32_t slot, uint64_t version) const {
  std::lock_guard lock(impl_->mutex);
  if (slot >= impl_->slots.size() || !impl_->slots[slot] || impl_->slots[slot]->version != version) return nullptr;
  return impl_->slots[slot];
}

void CacheTable::encode(Writer &out) const {
  std::lock_guard lock(impl_->mutex);
  out.u32(uint32_t(impl_->caches.size()));
  for (const auto &[id, cache] : impl_->caches) encode_cache(*cache, true, out);
}

uint32_t CacheTable::size() const {
  std::lock_guard lock(impl_->mutex);
  return uint32_t(impl_->caches.size());
}

std::shared_lock<std::shared_mutex> CacheTable::read_guard() const {
  std::lock_guard turn(impl_->turnstile);
  return std::shared_lock(impl_->guard);
}

}  // namespace ldr
