#include "cache_table.h"

#include <algorithm>
#include <mutex>
#include <string>

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
  if (params.num_keys > 0 && !params.keys) return fail(LDR_ERR_INVALID, "cache: %u keys without a list", params.num_keys);
  const uint64_t max_keys = is_blocks ? 1 : params.num_entries;
  if (params.num_keys > max_keys) {
    return fail(LDR_ERR_INVALID, "cache: %u keys, but at most %llu fit", params.num_keys, (unsigned long long)max_keys);
  }
  for (uint32_t i = 0; i < params.num_keys; ++i) {
    const ldr_cache_key_t &key = params.keys[i];
    if (key.kind > LDR_KEY_BLOCKS || (key.kind == LDR_KEY_BLOCKS) != is_blocks) {
      return fail(LDR_ERR_INVALID, "cache: key %u is of kind %u, which a %s cache does not take", i, key.kind, is_blocks ? "blocks" : "contiguous");
    }
    if (key.batch_index >= params.num_entries) {
      return fail(LDR_ERR_INVALID, "cache: key %u names entry %u of %llu", i, key.batch_index, (unsigned long long)params.num_entries);
    }
  }
  return Status::success();
}

Status check_params(const ldr_cache_params_t &params) {
  if (Status status = check_shape(params); !status.ok()) return status;
  if (!params.addresses) return fail(LDR_ERR_INVALID, "cache: %u tensors without addresses", params.num_tensors);
  for (uint32_t i = 0; i < params.num_tensors; ++i) {
    if (params.addresses[i] == 0 || params.tensor_bytes > UINT64_MAX - params.addresses[i]) {
      return fail(LDR_ERR_INVALID, "cache: tensor %u at address %#llx with %llu bytes cannot be", i, (unsigned long long)params.addresses[i],
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

Status check_shape(const ldr_cache_params_t &params) {
  if (params.kind > LDR_CACHE_BLOCKS) return fail(LDR_ERR_INVALID, "cache: unknown kind %u", params.kind);
  if (params.placement > LDR_PLACEMENT_DEVICE) return fail(LDR_ERR_INVALID, "cache: unknown placement %u", params.placement);
  if (params.num_tensors == 0 || params.num_tensors > kMaxTensors) {
    return fail(LDR_ERR_INVALID, "cache: %u tensors; 1 to %u are allowed", params.num_tensors, kMaxTensors);
  }
  if (params.num_entries == 0 || params.tensor_bytes == 0 || params.tensor_bytes % params.num_entries != 0) {
    return fail(LDR_ERR_INVALID, "cache: %llu bytes do not divide into %llu entries", (unsigned long long)params.tensor_bytes,
                (unsigned long long)params.num_entries);
  }
  return Status::success();
}

KeyName key_name(uint32_t key_kind, uint64_t id, uint64_t model_id) {
  return {key_kind == LDR_KEY_PREFIX, key_kind == LDR_KEY_BLOCKS ? kNoKeyId : id, model_id};
}

namespace {

KeyName name_of(const ldr_cache_key_t &key) { return key_name(key.kind, key.id, key.model_id); }

struct Entry {
  std::shared_ptr<Cache> cache;
  bool has_id = true;
  uint32_t num_pins = 0;
  uint64_t spec_bytes = 0, wire_bytes = 0;           // as counted in the totals
  std::map<KeyName, std::vector<bool>> is_unread;    // tensors, for keys that were pulled in parts

  bool is_shown() const { return has_id || (cache->kind == LDR_CACHE_CONTIGUOUS && !cache->keys.empty()); }
};

}  // namespace

struct CacheTable::Impl {
  Impl(Page &page_in, bool remote_access_in) : page(page_in), remote_access(remote_access_in) {}

  Page &page;
  const bool remote_access;
  mutable std::mutex mutex;  // the members below
  std::map<int64_t, Entry> entries;
  KeyMap keys;
  std::vector<std::shared_ptr<Cache>> slots;
  std::vector<uint32_t> free_slots;
  int64_t next_id = 1;
  uint64_t total_spec_bytes = 24, total_wire_bytes = 24;

  // The turnstile lets a remover in between readers that follow one another closely.
  std::mutex turnstile;
  std::shared_mutex guard;

  // The keys of a call that are to be bound. Registration: for a contiguous cache the first binding of a key stays and the last entry of one call wins, for a
  // blocks cache the newest wins. Allocation: every key must be free (spec api-cachemanager 2.3).
  Status bindable(const ldr_cache_params_t &params, bool is_allocation, std::vector<ldr_cache_key_t> *keys_p) const {
    std::map<KeyName, ldr_cache_key_t> chosen;
    for (uint32_t i = 0; i < params.num_keys; ++i) {
      const ldr_cache_key_t &key = params.keys[i];
      if (key.kind != LDR_KEY_BLOCKS && key.id == kNoKeyId) continue;
      const KeyName name = name_of(key);
      auto bound = keys.find(name);
      if (is_allocation && (bound != keys.end() || chosen.count(name))) {
        const std::string where = bound != keys.end() ? "is bound to cache " + std::to_string(bound->second.first) : "was given twice";
        return fail(LDR_ERR_KEY_BOUND, "allocate cache: key %u (%s %llu, model %llu) %s", i, key.kind == LDR_KEY_PREFIX ? "prefix" : "request",
                    (unsigned long long)std::get<1>(name), (unsigned long long)key.model_id, where.c_str());
      }
      if (key.kind == LDR_KEY_BLOCKS || bound == keys.end()) chosen[name] = key;
    }
    for (const auto &[name, key] : chosen) keys_p->push_back(key);
    return Status::success();
  }

  // What peers could fetch of it counts towards the size of their table.
  void recount(Entry &entry) {
    if (!remote_access) return;
    const bool is_shown = entry.is_shown();
    const uint64_t now_spec_bytes = is_shown ? spec_bytes(*entry.cache) : 0, now_wire_bytes = is_shown ? wire_bytes(*entry.cache) : 0;
    total_spec_bytes += now_spec_bytes - entry.spec_bytes;
    total_wire_bytes += now_wire_bytes - entry.wire_bytes;
    entry.spec_bytes = now_spec_bytes;
    entry.wire_bytes = now_wire_bytes;
  }

  // Caches are immutable for those who hold one, so one that loses keys is replaced by a copy without them.
  template <class F> void take_keys_away(Entry &entry, F is_lost) {
    auto copy = std::make_shared<Cache>(*entry.cache);
    copy->keys.clear();
    for (const ldr_cache_key_t &key : entry.cache->keys) {
      if (is_lost(key)) {
        keys.erase(name_of(key));
        entry.is_unread.erase(name_of(key));
      } else {
        copy->keys.push_back(key);
      }
    }
    entry.cache = slots[copy->slot] = copy;
    recount(entry);
    page.advance_table();
  }
  void take_key_away(Entry &entry, const KeyName &name) {
    take_keys_away(entry, [&](const ldr_cache_key_t &key) { return name_of(key) == name; });
  }

  void bind(const std::shared_ptr<Cache> &cache) {
    for (const ldr_cache_key_t &key : cache->keys) {
      const KeyName name = name_of(key);
      if (auto it = keys.find(name); it != keys.end()) take_key_away(entries.at(it->second.first), name);
      keys[name] = {cache->id, key.batch_index};
    }
  }

  // Nothing finds it from now on, by slot neither. The result goes to let_go().
  CachePtr erase(std::map<int64_t, Entry>::iterator it) {
    CachePtr cache = it->second.cache;
    page.advance_cache(cache->slot);
    for (const ldr_cache_key_t &key : cache->keys) {
      if (auto bound = keys.find(name_of(key)); bound != keys.end() && bound->second.first == cache->id) keys.erase(bound);
    }
    total_spec_bytes -= it->second.spec_bytes;
    total_wire_bytes -= it->second.wire_bytes;
    slots[cache->slot].reset();
    free_slots.push_back(cache->slot);
    entries.erase(it);
    page.advance_table();
    return cache;
  }

  // Once an allocated cache has lost its id or a key, or a pin.
  CachePtr erase_if_unused(std::map<int64_t, Entry>::iterator it) {
    const Entry &entry = it->second;
    return entry.is_shown() || entry.num_pins > 0 ? nullptr : erase(it);
  }

  CachePtr lose_id(std::map<int64_t, Entry>::iterator it, bool with_keys) {
    if (with_keys) take_keys_away(it->second, [](const ldr_cache_key_t &) { return true; });  // may throw: the id is still there then
    it->second.has_id = false;
    recount(it->second);
    page.advance_table();
    return erase_if_unused(it);
  }
};

CacheTable::CacheTable(Page &page, bool remote_access) : impl_(std::make_unique<Impl>(page, remote_access)) {}
CacheTable::~CacheTable() = default;

Status CacheTable::add(const ldr_cache_params_t &params, int64_t *cache_id_p, PoolMemory memory) {
  if (!cache_id_p) return fail(LDR_ERR_INVALID, "cache: no place for the id");
  if (Status status = check_params(params); !status.ok()) return status;
  Entry entry;
  entry.cache = make_cache(params);
  Cache &cache = *entry.cache;
  cache.in_pool = memory != nullptr;
  cache.memory = std::move(memory);  // before the mutex: it goes without it when the call fails

  std::lock_guard lock(impl_->mutex);
  if (Status status = impl_->bindable(params, cache.is_allocated(), &cache.keys); !status.ok()) return status;
  if (impl_->remote_access && (impl_->total_spec_bytes + spec_bytes(cache) > kMaxTableBytes || impl_->total_wire_bytes + wire_bytes(cache) > kMaxFrameBytes)) {
    return fail(LDR_ERR_INVALID, "cache: the table that peers fetch would exceed 1 MiB with it (%zu caches now); unregister some or use fewer tensors",
                impl_->entries.size());
  }
  if (impl_->free_slots.empty()) {
    if (impl_->slots.size() >= kNumCacheSlots) return fail(LDR_ERR_BUSY, "cache: there are %u caches, which is the limit", kNumCacheSlots);
    impl_->free_slots.push_back(uint32_t(impl_->slots.size()));
    impl_->slots.emplace_back();
  }
  cache.id = impl_->next_id++;
  cache.slot = impl_->free_slots.back();
  cache.version = impl_->page.cache_version(cache.slot);
  auto added = impl_->entries.emplace(cache.id, entry).first;
  impl_->free_slots.pop_back();
  impl_->slots[cache.slot] = entry.cache;
  try {
    impl_->recount(added->second);
    impl_->bind(entry.cache);
  } catch (const std::bad_alloc &) {
    impl_->erase(added);
    throw;
  }
  impl_->page.advance_table();
  *cache_id_p = cache.id;
  return Status::success();
}

void CacheTable::remove(int64_t cache_id) {
  CachePtr gone;
  {
    std::lock_guard lock(impl_->mutex);
    auto it = impl_->entries.find(cache_id);
    if (it == impl_->entries.end() || !it->second.has_id) return;
    gone = it->second.cache->is_allocated() ? impl_->lose_id(it, true) : impl_->erase(it);
  }
  let_go(std::move(gone));
}

Status CacheTable::drop_id(int64_t cache_id) {
  CachePtr gone;
  {
    std::lock_guard lock(impl_->mutex);
    auto it = impl_->entries.find(cache_id);
    if (it == impl_->entries.end() || !it->second.has_id) return fail(LDR_ERR_NO_CACHE, "deallocate cache: no cache %lld", (long long)cache_id);
    if (!it->second.cache->is_allocated()) return Status::success();
    gone = impl_->lose_id(it, it->second.cache->kind == LDR_CACHE_BLOCKS);
  }
  let_go(std::move(gone));
  return Status::success();
}

void CacheTable::unbind(const ldr_cache_key_t &key) {
  if (key.kind != LDR_KEY_BLOCKS && key.id == kNoKeyId) return;
  CachePtr gone;
  {
    std::lock_guard lock(impl_->mutex);
    const KeyName name = name_of(key);
    auto bound = impl_->keys.find(name);
    if (bound == impl_->keys.end()) return;
    auto it = impl_->entries.find(bound->second.first);
    if (!it->second.cache->is_allocated()) return;
    impl_->take_key_away(it->second, name);
    gone = impl_->erase_if_unused(it);
  }
  let_go(std::move(gone));
}

// Whoever takes the guard from now on does not find the cache any more; wait for those who had it before.
void CacheTable::let_go(CachePtr gone) {
  if (!gone) return;
  std::lock_guard turn(impl_->turnstile);
  std::unique_lock barrier(impl_->guard);
}

bool CacheTable::pin(const Cache &cache) {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->entries.find(cache.id);
  if (it == impl_->entries.end() || !it->second.is_shown() || !cache.is_allocated()) return false;
  ++it->second.num_pins;
  return true;
}

bool CacheTable::request_key(const Cache &cache, uint32_t batch_index, KeyName *name_p) {
  for (const ldr_cache_key_t &key : cache.keys) {
    if (key.kind != LDR_KEY_REQUEST || key.batch_index != batch_index) continue;
    *name_p = name_of(key);
    return true;
  }
  return false;
}

void CacheTable::consume(int64_t cache_id, const KeyName &key, uint32_t first_tensor, uint32_t num_tensors) {
  std::lock_guard lock(impl_->mutex);
  auto bound = impl_->keys.find(key);
  if (bound == impl_->keys.end() || bound->second.first != cache_id) return;  // somebody was faster
  Entry &entry = impl_->entries.at(cache_id);
  if (num_tensors > 0) {
    const uint32_t all = entry.cache->num_tensors();
    std::vector<bool> &is_unread = entry.is_unread.try_emplace(key, all, true).first->second;
    for (uint64_t i = first_tensor; i < uint64_t(first_tensor) + num_tensors && i < all; ++i) is_unread[i] = false;
    if (std::find(is_unread.begin(), is_unread.end(), true) != is_unread.end()) return;
  }
  impl_->take_key_away(entry, key);
}

CachePtr CacheTable::unpin(int64_t cache_id) {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->entries.find(cache_id);
  if (it == impl_->entries.end() || it->second.num_pins == 0) return nullptr;
  --it->second.num_pins;
  return impl_->erase_if_unused(it);
}

CachePtr CacheTable::find(int64_t cache_id) const {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->entries.find(cache_id);
  return it == impl_->entries.end() || !it->second.has_id ? nullptr : it->second.cache;
}

CachePtr CacheTable::find_shown(int64_t cache_id) const {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->entries.find(cache_id);
  return it == impl_->entries.end() || !it->second.is_shown() ? nullptr : it->second.cache;
}

CachePtr CacheTable::find_key(uint32_t key_kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p) const {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->keys.find(key_name(key_kind, id, model_id));
  if (it == impl_->keys.end()) return nullptr;
  *batch_index_p = it->second.second;
  return impl_->entries.at(it->second.first).cache;
}

CachePtr CacheTable::find_address(uint64_t address, uint64_t size_bytes, uint32_t *tensor_p) const {
  std::lock_guard lock(impl_->mutex);
  for (const auto &[id, entry] : impl_->entries) {
    const Cache &cache = *entry.cache;
    if (!entry.is_shown() || size_bytes > cache.tensor_bytes) continue;
    for (uint32_t i = 0; i < cache.num_tensors(); ++i) {
      if (address < cache.addresses[i] || address - cache.addresses[i] > cache.tensor_bytes - size_bytes) continue;
      *tensor_p = i;
      return entry.cache;
    }
  }
  return nullptr;
}

CachePtr CacheTable::find_slot(uint32_t slot, uint64_t version) const {
  std::lock_guard lock(impl_->mutex);
  if (slot >= impl_->slots.size() || !impl_->slots[slot] || impl_->slots[slot]->version != version) return nullptr;
  return impl_->slots[slot];
}

void CacheTable::encode(Writer &out) const {
  std::lock_guard lock(impl_->mutex);
  uint32_t num_shown = 0;
  for (const auto &[id, entry] : impl_->entries) num_shown += entry.is_shown();
  out.u32(num_shown);
  for (const auto &[id, entry] : impl_->entries) {
    if (entry.is_shown()) encode_cache(*entry.cache, true, out);
  }
}

uint32_t CacheTable::size() const {
  std::lock_guard lock(impl_->mutex);
  return uint32_t(impl_->entries.size());
}

std::shared_lock<std::shared_mutex> CacheTable::read_guard() const {
  std::lock_guard turn(impl_->turnstile);
  return std::shared_lock(impl_->guard);
}

}  // namespace ldr
