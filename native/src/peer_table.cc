#include "peer_table.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include "page.h"
#include "shared_memory.h"

namespace ldr {
namespace {

constexpr uint8_t kAccessible = 1, kInPool = 2;

// Neighbouring tensors mostly lie in one mapping, or none: (count, mapping id, address of the mapping) says it for all of them at once.
struct Run {
  uint32_t count;
  uint64_t mapping_id, base;
};

std::vector<Run> mapping_runs(const Cache &cache) {
  std::vector<Run> runs;
  for (size_t i = 0; i < cache.addresses.size(); ++i) {
    uint64_t id = cache.mapping_ids[i], base = id ? cache.addresses[i] - cache.mapping_offsets[i] : 0;
    if (runs.empty() || runs.back().mapping_id != id || runs.back().base != base) runs.push_back({0, id, base});
    ++runs.back().count;
  }
  return runs;
}

bool decode_addresses(Reader &in, Cache &cache) {
  uint32_t num_tensors = in.u32();
  if (num_tensors == 0 || num_tensors > kMaxTensors || in.left() / 8 < num_tensors) return false;
  cache.addresses.resize(num_tensors);
  for (uint64_t &address : cache.addresses) {
    address = in.u64();
    if (address == 0 || cache.tensor_bytes > UINT64_MAX - address) return false;
  }
  return in.ok();
}

bool decode_runs(Reader &in, Cache &cache) {
  const size_t num_tensors = cache.addresses.size();
  uint32_t num_runs = in.u32();
  if (num_runs == 0 || num_runs > num_tensors) return false;
  cache.mapping_ids.reserve(num_tensors);
  cache.mapping_offsets.reserve(num_tensors);
  for (uint32_t run = 0; run < num_runs; ++run) {
    uint32_t count = in.u32();
    uint64_t id = in.u64(), base = in.u64();
    if (!in.ok() || count == 0 || count > num_tensors - cache.mapping_ids.size()) return false;
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t address = cache.addresses[cache.mapping_ids.size()];
      if (id && address < base) return false;
      cache.mapping_ids.push_back(id);
      cache.mapping_offsets.push_back(id ? address - base : 0);
    }
  }
  return cache.mapping_ids.size() == num_tensors;
}

bool decode_keys(Reader &in, Cache &cache) {
  constexpr size_t kKeyBytes = 21;
  const bool is_blocks = cache.kind == LDR_CACHE_BLOCKS;
  uint32_t num_keys = in.u32();
  if (num_keys > (is_blocks ? 1 : cache.num_entries) || in.left() / kKeyBytes < num_keys) return false;
  cache.keys.resize(num_keys);
  for (ldr_cache_key_t &key : cache.keys) {
    key.kind = in.u8();
    key.batch_index = in.u32();
    key.id = in.u64();
    key.model_id = in.u64();
    if (key.kind > LDR_KEY_BLOCKS || (key.kind == LDR_KEY_BLOCKS) != is_blocks || key.batch_index >= cache.num_entries) return false;
  }
  return in.ok();
}

}  // namespace

void encode_cache(const Cache &cache, bool with_keys, Writer &out) {
  out.i64(cache.id);
  out.u32(cache.slot);
  out.u64(cache.version);
  out.u8(uint8_t(cache.kind));
  out.u8(uint8_t(cache.placement));
  out.u8(uint8_t((cache.remote_accessible ? kAccessible : 0) | (cache.in_pool ? kInPool : 0)));
  out.u64(cache.num_entries);
  out.u64(cache.tensor_bytes);
  out.u32(cache.num_tensors());
  for (uint64_t address : cache.addresses) out.u64(address);
  std::vector<Run> runs = mapping_runs(cache);
  out.u32(uint32_t(runs.size()));
  for (const Run &run : runs) {
    out.u32(run.count);
    out.u64(run.mapping_id);
    out.u64(run.base);
  }
  out.u32(with_keys ? uint32_t(cache.keys.size()) : 0);
  if (!with_keys) return;
  for (const ldr_cache_key_t &key : cache.keys) {
    out.u8(uint8_t(key.kind));
    out.u32(key.batch_index);
    out.u64(key.id);
    out.u64(key.model_id);
  }
}

CachePtr decode_cache(Reader &in) {
  auto cache = std::make_shared<Cache>();
  cache->id = in.i64();
  cache->slot = in.u32();
  cache->version = in.u64();
  cache->kind = in.u8();
  cache->placement = in.u8();
  const uint8_t flags = in.u8();
  cache->remote_accessible = flags & kAccessible;
  cache->in_pool = flags & kInPool;
  cache->num_entries = in.u64();
  cache->tensor_bytes = in.u64();
  if (!in.ok() || cache->id <= 0 || cache->slot >= kNumCacheSlots) return nullptr;
  if (cache->kind > LDR_CACHE_BLOCKS || cache->placement > LDR_PLACEMENT_DEVICE || flags > (kAccessible | kInPool)) return nullptr;
  if (cache->num_entries == 0 || cache->tensor_bytes == 0 || cache->tensor_bytes % cache->num_entries != 0) return nullptr;
  if (!decode_addresses(in, *cache) || !decode_runs(in, *cache) || !decode_keys(in, *cache)) return nullptr;
  return cache;
}

