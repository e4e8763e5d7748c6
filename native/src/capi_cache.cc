// The C functions for memory, pools and caches.
#include <algorithm>

#include "barrier.h"
#include "shared_memory.h"

namespace {

using ldr::Engine;
using ldr::enter;
using ldr::fail;
using ldr::guarded;
using ldr::not_null;
using ldr::read_params;
using ldr::Status;

Status allocate(Engine &engine, ldr_cache_params_t params, int64_t *cache_id_p, uint64_t *addresses_p) {
  if (params.addresses) return fail(LDR_ERR_INVALID, "allocate cache: addresses come from the pool; give NULL");
  if (Status s = ldr::check_shape(params); !s.ok()) return s;
  std::shared_ptr<ldr::Pool> pool = engine.pools.find(params.placement);
  if (!pool) return fail(LDR_ERR_INVALID, "allocate cache: there is no %s pool", params.placement == LDR_PLACEMENT_HOST ? "host" : "device");
  ldr::PoolMemory memory;
  std::vector<uint64_t> addresses;
  if (Status s = pool->allocate(params.tensor_bytes, params.num_tensors, &memory, &addresses); !s.ok()) return s;
  params.addresses = addresses.data();
  params.remote_accessible = 1;
  if (Status s = engine.caches.add(params, cache_id_p, std::move(memory)); !s.ok()) return s;
  std::copy(addresses.begin(), addresses.end(), addresses_p);
  return Status::success();
}

}  // namespace

ldr_status_t ldr_shared_alloc(uint64_t size_bytes, void **address_p, uint64_t *huge_bytes_p) {
  return guarded([&]() -> Status {
    if (Status s = not_null(address_p, "address_p"); !s.ok()) return s;
    return ldr::shared_alloc(size_bytes, address_p, huge_bytes_p);
  });
}

ldr_status_t ldr_shared_free(void *address) {
  return guarded([&] { return ldr::shared_free(address); });
}

ldr_status_t ldr_cache_register(ldr_engine_t *handle, const ldr_cache_params_t *params, int64_t *cache_id_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_cache_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    if (Status s = not_null(cache_id_p, "cache_id_p"); !s.ok()) return s;
    return engine->caches.add(p, cache_id_p);
  });
}

ldr_status_t ldr_cache_unregister(ldr_engine_t *handle, int64_t cache_id) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    engine->caches.remove(cache_id);
    return Status::success();
  });
}

ldr_status_t ldr_pool_create(ldr_engine_t *handle, const ldr_pool_params_t *params) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_pool_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    return engine->pools.create(p);
  });
}

ldr_status_t ldr_pool_info(ldr_engine_t *handle, uint32_t placement, ldr_pool_info_t *info_p) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = not_null(info_p, "info_p"); !s.ok()) return s;
    std::shared_ptr<ldr::Pool> pool = engine->pools.find(placement);
    if (!pool) return fail(LDR_ERR_NOT_FOUND, "there is no pool for placement %u", placement);
    *info_p = pool->info();
    return Status::success();
  });
}

ldr_status_t ldr_cache_allocate(ldr_engine_t *handle, const ldr_cache_params_t *params, int64_t *cache_id_p, uint64_t *addresses) {
  return guarded([&]() -> Status {
    Engine *engine;
    ldr_cache_params_t p;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = read_params(params, &p); !s.ok()) return s;
    if (!cache_id_p || !addresses) return fail(LDR_ERR_INVALID, "allocate cache: no place for the id or the addresses");
    return allocate(*engine, p, cache_id_p, addresses);
  });
}

ldr_status_t ldr_cache_deallocate(ldr_engine_t *handle, int64_t cache_id) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    return engine->caches.drop_id(cache_id);
  });
}

ldr_status_t ldr_cache_remove_key(ldr_engine_t *handle, const ldr_cache_key_t *key) {
  return guarded([&]() -> Status {
    Engine *engine;
    if (Status s = enter(handle, &engine); !s.ok()) return s;
    if (Status s = not_null(key, "key"); !s.ok()) return s;
    if (key->kind > LDR_KEY_BLOCKS) return fail(LDR_ERR_INVALID, "remove key: unknown kind %u", key->kind);
    engine->caches.unbind(*key);
    return Status::success();
  });
}