Status PeerTable::replace(Reader in) {
  std::map<int64_t, CachePtr> caches;
  KeyMap keys;
  uint32_t count = in.u32();
  for (uint32_t i = 0; i < count; ++i) {
    CachePtr cache = decode_cache(in);
    if (!cache || !caches.emplace(cache->id, cache).second) return fail(LDR_ERR_LINK_BROKEN, "the peer's cache table is malformed at entry %u of %u", i, count);
    for (const ldr_cache_key_t &key : cache->keys) keys[key_name(key.kind, key.id, key.model_id)] = {cache->id, key.batch_index};
  }
  if (!in.finished()) return fail(LDR_ERR_LINK_BROKEN, "the peer's cache table has %zu bytes too many", in.left());
  std::lock_guard lock(mutex_);
  caches_ = std::move(caches);
  keys_ = std::move(keys);
  filled_ = true;
  return Status::success();
}

bool PeerTable::filled() const {
  std::lock_guard lock(mutex_);
  return filled_;
}

CachePtr PeerTable::find(int64_t cache_id) const {
  std::lock_guard lock(mutex_);
  auto it = caches_.find(cache_id);
  return it == caches_.end() ? nullptr : it->second;
}

CachePtr PeerTable::find_key(uint32_t key_kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p) const {
  std::lock_guard lock(mutex_);
  auto it = keys_.find(key_name(key_kind, id, model_id));
  if (it == keys_.end()) return nullptr;
  *batch_index_p = it->second.second;
  return caches_.at(it->second.first);
}

PeerMappings::~PeerMappings() { drop(); }

uint8_t *PeerMappings::address(const Cache &cache, uint32_t tensor) {
  std::lock_guard lock(mutex_);
  auto it = mappings_.find(cache.mapping_ids[tensor]);
  if (it == mappings_.end()) return nullptr;
  Mapping &mapping = it->second;
  const uint64_t offset = cache.mapping_offsets[tensor];
  if (offset > mapping.size_bytes || cache.tensor_bytes > mapping.size_bytes - offset) return nullptr;
  mapping.users[cache.slot] = cache.version;
  mapping.is_pool = mapping.is_pool || cache.in_pool;
  return mapping.base + offset;
}

Status PeerMappings::add(uint64_t mapping_id, int fd) {
  if (mapping_id == 0) return fail(LDR_ERR_LINK_BROKEN, "the peer passed a shared mapping with id 0");
  if (!is_sealed(fd)) return fail(LDR_ERR_LINK_BROKEN, "the peer passed shared mapping %llu unsealed", (unsigned long long)mapping_id);
  struct stat info;
  if (fstat(fd, &info) != 0) return fail_errno(LDR_ERR_SYSTEM, "fstat of the peer's shared mapping");
  if (info.st_size <= 0) return fail(LDR_ERR_LINK_BROKEN, "the peer passed shared mapping %llu without bytes", (unsigned long long)mapping_id);
  std::lock_guard lock(mutex_);
  if (mappings_.count(mapping_id)) return Status::success();
  void *base = mmap(nullptr, size_t(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return fail_errno(LDR_ERR_SYSTEM, "mmap of %lld bytes of the peer's shared mapping", (long long)info.st_size);
  try {
    mappings_[mapping_id] = {static_cast<uint8_t *>(base), uint64_t(info.st_size), false, {}};
  } catch (...) {
    munmap(base, size_t(info.st_size));
    throw;
  }
  return Status::success();
}

void PeerMappings::unmap(Mappings &mappings) {
  for (const auto &[id, mapping] : mappings) munmap(mapping.base, mapping.size_bytes);
}

void PeerMappings::drop_unused(const PeerPage &page) {
  Mappings unused;  // unmapping takes long: without the lock
  {
    std::lock_guard lock(mutex_);
    for (auto it = mappings_.begin(); it != mappings_.end();) {
      auto &users = it->second.users;
      while (!users.empty() && page.cache_version(users.begin()->first) != users.begin()->second) users.erase(users.begin());
      auto next = std::next(it);
      if (users.empty() && !it->second.is_pool) unused.insert(mappings_.extract(it));
      it = next;
    }
  }
  unmap(unused);
}

void PeerMappings::drop() {
  Mappings all;
  {
    std::lock_guard lock(mutex_);
    all.swap(mappings_);
  }
  unmap(all);
}

}  // namespace ldr
